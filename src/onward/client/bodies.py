"""Bodies as bytes: bytes stay, text is UTF-8, everything else is JSON.

Whatever a function of an App may take as its body (`client.signature`) can be published: values of
JSON, dataclasses, `msgspec.Struct`, pydantic models, alone or inside of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from onward.errors import InvalidRequest


def _encode_unknown(value: object) -> object:
    """Return the JSON of a value that msgspec does not know; a pydantic model knows its own."""
    serializer: Any = getattr(type(value), _PYDANTIC, None)
    if serializer is None:
        raise TypeError(f"a {type(value).__name__} cannot be encoded as JSON")
    return msgspec.Raw(serializer.to_json(value, by_alias=True))


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
        raise InvalidRequest(
            f"a body is bytes, UTF-8 text or something JSON can say: {error}"
        ) from None


def _as_json(body: object) -> bytes:
    """Return the JSON of a body, or raise `InvalidRequest` for NaN and Infinity.

    The encoder writes null for these numbers, so only JSON with a null in it is searched for them.
    """
    # A pydantic dataclass is a dataclass to msgspec, which does not know its aliases.
    has_own = type(body) is not dict and hasattr(type(body), _PYDANTIC)
    encoded = _encode(_encode_unknown(body) if has_own else body)
    if b"null" in encoded and (found := _not_finite(_values_of(body), "$")):
        raise InvalidRequest(f"a body of JSON cannot hold {found}: JSON has no such number")
    return encoded


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


def _not_finite(value: object, path: str) -> str:
    """Return the first NaN or Infinity of a value, and where it is; "" when there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} (at {path})"
    if isinstance(value, dict):
        items = ((f"{path}.{key}", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        items = ((f"{path}[{number}]", one) for number, one in enumerate(value))
    else:
        return ""
    return next(filter(None, (_not_finite(one, at) for at, one in items)), "")


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
