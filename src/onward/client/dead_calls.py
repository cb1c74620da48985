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
from typing import Any

import msgspec

from onward.client.asking import Asking
from onward.client.finding import collect
from onward.client.groups import DeadLetterDescription, Offsets, as_ranges
from onward.delivery.ranges import Range, ranges_of
from onward.errors import Forbidden, InvalidRequest, UnknownTopic
from onward.message.message import Message
from onward.message.texts import check_text

logger = logging.getLogger("onward.client")

Where = Callable[[DeadLetterDescription, Message | None], bool]
"""Picks dead letters; the message is None when it is gone, or its topic may not be read."""

_PAGE = 1_000
_PAGE_WITH_MESSAGES = 100
_RANGES_MAX = 10_000


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
        request: dict[str, object] = {"op": "dead.list", "group": group, "limit": limit}
        if topic is not None:
            request["topic"] = topic
        after: object = None
        unreadable: set[str] = set()
        while True:
            asked = {**request, "after": after} if after else request
            reply = await self._request(asked)
            page = [_letter(fields) for fields in reply["dead"]]
            if is_looked_at:
                page = await self._with_messages(page, unreadable)
            for letter in page:
                if _is_wanted(letter, text, where):
                    yield letter
            after = reply.get("next")
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
        return await self._settle_dead(
            "dead.redrive", group, topic, offsets, text, where, dry_run=dry_run
        )

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
        return await self._settle_dead(
            "dead.purge", group, topic, offsets, text, where, dry_run=dry_run
        )

    # --- inside ------------------------------------------------------------------------------

    async def _settle_dead(
        self, op: str, group: str, topic: str | None, offsets: Offsets | None,
        text: str | None, where: Where | None, *, dry_run: bool,
    ) -> int:  # fmt: skip
        request: dict[str, object] = {"op": op, "group": group, "dry_run": dry_run}
        if offsets is not None and topic is None:
            raise InvalidRequest("offsets belong to a topic: say which")
        if offsets is None and text is None and where is None:
            asked = request | ({"all": True} if topic is None else {"all": True, "topic": topic})
            reply = await self._request(asked)
            _warn_of_gone(group, int(reply.get("gone", 0)))
            return int(reply["count"])
        if text is None and where is None:
            assert offsets is not None
            chosen = {str(topic): as_ranges(offsets)}
        else:
            chosen = await self._chosen(group, topic, offsets, text, where)
        count = gone = 0
        for name, ranges in chosen.items():
            for at in range(0, len(ranges), _RANGES_MAX):
                part = ranges[at : at + _RANGES_MAX]
                reply = await self._request({**request, "topic": name, "ranges": part})
                count += int(reply["count"])
                gone += int(reply.get("gone", 0))
        _warn_of_gone(group, gone)
        return count

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
        replace: Any = msgspec.structs.replace
        return [replace(one, message=found.get((one.topic, one.offset))) for one in page]


def _warn_of_gone(group: str, count: int) -> None:
    if count:
        logger.warning(
            "group %r: %d dead letters cannot be redriven: their messages are gone from the log; "
            "purge forgets them", group, count,
        )  # fmt: skip


def _letter(fields: dict[str, Any]) -> DeadLetterDescription:
    known = DeadLetterDescription.__struct_fields__
    return DeadLetterDescription(**{name: fields[name] for name in known if name in fields})


def _is_wanted(letter: DeadLetterDescription, text: str | None, where: Where | None) -> bool:
    message = letter.message
    if text is not None and not _has_text(letter, text):
        return False
    return where is None or where(letter, message)


def _has_text(letter: DeadLetterDescription, text: str) -> bool:
    message = letter.message
    return text in letter.cause or (message is not None and text.encode() in message.body)
