"""Numbers of offsets as ranges behave as a dict of offsets would, and stay small."""

from hypothesis import given
from hypothesis import strategies as st

from onward.delivery.range_counts import RangeCounts, ranges_of_offsets

STEPS = st.lists(
    st.tuples(st.sampled_from(("add", "remove")), st.integers(0, 30), st.integers(0, 30)),
    max_size=30,
)


@given(STEPS, st.integers(0, 30), st.integers(0, 30))
def test_ranges_of_numbers_are_what_a_dict_of_offsets_is(steps, start: int, end: int) -> None:
    counts, model = RangeCounts(), {}
    for step, low, high in steps:
        getattr(counts, step)(low, high)
        for offset in range(low, high):
            model[offset] = model.get(offset, 0) + 1 if step == "add" else 0
    rows = list(counts)
    assert rows == ranges_of_offsets({one: count for one, count in model.items() if count})
    spans = counts.spans(start, end)
    assert [offset for low, high, _ in spans for offset in range(low, high)] == list(
        range(start, end)
    )
    for low, high, count in spans:
        assert all(model.get(offset, 0) == count for offset in range(low, high))
    assert list(RangeCounts(rows)) == rows


def test_a_long_range_is_one_row() -> None:
    counts = RangeCounts()
    counts.add(0, 10**12)
    counts.add(10**12, 2 * 10**12)
    assert list(counts) == [(0, 2 * 10**12, 1)]
