"""What the members and operators of groups did and saw: the part of a history that is delivery.

    plan      how a group is to be: chosen by the seed, the same for all who join it
    stint     one membership: from asking to be let in to leaving, dying or being sent away
    handed    one message that one stint got; its verbs say what the member asked for
    verb      ack, retry, reject or release: `pending`, then done, lost (its lease), or unknown
    act       what an operator did to a group: from asking to the answer, or without one

Times are microseconds of the run. What has no answer may have happened at any time after it was
asked for; what was refused did not happen and is not kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from onward.delivery.filter import Filter
from onward.delivery.record import Mode
from onward.delivery.retry import RetryPolicy
from onward.errors import LeaseLost, OutcomeUnknown
from onward.message.message import Message
from onward.testing.wire_history import WireEvent

Do = Literal["ack", "retry", "reject", "release"]
Answer = Literal["pending", "done", "lost", "unknown"]
ActKind = Literal[
    "pause", "reset", "replay", "redrive", "purge", "skip", "fork", "offline", "delete"
]

NEVER_US = 1 << 62
DIED = "died"
"""The end of a stint whose program was killed."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How one group is to be."""

    name: str
    topics: tuple[str, ...]
    mode: Mode = "shared"
    at_most_once: bool = False
    lease_ms: int = 30_000
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    tag: str = ""
    priorities: bool = False
    key_concurrency: int = 0
    members: int = 2
    is_operated: bool = False
    source: str = ""
    """Of a fork: the group that it is a copy of."""

    @classmethod
    def choose(cls, random: Random, name: str, topics: tuple[str, ...]) -> GroupPlan:
        """Choose how a group is to be.

        >>> GroupPlan.choose(Random(7), "g0", ("kept-0",)).topics
        ('kept-0',)
        """
        mode: Mode = random.choice(("shared", "shared", "ordered", "exclusive"))
        is_plain = mode == "shared"
        at_most_once = is_plain and random.random() < 0.1
        policy = _policy(random)
        return cls(
            name,
            tuple(random.sample(topics, random.randint(1, min(2, len(topics))))),
            mode=mode,
            at_most_once=at_most_once,
            lease_ms=random.choice((1_000, 5_000, 30_000, 30_000)),
            retry=RetryPolicy(kind="none") if at_most_once else policy,
            tag=random.choice(("", "", "even")),
            priorities=is_plain and random.random() < 0.15,
            key_concurrency=_key_concurrency(random, at_most_once) if is_plain else 0,
            members=random.randint(1, 4),
            is_operated=random.random() < 0.4,
        )

    @property
    def options(self) -> dict[str, Any]:
        """What `Client.consume` and `Client.create_group` are called with."""
        return {
            "mode": self.mode,
            "start": "earliest",
            "retry": self.retry,
            "at_most_once": self.at_most_once,
            "lease_ms": self.lease_ms,
            "tags": [self.tag] if self.tag else None,
            "priorities": self.priorities,
            "key_concurrency": self.key_concurrency,
        }

    def wants(self, message: Message) -> bool:
        """Tell whether the group's filter lets a message through."""
        wanted = Filter(tags_any=(self.tag,) if self.tag else ())
        return not wanted or wanted.matches([message.tag], None, count=1)[0]


@dataclass(slots=True)
class Stint:
    """One membership of one program."""

    plan: GroupPlan
    machine: str
    joined_us: int
    ended_us: int = NEVER_US
    end: str = ""


@dataclass(slots=True)
class Verb:
    """What a member asked for, and what it was told."""

    do: Do
    asked_us: int
    counts: bool = True
    answer: Answer = "pending"
    answered_us: int = NEVER_US

    def settle(self, error: BaseException | None, now_us: int) -> None:
        """Note the answer."""
        self.answered_us = now_us
        if error is None:
            self.answer = "done"
        else:
            self.answer = "lost" if isinstance(error, LeaseLost) else "unknown"


