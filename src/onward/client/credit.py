"""How many messages a member lets come: enough that it never waits, few enough to hold.

    given to the broker (`out`) + waiting here (`waiting`)  is kept near `wanted`

Credit goes out in few frames: when half of it is used. It counts messages, but memory is bytes:
when messages turn out to be large, less is given, and what is too much is taken back.

In a group that delivers at most once what is sent is finished, so what waits here when a member
leaves would be lost: its credit is sparing, exactly what somebody waits for at this moment.
"""

from __future__ import annotations

SINGLE_MIN = 64
SINGLE_MAX = 1_000
BATCHES = 10_000
BATCHES_SPARING = 100
CREDIT_MAX = 1_000_000
BUFFERED_BYTES_MAX = 16 << 20
TAKE_ALL_BACK = -(2**31 - 1)

_QUICK_S = 0.05
_SLOW_S = 1.0


class Credit:
    """The credit of one member. It says what to send; it sends nothing.

    >>> credit = Credit(wanted=100)
    >>> credit.more(now=0.0)
    100
    >>> credit.arrived(60, size=6_000)
    0
    >>> credit.more(now=0.1), credit.took(30), credit.more(now=0.2)
    (0, None, 0)
    >>> credit.took(30)
    >>> credit.more(now=0.3)
    60
    """

    def __init__(self, *, wanted: int = 0, is_fixed: bool = True) -> None:
        self.wanted = wanted
        self.is_fixed = is_fixed
        self.is_off = False
        """Nothing is delivered: a member of a broadcast reads by itself."""
        self.is_sparing = False
        """Nothing is asked for ahead: only `ask` gives credit."""
        self.out = 0
        self.waiting = 0
        self.waiting_bytes = 0
        self._message_bytes = 0.0
        self._given_at = 0.0

    def restart(self) -> None:
        """Begin anew: the broker knows of no credit, and nothing of what it sent counts."""
        self.out = self.waiting = self.waiting_bytes = 0

    def more(self, *, now: float) -> int:
        """Return how much credit to give now; 0 while half of it is unused."""
        if self.is_sparing or self.out + self.waiting > self.wanted // 2:
            return 0
        wanted = self._affordable(self.wanted)
        if self.out + self.waiting > wanted // 2:
            return 0
        if not self.is_fixed:
            self._adapt(now - self._given_at)
            self._given_at = now
            wanted = self._affordable(self.wanted)
        return self.give(wanted - self.out - self.waiting)

    def give(self, count: int) -> int:
        """Take note of credit that is given, and return it."""
        count = 0 if self.is_off else max(0, count)
        self.out += count
        return count

    def ask(self, count: int) -> int:
        """Return what makes the credit exactly `count`: less than 0 takes back what is too much.

        >>> credit = Credit()
        >>> credit.ask(3), credit.arrived(1, size=10), credit.ask(0)
        (3, 0, -2)
        """
        change, self.out = count - self.out, count
        return change

    def arrived(self, count: int, *, size: int) -> int:
        """Take note of messages that came; return what to give: less than 0 when it is too much."""
        self.out = max(0, self.out - count)  # what was taken back may have been on its way
        self.waiting += count
        self.waiting_bytes += size
        self._message_bytes = size / max(1, count)
        if self.waiting_bytes > BUFFERED_BYTES_MAX and self.out:
            return self.take_back()
        return 0

    def take_back(self) -> int:
        """Return what takes everything back that is not used."""
        self.out = 0
        return TAKE_ALL_BACK

    def took(self, count: int) -> None:
        """Take note of messages that were handed out."""
        left = self.waiting - count
        self.waiting = left if left > 0 else 0  # once for each message: a call would be dear

    def opened(self, size: int) -> None:
        """Take note of bytes that wait no longer."""
        self.waiting_bytes = max(0, self.waiting_bytes - size)

    def _affordable(self, wanted: int) -> int:
        if self.waiting_bytes > BUFFERED_BYTES_MAX // 2:
            return 0
        if not self._message_bytes:
            return wanted
        return max(1, min(wanted, int(BUFFERED_BYTES_MAX // 2 / self._message_bytes)))

    def _adapt(self, since_s: float) -> None:
        """Who is quick gets more at once; who is slow leaves more to the others."""
        if since_s < _QUICK_S:
            self.wanted = min(self.wanted * 2, SINGLE_MAX)
        elif since_s > _SLOW_S:
            self.wanted = max(self.wanted // 2, SINGLE_MIN)
