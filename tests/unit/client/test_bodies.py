"""Bodies: bytes stay, text is UTF-8, the rest is JSON."""

import datetime

import pytest

from onward.client.bodies import encode_bodies, encode_body
from onward.errors import InvalidRequest


@pytest.mark.parametrize(
    ("body", "encoded"),
    [
        (b"raw", b"raw"),
        (bytearray(b"raw"), b"raw"),
        (memoryview(b"raw"), b"raw"),
        ("grüße", "grüße".encode()),
        ("", b""),
        ({"id": 7}, b'{"id":7}'),
        ([1, None, True], b"[1,null,true]"),
        (7, b"7"),
        (None, b"null"),
        (datetime.date(2026, 1, 1), b'"2026-01-01"'),
    ],
)
def test_a_body_becomes_bytes(body: object, encoded: bytes) -> None:
    assert encode_body(body) == encoded
    assert encode_bodies([b"first", body]) == [b"first", encoded]


def test_bytes_are_not_copied() -> None:
    body = b"raw"
    assert encode_body(body) is body


@pytest.mark.parametrize("body", [object(), {"a": object()}, {1j: 2}, "\ud800"])
def test_what_json_cannot_say_is_refused(body: object) -> None:
    with pytest.raises(InvalidRequest, match="a body is"):
        encode_body(body)
