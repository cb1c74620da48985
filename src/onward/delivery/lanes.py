"""What a choosy group may hand out next, of the offsets that were read for it.

    add ──▶ in line ──▶ taken ──▶ finished: forgotten
             │   ▲        │ └───▶ parked: waits for its retry ──▶ in line again
             ▼   │        └─────▶ in line again
        waiting behind its key

Each tenant has two lines, of what is fresh and of what failed and comes again: higher priorities
first, then lower offsets. At the same priority the two take turns, so that retries never delay
fresh messages. Tenants take turns by weight (start-time fair queueing): each turn costs 1 / weight,
the cheapest comes next, and who was away comes back at the present price, without credit for the
past. A message whose key may not be taken now steps out of line when it comes up, and waits behind
its key until that opens:

    ordered          one of a key is taken at a time, and none after one that is taken or parked
    key_concurrency  so many of a key are taken at a time
    key_rate         a bucket of tokens for each key; it holds what one second brings, at least 1

Messages without a key are not held back. Nothing here is durable, and no step looks at all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace, nlargest
from itertools import islice, repeat
from typing import TYPE_CHECKING, Final

from onward.delivery.ranges import Ranges

if TYPE_CHECKING:
    from onward.delivery.record import GroupRecord

HELD_MAX: Final = 65_536
REMEMBERED_MAX: Final = 65_536
"""How many idle keys' buckets and idle tenants' turns are kept; the emptiest buckets stay."""
RELEASED_MAX: Final = 64
"""To so many lines an opening key is offered at once; the others of that key come in turn."""

_STALE_MIN: Final = 1_024
_OFFSET_MASK: Final = (1 << 64) - 1
_TURN: Final = 1 << 40  # the price of a turn at weight 1: whole numbers do not drift
_WEIGHT_MIN: Final = 1e-6
_RATE_MIN: Final = 1e-9  # once in a life: anything below is the same, and numbers stay finite
_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000

_IN_LINE, _WAITING, _TAKEN, _PARKED = range(4)


class _Tenant:
    """One tenant's lines: heaps of ranks."""

    __slots__ = ("again", "count", "fresh", "is_active", "name", "price", "turn_at", "was_again")

    def __init__(self, name: str, *, price: int, turn_at: int) -> None:
        self.name = name
        self.price = price
        self.turn_at = turn_at
        self.count = 0
        self.fresh: list[int] = []
        self.again: list[int] = []
        self.was_again = False
        """The last that was taken had failed before: now it is the turn of a fresh one."""
        self.is_active = False
        """It is in the heap of turns. Who is not has nothing in line."""

    def next_line(self) -> list[int]:
        """Return the line whose turn it is: that with the higher priority, else the other one."""
        fresh, again = self.fresh, self.again
        if not fresh or not again:
            return fresh or again
        if fresh[0] >> 64 != again[0] >> 64:
            return fresh if fresh[0] < again[0] else again
        return fresh if self.was_again else again


class _Key:
    """What is known of a key that has messages here."""

    __slots__ = ("count", "first", "full_at_ns", "is_timed", "name", "taken", "waiting")

    def __init__(self, name: str, *, full_at_ns: int) -> None:
        self.name = name
        self.count = 0
        self.taken = 0
        self.first: _Held | None = None
        """Ordered: the one that is in line, taken or parked; all others of the key wait for it."""
        self.full_at_ns = full_at_ns
        """When the bucket is full again: all that a bucket must remember."""
        self.is_timed = False
        self.waiting: dict[_Line | None, list[int]] = {}
        """Heaps of ranks by line; of an ordered group one heap of offsets, under None."""


_Line = tuple[_Tenant, bool]
"""A line of a tenant: that of what is fresh, or (True) of what failed and comes again."""


class _Held:
    """One offset that is held."""

    __slots__ = ("has_failed", "key", "offset", "rank", "state", "tenant")

    def __init__(
        self, offset: int, *, key: _Key | None, tenant: _Tenant, priority: int, has_failed: bool
    ) -> None:
        self.offset = offset
        self.has_failed = has_failed
        self.key = key
        self.tenant = tenant
        self.rank = offset - (priority << 64)
        self.state = _WAITING


