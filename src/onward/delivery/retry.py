"""How often a message is delivered, and how long it waits in between.

    ladder       each attempt that failed waits one step longer; after the last step it is dead
    fixed        always the same pause
    exponential  each pause is `factor` times the one before, up to a limit, a little scattered
    none         one delivery: what fails is dead at once

A policy belongs to a group, so retries of one group never touch another. Chance comes in as a
number (`spread`), so the same question has the same answer.
"""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Final, Literal
from uuid import UUID

import msgspec

from onward.durations import format_duration, parse_duration_ms
from onward.errors import InvalidRequest

LADDER_S: Final = (
    10, 20, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600,
)  # fmt: skip
LADDER_MS: Final = tuple(step_s * 1_000 for step_s in LADDER_S)

DELAY_MS_LIMIT: Final = 10 * 365 * 86_400_000
STEPS_MAX: Final = 1_000
ATTEMPTS_LIMIT: Final = 10_000
FACTOR_LIMIT: Final = 1_000.0

_ATTEMPTS_DEFAULT: Final = 16
_NO_TEXTS: Final = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)
# A pure package imports no leaf but the errors, so the few units of a pause are read here.
POLICY_FORMS: Final = (
    "write ladder, none, fixed:10s, fixed:10s:5 (deliveries), exponential:1s..1h, "
    "exponential:1s..1h:8 or your own steps: 10s,1m,5m"
)


DEATH_PAUSE_MS: Final = 500
DEATH_PAUSE_MS_MAX: Final = 60_000


