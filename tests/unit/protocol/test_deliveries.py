import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import InvalidRequest, OnwardError, ProtocolError
from onward.protocol import deliveries
from onward.protocol.deliveries import (
    FINISHED,
    ROWS_MAX,
    STARTS,
    TOPICS_MAX,
    Ack,
    Claim,
    Consume,
    Joined,
    Outcome,
    Settle,
    ack_frame,
    decode_ack,
    decode_consume,
    decode_delivery,
    decode_joined,
    decode_more,
    decode_progress,
    decode_settle,
    decode_settled,
    decode_settled_steps,
    delivery_head,
    more_frame,
    progress_frame,
    settled_frame,
    settled_steps_frame,
)
from onward.protocol.frames import Kind
from onward.protocol.payloads import encode_json

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
# Together at most the largest offset there is, 2**63 - 1.
ranges = st.tuples(st.integers(0, 2**62 - 1), st.integers(1, 2**62)).map(
    lambda r: (r[0], r[0] + r[1])
)
rows = st.lists(st.tuples(u64, ranges).map(lambda row: (row[0], *row[1])), max_size=20)
u31 = st.integers(0, 2**31 - 1)
grants = st.lists(
    st.builds(lambda span, attempt, more: (*span, attempt, attempt + more), ranges, u31, u31),
    max_size=20,
)
topics = st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True)


def payload_of(whole: bytes, kind: Kind, request_id: int, *, missing: int = 0) -> bytes:
    assert int.from_bytes(whole[:4], "little") == len(whole) - 4 + missing
    assert whole[4:8] == bytes((kind, 0, 0, 0))
    assert int.from_bytes(whole[8:12], "little") == request_id
    return whole[12:]


@given(u32, u32, rows)
def test_an_ack_comes_back(request_id: int, consumer: int, acked: list[deliveries.Row]) -> None:
    payload = payload_of(ack_frame(request_id, consumer, acked), Kind.ACK, request_id)
    assert decode_ack(payload) == Ack(consumer, acked)
    assert decode_ack(bytearray(payload)) == Ack(consumer, acked)


@given(u32, rows)
def test_what_was_refused_comes_back(request_id: int, refused: list[deliveries.Row]) -> None:
    payload = payload_of(settled_frame(request_id, refused), Kind.SETTLED, request_id)
    assert decode_settled(payload) == refused
    assert bool(payload) == bool(refused)


@given(u32, st.integers(-(2**31), 2**31 - 1))
def test_credit_is_given_and_taken_back(request_id: int, credit: int) -> None:
    assert decode_more(payload_of(more_frame(request_id, credit), Kind.MORE, request_id)) == credit


@given(u32, topics, grants, u64, u64, st.binary(max_size=40))
def test_a_delivery_comes_back_with_its_entries(
    request_id: int,
    topic: str,
    given_out: list[deliveries.Grant],
    delivery: int,
    lease_ms: int,
    entries: bytes,
) -> None:
    head = delivery_head(
        request_id,
        topic,
        given_out,
        delivery=delivery,
        lease_ms=lease_ms,
        entries_bytes=len(entries),
    )
    payload = payload_of(head, Kind.DELIVERY, request_id, missing=len(entries)) + entries
    front = decode_delivery(payload)
    assert front[:4] == (delivery, lease_ms, topic, given_out)
    assert payload[front.entries_at :] == entries
    assert front.entries_at % 8 == 0
    assert decode_delivery(bytearray(payload)) == front


@pytest.mark.parametrize(
    "consume",
    [
        Consume("billing"),
        Consume("billing", ("orders", "refunds"), "b-1", 2**31 - 1, {"retry": {"kind": "none"}}),
        Consume("billing", ("orders",), refuse=True, create=False),
        Consume("billing", claims=(Claim(7, "orders", 2, ((0, 9, 1),)),)),
        Consume("billing", claims=(Claim(7, "orders", 2, ((0, 9, 1),), 90, ((0, 4, 80),)),)),
    ],
)
def test_a_consume_comes_back_with_its_wish_as_it_was(consume: Consume) -> None:
    assert decode_consume(encode_json(consume)) == consume


