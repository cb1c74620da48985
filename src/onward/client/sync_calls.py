"""The calls of the blocking client, derived from those of the asynchronous client.

Each has the name, the arguments, the types and the first paragraph of the documentation of the
asynchronous call, and returns its result without `await`. Declared by hand in `sync.py` are only
the calls whose result is another object here: receipts, readers, consumers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from onward.client.backlog_calls import BacklogCalls
from onward.client.client import Client
from onward.client.group_calls import GroupCalls
from onward.client.pipeline_calls import PipelineCalls
from onward.client.replica_calls import ReplicaCalls
from onward.client.schedule_calls import ScheduleCalls
from onward.client.topic_calls import TopicCalls

P = ParamSpec("P")
T = TypeVar("T")


class Runs(Protocol):
    """What runs calls of an asynchronous client, and waits for them."""

    def _open(self) -> Any: ...

    def _run(self, work: Coroutine[Any, Any, T]) -> T: ...


def _blocking(
    call: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a method that makes the same call and waits for it."""

    def method(self: Runs, *arguments: P.args, **options: P.kwargs) -> T:
        return self._run(call(self._open(), *arguments, **options))

    return cast(Callable[Concatenate[Any, P], T], _named_like(call, method))


def _iterating(
    call: Callable[Concatenate[Any, P], AsyncGenerator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Return a method that gives the same, for `for`."""

    def method(self: Runs, *arguments: P.args, **options: P.kwargs) -> Iterator[T]:
        given = call(self._open(), *arguments, **options)
        try:
            while True:
                try:
                    yield self._run(anext(given))
                except StopAsyncIteration:
                    return
        finally:
            self._run(given.aclose())

    return cast(Callable[Concatenate[Any, P], Iterator[T]], _named_like(call, method))


def _named_like(call: Callable[..., object], method: Callable[..., T]) -> Callable[..., T]:
    """Take over name, signature and what it does; the example would be another one here."""
    named = wraps(call)(method)
    named.__doc__ = (call.__doc__ or "").partition("\n\n")[0]
    return named


class SyncTopicCalls:
    """The calls about topics, their messages and the node, blocking."""

    create_topic = _blocking(TopicCalls.create_topic)
    change_topic = _blocking(TopicCalls.change_topic)
    delete_topic = _blocking(TopicCalls.delete_topic)
    topic = _blocking(TopicCalls.topic)
    has_topic = _blocking(TopicCalls.has_topic)
    topics = _blocking(TopicCalls.topics)
    get = _blocking(Client.get)
    status = _blocking(Client.status)


class SyncGroupCalls:
    """The calls about groups, dead letters and the history of messages, blocking."""

    groups = _blocking(GroupCalls.groups)
    group = _blocking(GroupCalls.group)
    create_group = _blocking(GroupCalls.create_group)
    change_group = _blocking(GroupCalls.change_group)
    delete_group = _blocking(GroupCalls.delete_group)
    pause_group = _blocking(GroupCalls.pause_group)
    resume_group = _blocking(GroupCalls.resume_group)
    set_member = _blocking(GroupCalls.set_member)
    reset_group = _blocking(GroupCalls.reset_group)
    skip = _blocking(GroupCalls.skip)
    group_counts = _blocking(BacklogCalls.group_counts)
    purge_ready = _blocking(BacklogCalls.purge_ready)
    replay = _blocking(GroupCalls.replay)
    fork_group = _blocking(GroupCalls.fork_group)
    peek = _blocking(GroupCalls.peek)
    dead_letters = _iterating(GroupCalls.dead_letters)
    redrive = _blocking(GroupCalls.redrive)
    purge = _blocking(GroupCalls.purge)
    find = _blocking(GroupCalls.find)
    explain = _blocking(GroupCalls.explain)


class SyncPipelineCalls:
    """The calls of pipelines, blocking."""

    topic_ends = _blocking(PipelineCalls.topic_ends)
    topic_entries = _blocking(PipelineCalls.topic_entries)
    advance_group = _blocking(PipelineCalls.advance_group)
    hold_group = _blocking(PipelineCalls.hold_group)
    publish_encoded = _blocking(PipelineCalls.publish_encoded)
    copy_batches = _blocking(PipelineCalls.copy_batches)


class SyncReplicaCalls:
    """The calls about copies of a node, blocking."""

    replication = _blocking(ReplicaCalls.replication)
    promote = _blocking(ReplicaCalls.promote)
    step_down = _blocking(ReplicaCalls.step_down)


class SyncScheduleCalls:
    """The calls about the schedule, blocking."""

    cancel_scheduled = _blocking(ScheduleCalls.cancel_scheduled)
    reschedule = _blocking(ScheduleCalls.reschedule)
    scheduled = _blocking(ScheduleCalls.scheduled)
    list_scheduled = _iterating(ScheduleCalls.list_scheduled)
    calendar = _blocking(ScheduleCalls.calendar)
    set_recurring = _blocking(ScheduleCalls.set_recurring)
    recurring = _blocking(ScheduleCalls.recurring)
    pause_recurring = _blocking(ScheduleCalls.pause_recurring)
    resume_recurring = _blocking(ScheduleCalls.resume_recurring)
    delete_recurring = _blocking(ScheduleCalls.delete_recurring)
