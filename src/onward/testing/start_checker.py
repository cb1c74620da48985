"""Says what is wrong with how starts were counted, from the frames of members (`wire_history`).

    G9   nobody gets a message that another member holds, also not one that was re-claimed
    G10  a message loses an attempt only if its member had reported its start, or asked for a retry:
         messages that were only fetched ahead lose nothing by a death or an expired lease
    G11  a message that was started when its member died is delivered alone: a member that holds it
         holds nothing else of the group (more than 64 of them may come in parts: see `ALONE_MAX`)
    G12  a death makes a dead letter only of a message that was the only one started
    G13  no attempt exceeds the policy, unless a lease of the message may have run out

The events are replayed: at each moment it is known what each member holds and has started. Nobody
sees a lease run out, or an operator end one: from `_EXPIRY_SLACK_US` before the end of its time a
lease counts as uncertain, and after the first operation on a group only G10 and G13 are checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from onward.testing.group_history import NEVER_US, GroupHistory, GroupPlan
from onward.testing.history import kind_of
from onward.testing.wire_history import Grant, Seat, WireEvent

Place = tuple[str, int]

ALONE_MAX: Final = 64
"""Of so many messages that died with one member each comes alone; of more, sixteenths together."""
# A lease begins when it is granted; the delivery is sent when the disk has been read.
_EXPIRY_SLACK_US: Final = 2_000_000


def check_starts(history: GroupHistory, plan: GroupPlan) -> Iterator[str]:
    """Yield all violations by one group, as sentences."""
    if plan.source or plan.at_most_once:
        return  # a fork begins with the attempts of its source; at most once there are no leases
    replay = _Replay(history, plan)
    for event in history.wire:
        if event.seat.group == plan.name:
            yield from replay.apply(event)
    for place, buried in history.dead.get(plan.name, {}).items():
        if "died with it" in buried.cause and place not in replay.died_alone and _is_lasting(place):
            yield f"G12: {place} is a dead letter by a death, but was never started alone"


@dataclass(slots=True)
class _Held:
    """One message in the hands of one member."""

    lease: int
    expires_us: int
    is_started: bool = False

    def is_certain(self, at_us: int) -> bool:
        return at_us < self.expires_us - _EXPIRY_SLACK_US


class _Replay:
    """Who holds what in one group, and what that makes of attempts."""

    def __init__(self, history: GroupHistory, plan: GroupPlan) -> None:
        self._history = history
        self._plan = plan
        operations = [*history.acts_on(plan.name), *history.refused]
        self._operated_us = min(
            (act.asked_us for act in operations if act.kind not in ("pause", "fork")),
            default=NEVER_US,
        )
        self._life = 0
        self._held: dict[Seat, dict[Place, _Held]] = {}
        self._holder: dict[Place, Seat] = {}
        self._topics: dict[int, str] = {}
        """The topic of each lease."""
        self._counted: Counter[Place] = Counter()
        """How many attempts a message may have lost."""
        self._expired: set[Place] = set()
        """Messages of which a lease may have run out."""
        self._alone: dict[Place, int] = {}
        """Messages with which a member died: how many of them may be delivered together."""
        self.died_alone: set[Place] = set()
        """Messages that were perhaps the only one started when a member died."""

    def apply(self, event: WireEvent) -> Iterator[str]:
        """Replay one event, and yield what is wrong with it."""
        if event.seat.life > self._life:
            self._restart(event)
        match event.kind:
            case "delivered":
                yield from self._delivered(event)
            case "joined":
                yield from self._hold(event, self._topics.get(event.lease, ""))
            case "started":
                for place in self._places(event):
                    self._held[event.seat][place].is_started = True
            case "renew":
                for place in self._places(event):
                    self._held[event.seat][place].expires_us = self._expiry_us(event)
            case "left" | "ended" | "lost":
                self._left(event)
            case _:
                self._settled(event)

    def _restart(self, event: WireEvent) -> None:
        """Forget all leases: a death of the broker is no attempt."""
        self._life = event.seat.life
        for place in list(self._holder):
            self._end(place, event.at_us, counts=False)
        self._held.clear()

    # --- deliveries --------------------------------------------------------------------------

    def _delivered(self, event: WireEvent) -> Iterator[str]:
        self._topics[event.lease] = event.topic
        for start, end, attempt in event.grants:
            for place in _places_in(event.topic, ((start, end, attempt),)):
                yield from self._end_unseen(place, event.at_us)
                if _is_lasting(place):
                    yield from self._check_attempt(place, attempt)
        yield from self._hold(event, event.topic)
        yield from self._check_alone(event)

    def _end_unseen(self, place: Place, at_us: int) -> Iterator[str]:
        """End a lease whose message goes to somebody else: it ran out, or an operator ended it."""
        if place not in self._holder:
            return
        held = self._held[self._holder[place]][place]
        if held.is_certain(at_us) and self._is_certain(at_us) and _is_lasting(place):
            yield f"G9: {place} went to another member at {_s(at_us)}, while one held it"
        self._expired.add(place)
        self._end(place, at_us, counts=held.is_started)

    def _hold(self, event: WireEvent, topic: str) -> Iterator[str]:
        held = self._held.setdefault(event.seat, {})
        for place in _places_in(topic, event.grants):
            yield from self._end_unseen(place, event.at_us)
            held[place] = _Held(event.lease, self._expiry_us(event))
            self._holder[place] = event.seat

    def _check_attempt(self, place: Place, attempt: int) -> Iterator[str]:
        limit = self._plan.retry.limit
        if attempt > 1 + self._counted[place]:
            yield (
                f"G10: {place} came as attempt {attempt}, but only {self._counted[place]} "
                f"attempts were started and failed"
            )
        if attempt > limit and place not in self._expired:
            yield f"G13: {place} came as attempt {attempt} of {limit}"

    def _check_alone(self, event: WireEvent) -> Iterator[str]:
        if not self._is_certain(event.at_us):
            return
        held = self._held[event.seat]
        new = set(_places_in(event.topic, event.grants))
        together = [
            place
            for place, one in held.items()
            if _is_lasting(place) and (place in new or one.is_certain(event.at_us))
        ]
        limits = [(self._alone[place], place) for place in together if place in self._alone]
        if limits and len(together) > min(limits)[0]:
            yield (
                f"G11: {min(limits)[1]} died with its member and is to come alone, but a member "
                f"holds it with {len(together) - 1} others at {_s(event.at_us)}"
            )

    # --- ends --------------------------------------------------------------------------------

    def _settled(self, event: WireEvent) -> None:
        for place in self._places(event):
            self._end(place, event.at_us, counts=event.kind == "retry" and event.counts)
            if event.kind != "release":
                self._alone.pop(place, None)

    def _left(self, event: WireEvent) -> None:
        held = self._held.get(event.seat, {})
        started = {place for place, one in held.items() if one.is_started}
        certain = {place for place in started if held[place].is_certain(event.at_us)}
        if event.kind != "left":
            self._note_alone(event, started, {place for place in certain if _is_lasting(place)})
        for place in list(held):
            self._end(place, event.at_us, counts=event.kind != "left" and place in started)
        if event.kind == "lost" and self._is_written(event.at_us):
            together = 1 if len(started) <= ALONE_MAX else len(started) // 16
            self._alone.update(dict.fromkeys(certain, together))
        self._held.pop(event.seat, None)

    def _note_alone(self, event: WireEvent, started: set[Place], certain: set[Place]) -> None:
        is_certain = self._is_certain(event.at_us)
        self.died_alone.update(
            place for place in started if not is_certain or not certain - {place}
        )

    def _end(self, place: Place, at_us: int, *, counts: bool) -> None:
        one = self._held[self._holder.pop(place)].pop(place)
        if not one.is_certain(at_us):
            self._expired.add(place)
            self._alone.pop(place, None)
            counts = counts or one.is_started
        self._counted[place] += counts

    # --- what is certain ---------------------------------------------------------------------

    def _is_certain(self, at_us: int) -> bool:
        """Tell whether no operator can have ended a lease by then."""
        return at_us < self._operated_us

    def _is_written(self, at_us: int) -> bool:
        """Tell whether the row of a death at that time became durable for sure."""
        history = self._history
        return not history.may_refuse_rows and not any(
            at_us <= died_us <= at_us + history.late_us for died_us in history.deaths_us
        )

    def _places(self, event: WireEvent) -> list[Place]:
        """Return what of an event's ranges the member holds by that delivery."""
        held = self._held.get(event.seat, {})
        return [
            place
            for place, one in held.items()
            if one.lease == event.lease
            and (not event.grants or any(start <= place[1] < end for start, end, _ in event.grants))
        ]

    def _expiry_us(self, event: WireEvent) -> int:
        return event.at_us + self._plan.lease_ms * 1000


def _places_in(topic: str, grants: tuple[Grant, ...]) -> Iterator[Place]:
    offsets = chain.from_iterable(range(start, end) for start, end, _ in grants)
    return ((topic, offset) for offset in offsets)


def _is_lasting(place: Place) -> bool:
    """Tell whether a topic is never deleted, so that its offsets are not used again."""
    return kind_of(place[0]) in ("kept", "trimmed")


def _s(us: int) -> str:
    return f"{us / 1_000_000:.3f}"
