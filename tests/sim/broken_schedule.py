"""Brokers whose schedule is wrong on purpose: the checker must notice each of them."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from onward.broker.broker import Broker
from onward.broker.scheduling import Step
from onward.errors import Unavailable
from onward.schedule.record import Records


def fire_early(broker: Broker) -> None:
    """Takes what is due within the next two seconds."""
    scheduling = broker.scheduling
    now_ms = scheduling.now_ms
    scheduling.now_ms = lambda: now_ms() + 2_000


def fire_what_is_gone(broker: Broker) -> None:
    """Does not look at what was cancelled or replaced."""
    scheduling = broker.scheduling

    def all_of_them(topic: str, records: Records) -> Records:
        cursor = scheduling.state.cursor_of(topic)
        moments = enumerate(zip(records.at_ms, records.numbers, strict=True))
        return records.select([row for row, moment in moments if moment > cursor])

    scheduling._waiting = all_of_them


def fire_again(broker: Broker) -> None:
    """Takes every fifth step as failed, when it was not."""
    scheduling, steps = broker.scheduling, count(1)
    finish = scheduling._finish

    def forgetful(step: Step) -> None:
        finish(step)
        if next(steps) % 5 == 0:
            scheduling.state.last, scheduling.state.cursors = step.taken.before, {}
            raise Unavailable("it seems to have failed")

    scheduling._finish = forgetful


def lose_some(broker: Broker) -> None:
    """Leaves out the first message of every third step."""
    scheduling, steps = broker.scheduling, count(1)
    waiting = scheduling._waiting

    def fewer(topic: str, records: Records) -> Records:
        kept = waiting(topic, records)
        return kept.slice(1, kept.count) if next(steps) % 3 == 0 else kept

    scheduling._waiting = fewer


def fire_backwards(broker: Broker) -> None:
    """Fires the messages of a step in the wrong order."""
    scheduling = broker.scheduling
    waiting = scheduling._waiting

    def backwards(topic: str, records: Records) -> Records:
        kept = waiting(topic, records)
        return kept.select(range(kept.count - 1, -1, -1))

    scheduling._waiting = backwards


def forget_replacements(broker: Broker) -> None:
    """Stores what replaces something, and lets both fire."""
    broker.state.apply_scheduled = lambda **facts: None


def confirm_cancels_without_writing(broker: Broker) -> None:
    """Says that something is cancelled, and writes nothing."""
    deciding = broker.scheduling.intake.deciding

    def cancel(decision: Any, found: Any) -> asyncio.Future[None]:
        decision.end(found)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    deciding._cancel = cancel
