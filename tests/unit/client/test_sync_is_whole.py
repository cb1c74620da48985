"""The blocking client has all of the asynchronous one: what is added there is added here."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import pytest

from onward.client import options, scheduled
from onward.client.client import Client
from onward.client.consumer import Consumer
from onward.client.delivery import Delivery
from onward.client.delivery_batch import DeliveryBatch
from onward.client.reader import Reader
from onward.client.scheduled import ScheduledBatchReceipt, ScheduledReceipt
from onward.client.sync import SyncClient
from onward.client.sync_consumer import SyncConsumer
from onward.client.sync_delivery import SyncDelivery, SyncDeliveryBatch
from onward.client.sync_reader import SyncReader
from onward.client.sync_schedule import SyncScheduledBatchReceipt, SyncScheduledReceipt


@dataclass(frozen=True)
class Pair:
    """Two classes that say the same, and what only one of them says, with the reason."""

    asynchronous: type
    blocking: type
    only_asynchronous: dict[str, str] = field(default_factory=dict)
    only_blocking: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


LEASES = "keeps the lease, for the membership: a thread that consumes has it kept"
RECEIVED = "between the connection and the consumer, before a program has the batch"
BY_RANGE = "how single deliveries are settled: a thread has the verbs of `messages()`"
IN_LOOP = "for who shares the loop: across threads there is `ack_soon`"

PAIRS = [
    Pair(Client, SyncClient),
    Pair(
        Consumer,
        SyncConsumer,
        only_asynchronous={
            "unstarted": "for the App, which lets lists wait inside the loop",
            "returned": "for the App, which lets lists wait inside the loop",
            "start": "for the App, which lets lists wait inside the loop",
            "name_function": "for the App, which calls functions",
            "retry_policy": "for the App, which says when a call comes again",
            "pace": "for the App, which knows how many functions run",
            "note_work": "for the App, which knows how many functions run",
            "take_for_task": "for the App, whose calls are tasks",
            "more_room": "for the App, which knows how many functions run",
        },
        renamed={"aclose": "close"},
    ),
    Pair(
        Delivery,
        SyncDelivery,
        only_blocking={
            "of": "makes it",
            "delivery": "what it stands for",
            "calls": "the way to the client's thread",
        },
    ),
    Pair(
        DeliveryBatch,
        SyncDeliveryBatch,
        only_asynchronous={
            **dict.fromkeys(("expires_at_ms", "lease_ms", "renew_soon", "renewed"), LEASES),
            **dict.fromkeys(("lose", "lose_ranges", "lost", "has_lost", "keep_only"), LEASES),
            **dict.fromkeys(("arrived_at_ms", "starts"), LEASES),
            **dict.fromkeys(("entries_bytes", "granted", "grants", "open", "taken"), RECEIVED),
            **dict.fromkeys(("again", "number", "topic_number", "wanted_by"), RECEIVED),
            **dict.fromkeys(("held", "ack_range", "ack_range_soon", "renew_for"), BY_RANGE),
            **dict.fromkeys(("retry_range", "settle_range", "settle_soon"), BY_RANGE),
            **dict.fromkeys(("retry_one_soon",), BY_RANGE),
            **dict.fromkeys(("acking", "ack_one_soon"), IN_LOOP),
            **dict.fromkeys(
                ("give_back_soon", "release_last_soon", "release_ranges_soon"), IN_LOOP
            ),
        },
    ),
    Pair(Reader, SyncReader, only_asynchronous={"wanted": "iterating does it, here as there"}),
    Pair(ScheduledReceipt, SyncScheduledReceipt),
    Pair(
        ScheduledBatchReceipt,
        SyncScheduledBatchReceipt,
        only_asynchronous={"of": "makes it, inside the client"},
    ),
]

DUNDERS = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__len__": "__len__",
}

OPTIONS: dict[str, type] = {
    "publish": scheduled.LaterOne,
    "publish_soon": scheduled.LaterSoon,
    "publish_many": scheduled.LaterMany,
    "consume": options.ConsumeOptions,
}
"""What `**options` of a call may be, for those that pass them on."""

each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.blocking.__name__)


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def arguments(function: object, name: str) -> list[str]:
    assert callable(function)
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == inspect.Parameter.VAR_KEYWORD:
            keys: frozenset[str] = getattr(OPTIONS[name], "__optional_keys__")  # noqa: B009
            found += list(keys)
        else:
            found.append(parameter.name)
    return sorted(found)


@each_pair
def test_threads_have_every_name_that_tasks_have(pair: Pair) -> None:
    wanted = public_names(pair.asynchronous) - pair.only_asynchronous.keys()
    wanted = {pair.renamed.get(name, name) for name in wanted}
    assert wanted == public_names(pair.blocking) - pair.only_blocking.keys()


@each_pair
def test_an_exception_is_one_that_still_exists(pair: Pair) -> None:
    both = public_names(pair.asynchronous) & public_names(pair.blocking)
    assert pair.only_asynchronous.keys() <= public_names(pair.asynchronous) - both
    assert pair.only_blocking.keys() <= public_names(pair.blocking) - both
    assert all(pair.only_asynchronous.values())
    assert all(pair.only_blocking.values())


@each_pair
def test_what_is_a_call_for_tasks_is_a_call_with_the_same_arguments_for_threads(pair: Pair) -> None:
    for name in public_names(pair.asynchronous) - pair.only_asynchronous.keys():
        one = getattr(pair.asynchronous, name)
        other = getattr(pair.blocking, pair.renamed.get(name, name))
        assert inspect.isfunction(one) == inspect.isfunction(other), name
        if inspect.isfunction(one):
            assert arguments(one, name) == arguments(other, name), name
            assert not inspect.iscoroutinefunction(other), name


@each_pair
def test_what_tasks_use_with_a_keyword_threads_use_with_the_same_one(pair: Pair) -> None:
    for asynchronous, blocking in DUNDERS.items():
        if hasattr(pair.asynchronous, asynchronous):
            assert hasattr(pair.blocking, blocking)
            assert not hasattr(pair.blocking, "__aiter__")


@each_pair
def test_every_public_name_says_what_it_is(pair: Pair) -> None:
    fields = set(getattr(pair.blocking, "__struct_fields__", ()))
    for name in public_names(pair.blocking) - fields:
        assert inspect.getdoc(getattr(pair.blocking, name)), name
