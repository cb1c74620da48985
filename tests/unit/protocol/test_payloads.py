import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import InvalidName, InvalidRequest, OnwardError, Overloaded, ProtocolError
from onward.protocol import payloads
from onward.protocol.operations import decode_reply, decode_request
from onward.protocol.operations.topics import DeleteTopic, TopicDeleted
from onward.protocol.payloads import (
    Durability,
    End,
    Goodbye,
    Hello,
    Published,
    Read,
    Start,
    Welcome,
    credit_frame,
    decode_credit,
    decode_end,
    decode_error,
    decode_goodbye,
    decode_hello,
    decode_publish,
    decode_published,
    decode_read,
    decode_welcome,
    encode_error,
    encode_json,
    publish_head,
    published_frame,
)

JSON_DECODERS = [
    decode_hello,
    decode_welcome,
    decode_goodbye,
    decode_read,
    decode_end,
    decode_request,
    decode_error,
]
number = st.integers(0, 2**63 - 1)


@pytest.mark.slow
@given(st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True), st.sampled_from(Durability))
def test_the_front_of_a_publish_comes_back(topic: str, durability: Durability) -> None:
    batch = b"batch" * 3
    whole = publish_head(7, topic, durability=durability, batch_bytes=len(batch)) + batch
    assert int.from_bytes(whole[:4], "little") == len(whole) - 4
    front = decode_publish(whole[12:])
    assert (front.durability, front.topic) == (durability, topic)
    assert whole[12:][front.batch_at :] == batch
    assert decode_publish(bytearray(whole[12:])) == front


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 3), st.booleans())
def test_published_comes_back(offset: int, event_id: int, durability: int, repeat: bool) -> None:
    whole = published_frame(9, offset, event_id, durability, repeat=repeat)
    assert int.from_bytes(whole[:4], "little") == len(whole) - 4
    assert decode_published(whole[12:]) == Published(offset, event_id, durability, repeat)


@given(st.integers(0, 2**32 - 1))
def test_credit_comes_back(credit_bytes: int) -> None:
    whole = credit_frame(9, credit_bytes)
    assert int.from_bytes(whole[:4], "little") == len(whole) - 4
    assert decode_credit(whole[12:]) == credit_bytes


def test_what_is_json_comes_back() -> None:
    hello = Hello(version=1, client="onward-python", host="h", pid=7, token="s3cret")
    welcome = Welcome(1, "n1", 5000, 17 << 20, 16 << 20, 4 << 20, 1024)
    assert decode_hello(encode_json(hello)) == hello
    assert decode_welcome(encode_json(welcome)) == welcome
    assert decode_end(encode_json(End("topic_ended", "gone", 7))) == End("topic_ended", "gone", 7)
    assert decode_goodbye(encode_json(Goodbye("stopping", ""))) == Goodbye("stopping", "")
    reply = decode_reply(encode_json({"topic": "orders"}), DeleteTopic(topic="orders"))
    assert reply == TopicDeleted("orders")


@pytest.mark.parametrize(
    "start",
    ["earliest", "latest", Start(offset=0), Start(time_ms=-5), Start(event_id=2**63 - 1)],
)
def test_a_read_comes_back_from_every_place_it_may_start(start: Start) -> None:
    read = Read("orders", start, 65_536, follow=True)
    assert decode_read(encode_json(read)) == read


def test_an_error_travels_with_its_fields() -> None:
    error = decode_error(encode_error(Overloaded("later", retry_after_ms=50)))
    assert isinstance(error, Overloaded)
    assert (str(error), error.retry_after_ms) == ("later", 50)


def test_a_token_is_never_shown() -> None:
    assert "s3cret" not in repr(Hello(version=1, token="s3cret"))


def test_fields_of_a_later_version_are_ignored() -> None:
    assert decode_hello(b'{"version": 1, "colour": {"a": [1]}}') == Hello(version=1)
    reply = decode_reply(b'{"topic": "orders", "x": 1}', DeleteTopic(topic="orders"))
    assert reply == TopicDeleted("orders")


def test_a_field_that_an_operation_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="operation 'status' has no field 'x'"):
        decode_request(b'{"op": "status", "x": 1}')


@pytest.mark.parametrize("decode", JSON_DECODERS)
@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xff\xff", b'{"a": NaN}', b'{"a": "\\ud800"}', b"[" * 60_000, b'{"a":' * 10_000],
)
def test_what_is_not_json_is_a_protocol_error(
    decode: Callable[[bytes], object], payload: bytes
) -> None:
    with pytest.raises((ProtocolError, InvalidRequest)) as caught:
        decode(payload)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"[]", "Expected `object`"),
        (b'{"topic": 7, "from": "latest", "credit_bytes": 1}', r"\$.topic"),
        (b'{"topic": "t", "from": "now", "credit_bytes": 1}', r"\$.from"),
        (b'{"topic": "t", "from": {}, "credit_bytes": 1}', "exactly one of"),
        (b'{"topic": "t", "from": {"offset": 1, "time_ms": 1}, "credit_bytes": 1}', "exactly one"),
        (b'{"topic": "t", "from": {"offset": -1}, "credit_bytes": 1}', "'offset' is at least"),
        (b'{"topic": "t", "from": {"offset": 1%s}, "credit_bytes": 1}' % (b"0" * 5000), "READ"),
        (b'{"topic": "t", "from": {"ofset": 1}, "credit_bytes": 1}', "ofset"),
        (b'{"topic": "t", "from": "latest"}', "credit_bytes"),
        (b'{"topic": "t", "from": "latest", "credit_bytes": 1.5}', r"\$.credit_bytes"),
        (b'{"topic": "t", "from": "latest", "credit_bytes": -1}', "'credit_bytes' is at least"),
    ],
)
def test_a_read_that_is_not_understood_is_the_clients_to_change(payload: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_read(payload)


def test_the_broker_speaking_nonsense_is_a_protocol_error() -> None:
    for decode in (decode_welcome, decode_end, decode_goodbye):
        with pytest.raises(ProtocolError, match="not understood"):
            decode(b'{"code": 7}')


@pytest.mark.parametrize(
    "payload", [b"", b"\x00" * 3, b"\x02\x05\x00\x00abc", b"\x02\x01\x01\x00abc"]
)
def test_a_publish_whose_front_does_not_fit_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="PUBLISH"):
        decode_publish(payload)


def test_a_topic_that_is_not_text_is_an_invalid_name() -> None:
    with pytest.raises(InvalidName):
        decode_publish(b"\x02\x02\x00\x00\xff\xfe")


@given(st.binary(max_size=40))
def test_garbage_in_any_payload_is_an_error_of_ours(garbage: bytes) -> None:
    for name in dir(payloads):
        if name.startswith("decode_") and name != "decode_json":
            with contextlib.suppress(OnwardError):
                getattr(payloads, name)(garbage)
