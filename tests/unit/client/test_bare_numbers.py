"""No public call takes a bare number as a duration, and each says both readings of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import onward
from onward.client.consumer import Consumer
from onward.client.delivery_batch import DeliveryBatch
from onward.client.options import ConsumeOptions
from onward.client.scheduled import (
    LaterMany,
    LaterOne,
    LaterSoon,
    Many,
    One,
    ScheduledReceipt,
)
from onward.client.sync_consumer import SyncConsumer
from onward.client.sync_delivery import SyncDelivery, SyncDeliveryBatch
from onward.client.sync_schedule import SyncScheduledReceipt
from onward.errors import InvalidRequest

KINDS = (
    *(onward.Client, onward.SyncClient, onward.App, onward.Delivery, onward.Retry, Consumer),
    *(DeliveryBatch, ScheduledReceipt, SyncConsumer, SyncDelivery, SyncDeliveryBatch),
    SyncScheduledReceipt,
)
OPTIONS = (ConsumeOptions, LaterMany, LaterOne, LaterSoon, Many, One)


def _declared() -> list[tuple[str, dict[str, str]]]:
    """Return the arguments of all public calls, with their annotations as text."""
    calls: list[tuple[str, Any]] = [("connect", onward.connect), ("sync", onward.connect_sync)]
    for kind in KINDS:
        found = inspect.getmembers(kind, inspect.isfunction)
        calls += [
            (f"{kind.__name__}.{name}", function)
            for name, function in found
            if name == "__init__" or not name.startswith("_")
        ]
    signatures = [
        (name, {one: str(p.annotation) for one, p in inspect.signature(call).parameters.items()})
        for name, call in calls
    ]
    options = [
        (kind.__name__, {one: str(hint) for one, hint in kind.__annotations__.items()})
        for kind in OPTIONS
    ]
    return signatures + options


MOMENTS: dict[str, Callable[[onward.Client], Any]] = {
    "read": lambda mq: mq.read("t", start="10"),
    "consume": lambda mq: mq.consume("t", group="g", start="10"),
    "create_group": lambda mq: mq.create_group("g", "t", start="10"),
    "reset_group": lambda mq: mq.reset_group("g", to="10"),
    "replay": lambda mq: mq.replay("g", "t", start="10"),
    "find start": lambda mq: mq.find("t", start="10"),
    "find end": lambda mq: mq.find("t", end="10"),
}


@pytest.mark.parametrize("call", MOMENTS)
async def test_digits_as_text_are_neither_an_offset_nor_a_time(call: str) -> None:
    async with onward.connect("memory:") as mq:
        with pytest.raises(InvalidRequest, match="offset is the number 10, a time .*'10s' is"):
            await MOMENTS[call](mq)


def test_every_duration_of_a_public_call_has_a_twin_in_milliseconds() -> None:
    durations = [
        (call, name, arguments)
        for call, arguments in _declared()
        for name, annotation in arguments.items()
        if re.search(r"\b(Duration|Delays)\b", annotation)
    ]
    assert {name for _, name, _ in durations} >= {
        *("after", "delay", "every", "lease", "lifetime", "retention", "step", "stop"),
        *("timeout", "wait"),
    }
    assert [f"{call}({name})" for call, name, given in durations if f"{name}_ms" not in given] == []


Call = Callable[[onward.SyncClient, dict[str, Any]], object]

CALLS: dict[str, tuple[str, Call]] = {
    "publish": ("delay", lambda mq, given: mq.publish("t", "x", **given)),
    "publish_soon": ("delay", lambda mq, given: mq.publish_soon("t", "x", **given).result()),
    "publish_many": ("delay", lambda mq, given: mq.publish_many("t", ["x", "y"], **given)),
    "publish, timeout": ("timeout", lambda mq, given: mq.publish("t", "x", **given)),
    "publish_many, timeout": ("timeout", lambda mq, given: mq.publish_many("t", ["x"], **given)),
    "fetch": ("wait", lambda mq, given: mq.fetch("t", group="g", **given)),
    "consumer.fetch": ("wait", lambda mq, given: mq.consume("t", group="g").fetch(1, **given)),
    "consume": ("lease", lambda mq, given: mq.consume("t", group="g", **given)),
    "create_group": ("lease", lambda mq, given: mq.create_group("g", "t", **given)),
    "change_group": ("lease", lambda mq, given: mq.change_group("g", **given)),
    "create_topic": ("lifetime", lambda mq, given: mq.create_topic("t2", **given)),
    "create_topic, retention": ("retention", lambda mq, given: mq.create_topic("t2", **given)),
    "change_topic": ("lifetime", lambda mq, given: mq.change_topic("t", **given)),
    "change_topic, retention": ("retention", lambda mq, given: mq.change_topic("t", **given)),
    "reschedule": ("delay", lambda mq, given: mq.reschedule(0, **given)),
    "calendar": ("step", lambda mq, given: mq.calendar(**given)),
    "set_recurring": ("every", lambda mq, given: mq.set_recurring("r", "t", "x", **given)),
    "topic_ends": ("wait", lambda mq, given: mq.topic_ends({}, **given)),
    "connect_sync": ("timeout", lambda mq, given: onward.connect_sync("memory:", **given).open()),
    "connect": ("timeout", lambda mq, given: onward.connect("memory:", **given)),
    "App": ("stop", lambda mq, given: onward.App(**given)),
    "Retry": ("after", lambda mq, given: onward.Retry("later", **given)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_bare_number_is_refused_and_both_readings_are_named(call: str) -> None:
    name, make = CALLS[call]
    with onward.connect_sync("memory:") as mq:
        mq.create_topic("t")
        for value in (60, "60"):
            readings = f'{name}={value!r} does not say its unit: write {name}="60s" or {name}_ms=60'
            with pytest.raises(InvalidRequest, match=f"^{re.escape(readings)}$"):
                make(mq, {name: value})
        with pytest.raises(InvalidRequest, match=f"give either {name} or {name}_ms"):
            make(mq, {name: "60s", f"{name}_ms": 60_000})


def test_the_verbs_of_a_delivery_refuse_a_bare_number_too() -> None:
    with onward.connect_sync("memory:") as mq:
        mq.publish("t", "x")
        (delivery,) = mq.fetch("t", group="g", wait="10s")
        with pytest.raises(InvalidRequest, match='write after="60s" or after_ms=60'):
            delivery.retry(after=60)  # type: ignore[arg-type]
        delivery.retry(after_ms=0)
        (again,) = mq.fetch("t", group="g", wait="10s")
        assert again.attempt == 2
        again.ack()


def test_a_number_of_milliseconds_means_what_its_name_says() -> None:
    with onward.connect_sync("memory:", timeout_ms=60_000) as mq:
        mq.create_topic("t", retention_ms=3_600_000, lifetime_ms=3_600_000)
        assert mq.topic("t").retention_ms == 3_600_000
        assert mq.create_group("g", "t", lease_ms=60_000).lease_ms == 60_000
        receipt = mq.publish("t", "x", delay_ms=3_600_000)
        status = receipt.status()
        assert status.state == "waiting"
        many = mq.publish_many("t", ["a", "b"], delay_ms=[7_200_000, 10_800_000])
        due = [one.at_ms for one in mq.list_scheduled(topic="t")]
        assert [at_ms - due[0] for at_ms in due] == pytest.approx([0, 3.6e6, 7.2e6], abs=60_000)
        assert many.count == 2
        assert mq.set_recurring("r", "t", "x", every_ms=60_000).every_ms == 60_000
        assert mq.calendar(step_ms=60_000).step_ms == 60_000
        assert mq.fetch("t", group="g", wait_ms=0) == []


@pytest.mark.parametrize("policy", ["fixed:10:3", "10,20,30", "exponential:1..10m", "10s,60"])
def test_a_retry_policy_has_units(policy: str) -> None:
    with onward.connect_sync("memory:") as mq:
        mq.create_topic("t")
        with pytest.raises(InvalidRequest, match=r"does not say its unit: write (\d+)s or \1ms"):
            mq.create_group("g", "t", retry=policy)
