"""Operations on dead letters: list, redrive to their own group, purge.

Dead letters belong to one group and one topic. They are chosen by ranges of offsets, or by `all`;
never by leaving something out. A dry run counts only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from onward.protocol.operations.group_moves import MessageCount, OffsetRanges
from onward.protocol.operations.operation import Request, manage_group, operation, read_group
from onward.protocol.operations.topics import LIST_LIMIT_MAX, LIST_PAGE_MAX


class ListedDeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message that its group gave up on, and why, without its body.

    >>> ListedDeadLetter(topic="orders", offset=7, cause="no such order").id
    'orders/7'
    """

    topic: str
    offset: int
    cause: str = ""
    attempts: int = 0
    member: str = ""
    died_at_ms: int = 0

    @property
    def id(self) -> str:
        """The name of the message for people: `topic/offset`."""
        return f"{self.topic}/{self.offset}"


class DeadLetterPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of dead letters."""

    dead: list[ListedDeadLetter] = []
    next: tuple[str, int] | None = None
    """Ask for the next page with this as `after`; None: this is the last page."""
    count: int = 0
    """How many there are in all."""


class DeadLetterCount(MessageCount, frozen=True):
    """How many dead letters were redriven or purged."""

    gone: int = 0
    """Letters that cannot be redriven: their messages are not stored any more."""


@operation(needs=read_group("group"), example={"group": "billing", "limit": 100})
class ListDeadLetters(Request[DeadLetterPage], frozen=True, tag="dead.list"):
    """Return a page of the dead letters of a group in the order of topic and offset."""

    group: str
    topic: str = ""
    """Empty: all topics of the group."""
    after: tuple[str, int] | None = None
    """Only letters after this topic and offset."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIST_LIMIT_MAX)] = LIST_PAGE_MAX


class DeadLetterChoice(Request[DeadLetterCount], frozen=True):
    """Which dead letters an operation is about: either `ranges` of a topic, or `all`."""

    group: str
    topic: str = ""
    ranges: OffsetRanges | None = None
    """Letters in these ranges of `topic`; offsets that are not dead are left alone."""
    all: bool = False
    """All letters, of `topic` or of the group."""
    dry_run: bool = False


@operation(needs=manage_group("group"), changes=True, example={"group": "billing", "all": True})
class RedriveDeadLetters(DeadLetterChoice, frozen=True, tag="dead.redrive"):
    """Deliver dead letters again, to their own group only; their attempts start again."""


@operation(
    needs=manage_group("group"),
    changes=True,
    example={"group": "billing", "topic": "orders", "ranges": [[7, 8]], "dry_run": True},
)
class PurgeDeadLetters(DeadLetterChoice, frozen=True, tag="dead.purge"):
    """Forget dead letters; the messages stay in their topic."""
