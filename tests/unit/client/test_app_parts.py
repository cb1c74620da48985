"""What an App is made of: signatures, slots, threads, and who blocks the loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import msgspec
import pytest

from onward.client.blocked import LoopWatch, code_of, culprit
from onward.client.outcome import Reject, Retry, cause_of
from onward.client.seldom import Seldom
from onward.client.signature import Signature, Unconvertible, is_coroutine_function
from onward.client.slots import Slots
from onward.client.threads import Threads
from onward.errors import InvalidRequest
from onward.message.message import Message
from onward.testing.clock import ManualClock
from onward.testing.loop import VirtualClock, run, running_loop


@dataclass
class Order:
    id: int
    note: str = ""


class Paid(msgspec.Struct):
    id: int


class Typed(TypedDict):
    id: int


class Named(NamedTuple):
    id: int


def body_of(function: Any, body: bytes) -> object:
    positional, named = Signature(function).arguments(Message("orders", 7, body))
    return [*positional, *named.values()][0]


def takes(annotation: Any) -> Any:
    def function(body: Any) -> None: ...

    function.__annotations__ = {"body": annotation}
    return function


# --- signatures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "body", "wanted"),
    [
        (bytes, b"\xff", b"\xff"),
        (str, "grün".encode(), "grün"),
        (dict, b'{"id": 1}', {"id": 1}),
        (list, b"[1, 2]", [1, 2]),
        (Any, b"7", 7),
        (object, b"null", None),
        (dict[str, int], b'{"id": 1}', {"id": 1}),
        (int | None, b"null", None),
        (Order, b'{"id": 1, "note": "x"}', Order(1, "x")),
        (list[Order], b'[{"id": 1}]', [Order(1)]),
        (Paid, b'{"id": 1}', Paid(1)),
        (Typed, b'{"id": 1}', {"id": 1}),
        (Named, b"[1]", Named(1)),
    ],
)
def test_a_body_comes_as_its_annotation_says(annotation: Any, body: bytes, wanted: object) -> None:
    assert body_of(takes(annotation), body) == wanted


def test_a_body_without_an_annotation_comes_as_it_is() -> None:
    assert body_of(lambda body: None, b"\xff") == b"\xff"


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        (str, b"\xff"),
        (dict, b"[]x"),
        (dict, b""),
        (Order, b'{"id": "seven"}'),
        (Order, b"{}"),
        (Any, b"[" * 100_000),
        (Any, b'"\xff"'),
    ],
)
def test_a_body_that_does_not_convert_says_whose_it_was_to_be(annotation: Any, body: bytes) -> None:
    with pytest.raises(Unconvertible, match="the body is not what '.*function' takes: "):
        body_of(takes(annotation), body)


def test_a_parameter_that_is_a_message_gets_the_message_wherever_it_stands() -> None:
    def first(message: Message, order: Order) -> None: ...
    def last(order: Order, *, message: Message) -> None: ...
    def alone(message: Message) -> None: ...
    def neither() -> None: ...

    message = Message("orders", 7, b'{"id": 1}')
    assert Signature(first).arguments(message) == ([message, Order(1)], {})
    assert Signature(last).arguments(message) == ([Order(1)], {"message": message})
    assert Signature(alone).arguments(message) == ([message], {})
    assert Signature(neither).arguments(message) == ([], {})


def test_only_what_is_asked_for_is_converted() -> None:
    def alone(message: Message) -> None: ...

    assert Signature(alone).arguments(Message("orders", 7, b"\xff no JSON"))[0]


def test_what_has_a_default_beside_the_body_keeps_it() -> None:
    def function(order: Order, database: str = "main") -> None: ...

    assert Signature(function).arguments(Message("orders", 7, b'{"id": 1}')) == ([Order(1)], {})


def test_a_second_body_is_refused_when_it_is_decorated() -> None:
    def function(order: Order, other: Order) -> None: ...

    with pytest.raises(InvalidRequest, match="parameter 'other' beside the body"):
        Signature(function)


def test_an_annotation_that_cannot_be_a_body_is_refused_when_it_is_decorated() -> None:
    with pytest.raises(InvalidRequest, match="cannot be given a body as"):
        Signature(takes(dict[Order, threading.Thread | int]))


def test_an_annotation_that_cannot_be_found_is_refused_when_it_is_decorated() -> None:
    with pytest.raises(InvalidRequest, match="annotations of .* cannot be read"):
        Signature(takes("NoSuchThing"))


def test_a_batch_function_takes_lists_of_what_it_says() -> None:
    def orders(orders: list[Order]) -> None: ...
    def messages(messages: list[Message]) -> None: ...
    def plain(bodies: list) -> None: ...  # type: ignore[type-arg]

    message = Message("orders", 7, b'{"id": 1}')
    assert Signature(orders, is_batch=True).convert(message) == Order(1)
    assert Signature(plain, is_batch=True).convert(message) == b'{"id": 1}'
    signature = Signature(messages, is_batch=True)
    assert signature.batch_arguments([message], [None]) == ([[message]], {})


def test_a_batch_function_that_takes_no_list_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"must be a list such as list\[bytes\]"):
        Signature(takes(Order), is_batch=True)


def test_a_pydantic_model_validates_itself_when_pydantic_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Model:
        def __init__(self, body: bytes) -> None:
            self.body = body

    class Adapter:
        def __init__(self, wanted: Any) -> None:
            self.wanted = wanted

        def validate_json(self, body: bytes) -> object:
            if body == b"bad":
                raise ValueError("1 validation error")
            return self.wanted, body

    stand_in = types.ModuleType("pydantic")
    stand_in.BaseModel = Model  # type: ignore[attr-defined]
    stand_in.TypeAdapter = Adapter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pydantic", stand_in)

    class Bill(Model): ...

    assert body_of(takes(Bill), b"{}") == (Bill, b"{}")
    assert body_of(takes(list[Bill]), b"[]") == (list[Bill], b"[]")
    assert body_of(takes(Order), b'{"id": 1}') == Order(1)
    with pytest.raises(Unconvertible, match="1 validation error"):
        body_of(takes(Bill), b"bad")


def test_coroutine_functions_are_known_in_all_their_forms() -> None:
    async def function(body: bytes) -> None: ...

    class Callee:
        async def __call__(self, body: bytes) -> None: ...

    assert is_coroutine_function(function)
    assert is_coroutine_function(functools.partial(function, b""))
    assert is_coroutine_function(Callee())
    assert not is_coroutine_function(print)


# --- outcomes ----------------------------------------------------------------------------------


def test_a_cause_is_short_and_can_always_be_stored() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert cause_of(ValueError("x" * 5_000)).startswith("ValueError: xxx")
    assert len(cause_of(ValueError("x" * 5_000))) == 1_000
    assert cause_of(Mute()) == "Mute"
    cause_of(ValueError("\ud800" * 999)).encode()
    assert cause_of(Retry("later", after="1s")) == "later"


def test_a_retry_is_after_a_delay_or_at_a_moment() -> None:
    assert Retry(after="10m").after_ms == 600_000
    assert Retry(at=7).at_ms == 7
    with pytest.raises(InvalidRequest, match="not both"):
        Retry(after="10m", at=7)
    assert Reject().cause == "rejected"


@pytest.mark.parametrize("at", ["tomorrow", True, -1, 10**30])
def test_a_retry_at_no_moment_is_refused_where_it_is_raised(at: Any) -> None:
    with pytest.raises(InvalidRequest, match="a retry"):
        Retry(at=at)


# --- slots -------------------------------------------------------------------------------------


async def test_a_slot_is_free_when_its_function_is_done_not_when_its_answer_is() -> None:
    slots = Slots(running_max=1, answering_max=2)
    slots.begin()
    waiting = asyncio.ensure_future(slots.free())
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.ran()
    assert await waiting == 1
    assert slots.answering == 1


async def test_answers_under_way_have_a_limit() -> None:
    slots = Slots(running_max=5, answering_max=2)
    for _ in range(2):
        slots.begin()
        slots.ran()
    waiting = asyncio.ensure_future(slots.free())
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.answered()
    assert await waiting == 5
    slots.answered()
    await slots.idle()


async def test_a_slot_that_goes_on_is_never_free_for_others() -> None:
    slots = Slots(running_max=1, answering_max=2)
    slots.begin()
    waiting = asyncio.ensure_future(slots.free())
    assert slots.may_go_on
    slots.went_on()
    await asyncio.sleep(0)
    assert not waiting.done()
    assert (slots.running, slots.answering) == (1, 1)
    slots.went_on()
    assert not slots.may_go_on  # two answers are under way
    slots.answered(2)
    assert slots.may_go_on
    slots.close()
    assert not slots.may_go_on
    assert await waiting == 0


# --- threads -----------------------------------------------------------------------------------


async def test_calls_run_at_once_as_far_as_there_are_threads() -> None:
    threads = Threads(3, name="test")
    together = threading.Barrier(3)
    places = await asyncio.gather(*(threads.run(together.wait, 30) for _ in range(3)))
    assert sorted(places) == [0, 1, 2]
    threads.close()


async def test_one_thread_serves_calls_that_follow_each_other() -> None:
    threads = Threads(3, name="test")
    assert len({await threads.run(threading.get_ident) for _ in range(5)}) == 1
    threads.close()


async def test_an_error_in_a_thread_is_raised_where_the_call_was_made() -> None:
    threads = Threads(1, name="test")
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(next, iter([]))
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await threads.run(sys.exit, 3)
    assert await threads.run(lambda: "still there") == "still there"
    threads.close()


async def test_a_thread_sees_the_context_of_its_caller() -> None:
    tenant = contextvars.ContextVar("tenant", default="nobody")
    tenant.set("ann")
    threads = Threads(1, name="test")
    assert await threads.run(tenant.get) == "ann"
    threads.close()


def test_a_thread_whose_loop_has_gone_ends_quietly() -> None:
    may_end, threads = threading.Event(), Threads(1, name="gone")

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await threads.run(may_end.wait, 30)

    asyncio.run(leave())
    working = [one for one in threading.enumerate() if one.name == "gone-1"]
    threads.close()
    may_end.set()
    for thread in working:
        thread.join(30)
        assert not thread.is_alive()


# --- warnings ----------------------------------------------------------------------------------


def test_what_comes_in_swarms_is_said_seldom_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    seldom = Seldom(logging.getLogger("test"), clock=clock)
    for number in range(5):
        seldom.warn("failed", f"number {number}")
    seldom.warn("lost", "another thing")
    clock.advance(1_000)
    seldom.warn("failed", "number 5")
    assert caplog.messages == [
        "number 0", "another thing", "number 5 (and 4 more like this before)"
    ]  # fmt: skip


def test_what_was_left_out_is_said_by_a_flush(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(logging.getLogger("test"), clock=ManualClock())
    for number in range(4):
        seldom.warn("failed", f"number {number}")
    seldom.flush()
    seldom.flush()
    assert caplog.messages == ["number 0", "3 more like this, the last one: number 3"]


def test_what_was_left_out_is_said_after_a_second_though_nothing_follows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def swarm() -> None:
        seldom = Seldom(logging.getLogger("test"), clock=VirtualClock(running_loop()))
        for number in range(4):
            seldom.warn("failed", f"number {number}")
        await asyncio.sleep(0.999)
        assert caplog.messages == ["number 0"]
        await asyncio.sleep(0.002)
        assert caplog.messages[1:] == ["3 more like this, the last one: number 3"]
        seldom.warn("failed", "number 4")
        assert len(caplog.messages) == 2
        await asyncio.sleep(1.001)
        assert caplog.messages[2:] == ["1 more like this, the last one: number 4"]

    run(swarm(), seed=7)


def test_a_blocked_loop_is_noticed_by_the_clock_and_blamed_on_its_function() -> None:
    clock = ManualClock()

    def charge() -> str | None:
        return watch.look(sys._getframe())

    watch = LoopWatch({charge.__code__: "charge"}, threshold_ms=5_000, clock=clock)
    clock.advance(4_999)
    assert charge() is None
    clock.advance(1)
    said = charge()
    assert said is not None
    assert said.startswith("'charge' (line ")
    assert said.endswith("has blocked the event loop for 5.0 s")
    assert charge() is None
    clock.advance(5_000)
    assert "10.0 s" in str(charge())


def test_something_else_that_blocks_is_named_by_its_place() -> None:
    assert culprit(sys._getframe(), {}).startswith("something (line ")
    assert culprit(None, {}) == "something"


def test_the_code_of_a_function_is_found_behind_what_wraps_it() -> None:
    def function() -> None: ...

    @functools.wraps(function)
    def wrapper() -> None: ...

    class Callee:
        def __call__(self) -> None: ...

    assert code_of(wrapper) is function.__code__
    assert code_of(functools.partial(function)) is function.__code__
    assert code_of(Callee()) is Callee.__call__.__code__
    assert code_of(print) is None


class Waiting(logging.Handler):
    """Lets a function wait for the warning about itself."""

    def __init__(self) -> None:
        super().__init__()
        self.said = threading.Event()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # A machine that stalls may be warned about as well.
        if "'charge'" in record.getMessage():
            self.texts.append(record.getMessage())
            self.said.set()


async def test_the_warning_comes_while_the_loop_is_still_blocked() -> None:
    waiting = Waiting()
    logger = logging.getLogger("onward.app")

    def charge() -> None:
        assert waiting.said.wait(60)

    watch = LoopWatch({charge.__code__: "charge"}, threshold_ms=50)
    logger.addHandler(waiting)
    try:
        watch.start()
        charge()
    finally:
        watch.stop()
        logger.removeHandler(waiting)
    assert "has blocked the event loop for" in waiting.texts[0]
