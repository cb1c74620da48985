"""What a function of an App says about a message when it does not simply return.

    returns                ack      the message is finished for this group
    raises anything        retry    by the group's policy; the cause is the type and the text
    raises Retry(...)      retry    after a delay, at a time, with or without counting the attempt
    raises Reject(why)     reject   never again: a dead letter with that cause

Neither is an `OnwardError`: nothing went wrong in Onward.
"""

from __future__ import annotations

from datetime import datetime

from onward.client.topics import instant_ms
from onward.durations import Duration, either_ms
from onward.errors import InvalidRequest

CAUSE_CHARS_MAX = 1_000
INSTANT_MS_MAX = 253_402_300_799_999  # the end of the year 9999


class Retry(Exception):
    """Raise it to get the message again.

    `after` is a delay, `at` a moment; without both the group's policy says when. With
    `count=False` the attempt is not counted: the message was fine, the moment was not.

    >>> str(Retry("the bank is closed", after="10m"))
    'the bank is closed'
    """

    def __init__(
        self,
        cause: str = "",
        *,
        after: Duration | None = None,
        after_ms: int | None = None,
        at: datetime | int | None = None,
        count: bool = True,
    ) -> None:
        self.after_ms = either_ms("after", after, after_ms)
        if self.after_ms is not None and at is not None:
            raise InvalidRequest("a retry is 'after' a delay or 'at' a moment, not both")
        super().__init__(cause)
        self.cause = cause
        self.at_ms = None if at is None else _checked_ms(at)
        self.count = count


class Reject(Exception):
    """Raise it when a message can never succeed: it becomes a dead letter with this cause.

    >>> str(Reject("no such customer"))
    'no such customer'
    """

    def __init__(self, cause: str = "rejected") -> None:
        super().__init__(cause)
        self.cause = cause


def _checked_ms(at: datetime | int) -> int:
    """Return a moment that can be asked for; here, where the mistake is, not when it is sent."""
    if isinstance(at, bool) or not isinstance(at, datetime | int):
        raise InvalidRequest(f"a retry is at a datetime or milliseconds since 1970, not {at!r}")
    at_ms = instant_ms(at)
    if not 0 <= at_ms <= INSTANT_MS_MAX:
        raise InvalidRequest(f"a retry at {at!r} is not a moment that will come")
    return at_ms


def cause_of(error: BaseException) -> str:
    """Return the type and the text of an error, short enough to be stored.

    >>> cause_of(KeyError("amount")), cause_of(Reject("no such customer"))
    ("KeyError: 'amount'", 'no such customer')
    """
    if isinstance(error, Retry | Reject):
        text = str(error.cause)
    else:
        kind = type(error).__name__
        try:
            said = str(error)
        except Exception:  # noqa: BLE001  # the text of a stranger's error is a stranger's code
            said = ""
        text = f"{kind}: {said}" if said else kind
    # What cannot be said in UTF-8 (a lone surrogate) is made visible: a cause is stored as JSON.
    return text[:CAUSE_CHARS_MAX].encode(errors="backslashreplace").decode()[:CAUSE_CHARS_MAX]
