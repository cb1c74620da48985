import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import InvalidRequest, ProtocolError
from onward.message.headers import decode_headers, encode_headers

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
headers = st.dictionaries(text, text | st.binary(max_size=20), max_size=5)


@given(headers)
def test_headers_come_back_as_they_were_in_their_order(
    given_headers: dict[str, str | bytes],
) -> None:
    back = decode_headers(encode_headers(given_headers))
    assert list(back.items()) == list(given_headers.items())


@given(headers, st.data())
def test_cut_headers_are_refused(
    given_headers: dict[str, str | bytes], data: st.DataObject
) -> None:
    packed = encode_headers(given_headers)
    kept = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ProtocolError):
        decode_headers(packed[:kept])


@given(st.binary(max_size=60))
def test_garbage_is_decoded_or_refused_and_nothing_else(garbage: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_headers(garbage)


def test_bytes_after_the_last_header_are_refused() -> None:
    with pytest.raises(ProtocolError, match="1 bytes are left over"):
        decode_headers(encode_headers({"a": "b"}) + b"x")


def test_bytes_that_are_not_utf8_survive_as_text() -> None:
    packed = encode_headers({"a": b"\xff"})
    as_text = packed[:5] + b"\x01\x00\x00\x80" + packed[9:]
    assert encode_headers(decode_headers(as_text)) == as_text


def test_headers_beyond_the_limits_are_refused_by_the_producer() -> None:
    with pytest.raises(InvalidRequest, match="at most 65535 headers"):
        encode_headers({str(n): "" for n in range(65_536)})
    with pytest.raises(InvalidRequest, match="name of a header"):
        encode_headers({"n" * 65_536: ""})
    with pytest.raises(InvalidRequest, match="utf-8"):
        encode_headers({"a": "\ud800"})
