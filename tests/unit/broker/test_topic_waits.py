"""Waiting for topics: the answer comes with the first news, at no cost until then."""

import pytest

from onward.broker import topic_waits
from onward.errors import TopicEnded, UnknownTopic

from .asking import Operator, until
from .speaking import open_broker, turns

LONG_MS = 60_000


async def test_what_is_there_already_is_told_at_once() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    await operator.publish("bills", 1)
    for ends in ({"orders": 2, "bills": 1}, {"orders": 3, "bills": 0}, {"orders": -1, "bills": 1}):
        reply = await operator.ask("topic.wait", ends=ends, wait_ms=LONG_MS)
        assert reply == {"topics": {"orders": [0, 3], "bills": [0, 1]}}
    await broker.stop()


async def test_an_empty_topic_is_told_at_once_when_nothing_is_known_of_it() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.ask("topic.create", topic="orders")
    reply = await operator.ask("topic.wait", ends={"orders": -1}, wait_ms=LONG_MS)
    assert reply == {"topics": {"orders": [0, 0]}}
    await broker.stop()


async def test_the_answer_comes_with_the_first_message_of_any_topic() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    await operator.publish("bills", 1)
    asked = operator.say("topic.wait", ends={"orders": 3, "bills": 1}, wait_ms=LONG_MS)
    await turns()
    await operator.publish("others", 5)
    assert not operator.speaker.of(asked)
    await operator.publish("bills", 1)
    assert await operator.answer(asked) == {"topics": {"orders": [0, 3], "bills": [0, 2]}}
    assert all(topic.watches is None for topic in broker.catalogue.by_name.values())
    await broker.stop()


async def test_an_offset_beyond_the_end_waits_until_there_is_more_than_that() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 1)
    asked = operator.say("topic.wait", ends={"orders": 3}, wait_ms=LONG_MS)
    await operator.publish("orders", 2)
    await turns()
    assert not operator.speaker.of(asked)
    await operator.publish("orders", 1)
    assert await operator.answer(asked) == {"topics": {"orders": [0, 4]}}
    await broker.stop()


async def test_without_news_the_answer_comes_when_the_time_is_over() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    for wait_ms in (0, 1):
        reply = await operator.ask("topic.wait", ends={"orders": 3}, wait_ms=wait_ms)
        assert reply == {"topics": {"orders": [0, 3]}}
    assert broker.catalogue.find("orders").watches is None
    await broker.stop()


async def test_a_topic_that_is_missing_or_ends_meanwhile_is_said() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    with pytest.raises(UnknownTopic, match="topic 'bills' does not exist"):
        await operator.ask("topic.wait", ends={"bills": 0}, wait_ms=LONG_MS)
    await operator.publish("orders", 3)
    asked = operator.say("topic.wait", ends={"orders": 3}, wait_ms=LONG_MS)
    await turns()
    await operator.ask("topic.delete", topic="orders")
    with pytest.raises(TopicEnded, match="topic 'orders' was deleted"):
        await operator.answer(asked)
    await broker.stop()


async def test_a_session_that_closes_while_it_waits_is_forgotten() -> None:
    broker = await open_broker()
    operator, other = await Operator.of(broker), await Operator.of(broker)
    await operator.publish("orders", 3)
    other.say("topic.wait", ends={"orders": 3}, wait_ms=LONG_MS)
    await turns()
    assert broker.catalogue.find("orders").watches
    other.speaker.transport.abort()
    await until(lambda: broker.catalogue.find("orders").watches is None)
    await operator.publish("orders", 1)
    await broker.stop()


async def test_one_connection_waits_a_limited_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_waits, "WAITS_PER_REQUESTER_MAX", 2)
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    waiting = [operator.say("topic.wait", ends={"orders": 3}, wait_ms=LONG_MS) for _ in range(2)]
    assert await operator.code("topic.wait", ends={"orders": 3}, wait_ms=LONG_MS) == "overloaded"
    await operator.publish("orders", 1)
    for asked in waiting:
        assert await operator.answer(asked) == {"topics": {"orders": [0, 4]}}
    await broker.stop()


async def test_thousands_of_waits_are_answered_by_one_message() -> None:
    broker = await open_broker()
    operators = [await Operator.of(broker) for _ in range(20)]
    await operators[0].publish("orders", 1)
    waiting = [
        (operator, operator.say("topic.wait", ends={"orders": 1}, wait_ms=LONG_MS))
        for operator in operators
        for _ in range(topic_waits.WAITS_PER_REQUESTER_MAX)
    ]
    await turns()
    assert len(broker.catalogue.find("orders").watches or ()) == 2_000
    await operators[0].publish("orders", 1)
    for operator, request_id in waiting:
        assert await operator.answer(request_id) == {"topics": {"orders": [0, 2]}}
    assert broker.topic_waits._count_of == {}
    await broker.stop()


@pytest.mark.parametrize(
    "fields",
    [
        {"ends": {"orders": -2}}, {"ends": {"orders": "all"}}, {"ends": 7}, {},
        {"ends": {"orders": 0}, "wait_ms": 60_001}, {"ends": {"orders": 0}, "wait_ms": -1},
        {"ends": {f"topic-{number}": 0 for number in range(1_001)}},
    ],
)  # fmt: skip
async def test_nonsense_is_refused(fields: dict[str, object]) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 1)
    assert await operator.code("topic.wait", **fields) == "invalid_request"
    await broker.stop()
