"""What users give, as bytes: bytes stay, text is UTF-8, everything else is JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import cast

import msgspec

from onward.errors import InvalidRequest

_encode = msgspec.json.Encoder().encode
_encode_finite = json.JSONEncoder(allow_nan=False).encode


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
            f"a body is bytes, text or something JSON can say, not {type(body).__name__}: {error}"
        ) from None


def _as_json(body: object) -> bytes:
    """Return the JSON of a body; numbers that JSON has not, NaN and Infinity, are a `ValueError`.

    Our encoder says null for them, so only what has a null in it is looked at more closely.
    """
    encoded = _encode(body)
    if b"null" in encoded:
        _encode_finite(msgspec.to_builtins(body, str_keys=True, enc_hook=_as_is))
    return encoded


def _as_is(raw: object) -> str:
    """Stand for a part that is JSON already, `msgspec.Raw`."""
    return type(raw).__name__


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
