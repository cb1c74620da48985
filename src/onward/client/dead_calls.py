"""Dead letters: what a group gave up on. List them, look for some, deliver them again, drop them.

    dead_letters   one page after another, with their messages where they are asked for
    redrive        deliver again, to this group only, with attempts from the beginning
    purge          forget them; the messages stay in their topic

Which ones: all, those of a topic, given offsets, those with a text, or those that a function picks.
With a text or a function each dead letter is looked at here: a dry run costs as much as the deed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from typing import TypedDict

from msgspec.structs import asdict, replace

from onward.client.asking import Asking
from onward.client.finding import collect
from onward.client.groups import DeadLetterDescription, Offsets, as_ranges, in_parts
from onward.delivery.ranges import Range, ranges_of
from onward.errors import Forbidden, InvalidRequest, UnknownTopic
from onward.message.message import Message
from onward.message.texts import check_text
from onward.protocol.operations.dead_letters import (
    ListDeadLetters,
    PurgeDeadLetters,
    RedriveDeadLetters,
)

logger = logging.getLogger("onward.client")

Where = Callable[[DeadLetterDescription, Message | None], bool]
"""Picks dead letters; the message is None when it is gone, or its topic may not be read."""

_PAGE = 1_000
_PAGE_WITH_MESSAGES = 100


class _Choice(TypedDict, total=False):
    """Fields of a request that say which dead letters it is about."""

    topic: str
    ranges: list[Range]
    all: bool


class DeadCalls(Asking):
    """The calls of a client that are about dead letters."""

    async def dead_letters(
        self,
        group: str,
        *,
        topic: str | None = None,
        text: str | None = None,
        where: Where | None = None,
        messages: bool = False,
    ) -> AsyncGenerator[DeadLetterDescription]:
        """Give the dead letters of a group, for `async for`, in the order of topic and offset.

        `text` is looked for in cause and body; `where(letter, message)` picks; with `messages`
        each one carries its message, which is what an export needs. A topic that may not be read
        (`closed`, `write-only`) gives its letters without messages; a warning of the logger
        `onward.client` names it.

        >>> import asyncio, onward
        >>> async def main() -> list[str]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish("orders", "bad")
        ...         async for delivery in mq.consume("orders", group="billing"):
        ...             await delivery.reject("no such order")
        ...             break
        ...         return [f"{one.id}: {one.cause}" async for one in mq.dead_letters("billing")]
        >>> asyncio.run(main())
        ['orders/0: no such order']
        """
        if text is not None and not isinstance(text, str):
            raise InvalidRequest(f"dead letters are searched for a text, not {text!r:.40}")
        if text is not None:
            check_text("text", text, characters_max=len(text))
        if where is not None and not callable(where):
            raise InvalidRequest(
                f"'where' is a function that picks dead letters, not {where!r:.40}"
            )
        is_looked_at = messages or text is not None or where is not None
        limit = _PAGE_WITH_MESSAGES if is_looked_at else _PAGE
        after: tuple[str, int] | None = None
        unreadable: set[str] = set()
        while True:
            page = await self._call(
                ListDeadLetters(group=group, topic=topic or "", after=after, limit=limit)
            )
            letters = [DeadLetterDescription(**asdict(letter)) for letter in page.dead]
            if is_looked_at:
                letters = await self._with_messages(letters, unreadable)
            for letter in letters:
                if _is_wanted(letter, text, where):
                    yield letter
            after = page.next
            if not after:
                return

    async def redrive(
        self,
        group: str,
        *,
        topic: str | None = None,
        offsets: Offsets | None = None,
        text: str | None = None,
        where: Where | None = None,
        dry_run: bool = False,
    ) -> int:
        """Deliver dead letters again, to this group only; return how many.

        A letter whose message is gone from the log stays dead; a warning of the logger
        `onward.client` says how many there are.

        >>> import asyncio, onward
        >>> async def main() -> list[int]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish("orders", "bad")
        ...         async for delivery in mq.consume("orders", group="billing"):
        ...             await delivery.reject("no such order")
        ...             break
        ...         return [await mq.redrive("billing", dry_run=True), await mq.redrive("billing")]
        >>> asyncio.run(main())
        [1, 1]
        """
        choices = await self._choices(group, topic, offsets, text, where)
        replies = [
            await self._call(RedriveDeadLetters(group=group, dry_run=dry_run, **choice))
            for choice in choices
        ]
        _warn_of_gone(group, sum(reply.gone for reply in replies))
        return sum(reply.count for reply in replies)

    async def purge(
        self,
        group: str,
        *,
        topic: str | None = None,
        offsets: Offsets | None = None,
        text: str | None = None,
        where: Where | None = None,
        dry_run: bool = False,
    ) -> int:
        """Forget dead letters; return how many. The messages stay where they are, in their topic.

        >>> import asyncio, onward
        >>> async def main() -> list[int]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish("orders", "bad")
        ...         async for delivery in mq.consume("orders", group="billing"):
        ...             await delivery.reject("no such order")
        ...             break
        ...         count = await mq.purge("billing", where=lambda letter, _: letter.attempts < 3)
        ...         return [count, (await mq.group("billing")).dead]
        >>> asyncio.run(main())
        [1, 0]
        """
        choices = await self._choices(group, topic, offsets, text, where)
        replies = [
            await self._call(PurgeDeadLetters(group=group, dry_run=dry_run, **choice))
            for choice in choices
        ]
        return sum(reply.count for reply in replies)

    # --- inside ------------------------------------------------------------------------------

    async def _choices(
        self, group: str, topic: str | None, offsets: Offsets | None, text: str | None,
        where: Where | None,
    ) -> list[_Choice]:  # fmt: skip
        """Return which dead letters are meant, as the fields of one or several requests."""
        if offsets is not None and topic is None:
            raise InvalidRequest("offsets belong to a topic: say which")
        if text is not None or where is not None:
            chosen = await self._chosen(group, topic, offsets, text, where)
        elif offsets is not None:
            chosen = {str(topic): as_ranges(offsets)}
        else:
            return [{"all": True, "topic": topic or ""}]
        return [
            {"topic": name, "ranges": part}
            for name, ranges in chosen.items()
            for part in in_parts(ranges)
        ]

    async def _chosen(
        self, group: str, topic: str | None, offsets: Offsets | None, text: str | None,
        where: Where | None,
    ) -> dict[str, list[Range]]:  # fmt: skip
        """Return which dead letters are picked, by topic. All are looked at before any is moved."""
        ranges = None if offsets is None else as_ranges(offsets)
        found: defaultdict[str, list[int]] = defaultdict(list)
        async for letter in self.dead_letters(group, topic=topic, text=text, where=where):
            if ranges is None or any(start <= letter.offset < end for start, end in ranges):
                found[letter.topic].append(letter.offset)
        return {name: ranges_of(listed) for name, listed in found.items()}

    async def _with_messages(
        self, page: list[DeadLetterDescription], unreadable: set[str]
    ) -> list[DeadLetterDescription]:
        """Return the letters with their messages; add topics that may not be read to a set."""
        offsets: defaultdict[str, list[int]] = defaultdict(list)
        for letter in page:
            if letter.topic not in unreadable:
                offsets[letter.topic].append(letter.offset)
        found: dict[tuple[str, int], Message] = {}
        for topic, listed in offsets.items():
            try:
                first_offset = await self._first_kept(topic)
                async for message in collect(
                    self._reader_at, topic, ranges_of(listed), first_offset=first_offset
                ):
                    found[topic, message.offset] = message
            except UnknownTopic:
                continue
            except Forbidden as error:
                unreadable.add(topic)
                logger.warning("dead letters are listed without their messages: %s", error)
        return [replace(one, message=found.get((one.topic, one.offset))) for one in page]


def _warn_of_gone(group: str, count: int) -> None:
    if count:
        logger.warning(
            "group %r: %d dead letters cannot be redriven: their messages are gone from the log; "
            "purge forgets them", group, count,
        )  # fmt: skip


def _is_wanted(letter: DeadLetterDescription, text: str | None, where: Where | None) -> bool:
    message = letter.message
    if text is not None and not _has_text(letter, text):
        return False
    return where is None or where(letter, message)


def _has_text(letter: DeadLetterDescription, text: str) -> bool:
    message = letter.message
    return text in letter.cause or (message is not None and text.encode() in message.body)
