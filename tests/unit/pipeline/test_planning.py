"""Ranges over tasks and over batches: nothing is left out, nothing comes twice, nobody starves."""

from hypothesis import given
from hypothesis import strategies as st

from onward.pipeline.planning import Stretch, admit, split

STRETCHES = st.lists(
    st.builds(
        lambda topic, first, rows: Stretch(topic, first, first + rows),
        st.sampled_from("abc"),
        st.integers(0, 1000),
        st.integers(0, 500),
    ),
    max_size=6,
)


@given(STRETCHES, st.integers(1, 12), st.integers(1, 50))
def test_tasks_have_all_offsets_once_and_in_order(stretches, parts, rows_min):
    tasks = split(stretches, parts=parts, rows_min=rows_min)
    joined = [(one.topic, n) for task in tasks for one in task for n in range(one.first, one.end)]
    assert joined == [(one.topic, n) for one in stretches for n in range(one.first, one.end)]
    assert len(tasks) <= parts


@given(STRETCHES, st.integers(1, 12))
def test_tasks_have_about_the_same_work(stretches, parts):
    sizes = [sum(one.rows for one in task) for task in split(stretches, parts=parts, rows_min=1)]
    assert not sizes or max(sizes) <= -(-sum(sizes) // parts)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 100), st.integers(0, 1000))),
    st.integers(1, 300),
)
def test_a_batch_moves_every_topic_that_has_something_and_none_beyond_its_end(topics, rows_max):
    start = {topic: first for topic, (first, _) in topics.items()}
    head = {topic: first + rows for topic, (first, rows) in topics.items()}
    ends = admit(start, head, rows_max=rows_max)
    for topic, end in ends.items():
        assert start[topic] <= end <= head[topic]
        assert end > start[topic] or head[topic] == start[topic]
    assert sum(ends[one] - start[one] for one in ends) <= rows_max + len(topics)


def test_without_a_limit_a_batch_takes_all():
    assert admit({"a": 1}, {"a": 9, "new": 4}, rows_max=None) == {"a": 9, "new": 4}


def test_a_topic_that_was_emptied_does_not_go_back():
    assert admit({"a": 10}, {"a": 4}, rows_max=5) == {"a": 10}
