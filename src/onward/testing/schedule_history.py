"""What programs scheduled, asked and saw, and what is wrong with it.

    planned    a message that somebody scheduled: `pending`, then acked, refused or unknown
    verdict    an answer about it: cancelled, moved, replaced, fired (where), not found

It knows nothing of the broker. What it promises, if it finds nothing:

    S1    what was acknowledged is in its topic once, unless an answer says that it never will be
    S2    what was cancelled, replaced or refused is in no topic
    S3    nothing fired twice
    S4    nothing was visible before its time, by the latest time that the clock ever showed
    S5    topics hold what fired in the order of (time, id)
    S6    what was answered is true: `fired` at an offset is there, an id that was given is known
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from onward.message.message import Message

Outcome = Literal["pending", "acked", "refused", "unknown"]
State = Literal["waiting", "cancelled", "replaced", "fired", "moved", "not_found"]
TOPICS = ("later-0", "later-1", "later-2")


def is_scheduled(topic: str) -> bool:
    """Tell whether a topic holds what was scheduled, and nothing else.

    >>> is_scheduled("later-0"), is_scheduled("kept-0")
    (True, False)
    """
    return topic in TOPICS


@dataclass(slots=True)
class Verdict:
    """One answer about a message."""

    state: State
    number: int
    offset: int | None = None


@dataclass(slots=True)
class Planned:
    """One message that somebody scheduled."""

    id: str
    topic: str
    due_at_ms: list[int]
    """When it fires: the first time, and those that it was moved to, or perhaps was."""
    unique: str | None = None
    outcome: Outcome = "pending"
    number: int = -1
    numbers: set[int] = field(default_factory=set)
    """All ids that it is known to have had."""
    shown_ms: int = 0
    """The latest time that the clock had shown when it was acknowledged, or moved."""
    verdicts: list[Verdict] = field(default_factory=list)
    may_be_gone: bool = False
    """It was cancelled, moved or replaced without an answer, or replaced when it may have fired."""
    is_astray: bool = False
    """It was perhaps moved, and has an id that nobody knows."""
    error: str = ""

    @property
    def body(self) -> bytes:
        """The body by which it is known."""
        return f"{self.id} {self.topic}".encode()

    @property
    def is_open(self) -> bool:
        """Tell whether it may still be asked about by its id."""
        return self.outcome == "acked" and not self.may_be_gone and not self.is_gone

    @property
    def is_gone(self) -> bool:
        """Tell whether an answer said that it will not fire.

        Of one that was perhaps moved, "replaced" may only say so of an id that it had before.
        """
        states = {one.state for one in self.verdicts}
        return "cancelled" in states or ("replaced" in states and not self.is_astray)

    @property
    def has_fired(self) -> bool:
        """Tell whether an answer said that it has fired."""
        return any(one.state == "fired" for one in self.verdicts)


@dataclass(slots=True)
class Sight:
    """A message that a reader saw, and the latest time that the clock had shown by then."""

    message: Message
    shown_ms: int


@dataclass(slots=True)
class ScheduleHistory:
    """Everything about the schedule."""

    planned: dict[str, Planned] = field(default_factory=dict)
    sights: list[Sight] = field(default_factory=list)
    loses_old: bool = False
    """The log is bounded: topics may have lost their oldest messages."""

    def count(self) -> Counter[str]:
        """Return how many there were of what."""
        found = Counter(f"schedule {one.outcome}" for one in self.planned.values())
        for one in self.planned.values():
            found.update(f"schedule {verdict.state}" for verdict in one.verdicts)
        return found


def check_schedule(history: ScheduleHistory, drains: dict[str, list[Message]]) -> list[str]:
    """Return all violations, as sentences."""
    return [
        *_fired_once_or_never(history, drains),
        *_never_early(history, drains),
        *_in_order(history, drains),
        *_answers_are_true(history, drains),
    ]


def _name(message: Message) -> str:
    return message.body.partition(b" ")[0].decode("ascii", "replace")


def _fired_once_or_never(
    history: ScheduleHistory, drains: dict[str, list[Message]]
) -> Iterator[str]:
    times = Counter(_name(message) for drain in drains.values() for message in drain)
    for name in times.keys() - history.planned.keys():
        yield f"S2: {name} was never scheduled, and fired"
    for name, one in history.planned.items():
        count = times[name]
        if count > 1:
            yield f"S3: {name} fired {count} times"
        if one.outcome == "pending":
            yield f"I13: the schedule of {name} was never answered"
        if count and (one.is_gone or one.outcome == "refused"):
            yield f"S2: {name} (ids {sorted(one.numbers)}) fired: {one.outcome} {one.verdicts}"
        is_due = one.outcome == "acked" and not one.is_gone and not one.may_be_gone
        if not count and (is_due or one.has_fired) and not history.loses_old:
            yield f"S1: {name} (ids {sorted(one.numbers)}) of {one.topic} is lost: {one.verdicts}"


def _never_early(history: ScheduleHistory, drains: dict[str, list[Message]]) -> Iterator[str]:
    for drain in drains.values():
        for message in drain:
            one = history.planned.get(_name(message))
            if one is None:
                continue
            if message.due_at_ms not in one.due_at_ms or message.topic != one.topic:
                yield f"S4: {message.id} is {one.id}, due {one.due_at_ms}, not {message.due_at_ms}"
            elif message.published_at_ms < message.due_at_ms:
                yield f"S4: {message.id} is of {message.published_at_ms}, before its time"
    for sight in history.sights:
        due_at_ms = sight.message.due_at_ms or 0
        if sight.shown_ms < due_at_ms:
            yield f"S4: {sight.message.id} was seen {due_at_ms - sight.shown_ms} ms before its time"


def _in_order(history: ScheduleHistory, drains: dict[str, list[Message]]) -> Iterator[str]:
    """Of a message whose time was ahead when it was accepted, that time is when it fires.

    Others fire later than they are due, nobody outside knows when: they only set no limit.
    """
    for drain in drains.values():
        latest = (-(2**63), -1)
        for message in drain:
            one = history.planned.get(_name(message))
            if one is None or message.due_at_ms is None or message.schedule_id is None:
                continue
            moment = (message.due_at_ms, message.schedule_id)
            is_known = one.shown_ms > 0 and not one.is_astray
            if is_known and message.due_at_ms > one.shown_ms and moment < latest:
                yield f"S5: {message.id} {moment} stands behind {latest}"
            latest = max(latest, moment)


def _answers_are_true(history: ScheduleHistory, drains: dict[str, list[Message]]) -> Iterator[str]:
    given: dict[int, str] = {}
    for one in history.planned.values():
        for number in one.numbers:
            if given.setdefault(number, one.id) != one.id:
                yield f"S6: {one.id} and {given[number]} both have the schedule id {number}"
        for verdict in one.verdicts:
            if verdict.state == "not_found":
                yield f"S6: {one.id} has the id {verdict.number}, which is not known"
            elif verdict.state == "fired" and verdict.offset is not None:
                found = _at(drains.get(one.topic, []), verdict.offset)
                if (found is None and not history.loses_old) or (
                    found is not None and _name(found) != one.id
                ):
                    yield f"S6: {one.id} is said to be {one.topic}/{verdict.offset}, not {found!r}"
    yield from _ids_are_theirs(history, drains)


def _ids_are_theirs(history: ScheduleHistory, drains: dict[str, list[Message]]) -> Iterator[str]:
    for drain in drains.values():
        for message in drain:
            one = history.planned.get(_name(message))
            is_known = one is not None and one.outcome == "acked" and not one.is_astray
            if one is not None and is_known and message.schedule_id not in one.numbers:
                yield f"S6: {one.id} has fired as {message.schedule_id}, not {one.numbers}"


def _at(drain: Sequence[Message], offset: int) -> Message | None:
    place = offset - drain[0].offset if drain else -1
    return drain[place] if 0 <= place < len(drain) else None
