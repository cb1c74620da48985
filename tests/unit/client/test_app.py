"""An App: what a function returns or raises is what happens to its message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import msgspec
import pytest

from onward import App, Client, Message, Reject, Retry, connect
from onward.client import signals
from onward.client.app_run import AppRun
from onward.client.delivery import Delivery
from onward.client.groups import DeadLetterDescription
from onward.errors import Conflict, InvalidRequest, NotConnected, UnknownGroup

from .calling import calling

WAIT_S = 60


class Order(msgspec.Struct):
    id: int


@asynccontextmanager
async def working(app: App, **options: Any) -> AsyncIterator[tuple[Client, AppRun]]:
    """Run an App on a broker in memory, as `run` does, with the run in our hands."""
    async with connect("memory:") as mq, app.running(mq, **options) as run:
        running = asyncio.ensure_future(run.run())
        try:
            await run.joined()
            yield mq, run
        finally:
            run.stop()
            async with asyncio.timeout(WAIT_S):
                await asyncio.wait([running])
        await running


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110  # functions tell nobody
            await asyncio.sleep(0.001)


async def dead_of(mq: Client, group: str) -> list[DeadLetterDescription]:
    return [letter async for letter in mq.dead_letters(group)]


async def until_acked(mq: Client, group: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while await backlog_of(mq, group):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)


async def backlog_of(mq: Client, group: str) -> int:
    return (await mq.group(group)).backlog


class Settled:
    """What became of each message, as the App saw it."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def __call__(self, work: Any, delivery: Delivery, did: str, cause: str) -> None:
        self.rows.append((delivery.id, did, cause))


# --- outcomes ----------------------------------------------------------------------------------


async def test_a_function_that_returns_acks_its_message() -> None:
    app, seen, settled = App(), [], Settled()

    @app.consumer("orders", group="billing")
    async def charge(order: Order, message: Message) -> str:
        seen.append((order, message.offset))
        return "what it returns does not matter"

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", [{"id": 1}, {"id": 2}])
        await until(lambda: len(settled.rows) == 2)
        assert await backlog_of(mq, "billing") == 0
    assert seen == [(Order(1), 0), (Order(2), 1)]


