"""How deliveries end: what members say of them, and what happens when they say nothing.

    ack ──────────▶ acked       retry ──▶ retried, or dead when it was the last attempt
    reject ───────▶ dead        lease ran out, connection died ──▶ expired, lost; or dead
    release ──────▶ ready again, no attempt is counted               renew ──▶ leased for longer
                    (released, as far as it was started)

Only who holds a lease can settle it: anything else is refused, row by row, and changes nothing.
The answer comes when everything of the frame is durable.

When a member dies or falls silent only what it had started counts as an attempt; the rest is
ready again. What it had started when it died comes again alone, after a pause that grows. A dead
letter is made only of a message with which a member died that had started nothing else: one that
died in company may be innocent, so its last attempt does not count then.

The first few times a lease that ran out makes no dead letter, whatever the policy of the group
says: when a process hangs, all that it had started runs out together, and most of it is innocent.
Nor does the death of a member that never reports what it starts: it has perhaps not even looked.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from onward.broker.crew import Crew, Member
from onward.broker.outcomes import Timed
from onward.broker.suspects import alone_after
from onward.delivery.lease import Lease
from onward.delivery.ranges import Range, count_of
from onward.delivery.retry import death_pause_ms
from onward.delivery.share import Grant
from onward.delivery.trace import Trace, short_cause
from onward.errors import InvalidRequest
from onward.protocol.deliveries import (
    FINISHED,
    ROWS_MAX,
    STARTS,
    Outcome,
    Row,
    Step,
    decode_ack,
    decode_progress,
    decode_settle,
    settled_frame,
    settled_steps_frame,
)

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.consume import Consuming
    from onward.broker.session import Session

logger = logging.getLogger("onward.consume")

DEATHS_MAX = 5
"""So often at least a message comes again whose members died or fell silent."""
DUE_MS_MAX = 10 * 366 * 86_400_000
EXPIRED_SAID = 8
"""A lease that ran out is said in the log for the first few of a group, then every 1,000th."""

Attempted = tuple[int, list[Range]]
"""Ranges of which this was the attempt."""
ROW_RANGES_MAX = 1_000


class Settling:
    """Takes ACK, PROGRESS and SETTLE frames, and the ends that nobody announces."""

    def __init__(self, broker: Broker, consuming: Consuming) -> None:
        self._broker = broker
        self._consuming = consuming

    # --- what members say --------------------------------------------------------------------

    def ack(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        """Take one ACK frame."""
        consumer, rows = decode_ack(payload)
        member = self._consuming.members_on(session).get(consumer)
        if member is None:
            # Its membership has ended, and with it every lease.
            session.write(settled_frame(request_id, _few(rows)))
            return
        refused: list[Row] = []
        is_any = self._finish(member, rows, refused)
        self._answer(session, request_id, refused, has_rows=is_any)

    def progress(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        """Take one PROGRESS frame: what several members have finished, and what they start."""
        steps = decode_progress(payload)
        finished: dict[int, list[Row]] = {}
        for consumer, kind, delivery, start, end in steps:
            if kind == FINISHED:
                finished.setdefault(consumer, []).append((delivery, start, end))
        members = self._consuming.members_on(session)
        refused: list[Step] = []
        has_rows = False
        for consumer, rows in finished.items():
            member = members.get(consumer)
            refused_here: list[Row] = rows if member is None else []
            if member is not None and self._finish(member, rows, refused_here):
                has_rows = True
            refused += [(consumer, FINISHED, *row) for row in refused_here]
        now_ms = self._broker.clock.monotonic_ms()
        for consumer, kind, delivery, start, end in steps:
            if kind == STARTS and (member := members.get(consumer)) is not None:
                member.start(delivery, start, end, now_ms=now_ms)
        if finished:
            if len(refused) > ROWS_MAX:
                refused = [step for step in steps if step[1] == FINISHED]
            settled = settled_steps_frame(request_id, refused)
            if has_rows:
                self._consuming.outcomes.answer(session, request_id, settled)
            else:
                session.write(settled)

    def _finish(self, member: Member, rows: list[Row], refused: list[Row]) -> bool:
        """End leases of messages that a member has finished; tell whether it held any of them."""
        leases = member.crew.leases
        now_ms = self._broker.clock.monotonic_ms()
        timed: dict[str, list[Timed]] = {}
        for delivery, start, end in rows:
            lease = leases.find(delivery)
            if lease is None:
                refused.append((delivery, start, end))
                continue
            took_ms = now_ms - lease.leased_at_ms
            held = leases.settle(delivery, start, end, member=member.name)
            if held != [(start, end)]:
                refused += _missing(delivery, start, end, held)
            if held:
                worked_ms = now_ms - lease.started_at_ms(held[0][0])
                timed.setdefault(lease.topic, []).extend(
                    [(first, last, took_ms, worked_ms) for first, last in held]
                )
        if member.is_waiting:
            self._consuming.go_on(member)
        member.is_recalled = member.is_stuck = False
        for topic, ranges in timed.items():
            member.acked += sum([end - start for start, end, _, _ in ranges])
            self._consuming.outcomes.ack(member.crew.group.record.name, topic, member.name, ranges)
        return bool(timed)

    def settle(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        """Take one SETTLE frame."""
        consumer, outcomes = _decoded(payload)
        member = self._consuming.members_on(session).get(consumer)
        refused: list[Row] = []
        traces: list[Trace] = []
        for outcome in outcomes:
            self._check(outcome)
        for outcome in outcomes:
            if member is None:
                refused += [(outcome.delivery, *one) for one in outcome.ranges or ((0, 1),)]
            elif outcome.do == "renew":
                refused += self._renew(member, outcome)
            else:
                traces += self._settle(member, outcome, refused)
        if traces:
            self._consuming.outcomes.add(traces)
        if member is not None:
            member.is_recalled = False
            member.is_stuck = member.is_stuck and not traces
            self._consuming.go_on(member)
            self._consuming.alarms.set(member.crew)
        self._answer(session, request_id, refused, has_rows=bool(traces))

    def _answer(
        self, session: Session, request_id: int, refused: list[Row], *, has_rows: bool
    ) -> None:
        settled = settled_frame(request_id, _few(refused))
        if has_rows:
            self._consuming.outcomes.answer(session, request_id, settled)
        else:
            session.write(settled)

    def _check(self, outcome: Outcome) -> None:
        due_ms = outcome.after_ms or 0
        if outcome.at_ms is not None:
            due_ms = outcome.at_ms - self._broker.clock.now_ms()
        if due_ms > DUE_MS_MAX:
            raise InvalidRequest("a retry is due within ten years")

    def _renew(self, member: Member, outcome: Outcome) -> list[Row]:
        crew = member.crew
        if crew.leases.renew(
            outcome.delivery, member=member.name, now_ms=self._broker.clock.monotonic_ms(),
            lease_ms=crew.group.record.lease_ms,
        ):  # fmt: skip
            return []
        return [(outcome.delivery, start, end) for start, end in outcome.ranges or ((0, 1),)]

    def _settle(self, member: Member, outcome: Outcome, refused: list[Row]) -> list[Trace]:
        crew = member.crew
        lease = crew.leases.find(outcome.delivery)
        if lease is None or lease.member != member.name:
            refused += [(outcome.delivery, *one) for one in outcome.ranges or ((0, 1),)]
            return []
        held: list[Range] = []
        for start, end in outcome.ranges or tuple(lease.ranges):
            part = crew.leases.settle(outcome.delivery, start, end, member=member.name)
            refused += _missing(outcome.delivery, start, end, part)
            held += part
        if not held:
            return []
        if outcome.do == "release":
            return self._release(crew, lease, held)
        grants = _by_attempt(crew.sources[lease.topic].share.grants(held))
        if outcome.do == "reject":
            return [self._dead(crew, lease, grant, outcome.cause) for grant in grants]
        member.retried += count_of(held)
        return [self._retried(crew, lease, grant, outcome) for grant in grants]

    def release_all(self, crew: Crew, leases: list[Lease]) -> None:
        """Return everything that a member held which leaves in order."""
        rows = [row for lease in leases for row in self._release(crew, lease, list(lease.ranges))]
        if rows:
            self._consuming.outcomes.add(rows)

    def _release(self, crew: Crew, lease: Lease, ranges: list[Range]) -> list[Trace]:
        """Make unstarted messages ready; return rows that make the started ones ready."""
        started, unstarted = lease.split_started(ranges)
        self._consuming.give_back(crew, lease.topic, unstarted)
        self._consuming.serve_soon(crew)
        if started and crew.group.record.mode == "exclusive":
            # Until then nothing overtakes them.
            self._consuming.hold(crew.group.record.name)
        return [self._row("released", crew, lease, part, attempt=0) for part in _row_parts(started)]

    def _retried(self, crew: Crew, lease: Lease, grant: Attempted, outcome: Outcome) -> Trace:
        """Return the row for one more attempt, or for none when that was the last."""
        attempt, ranges = grant
        policy = crew.group.record.retry
        if outcome.count and attempt >= policy.limit:
            cause = outcome.cause or f"attempt {attempt} of {policy.limit} failed"
            return self._dead(crew, lease, grant, cause)
        now_ms = self._broker.clock.now_ms()
        if outcome.at_ms is not None:
            due_at_ms = max(now_ms, outcome.at_ms)
        elif outcome.after_ms is not None:
            due_at_ms = now_ms + outcome.after_ms
        else:
            due_at_ms = now_ms + policy.delay_after(attempt, spread=self._broker.spread())
        return self._row(
            "retried", crew, lease, ranges, attempt=attempt if outcome.count else attempt - 1,
            counted=outcome.count, due_at_ms=due_at_ms, cause=outcome.cause,
        )  # fmt: skip

    def _dead(self, crew: Crew, lease: Lease, grant: Attempted, cause: str) -> Trace:
        attempt, ranges = grant
        return self._row("dead", crew, lease, ranges, attempt=attempt, cause=cause or "rejected")

    # --- what happens when they say nothing --------------------------------------------------

    def expire(self, crew: Crew, lease: Lease) -> None:
        """Give back what a lease holds that ran out: an attempt, as far as it was started."""
        if lease.topic not in crew.sources or not lease.ranges:
            return
        self._say_expired(crew, lease)
        if lease.unstarted and crew.group.record.mode in ("exclusive", "ordered"):
            self._consuming.hold(crew.group.record.name)
        self._lose(crew, lease, "expired")

    def lose_all(self, crew: Crew, leases: list[Lease]) -> None:
        """Give back what a member held that died."""
        company = sum(count_of(lease.started) for lease in leases)
        for lease in leases:
            if lease.reports:
                self._die(crew, lease, company)
            else:
                self._lose(crew, lease, "lost")

    def _die(self, crew: Crew, lease: Lease, company: int) -> None:
        """Let what a member had started come again alone, unless that was its last attempt."""
        self._consuming.give_back(crew, lease.topic, lease.unstarted)
        source, started = crew.sources.get(lease.topic), lease.started
        if source is None or not started:
            return
        limit, now_ms = crew.group.record.retry.limit, self._broker.clock.now_ms()
        rows = []
        for attempt, some in _by_attempt(source.share.grants(started)):
            is_last = attempt >= limit
            if is_last and company == 1:
                cause = f"member {lease.member!r} died with it alone, attempt {attempt} of {limit}"
                rows.append(self._dead(crew, lease, (attempt, some), cause))
                continue
            rows.append(
                self._row(
                    "lost", crew, lease, some, attempt=attempt - is_last, counted=not is_last,
                    due_at_ms=now_ms + death_pause_ms(attempt), alone=alone_after(company),
                )
            )  # fmt: skip
        self._consuming.outcomes.add(rows)

    def _lose(self, crew: Crew, lease: Lease, did: Literal["expired", "lost"]) -> None:
        self._consuming.give_back(crew, lease.topic, lease.unstarted)
        source, ranges = crew.sources.get(lease.topic), lease.started
        if source is None or not ranges:
            return
        limit = max(crew.group.record.retry.limit, DEATHS_MAX)
        rows = []
        for attempt, some in _by_attempt(source.share.grants(ranges)):
            if attempt >= limit:
                cause = (
                    f"its lease ran out with {lease.member!r}, attempt {attempt}"
                    if did == "expired"
                    else f"member {lease.member!r} died with it, attempt {attempt}"
                )
                rows.append(self._dead(crew, lease, (attempt, some), cause))
            else:
                now_ms = self._broker.clock.now_ms()
                rows.append(self._row(did, crew, lease, some, attempt=attempt, due_at_ms=now_ms))
        self._consuming.outcomes.add(rows)

    def _say_expired(self, crew: Crew, lease: Lease) -> None:
        if (member := crew.members.get(lease.member)) is not None:
            member.expired += lease.ranges.count
        expired = self._consuming.expired_of(crew.group.record.name)
        if expired <= EXPIRED_SAID or expired % 1_000 == 0:
            logger.warning(
                "lease ran out: member %r of group %r did not settle %d messages of %r in time",
                lease.member, crew.group.record.name, lease.ranges.count, lease.topic,
            )  # fmt: skip

    def _row(
        self, did: str, crew: Crew, lease: Lease, ranges: list[Range], *, attempt: int,
        counted: bool = True,
        due_at_ms: int = 0,
        alone: int = 0,
        cause: str = "",
    ) -> Trace:  # fmt: skip
        return Trace(
            did=did, at_ms=self._broker.clock.now_ms(), group=crew.group.record.name,
            topic=lease.topic, ranges=tuple(ranges), member=lease.member, attempt=attempt,
            counted=counted, due_at_ms=due_at_ms, alone=alone, cause=short_cause(cause),
        )  # fmt: skip


def _decoded(payload: bytes | bytearray) -> tuple[int, tuple[Outcome, ...]]:
    settle = decode_settle(payload)
    return settle.consumer, settle.rows


def _by_attempt(grants: list[Grant]) -> list[Attempted]:
    """Gather ranges that have the same attempt: they become one row, if they are not too many."""
    gathered: dict[int, list[Range]] = {}
    for start, end, attempt, _ in grants:
        gathered.setdefault(attempt, []).append((start, end))
    return [(attempt, part) for attempt, ranges in gathered.items() for part in _row_parts(ranges)]


def _row_parts(ranges: list[Range]) -> list[list[Range]]:
    """Split ranges into lists that fit into one row each."""
    return [ranges[at : at + ROW_RANGES_MAX] for at in range(0, len(ranges), ROW_RANGES_MAX)]


def _few(refused: list[Row]) -> list[Row]:
    """Return what was refused as few rows as a frame takes: at worst, whole deliveries."""
    if len(refused) <= ROWS_MAX:
        return refused
    whole: dict[int, tuple[int, int]] = {}
    for delivery, start, end in refused:
        first, last = whole.get(delivery, (start, end))
        whole[delivery] = min(first, start), max(last, end)
    return [(delivery, start, end) for delivery, (start, end) in whole.items()][:ROWS_MAX]


def _missing(delivery: int, start: int, end: int, held: list[Range]) -> list[Row]:
    """Return what of [start, end) was not held."""
    missing: list[Row] = []
    for first, last in held:
        if start < first:
            missing.append((delivery, start, first))
        start = last
    if start < end:
        missing.append((delivery, start, end))
    return missing