def test_the_reply_to_a_consume_comes_back() -> None:
    joined = Joined("b-1", "broadcast", 30_000, ("orders",), "standby", True, 17, {"orders": 5})
    assert decode_joined(encode_json(joined)) == joined


def test_outcomes_of_every_kind_come_back() -> None:
    settle = Settle(
        3,
        (
            Outcome("retry", 1, ((1, 2), (5, 9)), after_ms=0, cause="ключ"),
            Outcome("retry", 1, ((2, 3),), at_ms=-5, count=False),
            Outcome("reject", 1, ((3, 5),), cause="no"),
            Outcome("release", 2),
            Outcome("renew", 2),
        ),
    )
    assert decode_settle(encode_json(settle)) == settle


def test_a_claim_without_ages_is_of_an_older_client() -> None:
    claim = b'{"delivery": 7, "topic": "orders", "number": 2, "ranges": [[0, 9, 1]]}'
    (found,) = decode_consume(b'{"group": "g", "claims": [%s]}' % claim).claims
    assert (found.held_ms, found.starts) == (0, ())


@pytest.mark.parametrize(
    "ages", [b'"held_ms": -1', b'"starts": [[4, 4, 0]]', b'"starts": [[0, 4, -1]]']
)
def test_a_claim_with_ages_that_cannot_be_is_refused(ages: bytes) -> None:
    claim = b'{"delivery": 7, "topic": "orders", "number": 2, "ranges": [[0, 9, 1]], %s}' % ages
    with pytest.raises(InvalidRequest):
        decode_consume(b'{"group": "g", "claims": [%s]}' % claim)


def test_claims_with_too_many_starts_are_refused() -> None:
    starts = tuple((offset, offset + 1, 0) for offset in range(6_000))
    claims = tuple(Claim(number, "orders", 2, ((0, 6_000, 1),), 0, starts) for number in (1, 2))
    with pytest.raises(InvalidRequest, match="at most 10000 ranges when they were started"):
        decode_consume(encode_json(Consume("g", claims=claims)))


def test_fields_of_a_later_version_are_ignored_by_a_broker() -> None:
    assert decode_consume(b'{"group": "g", "colour": 7}') == Consume("g")
    settle = decode_settle(b'{"consumer":1,"x":1,"rows":[{"do":"renew","delivery":2,"x":[]}]}')
    assert settle == Settle(1, (Outcome("renew", 2),))


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"[]", "Expected `object`"),
        (b"{}", "group"),
        (b'{"group": 7}', r"\$.group"),
        (b'{"group": "g", "topics": "orders"}', r"\$.topics"),
        (b'{"group": "g", "topics": [7]}', r"\$.topics"),
        (b'{"group": "g", "credit": -1}', "'credit' is at least 0"),
        (b'{"group": "g", "credit": 2147483648}', "'credit' is at most"),
        (b'{"group": "g", "wish": []}', r"\$.wish"),
        (b'{"group": "g", "topics": [%s"t"]}' % (b'"t",' * TOPICS_MAX), "length <= 1000"),
    ],
)
def test_a_consume_that_is_not_understood_is_the_clients_to_change(
    payload: bytes, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_consume(payload)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b'{"do": "forget", "delivery": 1}', r"\$.rows\[0\].do"),
        (b'{"do": "retry"}', "delivery"),
        (b'{"do": "retry", "delivery": -1}', "delivery"),
        (b'{"do": "retry", "delivery": 1, "ranges": [[5, 5]]}', "ends after its start"),
        (b'{"do": "retry", "delivery": 1, "ranges": [[7, 5]]}', "ends after its start"),
        (b'{"do": "retry", "delivery": 1, "ranges": [[-1, 5]]}', "ranges"),
        (b'{"do": "retry", "delivery": 1, "ranges": [[1]]}', "ranges"),
        (b'{"do": "retry", "delivery": 1, "after_ms": -1}', "after_ms"),
        (b'{"do": "retry", "delivery": 1, "after_ms": 1.5}', "after_ms"),
        (b'{"do": "retry", "delivery": 1, "count": 1}', "count"),
    ],
)
def test_an_outcome_that_is_not_understood_is_the_clients_to_change(row: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_settle(b'{"consumer": 3, "rows": [%s]}' % row)


def test_a_settle_with_too_many_ranges_is_refused() -> None:
    row = b'{"do":"retry","delivery":1,"ranges":[%s[1,2]]},' % (b"[1,2]," * (ROWS_MAX // 2))
    with pytest.raises(InvalidRequest, match="at most 100000 ranges"):
        decode_settle(b'{"consumer":3,"rows":[%s]}' % (row * 2)[:-1])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x01" * 7,
        b"\x03\x00\x00\x00\x01\x00\x00\x00",
        ack_frame(7, 3, [(1, 2, 3)])[12:-1],
        ack_frame(7, 3, [(1, 3, 3)])[12:],
        ack_frame(7, 3, [(1, 2, 3), (1, 9, 3)])[12:],
        ack_frame(7, 3, [(1, 2, 2**63)])[12:],
    ],
)
def test_an_ack_that_does_not_fit_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="ACK"):
        decode_ack(payload)


