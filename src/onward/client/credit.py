"""How many messages a member lets come: enough that it never waits, few enough to hold.

    given to the broker (`out`) + waiting here (`waiting`)  is kept near `wanted`

Credit goes out in few frames: when half of it is used. It counts messages, but memory is bytes:
when messages turn out to be large, less is given, and what is too much is taken back.

Unless it is fixed, `wanted` follows how long the program works on a message: as many are fetched
ahead as it finishes in half a second, and none when one takes longer. It begins small. While the
program waits it gets what it has `room` for: without anything ahead it still has work.

In a group that delivers at most once what is sent is finished, so what waits here when a member
leaves would be lost: its credit is sparing, exactly what somebody waits for at this moment.
"""

from __future__ import annotations

AHEAD_S = 0.5
"""So much work is fetched ahead: what takes longer is not, and stays for other members."""
AHEAD_FIRST = 8
"""So many a program gets at first that has not said how many it works on at a time."""
AHEAD_MAX = 1_000
BATCHES = 10_000
BATCHES_SPARING = 100
CREDIT_MAX = 1_000_000
BUFFERED_BYTES_MAX = 16 << 20
TAKE_ALL_BACK = -(2**31 - 1)


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
        self.ahead_max = AHEAD_MAX
        self.work_s: float | None = None
        """How long a message takes, as the program has measured it; None: it is measured here."""
        self._busy_since = 0.0
        self._taken = 0
        self._last_taken = 0

    def restart(self) -> None:
        """Begin anew: the broker knows of no credit, and nothing of what it sent counts."""
        self.out = self.waiting = self.waiting_bytes = 0

    def more(self, *, now: float, room: int = 0) -> int:
        """Return how much credit to give now; 0 while half of it is unused.

        `room` is how many messages a program that waits could begin with at once.
        """
        if self.is_sparing:
            return 0
        if self.is_fixed:
            room = 0
        else:
            self._adapt(now, is_waiting=room > 0)
        have = self.out + self.waiting
        if have > self._affordable(self.wanted) // 2 and have >= room:
            return 0
        return self.give(self._affordable(self.wanted + room) - have)

    def resumed(self, *, now: float) -> None:
        """Take note that the program has waited, and goes on now."""
        self._busy_since = now
        self._taken = self._last_taken = 0

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
        self._taken += count
        self._last_taken = count
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
        return min(wanted, max(1, int(BUFFERED_BYTES_MAX // 2 / self._message_bytes)))

    def _adapt(self, now: float, *, is_waiting: bool) -> None:
        """Fetch ahead as much as is done in `AHEAD_S`; grow step by step, shrink at once."""
        work_s = self._measured(now, is_waiting=is_waiting) if self.work_s is None else self.work_s
        if work_s is not None:
            ahead = 0 if work_s >= AHEAD_S else int(AHEAD_S / max(work_s, 1e-9))
            self.wanted = min(ahead, 4 * self.wanted + 4, self.ahead_max)

    def _measured(self, now: float, *, is_waiting: bool) -> float | None:
        """Return how long a message took on the average; None when none was done since."""
        # What was taken last is being worked on, unless the program waits for more.
        done = self._taken - (0 if is_waiting else self._last_taken)
        if done <= 0:
            return None
        busy_s, self._busy_since = now - self._busy_since, now
        self._taken -= done
        return busy_s / done
