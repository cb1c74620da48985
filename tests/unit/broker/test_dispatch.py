"""The dispatcher: one answer for every request, limits, and what becomes of a lost connection.

Handlers are small objects of these tests, for operations of the table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from onward.broker.operations import dispatch
from onward.broker.operations.dispatch import Dispatcher, answers
from onward.broker.permissions import Policy
from onward.broker.requester import Requester
from onward.errors import (
    Conflict,
    DiskFull,
    Forbidden,
    InvalidRequest,
    OnwardError,
    Overloaded,
    Unavailable,
    UnknownTopic,
)
from onward.protocol.frames import HEADER_BYTES, Kind
from onward.protocol.operations import OPERATIONS, Request, encode_request, operation_of
from onward.protocol.operations.status import NodeStatus, ShowStatus
from onward.protocol.operations.topics import (
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    ListTopics,
    TopicDeleted,
    TopicDescription,
    TopicPage,
)
from onward.protocol.payloads import Hello

from .asking import Operator
from .speaking import Speaker, open_broker, turns

DESCRIBE, LIST, DELETE = DescribeTopic(topic="orders"), ListTopics(), DeleteTopic(topic="orders")

Step = Callable[[], Coroutine[Any, Any, object]]


class Client:
    """A requester that keeps its answers."""

    principal = "ann"
    hello: Hello | None = None
    is_paused = False

    def __init__(self) -> None:
        self.is_closed = False
        self.unanswered_bytes = self.repeats_waiting = 0
        self.held_sequences: dict[int, int] = {}
        self.replies: dict[int, Any] = {}
        self.errors: dict[int, OnwardError] = {}

    def write(self, frames: bytes) -> None:
        assert frames[4] == Kind.REPLY
        request_id = int.from_bytes(frames[8:12], "little")
        assert request_id not in self.replies, "answered twice"
        self.replies[request_id] = msgspec.json.decode(frames[HEADER_BYTES:])

    def refuse(self, request_id: int, error: OnwardError) -> None:
        assert request_id not in self.errors, "answered twice"
        self.errors[request_id] = error

    def keep_reading(self) -> None: ...

    def note_plain(self) -> None: ...


class Handlers:
    """Describes at once; lists and deletes when the test has decided what happens."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.heard: list[BaseException] = []
        self.requesters: list[Requester] = []
        self.gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.step: Step = self.wait

    async def wait(self) -> object:
        # Shielded, so that a cancelled handler does not close the gate for the others.
        return await asyncio.shield(self.gate)

    @answers(DescribeTopic)
    async def describe(self, request: DescribeTopic) -> TopicDescription:
        self.begun.append("describe")
        return TopicDescription(topic=request.topic, number=1, state="active")

    @answers(ListTopics)
    async def list(self, request: ListTopics) -> TopicPage:
        self.begun.append("list")
        try:
            await self.step()
        except BaseException as error:
            self.heard.append(error)
            raise
        return TopicPage(count=7)

    @answers(DeleteTopic)
    async def delete(self, request: DeleteTopic, requester: Requester) -> TopicDeleted:
        self.begun.append("delete")
        self.requesters.append(requester)
        await self.step()
        return TopicDeleted(request.topic)


class Only(Policy):
    """Lets everybody read."""

    def allows(self, principal: str, action: str, resource: str, name: str) -> bool:
        return action == "read"