def test_a_frame_with_too_many_rows_is_a_protocol_error() -> None:
    row = bytes(16) + b"\x01" + bytes(7)
    assert len(decode_settled(row * ROWS_MAX)) == ROWS_MAX
    with pytest.raises(ProtocolError, match="limit is 100000"):
        decode_settled(row * (ROWS_MAX + 1))
    with pytest.raises(ProtocolError, match="limit is 100000"):
        decode_ack(bytes(8) + row * (ROWS_MAX + 1))


def test_more_of_another_length_is_a_protocol_error() -> None:
    for payload in (b"", b"\x01\x00\x00", b"\x01\x00\x00\x00\x00"):
        with pytest.raises(ProtocolError, match="MORE"):
            decode_more(payload)


SOUND = delivery_head(3, "t", [(0, 9, 1, 1)], delivery=5, lease_ms=9, entries_bytes=0)[12:]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        SOUND[:23],
        SOUND[:-1],
        SOUND[:16] + b"\x02" + SOUND[17:],
        SOUND[:16] + b"\xff\xff\xff\xff" + SOUND[20:],
        SOUND[:20] + b"\xff\xff" + SOUND[22:],
        SOUND[:22] + b"\x01" + SOUND[23:],
        SOUND[:24] + b"\xff" + SOUND[25:],
        SOUND[:32] + b"\x09" + SOUND[33:],
        SOUND[:47] + b"\x80" + SOUND[48:],
    ],
)
def test_a_delivery_whose_front_does_not_fit_is_a_protocol_error(payload: bytes) -> None:
    decode_delivery(SOUND)
    with pytest.raises(ProtocolError):
        decode_delivery(payload)


def test_a_broker_that_answers_a_consume_with_nonsense_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="not understood"):
        decode_joined(b'{"member": 7}')


@given(st.binary(max_size=80))
def test_garbage_in_any_frame_of_a_member_is_an_error_of_ours(garbage: bytes) -> None:
    for name in dir(deliveries):
        if name.startswith("decode_") and name != "decode_json":
            with contextlib.suppress(OnwardError):
                getattr(deliveries, name)(garbage)


STEP = progress_frame(5, [(3, FINISHED, 9, 100, 101), (4, STARTS, 9, 101, 102)])[12:]


def test_the_rows_of_a_progress_come_back() -> None:
    assert decode_progress(STEP) == [(3, FINISHED, 9, 100, 101), (4, STARTS, 9, 101, 102)]
    refused = settled_steps_frame(5, [(3, FINISHED, 9, 100, 101)])
    assert decode_settled_steps(refused[12:]) == [(3, FINISHED, 9, 100, 101)]
    assert settled_steps_frame(5, []) == settled_frame(5)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(STEP[:-1], id="part of a row"),
        pytest.param(STEP[:4] + b"\x02" + STEP[5:], id="a kind that is not known"),
        pytest.param(STEP[:24] + STEP[16:24] + STEP[32:], id="an empty range"),
        pytest.param(STEP[:31] + b"\x80" + STEP[32:], id="an offset that is too large"),
        pytest.param(STEP[:32] * (ROWS_MAX + 1), id="too many rows"),
    ],
)
def test_a_progress_with_bad_rows_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="PROGRESS"):
        decode_progress(payload)
