"""What users give, as bytes: bytes stay, text is UTF-8, everything else is JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from onward.errors import InvalidRequest

_encode = msgspec.json.Encoder().encode


def encode_body(body: object) -> bytes:
    """Return a body as bytes.

    >>> encode_body(b"raw"), encode_body("text"), encode_body({"id": 7})
    (b'raw', b'text', b'{"id":7}')
    """
    if type(body) is bytes:
        return body
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    try:
        return _encode(body)
    except (TypeError, msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(
            f"a body is bytes, text or something JSON can say, not {type(body).__name__}: {error}"
        ) from None


def encode_bodies(bodies: Sequence[object]) -> list[bytes]:
    """Return many bodies as bytes; a list that holds only bytes costs next to nothing."""
    kinds = set(map(type, bodies))
    return list(bodies) if kinds <= {bytes} else list(map(encode_body, bodies))  # type: ignore[arg-type]
