import pytest

from onward.message.batch import decode_batch, encode_batch, messages_of
from onward.message.message import Message


def test_a_message_shows_its_body_as_text_and_as_json() -> None:
    message = Message("orders", 7, b'{"id": 1}')
    assert message.id == "orders/7"
    assert message.text == '{"id": 1}'
    assert message.json() == {"id": 1}


def test_the_tags_of_a_message_are_one_by_one() -> None:
    assert Message("t", 0, b"", tag="eu,paid").tags == ("eu", "paid")
    assert Message("t", 0, b"").tags == ()


@pytest.mark.parametrize("body", [b"", b"{", b"NaN", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json_is_a_value_error_that_names_the_message(body: bytes) -> None:
    with pytest.raises(ValueError, match="the body of t/3 is not JSON"):
        Message("t", 3, body).json()


def test_a_message_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Message("t", 0, b"").offset = 1  # type: ignore[misc]


def test_messages_of_a_batch_with_bodies_only_have_dense_offsets() -> None:
    batch = decode_batch(encode_batch([b"a", b"b"]), raw_bytes_max=0)
    assert messages_of(batch, topic="t", base_offset=5, published_at_ms=9, event_id=3) == [
        Message("t", 5, b"a", published_at_ms=9, event_id=3),
        Message("t", 6, b"b", published_at_ms=9, event_id=3),
    ]


def test_messages_of_a_batch_carry_what_each_column_says_about_them() -> None:
    packed = encode_batch(
        [b"a", b"b"],
        keys=["k", None],
        headers=[None, {"h": b"v"}],
        tags=["x,y", None],
        trace_ids=[None, "7"],
        due_at_ms=[None, 99],
        priorities=[3, None],
        tenants=["acme", None],
    )
    batch = decode_batch(packed, raw_bytes_max=0)
    assert messages_of(batch, topic="t", base_offset=0, published_at_ms=1, event_id=2) == [
        Message("t", 0, b"a", 1, 2, key="k", tag="x,y", priority=3, tenant="acme"),
        Message("t", 1, b"b", 1, 2, headers={"h": b"v"}, trace_id="7", due_at_ms=99),
    ]
