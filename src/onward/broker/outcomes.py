"""How messages ended, on the way to the disk: rows of the trace, one commit's worth together.

    acked ranges ──┐
    other rows  ───┴─▶ gathered ──▶ sealed (its commit begins) ──▶ folded ──▶ everyone told
                                         └─ refused: given back, everyone told why

Acks of all members that arrive before a commit begins become one row for each member and topic:
the acks first, then the other rows in their order. Nothing is folded before it is durable, and
what is folded is exactly what was written, in its order: recovery does the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from onward.delivery.ranges import Range
from onward.delivery.trace import Trace, encode_rows
from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.broker.publish import Publishing
    from onward.broker.session import Session

logger = logging.getLogger("onward.consume")

Done = Callable[[OnwardError | None], None]
Timed = tuple[int, int, int, int]
"""A range and how long it took: start, end, milliseconds since its delivery and its start."""
WAITED_MS_MIN = 100
"""A message that waited as long at its member is traced with the time from its start, too."""


class _Gathered:
    """What goes to the disk with one commit."""

    __slots__ = ("acked", "answers", "bodies", "done", "later", "rows")

    def __init__(self) -> None:
        self.acked: dict[tuple[str, str, str], list[Timed]] = {}
        self.later: list[Trace] = []
        self.answers: dict[Session, list[tuple[int, bytes]]] = {}
        self.done: list[Done] = []
        self.rows: list[Trace] = []
        self.bodies: list[bytes] | None = None


class Outcomes:
    """Gathers outcomes, publishes them as rows of the trace, and folds them."""

    def __init__(
        self,
        publishing: Publishing,
        *,
        apply: Callable[[Trace], None],
        give_back: Callable[[list[Trace]], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._publishing = publishing
        self._apply = apply
        self._give_back = give_back
        self._now_ms = now_ms
        self._gathered: _Gathered | None = None

    def ack(self, group: str, topic: str, member: str, timed: list[Timed]) -> None:
        """Take note that a member has finished ranges."""
        acked = self._open().acked
        key = (group, topic, member)
        if key in acked:
            acked[key] += timed
        else:
            acked[key] = timed

    def add(self, rows: list[Trace]) -> None:
        """Take note of anything else."""
        self._open().later += rows

    def when_durable(self, done: Done) -> None:
        """Call `done` when all that was taken note of is durable, or why it will not be."""
        self._open().done.append(done)

    def answer(self, session: Session, request_id: int, settled: bytes) -> None:
        """Send a SETTLED frame when all that was taken note of is durable, or an error."""
        self._open().answers.setdefault(session, []).append((request_id, settled))

    def _open(self) -> _Gathered:
        if self._gathered is None:
            self._gathered = gathered = _Gathered()
            self._publishing.record(
                lambda: self._seal(gathered), done=lambda error: self._settle(gathered, error)
            )
        return self._gathered

    def _seal(self, gathered: _Gathered) -> list[bytes]:
        """Return the rows as they are written; what comes from now on is for the next commit."""
        if gathered.bodies is None:
            if self._gathered is gathered:
                self._gathered = None
            now_ms = self._now_ms()
            gathered.rows = [
                _acked_row(key, timed, now_ms) for key, timed in gathered.acked.items()
            ] + gathered.later
            gathered.bodies = encode_rows(gathered.rows)
        return gathered.bodies

    def _settle(self, gathered: _Gathered, error: OnwardError | None) -> None:
        if error is None:
            for row in gathered.rows:
                self._apply(row)
        else:
            self._seal(gathered)
            self._give_back(gathered.rows)
        for session, answers in gathered.answers.items():
            _send_answers(session, answers, error)
        for done in gathered.done:
            try:
                done(error)
            except Exception:
                # One that fails must not keep the others from hearing of theirs.
                logger.exception("an answer could not be given")


def _send_answers(
    session: Session, answers: list[tuple[int, bytes]], error: OnwardError | None
) -> None:
    """Answer all frames of a connection that one commit has settled, in one write."""
    if error is None:
        session.write(b"".join([settled for _, settled in answers]))
        return
    for request_id, _ in answers:
        session.refuse(request_id, error)


def _acked_row(key: tuple[str, str, str], timed: list[Timed], now_ms: int) -> Trace:
    """Return one row for all that a member finished; neighbours become one range."""
    group, topic, member = key
    ranges: list[Range] = []
    took: list[int] = []
    worked: list[int] = []
    has_waited = False
    timed.sort()
    for start, end, took_ms, worked_ms in timed:
        has_waited = has_waited or took_ms - worked_ms >= WAITED_MS_MIN
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
            took[-1] = max(took[-1], took_ms)
            worked[-1] = max(worked[-1], worked_ms)
        else:
            ranges.append((start, end))
            took.append(took_ms)
            worked.append(worked_ms)
    return Trace(
        did="acked", at_ms=now_ms, group=group, topic=topic, member=member, ranges=tuple(ranges),
        took_ms=tuple(took), worked_ms=tuple(worked) if has_waited else (),
    )  # fmt: skip
