"""Schedules that come again: a cron expression in a time zone, or every so often.

    cron   "30 9 * * MON-FRI" in "Europe/Berlin"     five fields as cron knows them, or @daily ...
    every  600_000 ms from `start_ms` on: start + every, start + 2 every ...

All runs are after `start_ms`. When clocks change, cron does as cron does: a run at a fixed time in
the hour that is skipped comes right after it, one in the hour that comes twice comes once; a field
of minutes or hours that begins with `*` goes on with real time. A run that the next one has
overtaken is missed. After a stop only the latest run is made up for (`one`), or not even that when
it is more than a minute late (`none`). No clock is looked at here.
"""

import re
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from onward.errors import InvalidName, InvalidRequest
from onward.message.names import check_topic_name
from onward.message.recurring import RecurringFields

EVERY_MS_MIN: Final = 1_000
EVERY_MS_MAX: Final = 3_653 * 86_400_000  # ten years
LATE_MS_MAX: Final = 60_000
BODY_BYTES_MAX: Final = 1024 * 1024
HEADERS_MAX: Final = 100
TEXT_CHARACTERS_MAX: Final = 1_000

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MOMENT_MS_MAX: Final = 250_000_000_000_000  # in the year 9892: a calendar of four digits ends soon
_ALIASES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


class Recurring(RecurringFields, frozen=True):
    """A schedule that comes again, and the message that each run is.

    >>> daily = Recurring("report", "reports", cron="0 9 * * *", zone="Europe/Berlin").check()
    >>> daily.next_run(1_800_000_000_000)  # 2027-01-15T08:00:00Z is 9 o'clock in Berlin
    1800086400000
    """

    deleted: bool = False

    def check(self) -> "Recurring":
        """Return the schedule when it makes sense, else raise `InvalidRequest` with what does not.

        >>> Recurring("report", "reports", cron="0 25 * * *").check()
        Traceback (most recent call last):
        onward.errors.InvalidRequest: recurring 'report': cron '0 25 * * *' has a bad hour
        """
        self._check_types()
        if not _NAME.match(self.name) or self.name in (".", ".."):
            raise InvalidName(
                f"recurring name {self.name[:40]!a}: 1 to 128 of A-Z a-z 0-9 '.' '_' '-'"
            )
        check_topic_name(self.topic)
        self._check_message()
        if bool(self.cron) == bool(self.every_ms):
            raise self._wrong("it has either a cron expression or an interval")
        if not 0 <= self.start_ms <= _MOMENT_MS_MAX:
            raise self._wrong(f"start_ms is 0 to {_MOMENT_MS_MAX}, not {self.start_ms}")
        if self.cron:
            self._check_cron()
        elif not EVERY_MS_MIN <= self.every_ms <= EVERY_MS_MAX:
            raise self._wrong(
                f"every_ms is {EVERY_MS_MIN} (a second) to {EVERY_MS_MAX} (ten years), "
                f"not {self.every_ms}"
            )
        return self

    def next_run(self, after_ms: int) -> int:
        """Return when the first run after a moment is.

        >>> Recurring("tick", "ticks", every_ms=10_000, start_ms=5_000).next_run(25_000)
        35000
        """
        after_ms = max(after_ms, self.start_ms)
        if self.every_ms:
            steps = (after_ms - self.start_ms) // self.every_ms + 1
            return self.start_ms + steps * self.every_ms
        return self._next_of_cron(after_ms)

    def runs_due(self, last_ms: int, now_ms: int) -> list[int]:
        """Return the run to make up to `now_ms` when all up to `last_ms` are settled: one or none.

        >>> tick = Recurring("tick", "ticks", every_ms=10_000)
        >>> tick.runs_due(10_000, 19_999), tick.runs_due(10_000, 20_000), tick.runs_due(0, 45_000)
        ([], [20000], [40000])
        """
        if self.paused or self.deleted:
            return []
        latest_ms = self._latest_run(last_ms, now_ms)
        if latest_ms is None or (self.catch_up == "none" and now_ms - latest_ms > LATE_MS_MAX):
            return []
        return [latest_ms]

    def _latest_run(self, last_ms: int, now_ms: int) -> int | None:
        """Return the last run after `last_ms` and not after `now_ms`."""
        run_ms = self.next_run(last_ms)
        if run_ms > now_ms:
            return None
        if self.every_ms:
            return now_ms - (now_ms - self.start_ms) % self.every_ms
        # Years of missed minutes are not walked through: no run is in (end_ms, now_ms].
        end_ms = now_ms
        while (following_ms := self.next_run(run_ms)) <= end_ms:
            run_ms = following_ms
            middle_ms = (run_ms + end_ms) // 2
            later_ms = self.next_run(middle_ms)
            if later_ms <= end_ms:
                run_ms = later_ms
            else:
                end_ms = middle_ms
        return run_ms

    def _next_of_cron(self, after_ms: int) -> int:
        if after_ms > _MOMENT_MS_MAX:
            raise self._wrong(f"there is no run after {after_ms}")
        after = (_EPOCH + timedelta(milliseconds=after_ms)).astimezone(_zone_of(self.zone))
        runs = CronSim(_ALIASES.get(self.cron, self.cron), after)
        for run in runs:
            # In the hour that comes twice, runs at fixed times are those of its first time: seen
            # from its second time they are over.
            run_ms = (run - _EPOCH) // timedelta(milliseconds=1)
            if run_ms > after_ms:
                return run_ms
        raise self._wrong(f"cron {self.cron!a} never comes")

    def _check_cron(self) -> None:
        expression = _ALIASES.get(self.cron, self.cron)
        if len(expression) > TEXT_CHARACTERS_MAX or len(expression.split()) != 5:
            raise self._wrong(f"cron {self.cron[:40]!a} is not five fields, nor @daily or the like")
        try:
            _zone_of(self.zone)
        except (ValueError, KeyError, OSError):
            raise self._wrong(f"time zone {self.zone[:40]!a} is not known here") from None
        try:
            self._next_of_cron(self.start_ms)
        except CronSimError as error:
            raise self._wrong(f"cron {self.cron[:40]!a} has a {str(error).lower()}") from None

    def _check_types(self) -> None:
        """Refuse values of a wrong type in a schedule made by hand."""
        try:
            plain = msgspec.to_builtins(self, builtin_types=(bytes,))
            msgspec.convert(plain, Recurring, builtin_types=(bytes,))
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise InvalidRequest(f"recurring {str(self.name)[:40]!a}: {error}") from None

    def _check_message(self) -> None:
        if len(self.body) > BODY_BYTES_MAX:
            raise self._wrong(f"its body has at most {BODY_BYTES_MAX} bytes, not {len(self.body)}")
        headers = self.headers or {}
        if len(headers) > HEADERS_MAX:
            raise self._wrong(f"at most {HEADERS_MAX} headers, not {len(headers)}")
        texts = (self.key, self.tag, self.trace_id, self.tenant, *headers, *headers.values())
        if any(len(text) > TEXT_CHARACTERS_MAX for text in texts if text is not None):
            raise self._wrong(f"its texts have at most {TEXT_CHARACTERS_MAX} characters")
        if not 0 <= self.priority <= 255:
            raise self._wrong(f"a priority is a number from 0 to 255, not {self.priority}")

    def _wrong(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"recurring {self.name!r}: {what}")


@lru_cache(maxsize=64)
def _zone_of(name: str) -> tzinfo:
    # Cron is faster with the plain UTC than with the zone of that name.
    return UTC if name == "UTC" else ZoneInfo(name)