class Writable:
    """Says whether something may be changed, and notes who asked."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.error: OnwardError | None = None

    def check(self, *, even_when_full: bool) -> None:
        self.asked.append(even_when_full)
        if self.error is not None:
            raise self.error


class World:
    def __init__(self, policy: Policy | None = None) -> None:
        self.handlers = Handlers()
        self.writable = Writable()
        self.dispatcher = Dispatcher(
            [self.handlers], policy=policy or Policy(), check_writable=self.writable.check
        )
        self.client = Client()

    def receive(self, request: Request[Any], request_id: int = 1, *, by: Client | None = None):
        self.dispatcher.receive(by or self.client, request_id, encode_request(request))


@pytest.fixture
async def world() -> World:
    return World()


# --- answers -----------------------------------------------------------------------------------


async def test_a_handler_that_never_waits_answers_within_the_frame_and_needs_no_task(world: World):
    tasks = asyncio.all_tasks()
    world.receive(DESCRIBE)
    assert world.client.replies[1]["topic"] == "orders"
    assert asyncio.all_tasks() == tasks


async def test_a_handler_begins_before_the_next_frame_is_looked_at(world: World):
    world.receive(LIST, 1)
    world.receive(DESCRIBE, 2)
    assert world.handlers.begun == ["list", "describe"]
    assert world.client.replies.keys() == {2}


async def test_a_handler_that_waits_answers_when_it_has_ended(world: World):
    world.receive(LIST)
    await turns()
    assert not world.client.replies
    world.handlers.gate.set_result(None)
    await turns()
    assert world.client.replies[1]["count"] == 7


async def test_only_a_handler_that_takes_a_requester_gets_it(world: World):
    world.receive(DELETE)
    assert world.handlers.requesters == [world.client]


async def test_the_reply_has_all_fields_that_are_declared(world: World):
    world.receive(DESCRIBE)
    assert world.client.replies[1].keys() == set(TopicDescription.__struct_fields__)


async def test_the_names_are_those_of_the_handlers(world: World):
    handled = {operation_of(request).name for request in (DESCRIBE, LIST, DELETE)}
    assert world.dispatcher.names == handled


# --- refusals ----------------------------------------------------------------------------------

WRONG = [
    ({"op": "topic.vanish"}, "there is no such operation"),
    ({"op": "topic.describe", "topic": "orders", "deep": True}, "has no field 'deep'"),
    ({"op": "topic.describe", "topic": 7}, "Expected `str`, got `int`"),
    ({"op": "topic.describe"}, "missing required field `topic`"),
    ({"op": "topic.list", "limit": 10_001}, "'limit' is at most 10,000"),
    ({"op": "topic.create", "topic": "orders", "retention_ms": -1}, "'retention_ms' is at least 0"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[said for _, said in WRONG])
async def test_a_wrong_request_is_one_clear_error_and_the_connection_goes_on(
    fields: dict[str, Any], said: str
):
    broker = await open_broker()
    operator = await Operator.of(broker)
    request_id = operator.speaker.new_id()
    operator.speaker.say(Kind.REQUEST, request_id, msgspec.json.encode(fields))
    with pytest.raises(InvalidRequest) as refused:
        await operator.answer(request_id)
    assert said in str(refused.value)
    assert (await operator.ask("status"))["topics"] == 0
    assert len(operator.speaker.of(request_id)) == 1
    assert not operator.speaker.is_lost
    await broker.stop()


async def test_nothing_begins_without_the_permission():
    world = World(Only())
    with pytest.raises(Forbidden, match="'ann' has no permission to manage topic 'orders'"):
        world.receive(DELETE)
    assert world.handlers.begun == world.writable.asked == []
    world.receive(DESCRIBE)
    assert world.client.replies


async def test_what_changes_something_needs_a_node_that_can_write(world: World):
    world.writable.error = DiskFull("the disk is full")
    world.receive(DESCRIBE, 1)
    assert not world.writable.asked
    with pytest.raises(DiskFull):
        world.receive(DELETE, 2)
    assert world.handlers.begun == ["describe"]


@pytest.mark.parametrize("name", ["topic.create", "topic.delete"])
async def test_a_full_disk_is_no_reason_for_what_may_be_done_while_it_is_full(name: str):
    class Part:
        @answers(CreateTopic)
        async def create(self, request: CreateTopic) -> TopicDescription:
            return TopicDescription(topic=request.topic, number=1, state="active")

        @answers(DeleteTopic)
        async def delete(self, request: DeleteTopic) -> TopicDeleted:
            return TopicDeleted(request.topic)

    writable = Writable()
    dispatcher = Dispatcher([Part()], policy=Policy(), check_writable=writable.check)
    payload = msgspec.json.encode({"op": name, "topic": "orders"})
    dispatcher.receive(Client(), 1, payload)
    assert writable.asked == [OPERATIONS[name].while_full]


# --- errors of handlers ------------------------------------------------------------------------


async def test_an_error_of_ours_is_the_answer_before_and_after_a_wait(world: World):
    async def fail() -> None:
        raise UnknownTopic("there is no such topic")

    world.handlers.step = fail
    with pytest.raises(UnknownTopic):
        world.receive(LIST)

    async def fail_later() -> None:
        await asyncio.sleep(0)
        raise UnknownTopic("there is no such topic")

    world.handlers.step = fail_later
    world.receive(LIST, 2)
    await turns()
    assert world.client.errors[2].code == "unknown_topic"


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a wait"])
async def test_an_unexpected_error_is_unavailable_and_logged(
    world: World, waits: bool, caplog: pytest.LogCaptureFixture
):
    async def fail() -> None:
        if waits:
            await asyncio.sleep(0)
        raise ZeroDivisionError("by nothing")

    world.handlers.step = fail
    try:
        world.receive(LIST)
    except Unavailable as error:
        world.client.refuse(1, error)
    await turns()
    assert type(world.client.errors[1]) is Unavailable
    assert str(world.client.errors[1]) == "topic.list failed: by nothing"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("onward.operations", logging.ERROR)
    assert "'topic.list'" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_an_error_of_the_disk_is_unavailable_without_a_traceback(
    world: World, caplog: pytest.LogCaptureFixture
):
    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError("the disk is gone")

    world.handlers.step = fail
    world.receive(LIST)
    await turns()
    assert type(world.client.errors[1]) is Unavailable
    assert not caplog.records


async def test_a_request_after_an_unexpected_error_is_answered(world: World):
    async def fail() -> None:
        raise ZeroDivisionError

    world.handlers.step = fail
    with pytest.raises(Unavailable):
        world.receive(LIST, 1)
    world.handlers.step = world.handlers.wait
    world.receive(LIST, 2)
    world.handlers.gate.set_result(None)
    await turns()
    assert world.client.replies.keys() == {2}


# --- limits ------------------------------------------------------------------------------------


async def test_as_many_of_one_operation_may_run_as_it_declares(world: World):
    most = OPERATIONS["topic.list"].running_max
    others = [Client() for _ in range(4)]
    for number in range(most):
        world.receive(LIST, number, by=others[number % len(others)])
    with pytest.raises(Overloaded, match=rf"{most} requests 'topic.list' are under way") as refused:
        world.receive(LIST)
    assert refused.value.retry_after_ms
    world.receive(DELETE, 2)
    world.receive(DESCRIBE, 3)
    assert world.client.replies.keys() == {3}
    world.handlers.gate.set_result(None)
    await turns()
    assert sum(len(other.replies) for other in others) == most
    world.receive(LIST, 4)
    await turns()
    assert world.client.replies.keys() == {2, 3, 4}


async def test_a_requester_may_have_so_many_under_way(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "RUNNING_PER_REQUESTER_MAX", 3)
    for request_id in range(3):
        world.receive(LIST, request_id)
    with pytest.raises(Overloaded, match="too many requests are under way"):
        world.receive(DELETE, 3)
    other = Client()
    world.receive(DELETE, 1, by=other)
    world.handlers.gate.set_result(None)
    await turns()
    world.receive(DELETE, 4)
    await turns()
    assert world.client.replies.keys() == {0, 1, 2, 4}
    assert other.replies


async def test_a_node_may_have_so_many_under_way(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "RUNNING_MAX", 3)
    for request_id in range(3):
        world.receive(LIST, request_id, by=Client())
    with pytest.raises(Overloaded):
        world.receive(LIST)
    world.handlers.gate.set_result(None)
    await turns()
    world.receive(LIST)


async def test_whoever_fails_or_is_cancelled_makes_room_too(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "RUNNING_PER_REQUESTER_MAX", 1)
    world.receive(LIST, 1)
    world.dispatcher.forget(world.client)
    await turns()
    world.receive(DELETE, 2)
    world.handlers.gate.set_exception(Conflict("the world moved"))
    await turns()
    assert world.client.errors[2].code == "conflict"
    world.handlers.gate = asyncio.get_running_loop().create_future()
    world.receive(DELETE, 3)
    world.handlers.gate.set_result(None)
    await turns()
    assert world.client.replies.keys() == {3}


# --- lost connections, and the end -------------------------------------------------------------


async def test_a_lost_connection_cancels_what_changes_nothing_and_lets_the_rest_finish(
    world: World,
):
    other = Client()
    world.receive(LIST, 1)
    world.receive(DELETE, 2)
    world.receive(LIST, 3, by=other)
    await turns()
    world.client.is_closed = True
    world.dispatcher.forget(world.client)
    await turns()
    assert [type(error) for error in world.handlers.heard] == [asyncio.CancelledError]
    world.handlers.gate.set_result(None)
    await turns()
    assert world.client.replies == {2: {"topic": "orders"}}
    assert not world.client.errors
    assert other.replies.keys() == {3}


async def test_who_has_nothing_under_way_may_be_forgotten(world: World):
    world.receive(DESCRIBE)
    world.dispatcher.forget(world.client)
    world.dispatcher.forget(Client())


async def test_a_connection_that_is_lost_at_once_cancels_its_handler_as_well(world: World):
    """The task has not had its first step: the handler hears of it all the same."""
    inner = asyncio.get_running_loop().create_future()

    async def wait_and_tidy() -> None:
        try:
            await inner
        finally:
            await asyncio.sleep(0)
            world.handlers.begun.append("tidied")

    world.handlers.step = wait_and_tidy
    world.receive(LIST)
    world.dispatcher.forget(world.client)
    await turns()
    assert world.handlers.begun == ["list", "tidied"]
    assert [type(error) for error in world.handlers.heard] == [asyncio.CancelledError]
    assert inner.cancelled()
    assert not world.client.errors


async def test_a_change_is_durable_although_its_connection_is_gone():
    broker = await open_broker()
    speaker, other = await Speaker.to(broker), await Speaker.to(broker)
    speaker.say(Kind.REQUEST, 1, encode_request(CreateTopic(topic="orders")))
    speaker.transport.close()
    await turns()
    assert speaker.is_lost
    reply = await other.request("topic.describe", topic="orders")
    assert isinstance(reply, dict)
    assert reply["state"] == "active"
    await broker.stop()


async def test_a_drain_waits_for_what_changes_something_only(world: World):
    world.receive(LIST, 1)
    world.receive(DELETE, 2)
    draining = asyncio.ensure_future(world.dispatcher.drain())
    await turns()
    assert not draining.done()
    world.handlers.gate.set_result(None)
    await draining
    assert 2 in world.client.replies
    world.handlers.gate = asyncio.get_running_loop().create_future()
    world.receive(LIST, 3)
    await world.dispatcher.drain()
    assert 3 not in world.client.replies
    world.dispatcher.stop()


async def test_a_stop_cancels_everything(world: World):
    world.receive(LIST, 1)
    world.receive(DELETE, 2)
    await turns()
    world.dispatcher.stop()
    await turns()
    assert not world.client.replies
    assert not world.client.errors
    await world.dispatcher.drain()


# --- after the first await ---------------------------------------------------------------------


async def test_an_exception_reaches_a_handler_at_its_first_wait(world: World):
    world.receive(LIST)
    world.handlers.gate.set_exception(Conflict("the world moved"))
    await turns()
    assert [str(error) for error in world.handlers.heard] == ["the world moved"]
    assert world.client.errors[1].code == "conflict"


async def test_a_handler_may_go_on_after_an_exception_and_after_being_cancelled(world: World):
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))

    async def stubborn() -> None:
        try:
            await first
        except Conflict:
            world.handlers.begun.append("conflict")
        try:
            await second
        except asyncio.CancelledError:
            world.handlers.begun.append("cancelled")

    world.handlers.step = stubborn
    world.receive(LIST)
    first.set_exception(Conflict("the world moved"))
    await turns()
    world.dispatcher.forget(world.client)
    await turns()
    assert world.handlers.begun == ["list", "conflict", "cancelled"]
    assert world.client.replies[1]["count"] == 7


async def test_a_handler_may_wait_often_and_for_anything(world: World):
    async def wander() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0.001))
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))

    world.handlers.step = wander
    world.receive(LIST)
    async with asyncio.timeout(60):
        while not world.client.replies:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_what_a_handler_waits_for_may_be_done_before_its_task_begins(world: World):
    world.receive(LIST)
    world.handlers.gate.set_result(None)
    await turns()
    assert world.client.replies


# --- requesters inside the process -------------------------------------------------------------


async def test_a_call_returns_the_reply_itself(world: World):
    reply = await world.dispatcher.call(world.client, DESCRIBE)
    assert reply == TopicDescription(topic="orders", number=1, state="active")
    calling = asyncio.ensure_future(world.dispatcher.call(world.client, DELETE))
    await turns()
    assert world.handlers.requesters == [world.client]
    world.handlers.gate.set_result(None)
    assert await calling == TopicDeleted("orders")
    assert not world.client.replies


async def test_a_call_is_checked_as_a_request_is(monkeypatch: pytest.MonkeyPatch):
    world = World(Only())
    with pytest.raises(Forbidden):
        await world.dispatcher.call(world.client, DELETE)
    world = World()
    world.writable.error = DiskFull("the disk is full")
    with pytest.raises(DiskFull):
        await world.dispatcher.call(world.client, DELETE)
    monkeypatch.setattr(dispatch, "RUNNING_MAX", 0)
    with pytest.raises(Overloaded):
        await world.dispatcher.call(world.client, DESCRIBE)
    assert not world.handlers.begun


async def test_a_call_raises_the_error_of_its_handler(world: World):
    world.handlers.gate.set_exception(Conflict("the world moved"))
    with pytest.raises(Conflict):
        await world.dispatcher.call(world.client, LIST)


async def test_a_broker_answers_calls_of_its_own():
    broker = await open_broker()
    created = await broker.operations.call(Client(), CreateTopic(topic="orders"))
    assert created.state == "active"
    status = await broker.operations.call(Client(), ShowStatus())
    assert isinstance(status, NodeStatus)
    assert status.topics == 1
    with pytest.raises(UnknownTopic):
        await broker.operations.call(Client(), DescribeTopic(topic="parcels"))
    await broker.stop()


# --- a running broker --------------------------------------------------------------------------


async def test_a_broker_has_one_handler_for_every_request_of_the_table():
    broker = await open_broker()
    declared = {row.name for row in OPERATIONS.values() if row.frame == Kind.REQUEST}
    assert not declared - broker.operations.names, "these have no handler in broker/operations/"
    assert not broker.operations.names - declared, "these are answered and not declared"
    await broker.stop()
