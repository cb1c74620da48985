"""The headers of one message as bytes: names are text, values are text or bytes.

    0   count       u16
    then for each header, in the order it was given:
        name_bytes  u16
        name        utf-8
        value_bytes u32   the top bit is set when the value is text
        value

Text comes back as `str`, bytes as `bytes`. What does not fit exactly is a `ProtocolError`.
"""

from collections.abc import Mapping
from struct import Struct
from typing import Final

from onward.errors import InvalidRequest, ProtocolError

HEADERS_MAX: Final = 0xFFFF
NAME_BYTES_MAX: Final = 0xFFFF
VALUE_BYTES_MAX: Final = 0x7FFF_FFFF

_TEXT: Final = 0x8000_0000
_U16: Final = Struct("<H")
_U32: Final = Struct("<I")


def encode_headers(headers: Mapping[str, str | bytes]) -> bytes:
    """Return the bytes of one message's headers.

    >>> encode_headers({"a": "b"}).hex(" ")
    '01 00 01 00 61 01 00 00 80 62'
    """
    if len(headers) > HEADERS_MAX:
        raise InvalidRequest(f"a message has at most {HEADERS_MAX} headers, not {len(headers)}")
    parts = [_U16.pack(len(headers))]
    for name, value in headers.items():
        parts += _one_header(name, value)
    return b"".join(parts)


def decode_headers(packed: bytes) -> dict[str, str | bytes]:
    r"""Return the headers that `encode_headers` packed.

    >>> decode_headers(encode_headers({"a": "b", "c": b"\x00"}))
    {'a': 'b', 'c': b'\x00'}
    """
    headers: dict[str, str | bytes] = {}
    (count,), at = _U16.unpack(_take(packed, 0, 2)), 2
    for _ in range(count):
        (name_bytes,) = _U16.unpack(_take(packed, at, 2))
        name = _take(packed, at + 2, name_bytes)
        at += 2 + name_bytes
        (size,) = _U32.unpack(_take(packed, at, 4))
        value = _take(packed, at + 4, size & VALUE_BYTES_MAX)
        at += 4 + len(value)
        headers[_text(name)] = _text(value) if size & _TEXT else value
    if at != len(packed):
        raise ProtocolError(
            f"{len(packed) - at} bytes are left over after the headers of a message"
        )
    return headers


def _one_header(name: str, value: str | bytes) -> tuple[bytes, bytes, bytes, bytes]:
    if type(name) is not str or not isinstance(value, str | bytes | bytearray | memoryview):
        raise InvalidRequest("headers have text as names, and text or bytes as values")
    flag, packed = (_TEXT, _utf8(value)) if isinstance(value, str) else (0, bytes(value))
    packed_name = _utf8(name)
    if len(packed_name) > NAME_BYTES_MAX:
        raise InvalidRequest(f"the name of a header has at most {NAME_BYTES_MAX} bytes")
    if len(packed) > VALUE_BYTES_MAX:
        raise InvalidRequest(f"the value of a header has at most {VALUE_BYTES_MAX} bytes")
    return _U16.pack(len(packed_name)), packed_name, _U32.pack(flag | len(packed)), packed


def _take(packed: bytes, at: int, size: int) -> bytes:
    if at + size > len(packed):
        raise ProtocolError("the headers of a message end in the middle of a header")
    return packed[at : at + size]


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest(f"header text {text[:40]!a} cannot be written as utf-8") from None


def _text(packed: bytes) -> str:
    return packed.decode("utf-8", "surrogateescape")
