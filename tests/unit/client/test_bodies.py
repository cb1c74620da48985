"""Bodies: bytes stay, text is UTF-8, the rest is JSON."""

import datetime
import math
from dataclasses import dataclass

import msgspec
import pytest

from onward.client.bodies import encode_bodies, encode_body
from onward.errors import InvalidRequest


@dataclass
class Reading:
    degrees: float


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
        ({datetime.date(2026, 1, 1): None}, b'{"2026-01-01":null}'),
        ([None, msgspec.Raw(b"[null]")], b"[null,[null]]"),
    ],
)
def test_a_body_becomes_bytes(body: object, encoded: bytes) -> None:
    assert encode_body(body) == encoded
    assert encode_bodies([b"first", body]) == [b"first", encoded]


def test_bytes_are_not_copied() -> None:
    body = b"raw"
    assert encode_body(body) is body


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_not_is_refused_wherever_it_is(number: float) -> None:
    for body in (number, {"a": number}, [None, {"a": (1, number)}], Reading(number)):
        with pytest.raises(InvalidRequest, match="Out of range float"):
            encode_body(body)


@pytest.mark.parametrize("body", [object(), {"a": object()}, {1j: 2}, "\ud800"])
def test_what_json_cannot_say_is_refused(body: object) -> None:
    with pytest.raises(InvalidRequest, match="a body is"):
        encode_body(body)
