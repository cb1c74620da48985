"""One function of an App: what it consumes, and what a call of it is.

A `Work` never changes and belongs to no run: the same App can run many times, as in tests. What one
call needs besides (threads, middleware) is put around it by the run, with `chain`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any

from onward.client.checking import OF_THE_MEMBER, check_options
from onward.client.client import Client
from onward.client.consumer import Consumer
from onward.client.delivery import Delivery
from onward.client.options import ConsumeOptions
from onward.client.outcome import Reject
from onward.client.signature import Signature, Unconvertible, is_coroutine_function, name_of
from onward.client.threads import Threads
from onward.errors import InvalidRequest
from onward.message.names import check_group_name, check_topic_name

CONCURRENCY_MAX = 10_000
BATCH_MAX = 10_000
AHEAD_MIN = 64
AHEAD_MAX = 100_000

Deliveries = list[Delivery]
Call = Callable[[Any], Awaitable[object]]
"""Takes a Delivery, or a list of them for a batch function."""
Middleware = Callable[[Any, Call], Awaitable[object]]


@dataclass(frozen=True)
class Work:
    """A function and what it consumes."""

    function: Callable[..., object]
    name: str
    topics: tuple[str, ...]
    group: str
    concurrency: int
    batch: int | None
    signature: Signature
    is_async: bool
    options: ConsumeOptions

    def consume(self, client: Client, *, apply: bool = False) -> Consumer:
        """Return the member of the group that gives this function its messages.

        With `apply` the group gets the settings that the function has, if they differ.
        """
        options = self.options.copy()
        if apply:
            options["apply"] = True
        consumer = client.consume(self.topics, group=self.group, **options)
        consumer.name_function(self.name)
        return consumer

    @property
    def ahead_max(self) -> int:
        """How many messages are fetched ahead at most, however quick the function is."""
        return max(AHEAD_MIN, min(2 * self.concurrency * (self.batch or 1), AHEAD_MAX))

    def differs(self, other: Work) -> str:
        """Return the first setting of the group that both functions give, each another one."""
        for name, value in self.options.items():
            theirs = other.options.get(name)
            if name not in OF_THE_MEMBER and None not in (value, theirs) and value != theirs:
                return name
        return ""


def make_work(
    function: Callable[..., object],
    topics: str | Sequence[str],
    *,
    group: str,
    concurrency: int,
    batch: int | None,
    options: ConsumeOptions,
) -> Work:
    """Check everything that can be checked before there is a broker."""
    name = name_of(function)
    wanted = (topics,) if isinstance(topics, str) else tuple(topics)
    if not wanted:
        raise InvalidRequest(f"{name!r} needs at least one topic")
    for topic in wanted:
        check_topic_name(topic, system=True)
    check_group_name(group)
    if len(set(wanted)) < len(wanted):
        raise InvalidRequest(f"{name!r}: a topic is named twice")
    _check_count(name, concurrency, "concurrency", most=CONCURRENCY_MAX)
    if batch is not None:
        _check_count(name, batch, "batch", most=BATCH_MAX)
    check_options(name, options)
    return Work(
        function=function, name=name, topics=wanted, group=group, concurrency=concurrency,
        batch=batch, signature=Signature(function, is_batch=batch is not None),
        is_async=is_coroutine_function(function), options=options,
    )  # fmt: skip


def caller(work: Work, threads: Threads | None, rejected: Callable[[Delivery, str], None]) -> Call:
    """Return what converts the bodies and calls the function.

    `rejected` is told which messages of a batch do not convert: the others are not to suffer.
    """

    async def invoke(positional: list[object], named: dict[str, object]) -> object:
        if threads is None:
            result = work.function(*positional, **named)
        else:
            result = await threads.run(lambda: work.function(*positional, **named))
        return await result if isinstance(result, Awaitable) else result

    async def refuse(error: Unconvertible) -> object:
        raise Reject(str(error)) from error

    plain: Callable[..., Awaitable[object]] | None = None
    if threads is None and iscoroutinefunction(work.function):
        plain = work.function

    # Not a coroutine itself: its caller awaits the function's own, one fewer for each message.
    def call_one(delivery: Delivery) -> Awaitable[object]:
        try:
            positional, named = work.signature.arguments(delivery)
        except Unconvertible as error:
            return refuse(error)
        if plain is not None:
            return plain(*positional, **named)
        return invoke(positional, named)

    convert = work.signature.convert

    def call_with_body(delivery: Delivery) -> Awaitable[object]:
        assert plain is not None
        try:
            return plain(convert(delivery))
        except Unconvertible as error:
            return refuse(error)

    async def call_batch(deliveries: Deliveries) -> object:
        kept: Deliveries = []
        bodies: list[object] = []
        for delivery in deliveries:
            try:
                bodies.append(convert(delivery))
            except Unconvertible as error:
                rejected(delivery, str(error))
            else:
                kept.append(delivery)
        if not kept:
            return None
        return await invoke(*work.signature.batch_arguments(kept, bodies))

    if work.batch is not None:
        return call_batch
    # What most functions are, without the lists that arguments in general need.
    is_simple = plain is not None and work.signature.is_body_alone
    return call_with_body if is_simple else call_one


def chain(middleware: Sequence[Middleware], call: Call) -> Call:
    """Put middleware around a call: the first that was given is the outermost."""
    for one in reversed(middleware):
        call = _around(one, call)
    return call


def _around(middleware: Middleware, call_next: Call) -> Call:
    async def call(delivery: Any) -> object:
        return await middleware(delivery, call_next)

    return call


def _check_count(function: str, value: object, name: str, *, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidRequest(
            f"consumer {function!r}: {name} is a number from 1 to {most}, not {value!r}"
        )
