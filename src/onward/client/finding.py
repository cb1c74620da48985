"""Looking for messages: by id, key, trace id, header, text and time; and reading scattered ones.

    find     a whole topic, or a stretch of it, column by column: messages are made of hits only
    collect  the messages at given offsets, in as few reads as there are stretches

Both only read: no group is touched, nothing is changed. What retention has taken away is left out.
A search ends at `limit` hits or at the end of the topic as it is now; it never waits for more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from onward.client.reader import ReadBatch, Reader
from onward.client.topics import past_ms
from onward.delivery.ranges import Range, Ranges
from onward.errors import InvalidRequest, OffsetOutOfRange
from onward.message.message import Message
from onward.message.names import check_topic_name
from onward.message.relative import Relative, resolve_ms
from onward.message.texts import check_text

FIND_MAX = 100_000
STRETCH_GAP_MAX = 1_000
"""Offsets that are nearer than this are read together with what lies between them."""

Moment = str | int | datetime | timedelta
"""An offset, a time, or how long ago."""
OpenReader = Callable[[str, int, int], Reader]
"""Opens a reader of (topic, first offset, credit in bytes)."""


class Wanted(NamedTuple):
    """What a message must have to be found; None is anything."""

    key: str | None = None
    trace_id: str | None = None
    headers: Mapping[str, str | bytes] | None = None
    text: str | bytes | None = None


class End(NamedTuple):
    """Where a search stops: before an offset, before a time, or both."""

    offset: int | None = None
    time_ms: int | Relative | None = None


def parse_id(text: str) -> tuple[str, int]:
    """Return topic and offset of a message's id.

    >>> parse_id("orders/7")
    ('orders', 7)
    """
    topic, slash, digits = str(text).rpartition("/")
    if not slash or not (digits.isascii() and digits.isdecimal()) or len(digits) > 18:
        raise InvalidRequest(f"{text!r} is no id of a message: write topic/offset, as orders/7")
    check_topic_name(topic, system=True)
    return topic, int(digits)


def check_wanted(wanted: Wanted) -> None:
    r"""Raise `InvalidRequest` if a text is none that a message could have.

    >>> check_wanted(Wanted(key="\udc80"))
    Traceback (most recent call last):
    onward.errors.InvalidRequest: key is not valid Unicode: '\udc80' has a lone surrogate
    """
    for field in ("key", "trace_id"):
        if (value := getattr(wanted, field)) is not None:
            check_text(field, value)
    if isinstance(wanted.text, str):
        check_text("text", wanted.text, characters_max=len(wanted.text))
    for name, value in (wanted.headers or {}).items():
        check_text("name of a header", name)
        if isinstance(value, str):
            check_text(f"header {name!r}", value, characters_max=len(value))


def read_end(end: Moment | None) -> End:
    """Return where a search stops, from all the ways to say it.

    >>> read_end("10m").time_ms, read_end(7).offset
    (Relative(in_ms=-600000), 7)
    """
    if end is None:
        return End()
    if isinstance(end, bool) or not isinstance(end, str | int | datetime | timedelta):
        raise InvalidRequest("an end is an offset, a time, or how long ago ('10m')")
    if isinstance(end, int):
        return End(offset=end)
    return End(time_ms=past_ms(end, "end"))


async def find_messages(
    reader: Reader, wanted: Wanted, *, end: End, limit: int, now_ms: int
) -> list[Message]:
    """Return the first `limit` messages of a reader that have what is wanted, before `end`."""
    found: list[Message] = []
    end_ms = None if end.time_ms is None else resolve_ms(end.time_ms, now_ms=now_ms)
    batches = reader.batches()
    try:
        async for batch in batches:
            if end_ms is not None and batch.published_at_ms >= end_ms:
                break
            stop = batch.first_offset + batch.count
            if end.offset is not None:
                stop = min(stop, end.offset)
            found += _hits(batch, wanted, count=stop - batch.first_offset)
            if len(found) >= limit or (end.offset is not None and stop >= end.offset):
                break
    finally:
        await batches.aclose()
    return found[:limit]


def _hits(batch: ReadBatch, wanted: Wanted, *, count: int) -> list[Message]:
    """Return the messages of a batch that are wanted; none is made when no column has a hit."""
    if count <= 0:
        return []
    if wanted == Wanted():
        return batch.messages()[:count]
    skip = batch.columns.count - batch.count
    hits = matching(batch, wanted, places=range(skip, skip + count))
    if not hits:
        return []
    messages = batch.messages()
    return [messages[place - skip] for place in hits]


def matching(batch: ReadBatch, wanted: Wanted, *, places: Sequence[int]) -> Sequence[int]:
    """Return those of `places` (in the whole batch) that have what is wanted."""
    columns = batch.columns
    for value, column in ((wanted.key, "keys"), (wanted.trace_id, "trace_ids")):
        if value is not None:
            texts = getattr(columns, column) or ()
            places = [at for at in places if texts and texts[at] == value]
    if wanted.headers and places:
        listed = columns.headers
        asked = {name: _as_bytes(value) for name, value in wanted.headers.items()}
        places = [at for at in places if listed and _has_headers(listed[at], asked)]
    if wanted.text and places:
        sought = _as_bytes(wanted.text)
        bodies = columns.bodies
        places = [at for at in places if sought in bodies[at]]
    return places


def _has_headers(headers: Mapping[str, str | bytes] | None, asked: Mapping[str, bytes]) -> bool:
    if not headers:
        return False
    return all(
        name in headers and _as_bytes(headers[name]) == value for name, value in asked.items()
    )


def _as_bytes(value: str | bytes) -> bytes:
    if not isinstance(value, str | bytes):
        raise InvalidRequest(f"text or bytes can be looked for, not {value!r}")
    # `surrogateescape` is for stored headers, which another client may have written.
    return value.encode(errors="surrogateescape") if isinstance(value, str) else value


# --- messages at given offsets ----------------------------------------------------------------


async def collect(
    open_reader: OpenReader, topic: str, ranges: Iterable[Range], *, first_offset: int
) -> AsyncGenerator[Message]:
    """Give the messages at the offsets of `ranges` (ascending) that are still there."""
    kept = [(max(start, first_offset), end) for start, end in ranges if end > first_offset]
    for stretch in stretches(kept):
        start, end = stretch[0][0], stretch[-1][1]
        asked = Ranges(stretch)
        # A few messages are worth a small read; the credit of a long one is given as usual.
        reader = open_reader(topic, start, 1 if end - start == 1 else 256 << 10)
        batches = reader.batches()
        try:
            async for batch in batches:
                for message in _in_ranges(batch, asked):
                    yield message
                if batch.first_offset + batch.count >= end:
                    break
        except OffsetOutOfRange:
            continue  # retention was quicker than we are
        finally:
            await batches.aclose()


def stretches(ranges: Iterable[Range]) -> list[list[Range]]:
    """Return ascending ranges, sorted into runs that are read together.

    >>> stretches([(0, 2), (5, 6), (9_000, 9_001)])
    [[(0, 2), (5, 6)], [(9000, 9001)]]
    """
    runs: list[list[Range]] = []
    for start, end in ranges:
        if runs and start - runs[-1][-1][1] <= STRETCH_GAP_MAX:
            runs[-1].append((start, end))
        else:
            runs.append([(start, end)])
    return runs


def _in_ranges(batch: ReadBatch, ranges: Ranges) -> list[Message]:
    first = batch.first_offset
    inside = ranges.overlap(first, first + batch.count)
    if not inside:
        return []
    messages = batch.messages()
    return [message for s, e in inside for message in messages[s - first : e - first]]
