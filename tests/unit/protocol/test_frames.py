import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.protocol.frames import HEADER, PREFACE, Kind, frame, frame_head, kind_name


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=100))
def test_a_frame_says_how_long_it_is_and_whose_it_is(
    kind: int, request_id: int, payload: bytes
) -> None:
    whole = frame(kind, request_id, payload)
    assert HEADER.unpack_from(whole) == (len(whole) - 4, kind, 0, 0, request_id)
    assert whole == frame_head(kind, request_id, len(payload)) + payload


def test_the_preface_is_eight_bytes_that_no_frame_can_begin_with() -> None:
    length = int.from_bytes(PREFACE[:4], "little")
    assert len(PREFACE) == 8
    assert length > 2**30, "as the length of a frame it would be over every limit"


@pytest.mark.parametrize("kind", Kind)
def test_kinds_of_the_client_are_below_64_and_those_of_the_broker_above(kind: Kind) -> None:
    from_client = {"HELLO", "PING", "BYE", "PUBLISH", "READ", "CREDIT", "CANCEL", "REQUEST"}
    from_client |= {"CONSUME", "ACK", "SETTLE", "MORE", "STARTED", "PROGRESS"}
    from_client |= {"FOLLOW", "FOLLOWED", "FETCH"}
    assert (kind < 64) == (kind.name in from_client)
    assert kind_name(kind) == kind.name