@dataclass(slots=True)
class Handed:
    """One message in the hands of one member."""

    stint: Stint
    message: Message
    attempt: int
    lease: int
    at_us: int
    verbs: list[Verb] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, int]:
        """The topic and the offset."""
        return self.message.topic, self.message.offset


@dataclass(slots=True)
class Act:
    """What an operator did to a group, or perhaps did."""

    kind: ActKind
    group: str
    asked_us: int
    topic: str = ""
    """No topic: all of them."""
    ranges: tuple[tuple[int, int], ...] = ()
    """No ranges: everything."""
    answered_us: int = NEVER_US
    ended_us: int = NEVER_US
    """Of a pause: when somebody asked to resume."""
    detail: str = ""

    def covers(self, topic: str, offset: int) -> bool:
        """Tell whether a message is among those that the act is about."""
        if self.topic not in ("", topic):
            return False
        return not self.ranges or any(start <= offset < end for start, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Buried:
    """A dead letter, as it was listed at the end."""

    attempts: int
    cause: str
    member: str
    message: Message | None = None


@dataclass(slots=True)
class GroupHistory:
    """Everything that members and operators did and saw, and what may explain it."""

    plans: dict[str, GroupPlan] = field(default_factory=dict)
    handed: list[Handed] = field(default_factory=list)
    stints: list[Stint] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    refused: list[Act] = field(default_factory=list)
    """Acts that did not happen."""
    dead: dict[str, dict[tuple[str, int], Buried]] = field(default_factory=dict)
    """Of each group that was swept in the end, by topic and offset."""
    deaths_us: list[int] = field(default_factory=list)
    """When the broker died."""
    starts_us: list[int] = field(default_factory=list)
    """When it was there again."""
    losses_us: dict[str, list[int]] = field(default_factory=dict)
    """When connections of a machine ended, for the broker or for the machine."""
    late_us: int = 3_000_000
    """How long something may be on its way."""
    wire: list[WireEvent] = field(default_factory=list)
    """The frames of all members, in the order in which the broker handled them."""
    may_refuse_rows: bool = False
    """The disk may be full, so that the row of a death is not written."""

    def of_group(self, name: str) -> list[Handed]:
        """Return what the members of a group got, in the order in which it came."""
        return [one for one in self.handed if one.stint.plan.name == name]

    def acts_on(self, name: str) -> list[Act]:
        """Return what operators did to a group."""
        return [act for act in self.acts if act.group == name]

    def count(self) -> Counter[str]:
        """Return how much of everything there was."""
        found = Counter(f"{verb.do} {verb.answer}" for one in self.handed for verb in one.verbs)
        found.update(act.kind for act in self.acts)
        found["delivered"] = len(self.handed)
        found["stints"] = len(self.stints)
        found["died"] = sum(stint.end == DIED for stint in self.stints)
        found["dead letters"] = sum(map(len, self.dead.values()))
        return found


def is_refused(error: BaseException) -> bool:
    """Tell whether an operator's error promises that nothing was done."""
    return not isinstance(error, OutcomeUnknown)


def _key_concurrency(random: Random, at_most_once: bool) -> int:
    limit = random.choice((0, 0, 0, 1, 2))
    # What is sent is finished there: a key is never on its way.
    return 0 if at_most_once else limit


def _policy(random: Random) -> RetryPolicy:
    delay_ms = random.choice((0, 50, 1_000, 4_000))
    match random.choice(("fixed", "ladder", "exponential", "none")):
        case "ladder":
            return RetryPolicy(kind="ladder", steps_ms=(delay_ms, 2 * delay_ms, 3 * delay_ms))
        case "exponential":
            return RetryPolicy(
                kind="exponential", delay_ms=delay_ms, delay_ms_max=5_000, attempts_max=5
            )
        case "none":
            return RetryPolicy(kind="none")
    return RetryPolicy(kind="fixed", delay_ms=delay_ms, attempts_max=random.randint(2, 5))
