"""Says what is wrong with how groups were served. It knows only what members and operators saw.

    G1   a message that a group wanted was acked, rejected, dead or skipped: none is forgotten
    G2   what was acked, and confirmed, is never delivered again in that group
    G3   each further delivery of a message has a reason: it was asked for, its member left or was
         cut off, the broker died, or the lease may have run out
    G4   attempts are counted: they follow from what was asked, and end in a dead letter in time
    G5   ordered: a message comes only when all before it with its key are finished
    G6   exclusive: one member is active, until it is gone
    G7   at most once: nothing comes twice
    G8   nobody gets what the filter keeps out, and nobody joins a paused group and gets something
    G9   what a member held over a restart of the broker, and settled after it, came to nobody else
    G10  and on: how starts are counted, see `start_checker`

What operators did is an excuse for what it covers, from when it was asked for until it was answered
(see `Act`). Offsets of topics that lose messages, or begin again, are only held to what is certain.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from onward.broker.settle import DEATHS_MAX
from onward.message.message import Message
from onward.testing.group_history import (
    NEVER_US,
    ActKind,
    GroupHistory,
    GroupPlan,
    Handed,
    Stint,
    Verb,
)
from onward.testing.history import kind_of
from onward.testing.start_checker import check_starts

Drains = dict[str, list[Message]]
Place = tuple[str, int]

_OPENS: frozenset[ActKind] = frozenset(("reset", "replay", "redrive", "delete"))
_CLOSES: frozenset[ActKind] = frozenset(("reset", "skip", "purge", "delete"))


def check_groups(history: GroupHistory, drains: Drains) -> list[str]:
    """Return all violations, as sentences; an empty list when all is well."""
    return [
        f"{violation} (group {plan.name!r}, {plan.mode})"
        for plan in history.plans.values()
        for violation in chain(
            _Check(history, plan, drains).violations(), check_starts(history, plan)
        )
    ]


class _Check:
    """The check of one group."""

    def __init__(self, history: GroupHistory, plan: GroupPlan, drains: Drains) -> None:
        self._history = history
        self._plan = plan
        self._handed = [
            one
            for one in history.of_group(plan.name)
            if kind_of(one.message.topic) in ("kept", "trimmed")
        ]
        self._acts = history.acts_on(plan.name)
        self._dead = history.dead.get(plan.name)
        self._stored = {
            topic: messages
            for topic, messages in drains.items()
            if topic in plan.topics and kind_of(topic) == "kept"
        }
        self._by_place = _by_place(self._handed)
        self._in_source = _by_place(history.of_group(plan.source)) if plan.source else {}
        if plan.source:
            self._acts += history.acts_on(plan.source)

    def violations(self) -> Iterator[str]:
        """Yield all that is wrong."""
        yield from self._wanted_ones_only()
        if self._plan.at_most_once:
            yield from self._at_most_once()
            return
        yield from self._nothing_is_forgotten()
        yield from self._acked_is_the_end()
        yield from self._repeats_have_reasons()
        yield from self._claims_are_respected()
        yield from self._attempts_are_counted()
        yield from self._the_dead_had_their_attempts()
        if self._plan.mode == "ordered":
            yield from self._keys_are_in_order()
        if self._plan.mode == "exclusive":
            yield from self._one_is_active()

    # --- G1 ----------------------------------------------------------------------------------

    def _nothing_is_forgotten(self) -> Iterator[str]:
        if self._dead is None:
            return  # the group was never swept
        for topic, messages in self._stored.items():
            for message in messages:
                if not self._plan.wants(message) or (topic, message.offset) in self._dead:
                    continue
                if self._is_finished((topic, message.offset)):
                    continue
                yield f"G1: {message.id} is finished, but nobody acked or rejected it"

    def _is_finished(self, place: Place) -> bool:
        verbs = self._verbs(place)
        if any(verb.do == "ack" and verb.answer != "lost" for verb in verbs):
            return True
        return any(act.kind in _CLOSES and act.covers(*place) for act in self._acts)

    # --- G2 ----------------------------------------------------------------------------------

    def _acked_is_the_end(self) -> Iterator[str]:
        for place, handed in self._by_place.items():
            for acked, verb in _confirmed(handed, "ack"):
                for again in handed:
                    is_later = again.stint.joined_us > verb.answered_us or (
                        again.at_us > verb.answered_us
                        and again.attempt > acked.attempt
                        and not _was_granted_before(again, acked)
                    )
                    if is_later and not self._is_opened(place, verb.asked_us, again.at_us):
                        yield (
                            f"G2: {again.message.id} was acked by {acked.stint.machine} at "
                            f"{_s(verb.answered_us)} and came to {again.stint.machine} at "
                            f"{_s(again.at_us)}"
                        )

    # --- G3 ----------------------------------------------------------------------------------

    def _repeats_have_reasons(self) -> Iterator[str]:
        for place, handed in self._by_place.items():
            for before, again in pairwise(handed):
                if not self._has_reason(place, before, again):
                    yield (
                        f"G3: {again.message.id} came to {before.stint.machine} at "
                        f"{_s(before.at_us)} and to {again.stint.machine} at {_s(again.at_us)}, "
                        f"for no reason"
                    )

    def _has_reason(self, place: Place, before: Handed, again: Handed) -> bool:
        history, since_us = self._history, before.at_us - self._history.late_us
        lost_us = history.losses_us.get(before.stint.machine, [])
        return (
            # What was refused for a full disk is given back, too.
            any(
                verb.do in ("retry", "release") or verb.answer == "unknown" for verb in before.verbs
            )
            or before.stint.ended_us <= again.at_us
            or _was_sent_away(before.stint, again.at_us + history.late_us)
            or _any_between(lost_us, since_us, again.at_us)
            or _any_between(history.deaths_us, since_us, again.at_us)
            or again.at_us - since_us >= self._plan.lease_ms * 1000
            or self._is_opened(place, since_us, again.at_us)
            or self._is_voided(place, since_us, again.at_us)
            or (_was_granted_before(again, before) and self._is_opened(place, 0, before.at_us))
            or any(act.kind == "offline" and act.asked_us <= again.at_us for act in self._acts)
        )

    # --- G9 ----------------------------------------------------------------------------------

    def _claims_are_respected(self) -> Iterator[str]:
        """A verb that is done after a restart shows that its member had re-claimed the message."""
        starts_us = self._history.starts_us
        for place, handed in self._by_place.items():
            for one in handed:
                for verb in one.verbs:
                    life = bisect_right(starts_us, verb.asked_us)
                    if verb.answer != "done" or not life or one.at_us >= starts_us[life - 1]:
                        continue
                    yield from self._came_to_others(place, one, verb, starts_us[life - 1])

    def _came_to_others(
        self, place: Place, held: Handed, verb: Verb, start_us: int
    ) -> Iterator[str]:
        for other in self._by_place[place]:
            if (
                other is not held
                and other.attempt == held.attempt
                and start_us <= other.at_us <= verb.asked_us
                and not self._is_opened(place, held.at_us, other.at_us)
            ):
                yield (
                    f"G9: {held.message.id} was re-claimed by {held.stint.machine} after the start "
                    f"at {_s(start_us)}, and came to {other.stint.machine} at {_s(other.at_us)}"
                )

    # --- G4 ----------------------------------------------------------------------------------

    def _attempts_are_counted(self) -> Iterator[str]:
        # Deaths are forgiven a few times, whatever the policy says.
        limit = max(self._plan.retry.limit, DEATHS_MAX)
        for place, handed in self._by_place.items():
            for one in handed:
                if not 1 <= one.attempt <= limit:
                    yield f"G4: {one.message.id} came as attempt {one.attempt} of {limit}"
            for failed, verb in _confirmed(handed, "retry"):
                least = failed.attempt + verb.counts
                for again in handed:
                    if (
                        again.stint.joined_us > verb.answered_us
                        and again.attempt < least
                        and not self._is_opened(place, verb.asked_us, again.at_us)
                    ):
                        yield (
                            f"G4: {again.message.id} failed as attempt {failed.attempt} and came "
                            f"again as attempt {again.attempt}, not {least}"
                        )
            yield from self._exact_attempts(place, handed)

    def _exact_attempts(self, place: Place, handed: list[Handed]) -> Iterator[str]:
        """Nothing went wrong but what members asked for: then each attempt is known."""
        if self._plan.source:
            return
        counted = 1 if self._was_quiet(place, None, handed[0]) else handed[0].attempt
        for one in handed:
            if one is not handed[0] and not self._was_quiet(place, handed[0], one):
                return
            if one.attempt != counted:
                yield f"G4: {one.message.id} came as attempt {one.attempt}, not {counted}"
                return
            if any(verb.do != "release" and verb.answer != "done" for verb in one.verbs):
                return
            counted += any(verb.do == "retry" and verb.counts for verb in one.verbs)

    def _was_quiet(self, place: Place, first: Handed | None, last: Handed) -> bool:
        """Tell whether no member, broker or lease can have ended from the first to the last."""
        history, lease_us = self._history, self._plan.lease_ms * 1000
        since_us = 0 if first is None else first.at_us - history.late_us
        held_us = history.late_us if first is None else last.at_us - since_us
        return not (
            _any_between(history.deaths_us, since_us, last.at_us)
            or any(_any_between(one, since_us, last.at_us) for one in history.losses_us.values())
            or held_us >= lease_us
            or self._is_opened(place, since_us, last.at_us)
        )

    def _the_dead_had_their_attempts(self) -> Iterator[str]:
        limit = self._plan.retry.limit
        for place, buried in (self._dead or {}).items():
            verbs = self._verbs(place)
            if buried.attempts > max(limit, DEATHS_MAX):
                yield f"G4: {place} is dead after {buried.attempts} attempts; the limit is {limit}"
            if kind_of(place[0]) not in ("kept", "trimmed"):
                continue
            if buried.attempts < limit and not any(verb.do == "reject" for verb in verbs):
                yield f"G4: {place} is dead after {buried.attempts} of {limit} attempts"
            for acked, verb in _confirmed(self._by_place.get(place, []), "ack"):
                if not self._is_opened(place, verb.asked_us, NEVER_US):
                    yield f"G2: {place} was acked by {acked.stint.machine}, and is a dead letter"

    # --- G5 ----------------------------------------------------------------------------------

    def _keys_are_in_order(self) -> Iterator[str]:
        if any(act.kind not in ("pause", "offline", "fork") for act in self._acts):
            return
        for topic, messages in self._stored.items():
            finished_us = self._finished_before(topic, messages)
            for one in self._handed:
                if one.message.topic == topic and one.message.key is not None:
                    before = finished_us.get(one.message.offset)
                    if before is not None and before[0] >= one.at_us:
                        yield (
                            f"G5: {one.message.id} came at {_s(one.at_us)} before {topic}/"
                            f"{before[1]} with the same key was finished"
                        )

    def _finished_before(self, topic: str, messages: list[Message]) -> dict[int, tuple[int, int]]:
        """Return when the last one before each message with its key was finished, and which."""
        last: dict[str, tuple[int, int]] = {}
        found: dict[int, tuple[int, int]] = {}
        for message in messages:
            if message.key is None or not self._plan.wants(message):
                continue
            if message.key in last:
                found[message.offset] = last[message.key]
            mine = (self._finished_us((topic, message.offset)), message.offset)
            last[message.key] = max(mine, last.get(message.key, mine))
        return found

    def _finished_us(self, place: Place) -> int:
        """Return the earliest moment at which a message can have been finished."""
        if self._dead is not None and place in self._dead:
            return -1
        asked = [verb.asked_us for verb in self._verbs(place) if verb.do in ("ack", "reject")]
        return min(asked, default=NEVER_US)

    # --- G6, G7, G8 --------------------------------------------------------------------------

    def _one_is_active(self) -> Iterator[str]:
        """Whoever was active and was not disturbed is so until it is gone."""
        last: Handed | None = None
        mine: dict[int, Handed] = {}
        for one in self._handed:
            earlier = mine.get(id(one.stint))
            if (
                last is not None
                and earlier is not None
                and last.stint is not one.stint
                and last.at_us > earlier.at_us
                and not self._was_disturbed(earlier, one)
                and not self._was_disturbed(earlier, last)
            ):
                yield (
                    f"G6: {one.stint.machine} was active from {_s(earlier.at_us)} to "
                    f"{_s(one.at_us)}, and {last.stint.machine} at {_s(last.at_us)}"
                )
                return
            last = mine[id(one.stint)] = one

    def _was_disturbed(self, first: Handed, last: Handed) -> bool:
        history, since_us = self._history, first.at_us - self._history.late_us
        machines = (first.stint.machine, last.stint.machine)
        return (
            any(_any_between(history.losses_us.get(m, []), since_us, last.at_us) for m in machines)
            or _any_between(history.deaths_us, since_us, last.at_us)
            or any(act.asked_us <= last.at_us <= act.answered_us for act in self._acts)
            or any(act.kind in ("offline", "delete") for act in self._acts)
        )

    def _at_most_once(self) -> Iterator[str]:
        for place, handed in self._by_place.items():
            for before, again in pairwise(handed):
                if not self._is_opened(place, 0, again.at_us):
                    yield (
                        f"G7: {again.message.id} came at {_s(before.at_us)} and again at "
                        f"{_s(again.at_us)}"
                    )

    def _wanted_ones_only(self) -> Iterator[str]:
        pauses = [act for act in self._acts if act.kind == "pause" and act.answered_us < NEVER_US]
        for one in self._handed:
            if not self._plan.wants(one.message):
                yield f"G8: {one.message.id} with tag {one.message.tag!r} was not wanted"
            for act in pauses:
                if act.answered_us < one.stint.joined_us and one.at_us < act.ended_us:
                    yield f"G8: {one.message.id} came at {_s(one.at_us)} to a paused group"

    # --- what others ask for -----------------------------------------------------------------

    def _verbs(self, place: Place) -> list[Verb]:
        handed = [*self._by_place.get(place, []), *self._in_source.get(place, [])]
        return [verb for one in handed for verb in one.verbs]

    def _is_opened(self, place: Place, since_us: int, until_us: int) -> bool:
        """Tell whether an operator may have made a message deliverable again in that time."""
        return any(
            act.kind in _OPENS
            and act.covers(*place)
            and act.asked_us <= until_us
            and act.answered_us >= since_us
            for act in self._acts
        )

    def _is_voided(self, place: Place, since_us: int, until_us: int) -> bool:
        """Tell whether a reset or a skip that was refused took a message from who had it.

        Leases end before such a row is written, for no old ack may come after it.
        """
        return any(
            act.kind in ("reset", "skip")
            and act.group == self._plan.name
            and act.covers(*place)
            and act.asked_us <= until_us
            and act.answered_us >= since_us
            for act in self._history.refused
        )


def _was_sent_away(stint: Stint, until_us: int) -> bool:
    """Tell whether a membership ended with an error, which its member learns a little later."""
    return bool(stint.end) and stint.end != "enough" and stint.ended_us <= until_us


def _by_place(handed: Iterable[Handed]) -> dict[Place, list[Handed]]:
    found: dict[Place, list[Handed]] = {}
    for one in handed:
        found.setdefault(one.place, []).append(one)
    return found


def _was_granted_before(late: Handed, other: Handed) -> bool:
    """Tell whether a message that its member handed out late was leased before the other was.

    A member that has fetched many may come to one of them after a reset has made its lease void
    and the message went to somebody else. Numbers of leases only grow.
    """
    return late.lease < other.lease


def _confirmed(handed: Iterable[Handed], do: str) -> Iterator[tuple[Handed, Verb]]:
    for one in handed:
        for verb in one.verbs:
            if verb.do == do and verb.answer == "done":
                yield one, verb


def _any_between(times_us: list[int], start_us: int, end_us: int) -> bool:
    """Tell whether one of the times, which are in order, is from `start_us` to `end_us`."""
    at = bisect_left(times_us, start_us)
    return at < len(times_us) and times_us[at] <= end_us


def _s(us: int) -> str:
    return f"{us / 1_000_000:.3f}"
