"""Rows of the trace: small, readable by later and earlier versions, garbage is told."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.delivery import trace
from onward.delivery.trace import (
    CAUSE_CHARS_MAX,
    DIDS,
    Trace,
    decode_row,
    encode_rows,
    short_cause,
)
from onward.errors import Corruption

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
NUMBER = st.integers(0, 2**63 - 1)
NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
ROWS = st.builds(
    Trace, did=st.sampled_from(DIDS), at_ms=NUMBER, group=NAME, topic=NAME, member=NAME,
    ranges=st.lists(st.tuples(NUMBER, NUMBER), max_size=3).map(tuple), attempt=NUMBER,
    due_at_ms=NUMBER, cause=NAME, took_ms=st.lists(NUMBER, max_size=3).map(tuple),
    offset=st.integers(-1, 2**63 - 1), source=NAME, producer_id=NUMBER, client=NAME, host=NAME,
    pid=NUMBER,
)  # fmt: skip


@SETTINGS
@given(st.lists(ROWS, max_size=4))
def test_rows_come_back_as_they_were_written(rows: list[Trace]):
    assert [decode_row(body) for body in encode_rows(rows)] == rows


def test_a_row_costs_some_bytes_for_a_whole_range():
    row = Trace(did="acked", at_ms=1_794_823_200_000, group="g", topic="t", ranges=((0, 10**6),))
    assert len(encode_rows([row])[0]) < 100


def test_fields_of_a_later_version_are_ignored():
    row = decode_row(b'{"did":"praised","at_ms":1,"stars":5,"ranges":[[0,5]]}')
    assert row == Trace(did="praised", at_ms=1, ranges=((0, 5),))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"{}", b'{"did":"acked"}', b'{"did":1,"at_ms":1}', b"\xff\xfe",
        b'{"did":"acked","at_ms":1,"ranges":[[0]]}', b'{"did":"acked","at_ms":1,"ranges":[[-1,2]]}',
        b'{"did":"acked","at_ms":1,"ranges":"all"}', b'{"did":"\xff","at_ms":1}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_row_is_told_as_corruption(body: bytes):
    with pytest.raises(Corruption, match="@trace"):
        decode_row(body)


@SETTINGS
@given(st.binary(max_size=60))
def test_random_bytes_are_a_row_or_corruption_and_nothing_else(body: bytes):
    with contextlib.suppress(Corruption):
        assert isinstance(decode_row(body), Trace)


@SETTINGS
@given(st.text(st.characters(), max_size=50))
def test_any_cause_fits_into_a_row(text: str):
    row = Trace(did="dead", at_ms=0, cause=short_cause(text))
    assert decode_row(encode_rows([row])[0]) == row


def test_a_long_cause_is_cut_and_says_so():
    assert short_cause("x" * CAUSE_CHARS_MAX) == "x" * CAUSE_CHARS_MAX
    cut = short_cause("x" * (CAUSE_CHARS_MAX + 1))
    assert (len(cut), cut[-1]) == (CAUSE_CHARS_MAX, "…")
    assert short_cause("half \ud800 a pair") == "half ? a pair"


def test_everything_that_can_be_done_is_in_the_table_of_the_module():
    assert trace.__doc__ is not None
    table = {line.split()[0] for line in trace.__doc__.splitlines() if line.startswith("    ")}
    assert table == {"did", *DIDS}