class Lanes:
    """The offsets of one topic that a choosy group holds, and which of them come next.

    >>> from onward.delivery.record import GroupRecord
    >>> lanes = Lanes(GroupRecord(name="billing", mode="ordered"))
    >>> lanes.add([0, 1, 2], keys=["a", "a", "b"], tenants=None, priorities=None)
    >>> lanes.take(10, now_ms=0)
    [0, 2]
    >>> lanes.finish([0])
    >>> lanes.take(10, now_ms=0)
    [1]
    """

    def __init__(self, record: GroupRecord, *, buckets: dict[str, int] | None = None) -> None:
        self._is_ordered = record.mode == "ordered"
        self._concurrency = record.key_concurrency
        self._has_priorities = record.priorities
        self._weights = record.tenants
        self._looks_at_keys = self._is_ordered or bool(record.key_concurrency or record.key_rate)
        self._token_ns = _token_ns(record.key_rate)
        self._bucket_ns = round(self._token_ns * max(1.0, record.key_rate))
        self._now_ns = 0
        self._present = 0
        """The price at which the last turn was taken: who comes now begins here."""
        self._idle_turns: dict[str, int] = {}
        self._idle_buckets: dict[str, int] = {} if buckets is None else buckets
        """What keys have used of their rates; given, it outlives these lanes."""
        self._forget_held()

    def _forget_held(self) -> None:
        self.ready_count = 0
        """How many are in line: no more than so many can be taken now, and none when it is 0."""
        self._held: dict[int, _Held] = {}
        self._keys: dict[str, _Key] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._turns: list[tuple[int, str, _Tenant]] = []
        self._timed: list[tuple[int, int, _Key]] = []
        self._timed_serial = 0
        self._stale = 0

    @property
    def count(self) -> int:
        """How many offsets are held, whatever their state."""
        return len(self._held)

    @property
    def room(self) -> int:
        """How many may still be added."""
        return max(0, HELD_MAX - len(self._held))

    def count_of(self, tenant: str | None) -> int:
        """Return how many offsets of a tenant are held."""
        held = self._tenants.get(tenant or "")
        return 0 if held is None else held.count

    def knows(self, offset: int) -> bool:
        """Tell whether this offset is held."""
        return offset in self._held

    def held_in(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Return the held offsets that lie in ranges, by whichever is shorter to go through."""
        if sum(end - start for start, end in ranges) <= len(self._held):
            return [one for start, end in ranges for one in range(start, end) if one in self._held]
        inside = Ranges(ranges)
        return [one for one in self._held if one in inside]

    def first_of_key(self, offset: int) -> int | None:
        """Return which message of its key comes first, perhaps itself; None when it is not held.

        Only an ordered key has one that all others wait for.
        """
        held = self._held.get(offset)
        if held is None:
            return None
        key = held.key
        if key is None or not self._is_ordered:
            return offset
        if key.first is not None:
            return key.first.offset
        # The rate of the key holds all of them back: the lowest comes first when it opens.
        waiting = map(self._held.get, key.waiting.get(None, ()))
        behind = (one.offset for one in waiting if one is not None and self._is_behind(one))
        return min(behind, default=offset)

    # --- in ----------------------------------------------------------------------------------

    def add(
        self,
        offsets: Sequence[int],
        *,
        keys: Sequence[str | None] | None,
        tenants: Sequence[str | None] | None,
        priorities: Sequence[int] | None,
        failed: Ranges | Container[int] = (),
    ) -> None:
        """Take in offsets that were read; one that was taken or parked is in line again.

        `failed` are those among them that are not fresh.
        """
        columns = zip(
            offsets,
            keys if keys is not None and self._looks_at_keys else repeat(None),
            tenants if tenants is not None and self._weights is not None else repeat(None),
            priorities if priorities is not None and self._has_priorities else repeat(0),
            strict=False,  # an endless column stands for one that is absent or of no interest
        )
        for offset, key_name, tenant_name, priority in columns:
            held = self._held.get(offset)
            if held is None:
                held = self._hold(
                    offset, key_name, tenant_name or "", priority, has_failed=offset in failed
                )
                self._enter(held)
            else:
                self._return(held)

    def again(self, offsets: Iterable[int]) -> None:
        """Put taken or parked offsets in line again, where they were: before later ones."""
        for offset in offsets:
            held = self._held.get(offset)
            if held is not None:
                self._return(held)

    def take_over(self, offsets: Iterable[int]) -> None:
        """Count offsets that were just added as taken: somebody has them already."""
        for offset in offsets:
            held = self._held.get(offset)
            if held is not None and held.state == _IN_LINE:
                self._stale += 1
                self._count_taken(held)

    def _hold(
        self,
        offset: int,
        key_name: str | None,
        tenant_name: str,
        priority: int,
        *,
        has_failed: bool,
    ) -> _Held:
        key = None
        if key_name is not None:
            key = self._keys.get(key_name)
            if key is None:
                full_at_ns = self._idle_buckets.pop(key_name, 0)
                key = self._keys[key_name] = _Key(key_name, full_at_ns=full_at_ns)
            key.count += 1
        tenant = self._tenants.get(tenant_name)
        if tenant is None:
            tenant = self._tenants[tenant_name] = self._new_tenant(tenant_name)
        tenant.count += 1
        held = _Held(offset, key=key, tenant=tenant, priority=priority, has_failed=has_failed)
        self._held[offset] = held
        return held

    def _new_tenant(self, name: str) -> _Tenant:
        weight = (self._weights or {}).get(name, 1.0)
        turn_at = self._idle_turns.pop(name, 0)
        price = round(_TURN / max(weight, _WEIGHT_MIN))
        return _Tenant(name, price=price, turn_at=turn_at)

    def _enter(self, held: _Held) -> None:
        """Put in line what may come next of its key; let the rest wait behind it."""
        key = held.key
        if key is None or not self._is_ordered:
            self._line_up(held)
        elif key.first is None and not key.waiting:
            key.first = held
            self._line_up(held)
        else:
            held.state = _WAITING
            self._find_first(key, held)

    def _return(self, held: _Held) -> None:
        if held.state not in (_TAKEN, _PARKED):
            return
        self._untake(held)
        if self._is_parked_behind(held):
            held.state = _WAITING
        else:
            self._enter(held)
        if held.key is not None:
            self._release(held.key)

    # --- out ---------------------------------------------------------------------------------

    def take(self, limit: int, *, now_ms: int) -> list[int]:
        """Return what comes next, at most `limit` offsets, in the order of choice; now taken.

        Fewer than `limit` means that there is no more until something changes: an offset is added,
        finished, parked or comes again, or `next_ready_ms` is reached.
        """
        self.wake(now_ms)
        chosen: list[int] = []
        turns = self._turns
        while len(chosen) < limit and turns:
            tenant = turns[0][2]
            held = self._next_of(tenant)
            if held is not None:
                self._present = tenant.turn_at
                tenant.turn_at += tenant.price
                chosen.append(held.offset)
            if tenant.fresh or tenant.again:
                heapreplace(turns, (tenant.turn_at, tenant.name, tenant))
            else:
                heappop(turns)
                tenant.is_active = False
                self._forget_if_idle(tenant)
            if held is not None:
                self._take(held)
        return chosen

    def _next_of(self, tenant: _Tenant) -> _Held | None:
        """Return whose turn it is, of those whose key is open; others wait behind their keys."""
        self._clear_front(tenant.fresh, has_failed=False)
        self._clear_front(tenant.again, has_failed=True)
        line = tenant.next_line()
        if not line:
            return None
        tenant.was_again = line is tenant.again
        return self._held[heappop(line) & _OFFSET_MASK]

    def in_order_of_offsets(self, chosen: Sequence[int]) -> int:
        """Return how many of what was just taken may be handed out by their offsets.

        Those of one priority may, in any order; what comes after a higher one must stay after it.
        """
        before = highest = last = -1
        for number, offset in enumerate(chosen):
            priority = self._held[offset].rank >> 64
            if number and priority != last:
                before = highest
            if offset < before:
                return number
            highest, last = max(highest, offset), priority
        return len(chosen)

    def _clear_front(self, line: list[int], *, has_failed: bool) -> None:
        """Let the first of a line be one that may be taken."""
        while line:
            held = self._held.get(line[0] & _OFFSET_MASK)
            if held is None or held.state != _IN_LINE or held.has_failed != has_failed:
                self._stale -= 1
            elif held.key is None or self._is_open(held.key):
                return
            else:
                self._step_out(held)
            heappop(line)

    def _count_taken(self, held: _Held) -> None:
        held.state = _TAKEN
        self.ready_count -= 1
        if held.key is not None:
            held.key.taken += 1

    def _take(self, held: _Held) -> None:
        self._count_taken(held)
        key = held.key
        if key is None:
            return
        if self._token_ns:
            key.full_at_ns = max(key.full_at_ns, self._now_ns) + self._token_ns
        if not self._is_ordered:
            self._release(key, line=(held.tenant, held.has_failed))

    def finish(self, offsets: Iterable[int]) -> None:
        """Forget offsets that were acked, died or were skipped: their keys go on."""
        for offset in offsets:
            held = self._held.pop(offset, None)
            if held is not None:
                self._let_go(held)
        if self._stale > _STALE_MIN + len(self._held):
            self._sweep()

    def park(self, offsets: Iterable[int]) -> None:
        """Let offsets wait for a retry: an ordered key waits with them, any other goes on."""
        for offset in offsets:
            held = self._held.get(offset)
            if held is not None and held.state != _PARKED:
                self._park(held)

    def _park(self, held: _Held) -> None:
        before, held.state = held.state, _PARKED
        held.has_failed = True
        if before == _IN_LINE:
            # It was read again after a restart, and its time has not come.
            self.ready_count -= 1
        if before == _IN_LINE or (before == _WAITING and not self._is_ordered):
            self._stale += 1
        key = held.key
        if key is None:
            return
        if before == _TAKEN:
            key.taken -= 1
        if self._is_ordered and key.first is held and key.waiting:
            self._find_first(key, held)
        else:
            self._release(key)

    def drop_all(self) -> list[int]:
        """Forget all offsets; what keys have used of their rates is remembered.

        Returns those that nobody had taken and that wait for no retry.
        """
        untaken = [one.offset for one in self._held.values() if one.state in (_IN_LINE, _WAITING)]
        for key in self._keys.values():
            self._remember_bucket(key)
        self._forget_held()
        return untaken

    def _let_go(self, held: _Held) -> None:
        if held.state == _IN_LINE:
            self.ready_count -= 1
        if held.state == _IN_LINE or self._is_behind(held):
            self._stale += 1
        self._untake(held)
        tenant, key = held.tenant, held.key
        tenant.count -= 1
        if not tenant.count:
            tenant.was_again = False
        self._forget_if_idle(tenant)
        if key is None:
            return
        key.count -= 1
        if key.first is held:
            key.first = None
        if key.count:
            self._release(key)
        else:
            del self._keys[key.name]
            self._remember_bucket(key)

    def _untake(self, held: _Held) -> None:
        if held.state == _TAKEN and held.key is not None:
            held.key.taken -= 1

    # --- lines -------------------------------------------------------------------------------

    def _line_up(self, held: _Held) -> None:
        held.state = _IN_LINE
        self.ready_count += 1
        tenant = held.tenant
        heappush(tenant.again if held.has_failed else tenant.fresh, held.rank)
        if not tenant.is_active:
            tenant.is_active = True
            tenant.turn_at = max(tenant.turn_at, self._present)
            heappush(self._turns, (tenant.turn_at, tenant.name, tenant))

    def _step_out(self, held: _Held) -> None:
        """Leave the line, and wait behind the key."""
        self.ready_count -= 1
        self._wait(held)

    def _wait(self, held: _Held) -> None:
        held.state = _WAITING
        key = held.key
        assert key is not None, "what has no key waits for nothing"
        if self._is_ordered:
            heappush(key.waiting.setdefault(None, []), held.offset)
            if key.first is held:
                key.first = None
        else:
            line = held.tenant, held.has_failed
            heappush(key.waiting.setdefault(line, []), held.rank)

    # --- keys --------------------------------------------------------------------------------

    def _is_open(self, key: _Key) -> bool:
        """Tell whether one of this key may be taken; if its rate forbids it, note until when."""
        if self._concurrency and key.taken >= self._concurrency:
            return False
        open_at_ns = key.full_at_ns + self._token_ns - self._bucket_ns
        if open_at_ns <= self._now_ns:
            return True
        if not key.is_timed:
            key.is_timed = True
            self._timed_serial += 1
            heappush(self._timed, (open_at_ns, self._timed_serial, key))
        return False

    def _release(self, key: _Key, *, line: _Line | None = None) -> None:
        """Let come into line what may be next of a key that may have opened.

        For each line that waits behind the key, its first one is in line while the key is open.
        When one of `line` was taken, only that line needs its next one there.
        """
        if not key.waiting or key.is_timed or (key.first is not None and self._is_ordered):
            return
        if self._concurrency and key.taken >= self._concurrency:
            return
        if line in key.waiting:
            self._release_first(key, line)
            return
        # Who is offered nothing of the first RELEASED_MAX comes as soon as one of them has taken.
        for one in list(islice(key.waiting, RELEASED_MAX if line is None else 1)):
            self._release_first(key, one)

    def _release_first(self, key: _Key, line: _Line | None) -> None:
        """Put the first that waits in line; this line goes behind the others of the key."""
        waiting = key.waiting.pop(line)
        while waiting:
            held = self._held.get(heappop(waiting) & _OFFSET_MASK)
            if held is not None and self._is_behind_in(held, line):
                if self._is_ordered:
                    key.first = held
                if held.state == _WAITING:
                    self._line_up(held)
                break
            self._stale -= 1
        if waiting:
            key.waiting[line] = waiting

    def _find_first(self, key: _Key, held: _Held) -> None:
        """Find anew who is first of an ordered key, when `held` has just come among those waiting.

        The lowest offset is, also when it is parked, but nobody gets before one that is taken.
        """
        first = key.first
        if first is held:
            key.first = None
        elif first is not None and first.state != _TAKEN and held.offset < first.offset:
            key.first = None
            if first.state == _IN_LINE:
                self._stale += 1
                self._step_out(first)
            else:
                heappush(key.waiting.setdefault(None, []), first.offset)
        heappush(key.waiting.setdefault(None, []), held.offset)
        self._release(key)

    def _is_parked_behind(self, held: _Held) -> bool:
        """Tell whether it is parked and has its place among those that wait for an ordered key."""
        return (
            self._is_ordered
            and held.state == _PARKED
            and held.key is not None
            and held.key.first is not held
        )

    def _is_behind(self, held: _Held) -> bool:
        return held.state == _WAITING or self._is_parked_behind(held)

    def _is_behind_in(self, held: _Held, line: _Line | None) -> bool:
        """Tell whether it waits behind its key, and in this line: it may have failed since."""
        return self._is_behind(held) and (line is None or held.has_failed == line[1])

    def wake(self, now_ms: int) -> int:
        """Let come into line what waited for its rate until now; return `ready_count`."""
        before_ns, self._now_ns = self._now_ns, now_ms * _NS_PER_MS
        if self._now_ns < before_ns:
            self._set_back(before_ns - self._now_ns)
        while self._timed and self._timed[0][0] <= self._now_ns:
            key = heappop(self._timed)[2]
            key.is_timed = False
            self._release(key)
        return self.ready_count

    def next_ready_ms(self, now_ms: int) -> int | None:
        """Return when the next rate lets something through; None when none waits for its rate.

        What may come through now is in line afterwards, and counted in `ready_count`.

        >>> from onward.delivery.record import GroupRecord
        >>> lanes = Lanes(GroupRecord(name="g", key_rate=0.5))
        >>> lanes.add([0, 1], keys=["a", "a"], tenants=None, priorities=None)
        >>> lanes.take(2, now_ms=0), lanes.next_ready_ms(0), lanes.take(2, now_ms=2_000)
        ([0], 2000, [1])
        """
        ready_before = self.ready_count
        if self.wake(now_ms) > ready_before:
            return now_ms
        while self._timed and not self._timed[0][2].count:
            heappop(self._timed)
        if not self._timed:
            return None
        return max(now_ms, -(-self._timed[0][0] // _NS_PER_MS))

    def _set_back(self, by_ns: int) -> None:
        """Move all buckets with a clock that was set back, so that no key waits for it."""
        for key in self._keys.values():
            key.full_at_ns -= by_ns
        for name in self._idle_buckets:
            self._idle_buckets[name] -= by_ns
        self._timed = [(at - by_ns, serial, key) for at, serial, key in self._timed]

    # --- forgetting --------------------------------------------------------------------------

    def _forget_if_idle(self, tenant: _Tenant) -> None:
        if tenant.count or tenant.is_active:
            return
        del self._tenants[tenant.name]
        if tenant.turn_at > self._present:
            self._idle_turns[tenant.name] = tenant.turn_at
            if len(self._idle_turns) > REMEMBERED_MAX:
                _keep_most(self._idle_turns, above=self._present)

    def _remember_bucket(self, key: _Key) -> None:
        if key.full_at_ns > self._now_ns:
            self._idle_buckets[key.name] = key.full_at_ns
            if len(self._idle_buckets) > REMEMBERED_MAX:
                _keep_most(self._idle_buckets, above=self._now_ns)

    def _sweep(self) -> None:
        """Remove what is stale: finished while it was ready, so its rank still stands somewhere."""
        self._stale = 0
        for tenant in self._tenants.values():
            tenant.fresh = self._only(tenant.fresh, _is_fresh_in_line)
            tenant.again = self._only(tenant.again, _is_again_in_line)
            tenant.is_active = bool(tenant.fresh or tenant.again)
        for key in self._keys.values():
            swept = {
                one: self._only(ranks, partial(self._is_behind_in, line=one))
                for one, ranks in key.waiting.items()
            }
            key.waiting = {one: ranks for one, ranks in swept.items() if ranks}
        for tenant in list(self._tenants.values()):
            self._forget_if_idle(tenant)
        self._turns = [(one.turn_at, one.name, one) for *_, one in self._turns if one.is_active]
        heapify(self._turns)
        self._timed = [timed for timed in self._timed if timed[2].count]
        heapify(self._timed)

    def _only(self, ranks: list[int], is_wanted: Callable[[_Held], bool]) -> list[int]:
        """Return those that are held and wanted, each once; in order they are a heap."""
        found = ((rank, self._held.get(rank & _OFFSET_MASK)) for rank in set(ranks))
        return sorted(rank for rank, held in found if held is not None and is_wanted(held))


def _token_ns(rate: float) -> int:
    """Return how long a key's bucket takes for one token; 0 when there is no limit."""
    return max(1, round(_NS_PER_S / max(rate, _RATE_MIN))) if rate else 0


def _is_fresh_in_line(held: _Held) -> bool:
    return held.state == _IN_LINE and not held.has_failed


def _is_again_in_line(held: _Held) -> bool:
    return held.state == _IN_LINE and held.has_failed


def _keep_most(remembered: dict[str, int], *, above: int) -> None:
    """Keep the half of what may be remembered that matters most: what lies furthest ahead."""
    kept = [(value, name) for name, value in remembered.items() if value > above]
    remembered.clear()
    remembered.update((name, value) for value, name in nlargest(REMEMBERED_MAX // 2, kept))
