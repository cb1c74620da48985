"""The catalogue: the same fold in a running broker and in recovery."""

import msgspec
import pytest

from onward.broker.catalogue import ENDED_KEPT, Catalogue, TopicEnding, TopicRecord
from onward.errors import Forbidden, UnknownTopic
from onward.message.entry import Entry, Kind


def entry(kind: Kind, *, topic: int = 0, base: int = 0, count: int = 0) -> Entry:
    return Entry(0, 80, 0, 0, 1, 0, 0, base, 0, topic, count, kind, 0)


def create(catalogue: Catalogue, number: int, name: str, **options: object) -> None:
    record = TopicRecord(number, name, **options)  # type: ignore[arg-type]
    catalogue.apply(entry(Kind.TOPIC_CREATED), msgspec.json.encode(record))


def end(catalogue: Catalogue, number: int, name: str) -> None:
    ending = TopicEnding(number, name, "deleted", 5)
    catalogue.apply(entry(Kind.TOPIC_DELETED), msgspec.json.encode(ending))


def test_a_topic_that_nobody_created_is_unknown() -> None:
    with pytest.raises(UnknownTopic):
        Catalogue().find("orders")


def test_messages_move_the_next_offset() -> None:
    catalogue = Catalogue()
    create(catalogue, 1, "orders")
    catalogue.apply(entry(Kind.MESSAGES, topic=1, base=0, count=5), b"")
    catalogue.apply(entry(Kind.MESSAGES, topic=1, base=5, count=2), b"")
    topic = catalogue.find("orders")
    assert (topic.next_offset, topic.staged_offset) == (7, 7)


def test_messages_of_a_topic_that_ended_are_nobodys() -> None:
    catalogue = Catalogue()
    create(catalogue, 1, "orders")
    end(catalogue, 1, "orders")
    catalogue.apply(entry(Kind.MESSAGES, topic=1, base=0, count=5), b"")
    assert len(catalogue) == 0


def test_the_name_of_an_ended_topic_is_free_and_its_number_is_not() -> None:
    catalogue = Catalogue()
    create(catalogue, 1, "orders")
    end(catalogue, 1, "orders")
    assert catalogue.next_number == 2
    create(catalogue, 2, "orders")
    assert catalogue.find("orders").number == 2
    assert [ending.number for ending in catalogue.ended] == [1]


def test_what_is_saved_loads_again() -> None:
    catalogue = Catalogue()
    create(catalogue, 1, "orders", expires_at_ms=50, rule="read-only")
    create(catalogue, 2, "bills")
    catalogue.apply(entry(Kind.MESSAGES, topic=2, base=0, count=5), b"")
    catalogue.by_number[2].first_offset = 3
    create(catalogue, 3, "gone")
    end(catalogue, 3, "gone")
    again = Catalogue.load(catalogue.save())
    assert again.save() == catalogue.save()
    assert (again.find("bills").first_offset, again.find("bills").staged_offset) == (3, 5)
    assert [topic.name for topic in again.take_expired(now_ms=50)] == ["orders"]
    assert again.next_number == 4


def test_a_topic_whose_creation_is_under_way_is_not_saved() -> None:
    catalogue = Catalogue()
    record = TopicRecord(1, "orders")
    catalogue.add(record)
    assert len(Catalogue.load(catalogue.save())) == 0
    catalogue.apply(entry(Kind.TOPIC_CREATED), msgspec.json.encode(record))
    assert len(Catalogue.load(catalogue.save())) == 1


def test_a_creation_that_failed_frees_the_name() -> None:
    catalogue = Catalogue()
    catalogue.add(TopicRecord(1, "orders"))
    catalogue.remove(1)
    assert catalogue.by_name == {}
    assert catalogue.remove(1) is None


def test_each_expired_topic_is_taken_once_and_only_when_its_time_has_come() -> None:
    catalogue = Catalogue()
    create(catalogue, 1, "late", expires_at_ms=200)
    create(catalogue, 2, "soon", expires_at_ms=100)
    create(catalogue, 3, "never")
    assert catalogue.take_expired(now_ms=99) == []
    assert [topic.name for topic in catalogue.take_expired(now_ms=100)] == ["soon"]
    assert catalogue.take_expired(now_ms=150) == []
    assert [topic.name for topic in catalogue.take_expired(now_ms=10**9)] == ["late"]


def test_an_expiry_that_was_changed_counts_and_the_old_one_does_not() -> None:
    catalogue = Catalogue()
    create(catalogue, 1, "orders", expires_at_ms=100)
    for expires_at_ms in (300, 300, 300):
        record = TopicRecord(1, "orders", expires_at_ms=expires_at_ms)
        catalogue.apply(entry(Kind.TOPIC_CHANGED), msgspec.json.encode(record))
    assert catalogue.take_expired(now_ms=299) == []
    assert [topic.name for topic in catalogue.take_expired(now_ms=300)] == ["orders"]


def test_a_change_of_a_topic_that_ended_is_nobodys() -> None:
    catalogue = Catalogue()
    record = TopicRecord(7, "orders", rule="closed")
    catalogue.apply(entry(Kind.TOPIC_CHANGED), msgspec.json.encode(record))
    assert len(catalogue) == 0


def test_the_rule_of_a_topic_decides_who_may_read_and_write() -> None:
    catalogue = Catalogue()
    for number, rule in enumerate(("read-write", "write-only", "read-only", "closed"), 1):
        create(catalogue, number, rule, rule=rule)
    is_open = [topic.name for topic in catalogue.by_number.values() if topic.is_open]
    assert is_open == ["read-write", "write-only"]
    assert catalogue.find_readable("read-only").number == 3
    with pytest.raises(Forbidden, match="cannot be read"):
        catalogue.find_readable("closed")


def test_endings_are_remembered_up_to_a_limit() -> None:
    catalogue = Catalogue()
    for number in range(1, ENDED_KEPT + 11):
        create(catalogue, number, "orders")
        end(catalogue, number, "orders")
    assert len(catalogue.ended) == ENDED_KEPT