async def test_a_function_that_raises_gets_its_message_again_with_the_cause_in_the_trace() -> None:
    app, attempts, settled = App(), [], Settled()

    @app.consumer("orders", group="billing", retry="fixed:0s:3")
    async def charge(body: bytes, delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        raise ValueError("no such account")

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", b"x")
        await until(lambda: len(settled.rows) == 3)
        letters = await dead_of(mq, "billing")
    assert attempts == [1, 2, 3]
    assert [letter.cause for letter in letters] == ["ValueError: no such account"]


async def test_a_retry_says_when_and_whether_it_counts() -> None:
    app, attempts, settled = App(), [], Settled()

    @app.consumer("orders", group="billing", retry="none")
    async def charge(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if len(attempts) < 4:
            raise Retry("not yet", after=0, count=False)

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", b"x")
        await until(lambda: len(settled.rows) == 4)
        assert await backlog_of(mq, "billing") == 0
        assert await dead_of(mq, "billing") == []
    assert attempts == [1, 1, 1, 1]
    assert [row[1:] for row in settled.rows] == [("retried", "not yet")] * 3 + [("acked", "")]


async def test_a_rejected_message_is_a_dead_letter_with_its_cause() -> None:
    app, settled = App(), Settled()

    @app.consumer("orders", group="billing")
    async def charge(body: str) -> None:
        raise Reject(f"unknown customer {body}")

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", "ann")
        await until(lambda: len(settled.rows) == 1)
        letters = await dead_of(mq, "billing")
    assert [(one.id, one.cause) for one in letters] == [("orders/0", "unknown customer ann")]


async def test_a_body_that_does_not_convert_is_rejected_and_the_function_not_called() -> None:
    app, settled, called = App(), Settled(), []

    @app.consumer("orders", group="billing")
    async def charge(order: Order) -> None:
        called.append(order)

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", ["no JSON", {"id": "seven"}, {"id": 7}])
        await until(lambda: len(settled.rows) == 3)
        letters = await dead_of(mq, "billing")
    assert called == [Order(7)]
    assert [one.offset for one in letters] == [0, 1]
    assert all("the body is not what 'charge' takes" in one.cause for one in letters)


async def test_what_is_cancelled_inside_a_function_is_its_failure_not_the_end_of_the_app() -> None:
    app, settled = App(), Settled()

    @app.consumer("orders", group="billing", retry="none")
    async def charge(body: bytes) -> None:
        raise asyncio.CancelledError

    @app.consumer("orders", group="audit", retry="none")
    async def leave(body: bytes) -> None:
        raise SystemExit(3)

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", b"x")
        await until(lambda: len(settled.rows) == 2)
        causes = {one.cause for group in ("billing", "audit") for one in await dead_of(mq, group)}
    assert causes == {"CancelledError", "SystemExit: 3"}


async def cancel_at_once() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def cancel_later() -> None:
    """Fail, and have the task cancelled while its answer is on the way."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    raise ValueError("cancelled after its end")


async def cancel_without_waiting() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    raise ValueError("still to be cancelled")


@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize(
    ("cancel", "cause"),
    [
        (cancel_at_once, "CancelledError"),
        (cancel_later, "ValueError: cancelled after its end"),
        (cancel_without_waiting, "ValueError: still to be cancelled"),
    ],
)
async def test_a_function_that_cancels_its_own_task_has_failed_and_blocks_no_key(
    caplog: pytest.LogCaptureFixture,
    batch: int | None,
    cancel: Callable[[], Awaitable[None]],
    cause: str,
) -> None:
    app, settled = App(), Settled()

    async def charge(delivery: Delivery) -> None:
        if delivery.text == "bad":
            await cancel()

    async def charge_list(deliveries: list[Delivery]) -> None:
        await charge(*deliveries)

    app.consumer("orders", group="billing", ordered=True, retry="fixed:0s:3", batch=batch)(
        charge_list if batch else charge
    )
    async with working(app, on_settled=settled) as (mq, run):
        await mq.publish_many("orders", ["bad", "behind it"], keys=["ann", "ann"])
        await until(lambda: len(settled.rows) == 4)
        assert await backlog_of(mq, "billing") == 0
        assert run.is_idle
        (letter,) = await dead_of(mq, "billing")
    assert settled.rows == [("orders/0", "retried", cause)] * 3 + [("orders/1", "acked", "")]
    assert (letter.attempts, letter.cause) == (3, cause)
    assert "failed with orders/0" in caplog.text


class Odd(BaseException):
    """Not an Exception."""


@pytest.mark.parametrize("kind", [Odd, GeneratorExit, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("is_async", [True, False])
async def test_whatever_a_function_raises_is_an_attempt_and_others_go_on(
    kind: type[BaseException], is_async: bool
) -> None:
    app, settled = App(), Settled()

    async def charge(body: str) -> None:
        if body == "bad":
            raise kind

    def charge_in_a_thread(body: str) -> None:
        if body == "bad":
            raise kind

    app.consumer("orders", group="billing", retry="fixed:0s:3")(
        charge if is_async else charge_in_a_thread
    )
    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", ["bad", "good"])
        await until(lambda: len(settled.rows) == 4)
        (letter,) = await dead_of(mq, "billing")
        assert await backlog_of(mq, "billing") == 0
    assert (letter.id, letter.attempts) == ("orders/0", 3)
    assert letter.cause == kind.__name__


INTERRUPTED = """
import asyncio, os, signal, time
from onward import App

app = App("memory:")

@app.on_start
async def begin():
    await app.publish("orders", b"x")

@app.consumer("orders", group="billing")
async def charge(body: bytes):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

asyncio.new_event_loop().run_until_complete(app.run(signals=False))
"""


def test_a_real_ctrl_c_inside_a_function_ends_a_program_that_does_not_handle_signals() -> None:
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=WAIT_S, check=False
    )
    assert process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in process.stderr


async def test_a_function_may_settle_its_message_itself() -> None:
    app, settled, done = App(), Settled(), asyncio.Event()

    @app.consumer("orders", group="billing")
    async def charge(delivery: Delivery) -> None:
        await delivery.reject("decided inside")
        done.set()

    async with working(app, on_settled=settled) as (mq, run):
        await mq.publish("orders", b"x")
        await done.wait()
        await until(lambda: run.is_idle)
        assert [one.cause for one in await dead_of(mq, "billing")] == ["decided inside"]
    assert settled.rows == []


async def test_an_answer_that_comes_too_late_is_a_warning_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, settled, seen = App(), Settled(), []

    @app.consumer("orders", group="billing")
    async def charge(delivery: Delivery) -> None:
        seen.append(delivery.offset)
        if len(seen) == 1:
            await app.mq.reset_group("billing", to="earliest")

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", b"x")
        await until(lambda: len(settled.rows) == 2)
        assert await backlog_of(mq, "billing") == 0
    assert [row[1] for row in settled.rows] == ["lost", "acked"]
    assert "orders/0 was done by 'charge', but its lease had been lost by then" in caplog.text


# --- how functions are called ------------------------------------------------------------------


async def test_as_many_functions_run_at_once_as_there_are_slots() -> None:
    app, together, most, running = App(), asyncio.Barrier(4), [0], [0]

    @app.consumer("orders", group="billing", concurrency=4)
    async def charge(body: bytes) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await together.wait()
        running[0] -= 1

    settled = Settled()
    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", [b"x"] * 12)
        await until(lambda: len(settled.rows) == 12)
    assert most == [4]


async def test_a_plain_function_runs_in_threads_and_can_use_the_blocking_client() -> None:
    app, settled = App(), Settled()
    together, names = threading.Barrier(3), set()

    @app.consumer("orders", group="billing", concurrency=3)
    def charge(order: Order) -> None:
        together.wait(WAIT_S)
        names.add(threading.current_thread().name)
        app.sync.publish("bills", {"order": order.id})

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", [{"id": number} for number in range(3)])
        await until(lambda: len(settled.rows) == 3)
        bills = [message.json()["order"] async for message in mq.read("bills")]
    assert sorted(bills) == [0, 1, 2]
    assert names == {f"onward-charge-{number}" for number in (1, 2, 3)}


async def test_the_blocking_client_on_the_loop_is_refused_instead_of_waiting_for_itself() -> None:
    app, settled = App(), Settled()

    @app.consumer("orders", group="billing", retry="none")
    async def charge(body: bytes) -> None:
        app.sync.publish("bills", b"x")

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", b"x")
        await until(lambda: len(settled.rows) == 1)
    assert "in a coroutine await app.mq" in settled.rows[0][2]


async def test_a_batch_function_gets_lists_of_what_has_arrived() -> None:
    app, sizes, settled, may_go = App(), [], Settled(), asyncio.Event()

    @app.consumer("orders", group="billing", batch=10)
    async def charge(orders: list[Order], deliveries: list[Delivery]) -> None:
        assert [one.json()["id"] for one in deliveries] == [order.id for order in orders]
        sizes.append(len(orders))
        await may_go.wait()

    async with working(app, on_settled=settled) as (mq, _):
        for number in range(31):
            await mq.publish("orders", {"id": number})
        may_go.set()
        await until(lambda: len(settled.rows) == 31)
        assert await backlog_of(mq, "billing") == 0
    assert max(sizes) == 10
    assert sum(sizes) == 31


async def test_a_body_of_a_batch_that_does_not_convert_is_rejected_alone() -> None:
    app, seen, settled = App(), [], Settled()

    @app.consumer("orders", group="billing", batch=10)
    async def charge(orders: list[Order]) -> None:
        seen.extend(orders)

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", [{"id": 1}, "no JSON", {"id": 3}])
        await until(lambda: len(settled.rows) == 3)
        letters = await dead_of(mq, "billing")
    assert seen == [Order(1), Order(3)]
    assert [letter.offset for letter in letters] == [1]


async def test_a_batch_that_fails_comes_again_as_a_whole() -> None:
    app, settled, calls = App(), Settled(), []

    @app.consumer("orders", group="billing", batch=10, retry="fixed:0s:5")
    def charge(bodies: list[bytes]) -> None:
        calls.append(sorted(bodies))
        if len(calls) == 1:
            raise OSError("the disk is full")

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", [b"a", b"b", b"c"])
        await until(lambda: [row[1] for row in settled.rows].count("acked") == 3)
    assert calls[0] == [b"a", b"b", b"c"]
    assert sorted(body for call in calls[1:] for body in call) == [b"a", b"b", b"c"]


async def test_a_call_that_follows_another_in_its_slot_sees_nothing_of_its_context() -> None:
    app, seen = App(), []
    number: ContextVar[int] = ContextVar("number", default=-1)

    @app.consumer("orders", group="billing", concurrency=2)
    async def charge(message: Message) -> None:
        seen.append((message.offset, number.get()))
        number.set(message.offset)
        await asyncio.sleep(0)

    async with working(app) as (mq, _):
        await mq.publish_many("orders", [b"x"] * 500)
        await until(lambda: len(seen) == 500)
        await until_acked(mq, "billing")
    assert seen == [(offset, -1) for offset in range(500)]


async def test_with_a_task_factory_no_call_is_begun_by_the_one_before() -> None:
    app, seen, begun_by = App(), [], set()

    def factory(loop: Any, coro: Any, **more: Any) -> Any:
        if coro.__qualname__ == "WorkRun._perform":
            caller = asyncio.current_task(loop)
            begun_by.add(caller and caller.get_coro().__qualname__)  # type: ignore[union-attr]
        return asyncio.Task(coro, loop=loop, **more)

    @app.consumer("orders", group="billing", concurrency=2)
    async def charge(message: Message) -> None:
        seen.append(message.offset)
        await asyncio.sleep(0)

    asyncio.get_running_loop().set_task_factory(factory)
    async with working(app) as (mq, _):
        await mq.publish_many("orders", [b"x"] * 500)
        await until(lambda: len(seen) == 500)
        await until_acked(mq, "billing")
    assert sorted(seen) == list(range(500))
    assert begun_by
    assert "WorkRun._perform" not in begun_by


async def test_every_call_sees_what_the_start_of_the_app_has_set() -> None:
    app, seen = App(), []
    pool: ContextVar[str] = ContextVar("pool", default="none")

    @app.on_start
    async def open_pool() -> None:
        pool.set("open")

    @app.consumer("orders", group="billing", concurrency=1)
    async def charge(body: str) -> None:
        seen.append(pool.get())

    async with working(app) as (mq, _):
        await mq.publish_many("orders", ["x"] * 20)
        await until(lambda: len(seen) == 20)
    assert seen == ["open"] * 20


async def test_a_call_that_returns_when_it_is_cancelled_is_acked_and_nothing_follows_it() -> None:
    app, seen = App(), []

    @app.consumer("orders", group="billing", concurrency=1)
    async def charge(body: str) -> None:
        seen.append(body)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(WAIT_S)

    async with connect("memory:") as mq:
        await mq.publish_many("orders", ["a", "b"])
        async with app.running(mq) as run:
            running = asyncio.ensure_future(run.run())
            await until(lambda: seen == ["a"])
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert seen == ["a"]
        assert await backlog_of(mq, "billing") == 1


async def test_middleware_sees_a_body_that_does_not_convert_where_it_awaits_the_call() -> None:
    app, seen = App(), []

    @app.middleware
    async def watch(delivery: Delivery, call_next: Any) -> object:
        called = call_next(delivery)
        try:
            return await called
        except Reject as error:
            seen.append(str(error))
            raise

    @app.consumer("orders", group="billing")
    async def charge(order: Order) -> None:
        raise AssertionError("it is never called")

    async with working(app) as (mq, _):
        await mq.publish("orders", "no JSON")
        await until(lambda: bool(seen))
    assert "the body is not what 'charge' takes" in seen[0]


async def test_a_function_that_was_told_to_stop_is_not_called_with_what_waits() -> None:
    app, seen = App(), []
    runs: list[AppRun] = []

    @app.consumer("orders", group="billing", concurrency=1)
    async def charge(message: Message) -> None:
        seen.append(message.offset)
        if len(seen) == 3:
            runs[0].stop()

    async with working(app) as (mq, run):
        runs.append(run)
        await mq.publish_many("orders", [b"x"] * 100)
        await until(lambda: len(seen) >= 3)
        await asyncio.sleep(0.05)
        assert seen == [0, 1, 2]
        async with mq.consume("orders", group="billing") as consumer:
            assert [one.offset for one in await consumer.fetch(100)][:2] == [3, 4]


async def test_an_ordered_group_keeps_the_order_of_each_key_at_any_concurrency() -> None:
    app, settled = App(), Settled()
    seen: dict[str, list[str]] = {"a": [], "b": []}

    @app.consumer("orders", group="billing", concurrency=8, ordered=True)
    async def charge(body: str, message: Message) -> None:
        await asyncio.sleep(0)
        seen[str(message.key)].append(body)

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", [str(n) for n in range(40)], keys=["a", "b"] * 20)
        await until(lambda: len(settled.rows) == 40)
    assert seen == {key: [str(n) for n in range(at, 40, 2)] for at, key in enumerate("ab")}


async def test_middleware_is_around_every_call_the_first_outermost() -> None:
    app, order, settled = App(), [], Settled()

    @app.middleware
    async def outer(delivery: Delivery, call_next: Any) -> object:
        order.append(f"outer {delivery.offset}")
        try:
            return await call_next(delivery)
        except ValueError as error:
            raise Reject(f"turned into a rejection: {error}") from error
        finally:
            order.append("outer ends")

    @app.middleware
    async def inner(delivery: Delivery, call_next: Any) -> object:
        order.append("inner")
        return await call_next(delivery)

    @app.consumer("orders", group="billing")
    def charge(body: bytes) -> None:
        raise ValueError("bad")

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", b"x")
        await until(lambda: len(settled.rows) == 1)
    assert order == ["outer 0", "inner", "outer ends"]
    assert settled.rows == [("orders/0", "rejected", "turned into a rejection: bad")]


async def test_hooks_run_before_the_first_and_after_the_last_message() -> None:
    app, order = App(), []

    @app.on_start
    async def begin() -> None:
        order.append("start")
        await app.publish("orders", b"x")

    @app.on_stop
    def end() -> None:
        order.append("stop")

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None:
        order.append("message")
        app.stop()

    async with asyncio.timeout(WAIT_S):
        await app.run(address="memory:")
    assert order == ["start", "message", "stop"]


# --- stopping ----------------------------------------------------------------------------------


async def test_a_stop_lets_functions_end_and_makes_their_acks_durable() -> None:
    app, begun, may_end = App(), asyncio.Event(), asyncio.Event()

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None:
        begun.set()
        await may_end.wait()

    async with connect("memory:stop") as mq:
        await mq.publish_many("orders", [b"a", b"b", b"c"])
        running = asyncio.ensure_future(app.run(address="memory:stop"))
        await begun.wait()
        app.stop()
        # What waited for a slot is given back at once, while the function still runs.
        async with mq.consume("orders", group="billing") as other:
            taken = [(await other.fetch(1, wait="60s"))[0].body for _ in range(2)]
            may_end.set()
            await asyncio.wait_for(running, WAIT_S)
            assert sorted(taken) == [b"b", b"c"]
        assert (await mq.group("billing")).backlog == 2


async def test_functions_that_do_not_end_in_time_are_given_up_and_their_messages_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, begun = App(stop="10ms"), asyncio.Event()

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with connect("memory:late") as mq:
        await mq.publish("orders", b"a")
        running = asyncio.ensure_future(app.run(address="memory:late"))
        await begun.wait()
        app.stop()
        await asyncio.wait_for(running, WAIT_S)
        again = await mq.fetch("orders", group="billing", wait="60s")
        assert [one.attempt for one in again] == [1]
    assert "1 calls did not end in time" in caplog.text


async def test_a_thread_that_never_ends_does_not_keep_the_app_from_stopping() -> None:
    app, begun, may_end = App(stop="10ms"), threading.Event(), threading.Event()

    @app.consumer("orders", group="billing")
    def charge(body: bytes) -> None:
        begun.set()
        may_end.wait(WAIT_S)

    async with connect("memory:stuck") as mq:
        await mq.publish("orders", b"a")
        running = asyncio.ensure_future(app.run(address="memory:stuck"))
        await until(begun.is_set)
        app.stop()
        await asyncio.wait_for(running, WAIT_S)
    may_end.set()


async def test_a_function_in_a_thread_can_stop_the_app() -> None:
    app, done = App("memory:"), []

    @app.on_start
    async def begin() -> None:
        await app.publish("orders", b"x")

    @app.consumer("orders", group="billing")
    def charge(body: bytes) -> None:
        app.stop()
        done.append(body)

    async with asyncio.timeout(WAIT_S):
        await app.run()
    assert done == [b"x"]


@pytest.mark.parametrize("batch", [None, 10])
async def test_a_stop_does_not_wait_for_a_broker_that_is_away(batch: int | None) -> None:
    app = App()
    app.consumer("orders", group="billing", batch=batch)(lambda bodies: None)
    async with calling() as (mq, cable, _), app.running(mq) as run:
        running = asyncio.ensure_future(run.run())
        await run.joined()
        cable.pull()
        dialled = cable.dialled
        await until(lambda: cable.dialled > dialled)
        run.stop()
        await asyncio.wait_for(running, WAIT_S)


async def test_a_stop_does_not_wait_for_a_connection_that_is_not_there() -> None:
    app = App("127.0.0.1:1")
    app.consumer("orders", group="billing")(lambda body: None)
    running = asyncio.ensure_future(app.run())
    await until(lambda: app._opening is not None)
    app.stop()
    app.stop()
    await asyncio.wait_for(running, WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_gracefully(number: int) -> None:
    app, done = App("memory:"), []

    @app.on_start
    async def begin() -> None:
        await app.publish("orders", b"x")

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        done.append(body)

    before = signal.getsignal(number)
    async with asyncio.timeout(WAIT_S):
        await app.run()
    assert done == [b"x"]
    assert signal.getsignal(number) is before


async def test_one_wish_that_is_sent_twice_is_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_S", 3_600.0)
    app, done = App("memory:"), []

    @app.on_start
    async def begin() -> None:
        await app.publish("orders", b"x")

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None:
        assert app._run is not None
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            await app._run.ended()
        done.append(body)

    async with asyncio.timeout(WAIT_S):
        await app.run()
    assert done == [b"x"]


async def test_a_second_signal_waits_for_nobody() -> None:
    app, was_cancelled = App("memory:"), []

    @app.on_start
    async def begin() -> None:
        await app.publish("orders", b"x")

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None:
        try:
            while True:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            was_cancelled.append(True)
            raise

    running = asyncio.ensure_future(app.run())
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert was_cancelled == [True]


async def test_a_consumer_whose_group_is_deleted_ends_the_app_with_the_error() -> None:
    app = App()

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None: ...

    @app.consumer("orders", group="audit")
    async def note(body: bytes) -> None: ...

    async def delete() -> None:
        async with working(app) as (mq, run), asyncio.timeout(WAIT_S):
            await mq.delete_group("billing")
            await run.ended()

    with pytest.raises(UnknownGroup, match="'billing' was deleted"):
        await delete()


# --- what is logged ----------------------------------------------------------------------------


async def test_a_failed_attempt_is_logged_with_its_number_and_when_it_comes_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, settled = App(), Settled()

    @app.consumer("orders", group="billing", retry="fixed:2s:4")
    async def charge(body: bytes) -> None:
        raise ValueError

    @app.consumer("orders", group="audit", retry="none")
    async def note(body: bytes) -> None:
        raise ValueError

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", b"x")
        await until(lambda: len(settled.rows) == 2)
    assert "'charge' failed with orders/0, attempt 1 of 4, again in 2s" in caplog.text
    assert "'note' failed with orders/0, attempt 1 of 1, the last one" in caplog.text


async def test_the_debug_log_tells_a_retry_from_a_dead_letter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="onward.app")
    app, settled = App(), Settled()

    @app.consumer("orders", group="billing", retry="fixed:0s:2")
    async def charge(body: str) -> None:
        raise Reject("no") if body == "never" else ValueError

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", ["a", "never"])
        await until(lambda: len(settled.rows) == 3)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.DEBUG]
    assert [text for text in said if "orders/0" in text] == [
        "'charge': orders/0 retried, attempt 1",
        "'charge': orders/0 became a dead letter, attempt 2",
    ]
    assert "'charge': orders/1 became a dead letter, attempt 1" in said


@pytest.mark.parametrize("is_async", [True, False])
async def test_the_traceback_of_a_failure_begins_with_the_function(
    is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app, settled = App(), Settled()

    def divide(body: str) -> None:
        _ = 1 / int(body)

    async def charge(body: str) -> None:
        divide(body)

    app.consumer("orders", group="billing", retry="none")(charge if is_async else divide)
    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", "0")
        await until(lambda: len(settled.rows) == 1)
    (record,) = [one for one in caplog.records if one.exc_info]
    assert record.exc_info is not None
    frames = [frame.name for frame in traceback.extract_tb(record.exc_info[2])]
    assert frames == (["charge", "divide"] if is_async else ["divide"])
    assert 'work_run.py"' not in caplog.text


async def test_the_traceback_of_what_ended_a_thread_is_that_of_the_function(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, settled = App(), Settled()

    @app.consumer("orders", group="billing", retry="none")
    def leave(body: str) -> None:
        raise KeyboardInterrupt(body)

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish("orders", "x")
        await until(lambda: len(settled.rows) == 1)
        (letter,) = await dead_of(mq, "billing")
    assert letter.cause == "KeyboardInterrupt: x"
    (record,) = [one for one in caplog.records if one.exc_info]
    assert record.exc_info is not None
    assert [frame.name for frame in traceback.extract_tb(record.exc_info[2])] == ["leave"]


async def test_every_dead_letter_is_logged_with_its_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, settled = App(), Settled()

    @app.consumer("orders", group="billing", retry="fixed:0s:2")
    async def charge(body: str) -> None:
        if body == "never":
            raise Reject("no such customer")
        raise OSError(f"no bank for {body}")

    async with working(app, on_settled=settled) as (mq, _):
        await mq.publish_many("orders", ["never", "a", "b", "c"])
        await until(lambda: len(settled.rows) == 7)
    said = [text for text in caplog.messages if text.startswith("dead letter")]
    assert sorted(said) == [
        "dead letter of group 'billing': orders/0, attempt 1 of 'charge': no such customer",
        "dead letter of group 'billing': orders/1, attempt 2 of 'charge': OSError: no bank for a",
        "dead letter of group 'billing': orders/2, attempt 2 of 'charge': OSError: no bank for b",
        "dead letter of group 'billing': orders/3, attempt 2 of 'charge': OSError: no bank for c",
    ]


# --- mistakes ----------------------------------------------------------------------------------


def test_what_can_be_wrong_with_a_consumer_is_said_when_it_is_decorated() -> None:
    app = App()

    async def charge(body: bytes) -> None: ...

    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"topics": []}, "at least one topic"),
        ({"concurrency": 0}, "concurrency is a number from 1 to"),
        ({"batch": True}, "batch is a number from 1 to"),
        ({"batch": 5}, "takes batches"),
        ({"ordered": True, "mode": "shared"}, "the mode is 'shared'"),
        ({"topics": ["orders", "orders"]}, "'.*charge': a topic is named twice"),
        ({"leese": "1m"}, "'.*charge' has no option 'leese'; did you mean 'lease'?"),
        ({"colour": "red"}, "'.*charge' has no option 'colour': it has mode, "),
        ({"retry": "sometimes"}, "'.*charge', option 'retry': 'sometimes' is not a retry policy"),
        ({"retry": 5}, "'.*charge', option 'retry': "),
        ({"lease": "soon"}, "'.*charge', option 'lease': "),
        ({"lease": 0}, "'.*charge', option 'lease': "),
        ({"mode": "shard"}, "'.*charge', option 'mode': .*'shard'"),
        ({"tags": 5}, "'.*charge', option 'tags': "),
        ({"headers": "no"}, "'.*charge', option 'headers': "),
        ({"headers": {"sig": b"x"}}, "'.*charge', option 'headers': a filter compares .* as text"),
        ({"start": "once upon a time"}, "'.*charge', option 'start': "),
        ({"credit": 0}, "'.*charge', option 'credit': credit is 1 to"),
        ({"member": ""}, "'.*charge', option 'member': "),
        ({"refuse": "yes"}, "'.*charge', option 'refuse': refuse is True or False"),
        ({"position": 7}, "'.*charge', option 'position': "),
        ({"position": "here", "mode": "shared"}, "'.*charge': a position is kept only by"),
        ({"at_most_once": True, "retry": "fixed:1s:5"}, "'.*charge': "),
        ({"at_most_once": True, "ordered": True}, "'.*charge': .* exclude each other"),
    ]
    for mistake, said in mistakes:
        given: dict[str, Any] = {"topics": "orders", "group": "billing", **mistake}
        with pytest.raises(InvalidRequest, match=said):
            app.consumer(**given)(charge)
    assert app.works == []


def test_options_that_a_consumer_can_have_are_taken_as_they_are() -> None:
    app = App()
    options: dict[str, Any] = {
        "mode": "broadcast", "start": "10m", "member": "ann", "credit": 5, "lease": "1m",
        "retry": None, "tags": "vip,new", "headers": {"to": "ann"}, "refuse": False,
        "position": "here",
    }  # fmt: skip
    app.consumer("orders", group="billing", **options)(lambda body: None)
    assert app.works[0].options == options


async def test_a_group_that_has_other_settings_refuses_the_app_with_the_command_that_helps() -> (
    None
):
    app = App()

    @app.consumer("mails", group="mailer", retry="1s,2s,3s,4s", lease="1m")
    async def send(body: bytes) -> None: ...

    async with connect("memory:") as mq:
        await mq.create_group("mailer", "mails", retry="1s,2s,3s", lease="30s")
        async with app.running(mq) as run:
            with pytest.raises(Conflict, match="has retry 1s,2s,3s, not 1s,2s,3s,4s") as caught:
                await run.run()
        assert caught.value.command == "onward group change mailer --retry 1s,2s,3s,4s --lease 1m"
        assert (await mq.group("mailer")).retry.limit == 4


@pytest.mark.parametrize("where", ["app", "consumer"])
async def test_with_apply_the_code_decides_how_a_group_is(where: str) -> None:
    app, seen = App(apply=where == "app"), []

    @app.consumer("mails", group="mailer", retry="1s,2s,3s,4s", apply=where == "consumer")
    async def send(body: bytes) -> None:
        seen.append(body)

    async with connect("memory:") as mq:
        await mq.create_group("mailer", "mails", retry="1s,2s,3s", lease="1m")
        async with mq.consume("mails", group="mailer"), app.running(mq) as run:
            running = asyncio.ensure_future(run.run())
            await run.joined()
            group = await mq.group("mailer")
            run.stop()
            await running
        assert (group.retry.limit, group.lease_ms) == (5, 60_000)


async def test_the_mode_of_a_group_with_members_is_not_applied() -> None:
    app = App(apply=True)

    @app.consumer("mails", group="mailer", ordered=True)
    async def send(body: bytes) -> None: ...

    async with connect("memory:") as mq, mq.consume("mails", group="mailer"):
        async with app.running(mq) as run:
            with pytest.raises(Conflict, match="its mode changes when it has none") as caught:
                await run.run()
        # It helps to wait: so a supervisor starts it again.
        assert caught.value.command == ""


async def test_a_member_that_comes_back_takes_its_group_as_it_is_by_then() -> None:
    async with (
        calling() as (mq, cable, _),
        mq.consume("orders", group="billing", lease="1m") as consumer,
    ):
        await mq.change_group("billing", lease="10s")
        cable.cut()
        await mq.publish("orders", b"x")
        async with asyncio.timeout(WAIT_S):
            (delivery,) = await consumer.take()
        await delivery.ack()
        assert consumer.lease_ms == 10_000


def test_two_functions_that_give_their_group_different_settings_are_refused() -> None:
    app = App()
    app.consumer("a", group="g", retry="none", credit=3)(lambda body: None)
    app.consumer("b", group="g", lease="1m", credit=4)(lambda body: None)
    with pytest.raises(InvalidRequest, match="give it different settings: 'retry'"):
        app.consumer("c", group="g", retry="fixed:1s")(lambda body: None)


def test_two_functions_on_one_topic_in_one_group_are_refused() -> None:
    app = App()
    app.consumer("orders", group="billing")(lambda body: None)
    app.consumer("orders", group="audit")(lambda body: None)
    with pytest.raises(InvalidRequest, match="both consume 'orders' in group 'billing'"):
        app.consumer(["refunds", "orders"], group="billing")(lambda body: None)


def test_a_middleware_that_is_no_coroutine_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="async def"):
        App().middleware(lambda delivery, call_next: call_next(delivery))


async def test_an_app_without_consumers_or_that_runs_already_says_so() -> None:
    app = App("memory:")
    with pytest.raises(InvalidRequest, match="no consumer"):
        await app.run()
    with pytest.raises(NotConnected, match="does not run"):
        _ = app.mq
    with pytest.raises(NotConnected, match="does not run"):
        _ = app.sync
    app.consumer("orders", group="billing")(lambda body: None)
    async with working(app):
        with pytest.raises(InvalidRequest, match="runs already"):
            await app.run()


async def test_a_function_that_blocks_the_loop_is_named_in_a_warning() -> None:
    app, said = App(), threading.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # A machine that stalls may be warned about as well.
            if "'charge'" in record.getMessage():
                texts.append(record.getMessage())
                said.set()

    @app.consumer("orders", group="billing", lease="1s")
    async def charge(body: bytes) -> None:
        assert said.wait(WAIT_S)

    texts: list[str] = []
    settled, listening = Settled(), Listening()
    logger = logging.getLogger("onward.app")
    logger.addHandler(listening)
    try:
        async with working(app, on_settled=settled) as (mq, _):
            await mq.publish("orders", b"x")
            await until(said.is_set)
    finally:
        logger.removeHandler(listening)
    assert "has blocked the event loop" in texts[0]


async def test_a_client_may_open_before_its_broker_is_up() -> None:
    async with connect("localhost:1", wait_for_broker=False, timeout="100ms") as mq:
        with pytest.raises(NotConnected):
            await mq.publish("orders", b"x")
    async with connect("memory:", wait_for_broker=False) as mq:
        assert (await mq.publish("orders", b"x")).offset == 0
