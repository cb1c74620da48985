"""What clients did and saw: the only thing the checker believes.

    attempt    a publish: before its answer `pending`, then exactly one of
                   acked     a receipt came: it is at that offset
                   refused   nothing was done, says the broker or the client
                   unknown   perhaps done
    reading    one read of a topic: where it was to begin, and all messages it gave, in order

Topics are named by what may happen to them: `kept` never loses a message, `trimmed` forgets its old
ones (retention), `brief` is deleted and created again, `volatile` is published to without waiting
for the disk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from onward.client.receipt import BatchReceipt, Receipt
from onward.delivery.trace import Trace
from onward.errors import Conflict, OnwardError, OutcomeUnknown, TopicEnded
from onward.message.message import Message
from onward.testing.group_history import GroupHistory

Outcome = Literal["pending", "acked", "refused", "unknown"]
TopicKind = Literal["kept", "trimmed", "brief", "volatile"]


@dataclass(slots=True)
class Attempt:
    """One message that somebody tried to publish."""

    id: str
    topic: str
    producer: int
    number: int
    """Counts the attempts of a producer, in the order of its calls."""
    body: bytes
    key: str | None = None
    tag: str | None = None
    priority: int | None = None
    outcome: Outcome = "pending"
    offset: int = -1
    event_id: int = -1
    error: str = ""


@dataclass(slots=True)
class Reading:
    """One read of a topic."""

    reader: str
    topic: str
    start: Literal["earliest", "latest", "offset", "time", "event_id"]
    value: int = 0
    is_early: bool = False
    """Nobody had an ack for this topic when the read began: it may not exist."""
    messages: list[Message] = field(default_factory=list)
    error: str = ""


@dataclass(slots=True)
class History:
    """Everything that clients did and saw."""

    attempts: dict[str, Attempt] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    acked_topics: set[str] = field(default_factory=set)
    groups: GroupHistory = field(default_factory=GroupHistory)
    first_offsets: list[tuple[str, int]] = field(default_factory=list)
    """Topics and their first offsets, in the order in which they were reported."""
    trace: list[tuple[Trace, int]] = field(default_factory=list)
    """The rows of the trace, in their order, and when each was read."""
    has_whole_trace: bool = False
    """No row of the trace was lost to retention."""

    def attempt(self, topic: str, *, producer: int, number: int, padding: int) -> Attempt:
        """Note a publish that is about to be made; its body is like no other one."""
        name = f"{producer}-{number}"
        body = f"{name} {topic} ".encode().ljust(padding, b"%d" % (number % 10))
        attempt = self.attempts[name] = Attempt(name, topic, producer, number, body)
        # Few keys, so that they meet; some messages have none.
        attempt.key = f"k{number % 8}" if number % 8 else None
        attempt.tag = "odd" if number % 2 else f"even,{number % 10}"
        attempt.priority = number % 3 or None
        return attempt

    def settle(
        self, attempts: list[Attempt], answer: Receipt | BatchReceipt | BaseException
    ) -> None:
        """Note what became of attempts that share one answer."""
        first = 0
        if isinstance(answer, Receipt | BatchReceipt):
            first = answer.offset if isinstance(answer, Receipt) else answer.first_offset
            self.acked_topics.add(answer.topic)
        for number, attempt in enumerate(attempts):
            if isinstance(answer, BaseException):
                attempt.outcome = "refused" if is_definite(answer) else "unknown"
                attempt.error = f"{type(answer).__name__}: {answer}"
            else:
                attempt.outcome = "acked"
                attempt.offset = first + number
                attempt.event_id = answer.event_id

    def count(self) -> Counter[str]:
        """Return how many attempts had which outcome, and how many messages were read."""
        found: Counter[str] = Counter(one.outcome for one in self.attempts.values())
        found["attempts"] = len(self.attempts)
        found.update(self.groups.count())
        found["dropped"] = sum(row.did == "skipped" for row, _ in self.trace)
        found["read"] = sum(len(reading.messages) for reading in self.readings)
        return found


def is_definite(error: BaseException) -> bool:
    """Tell whether an error promises that nothing was stored."""
    if isinstance(error, Conflict):
        return isinstance(error, TopicEnded)  # any other: the broker no longer knows
    return isinstance(error, OnwardError) and not isinstance(error, OutcomeUnknown)


def id_of(message: Message) -> str:
    """Return which attempt a message says that it is.

    >>> id_of(Message("kept-0", 7, b"3-12 kept-0 "))
    '3-12'
    """
    return message.body.partition(b" ")[0].decode("ascii", "replace")


def kind_of(topic: str) -> TopicKind:
    """Return what may happen to a topic, from its name.

    >>> kind_of("kept-1")
    'kept'
    """
    kind = topic.partition("-")[0]
    assert kind in ("kept", "trimmed", "brief", "volatile"), topic
    return kind  # type: ignore[return-value]
