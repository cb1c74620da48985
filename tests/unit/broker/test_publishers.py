"""Who published: noted once, told later, and never more than there is room for."""

import pytest

from onward.broker import publishers as module
from onward.broker.publishers import Publisher, Publishers
from onward.delivery.trace import Trace
from onward.protocol.payloads import Hello

ANN = Hello(1, client="ann", host="h1", pid=7)


def test_a_publisher_is_noted_once_and_again_when_it_is_another() -> None:
    publishers = Publishers()
    row = publishers.note(ANN, 5, now_ms=3)
    assert row == Trace(did="published_by", at_ms=3, producer_id=5, client="ann", host="h1", pid=7)
    assert publishers.note(ANN, 5, now_ms=4) is None
    publishers.apply(row)
    assert publishers.note(ANN, 5, now_ms=4) is None
    again = publishers.note(Hello(1, client="ann", host="h1", pid=8), 5, now_ms=5)
    assert again is not None
    publishers.apply(again)
    assert publishers.find(5) == Publisher("ann", "h1", 8)


def test_a_publisher_is_known_and_saved_only_when_its_row_is_durable() -> None:
    publishers = Publishers()
    row = publishers.note(ANN, 5, now_ms=3)
    assert row is not None
    assert publishers.find(5) is None
    assert len(Publishers.load(publishers.save())) == 0
    publishers.apply(row)
    assert publishers.find(5) == Publisher("ann", "h1", 7)
    assert len(Publishers.load(publishers.save())) == 1


def test_a_producer_without_an_id_is_nobody() -> None:
    publishers = Publishers()
    assert publishers.note(ANN, 0, now_ms=3) is None
    assert publishers.find(0) is None


def test_what_could_not_be_written_is_noted_again() -> None:
    publishers = Publishers()
    publishers.note(ANN, 5, now_ms=3)
    publishers.forget(5)
    assert publishers.note(ANN, 5, now_ms=4) is not None


def test_a_fold_of_the_rows_and_a_saved_state_know_the_same() -> None:
    noted, folded = Publishers(), Publishers()
    rows = [noted.note(Hello(1, client=f"c{n}", pid=n), n % 3 + 1, now_ms=n) for n in range(7)]
    for row in rows:
        assert row is not None
        noted.apply(row)
        folded.apply(row)
    folded.apply(Trace(did="acked", at_ms=0, producer_id=1, client="nobody"))
    loaded = Publishers.load(noted.save())
    assert list(folded.by_id.items()) == list(noted.by_id.items()) == list(loaded.by_id.items())


def test_the_one_noted_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUBLISHERS_MAX", 3)
    publishers = Publishers()
    for client, number in (("a", 1), ("a", 2), ("a", 3), ("b", 1), ("a", 4)):
        row = publishers.note(Hello(1, client=client), number, now_ms=0)
        assert row is not None
        publishers.apply(row)
    assert list(publishers.by_id) == [3, 1, 4]


def test_a_long_name_does_not_fill_the_trace() -> None:
    row = Publishers().note(Hello(1, client="x" * 10_000, host="y" * 10_000), 1, now_ms=0)
    assert row is not None
    assert (len(row.client), len(row.host)) == (256, 256)