def death_pause_ms(attempt: int) -> int:
    """Return how long a message waits whose member died with it, in this attempt.

    It does not depend on the policy: what kills processes must not do so in quick succession.

    >>> [death_pause_ms(attempt) for attempt in (1, 2, 3, 8, 9_000)]
    [500, 1000, 2000, 60000, 60000]
    """
    doublings = min(max(attempt, 1) - 1, 16)
    return min(DEATH_PAUSE_MS << doublings, DEATH_PAUSE_MS_MAX)


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a group tries again.

    >>> policy = RetryPolicy()
    >>> policy.limit, policy.delay_after(1, spread=0), policy.delay_after(16, spread=0)
    (17, 10000, 3600000)
    """

    kind: Literal["ladder", "fixed", "exponential", "none"] = "ladder"
    steps_ms: tuple[int, ...] = LADDER_MS
    delay_ms: int = 10_000
    """The pause of `fixed`, the first pause of `exponential`."""
    factor: float = 2.0
    delay_ms_max: int = 3_600_000
    jitter: float = 0.1
    """Which part of an exponential pause is left to chance; a pause only becomes shorter by it."""
    attempts_max: int = 0
    """Deliveries at most; 0: as the kind says."""

    @property
    def limit(self) -> int:
        """How often a message is delivered at most; after that it is a dead letter."""
        if self.kind == "none":
            return 1
        if self.attempts_max:
            return self.attempts_max
        return len(self.steps_ms) + 1 if self.kind == "ladder" else _ATTEMPTS_DEFAULT

    def delay_after(self, attempt: int, *, spread: float) -> int:
        """Return how many milliseconds to wait after this attempt, counted from 1, has failed.

        `spread` is a number from 0 to 1 that decides what is left to chance.

        >>> RetryPolicy(kind="exponential", delay_ms=1_000).delay_after(3, spread=0.5)
        3800
        """
        if self.kind == "ladder":
            return self.steps_ms[max(1, min(attempt, len(self.steps_ms))) - 1]
        if self.kind == "fixed":
            return self.delay_ms
        if self.kind == "none":
            return 0
        return int(self._grown(attempt) * (1 - self.jitter * spread))

    def check(self) -> RetryPolicy:
        """Return the policy when it makes sense, else raise `InvalidRequest` with what does not.

        >>> RetryPolicy(kind="fixed", delay_ms=-1).check()
        Traceback (most recent call last):
        onward.errors.InvalidRequest: retry policy: delay_ms is 0 to 315360000000, not -1
        """
        check_types(self, "retry policy")
        if not 1 <= len(self.steps_ms) <= STEPS_MAX:
            raise _wrong(f"a ladder has 1 to {STEPS_MAX} steps, not {len(self.steps_ms)}")
        for name, value_ms in (
            *(("a step", step_ms) for step_ms in self.steps_ms),
            ("delay_ms", self.delay_ms),
            ("delay_ms_max", self.delay_ms_max),
        ):
            if not 0 <= value_ms <= DELAY_MS_LIMIT:
                raise _wrong(f"{name} is 0 to {DELAY_MS_LIMIT}, not {value_ms}")
        # Written so that NaN, which compares as false with everything, fails too.
        if not 1 <= self.factor <= FACTOR_LIMIT:
            raise _wrong(f"factor is 1 to {FACTOR_LIMIT:g}, not {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise _wrong(f"jitter is 0 to 1, not {self.jitter}")
        attempts_limit = 1 if self.kind == "none" else ATTEMPTS_LIMIT
        if not 0 <= self.attempts_max <= attempts_limit:
            raise _wrong(
                f"attempts_max of {self.kind} is 0 to {attempts_limit}, not {self.attempts_max}"
            )
        if self.kind == "exponential" and self.delay_ms > self.delay_ms_max:
            raise _wrong(f"delay_ms {self.delay_ms} is above delay_ms_max {self.delay_ms_max}")
        return self

    def _grown(self, attempt: int) -> float:
        if not self.delay_ms:
            return 0.0
        # Compared as logarithms: the power itself may be larger than any float.
        steps_left = math.log(max(1, self.delay_ms_max) / self.delay_ms)
        attempt = max(1, attempt)
        if (attempt - 1) * math.log(self.factor) >= steps_left:
            return self.delay_ms_max
        return min(self.delay_ms_max, self.delay_ms * self.factor ** (attempt - 1))


def parse_policy(text: str) -> RetryPolicy:
    """Read a policy as people write it.

    >>> parse_policy("fixed:10s:5").limit
    5
    >>> parse_policy("10s,1m,5m").steps_ms
    (10000, 60000, 300000)
    """
    try:
        return _read(text).check()
    except InvalidRequest as error:
        raise InvalidRequest(f"{text!r} is not a retry policy ({error}): {POLICY_FORMS}") from None


def format_policy(policy: RetryPolicy) -> str:
    """Write a policy as `parse_policy` reads it; one that has no such form is written as JSON.

    >>> format_policy(parse_policy("60s,5m")), format_policy(parse_policy("fixed:10s:5"))
    ('1m,5m', 'fixed:10s:5')
    """
    attempts = f":{policy.attempts_max}" if policy.attempts_max else ""
    first, last = format_duration(policy.delay_ms), format_duration(policy.delay_ms_max)
    forms = {
        "none": "none",
        "ladder": f"ladder{attempts}",
        "fixed": f"fixed:{first}{attempts}",
        "exponential": f"exponential:{first}..{last}{attempts}",
    }
    for text in (forms[policy.kind], ",".join(map(format_duration, policy.steps_ms))):
        if _read(text) == policy:
            return text
    return msgspec.json.encode(policy).decode()


def check_types(struct: msgspec.Struct, what: str) -> None:
    """Raise `InvalidRequest` when a field of a struct made by hand has a value of a wrong type.

    >>> check_types(RetryPolicy(delay_ms="10s"), "retry policy")
    Traceback (most recent call last):
    onward.errors.InvalidRequest: retry policy: Expected `int`, got `str` - at `$.delay_ms`
    """
    try:
        # Left as they are: as texts, which they would become, they are not what was meant.
        fields = msgspec.to_builtins(struct, builtin_types=_NO_TEXTS)
        msgspec.convert(fields, type(struct))
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"{what}: {error}") from None


def _read(text: str) -> RetryPolicy:
    kind, *rest = text.strip().split(":")
    if kind == "none" and not rest:
        return RetryPolicy(kind="none")
    if kind == "ladder" and len(rest) <= 1:
        return RetryPolicy(attempts_max=_attempts(rest))
    if kind == "fixed" and 1 <= len(rest) <= 2:
        delay_ms = parse_duration_ms(rest[0])
        return RetryPolicy(kind="fixed", delay_ms=delay_ms, attempts_max=_attempts(rest[1:]))
    if kind == "exponential" and 1 <= len(rest) <= 2:
        first, _, last = rest[0].partition("..")
        return RetryPolicy(
            kind="exponential",
            delay_ms=parse_duration_ms(first),
            delay_ms_max=parse_duration_ms(last),
            attempts_max=_attempts(rest[1:]),
        )
    if rest:
        raise InvalidRequest(f"no policy is called {kind!r}, or it has no such form")
    steps = kind.split(",", STEPS_MAX)
    return RetryPolicy(steps_ms=tuple(parse_duration_ms(step.strip()) for step in steps))


def _attempts(rest: list[str]) -> int:
    if not rest:
        return 0
    if not (rest[0].isascii() and rest[0].isdigit() and len(rest[0]) <= 9) or not int(rest[0]):
        raise InvalidRequest(f"{rest[0]!r} is not a number of deliveries")
    return int(rest[0])


def _wrong(text: str) -> InvalidRequest:
    return InvalidRequest(f"retry policy: {text}")
