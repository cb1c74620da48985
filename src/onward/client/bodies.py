"""Bodies as bytes: bytes stay, text is UTF-8, everything else is JSON.

Whatever a function of an App may take as its body (`client.signature`) can be published: values of
JSON, dataclasses, `msgspec.Struct`, pydantic models, alone or inside of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec

from onward.errors import InvalidRequest


def _encode_unknown(value: object) -> object:
    """Return the JSON of a value that msgspec does not know; a pydantic model knows its own."""
    serializer: Any = getattr(type(value), _PYDANTIC, None)
    if serializer is None:
        raise _Unencodable(f"a value of type {type(value).__name__!r} cannot be encoded as JSON")
    return msgspec.Raw(serializer.to_json(value, by_alias=True))


class _Unencodable(TypeError):
    """A value somewhere in a body is of a type that has no JSON."""


_PYDANTIC = "__pydantic_serializer__"
_encode = msgspec.json.Encoder(enc_hook=_encode_unknown).encode


def encode_body(body: object) -> bytes:
    """Return a body as bytes.

    >>> encode_body(b"raw"), encode_body("text"), encode_body({"id": 7})
    (b'raw', b'text', b'{"id":7}')
    """
    if type(body) is bytes:
        return body
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    try:
        return body.encode() if isinstance(body, str) else _as_json(body)
    except (TypeError, msgspec.MsgspecError, RecursionError, ValueError) as error:
        place = _place_of_unencodable(body) if isinstance(error, _Unencodable) else ""
        raise InvalidRequest(
            f"a body is bytes, UTF-8 text or something JSON can say: {error}{place}"
        ) from None


def _as_json(body: object) -> bytes:
    """Return the JSON of a body, or raise `InvalidRequest` for NaN and Infinity.

    The encoder writes null for these numbers, so only JSON with a null in it is searched for them.
    """
    # A pydantic dataclass is a dataclass to msgspec, which does not know its aliases.
    has_own = type(body) is not dict and hasattr(type(body), _PYDANTIC)
    encoded = _encode(_encode_unknown(body) if has_own else body)
    if b"null" in encoded:
        for place, value in _walk(_values_of(body), "$"):
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest(
                    f"a body of JSON cannot hold {value} (at {place}): JSON has no such number"
                )
    return encoded


def _place_of_unencodable(body: object) -> str:
    """Return where the first value is that JSON cannot express: ` (at $.lines[2].price)`."""
    marker = f"unencodable {id(body)}"  # found by identity, whatever the texts of the body

    def mark(value: object) -> object:
        return _values_of(value) if hasattr(type(value), _PYDANTIC) else marker

    try:
        values = msgspec.to_builtins(body, str_keys=True, enc_hook=mark)
    except (TypeError, ValueError, RecursionError):
        return ""  # another value is wrong, too
    return next((f" (at {place})" for place, value in _walk(values, "$") if value is marker), "")


def _values_of(value: object) -> object:
    """Return the dicts, lists and numbers that a body is encoded from."""
    serializer: Any = getattr(type(value), _PYDANTIC, None)
    if serializer is not None:
        return _values_of(serializer.to_python(value, by_alias=True))
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_values_of_unknown)


def _values_of_unknown(value: object) -> object:
    if isinstance(value, msgspec.Raw):
        return None  # JSON already
    return _values_of(value)


def _walk(value: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield every value inside of a value, depth first, with its place."""
    yield place, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _walk(inner, f"{place}[{number}]")


def encode_bodies(bodies: Iterable[object]) -> list[bytes]:
    """Return many bodies as bytes; a list that holds only bytes costs next to nothing.

    >>> encode_bodies(["a", b"b"])
    [b'a', b'b']
    """
    if isinstance(bodies, str | bytes | bytearray | memoryview | Mapping):
        raise InvalidRequest("publish_many takes many bodies, for example a list of them")
    given = list(bodies)
    if set(map(type, given)) <= {bytes}:
        return cast(list[bytes], given)
    return list(map(encode_body, given))
