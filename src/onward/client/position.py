"""Where a member of a broadcast keeps how far it is: in a file of its own, or with its broker.

    file     {"group": "prices", "positions": {"ticks": 71}, "numbers": {"ticks": 5}}: written
             aside, synced, renamed; the numbers are those of the topics
    broker   under the member's name, by `SetPosition`

A position is an offset below which everything is done. It is stored now and then, not with each
ack: after a crash a member gets some messages again, and misses none. It counts only in the topic
that it was stored for, not in a later one of the same name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec

from onward.client.delivery_batch import fail, failed
from onward.client.link import Link
from onward.delivery.position import Position
from onward.errors import Conflict, Corruption, InvalidRequest, NotConnected, OnwardError
from onward.protocol.frames import Kind
from onward.protocol.operations import encode_request
from onward.protocol.operations.group_moves import SetPosition
from onward.protocol.payloads import decode_error

FILE_BYTES_MAX = 1 << 20
_serials = count()


class Place(Protocol):
    """Where positions are kept."""

    def save(self, positions: Mapping[str, Position], link: Link) -> asyncio.Future[None]:
        """Store positions by topic; the future ends when that is done, or not possible."""


class _Stored(msgspec.Struct):
    group: str
    positions: dict[str, int]
    numbers: dict[str, int] = {}
    """Of the topics; absent in files that were written before there were any."""


class PositionFile:
    """Positions in a local file.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> place = PositionFile(Path(folder.name) / "ticks.json", group="prices")
    >>> place.load()
    {}
    >>> place.write({"ticks": Position(71, number=5)})
    >>> place.load()
    {'ticks': Position(offset=71, number=5)}
    >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], *, group: str) -> None:
        self._path = Path(path)
        self._group = group

    def load(self) -> dict[str, Position]:
        """Return what was stored; nothing when there is no file yet."""
        try:
            with self._path.open("rb") as file:
                text = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise InvalidRequest(f"position file '{self._path}' cannot be read: {error}") from None
        try:
            stored = msgspec.json.decode(text, type=_Stored)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corruption(
                f"position file '{self._path}' is not understood: {error}; remove it to begin anew"
            ) from None
        if stored.group != self._group:
            raise Conflict(
                f"position file '{self._path}' belongs to group {stored.group!r}, "
                f"not to {self._group!r}"
            )
        return {
            topic: Position(max(0, offset), max(0, stored.numbers.get(topic, 0)))
            for topic, offset in stored.positions.items()
        }

    def write(self, positions: Mapping[str, Position]) -> None:
        """Store positions so that the old or the new ones survive whatever happens."""
        # A name of its own: a consumer that was abandoned may still write while the next one does.
        aside = self._path.with_name(f"{self._path.name}.{os.getpid()}-{next(_serials)}.new")
        stored = _Stored(
            self._group,
            {topic: position.offset for topic, position in positions.items()},
            {topic: position.number for topic, position in positions.items() if position.number},
        )
        with aside.open("wb") as file:
            file.write(msgspec.json.encode(stored))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def save(self, positions: Mapping[str, Position], link: Link) -> asyncio.Future[None]:
        """Write in a thread: a disk may be slow."""
        return asyncio.get_running_loop().run_in_executor(None, self.write, dict(positions))


class PositionOnBroker:
    """Positions with the broker, under the name of a member."""

    def __init__(self, *, group: str, member: str) -> None:
        self._group = group
        self._member = member

    def save(self, positions: Mapping[str, Position], link: Link) -> asyncio.Future[None]:
        """Send one request for each topic."""
        if not link.is_open:
            return failed(NotConnected("the connection is lost"))
        storing = _Storing(link, len(positions))
        for topic, position in positions.items():
            request = SetPosition(
                group=self._group, member=self._member, topic=topic, offset=position.offset,
                number=position.number,
            )  # fmt: skip
            link.send(Kind.REQUEST, storing.expect(), encode_request(request))
        return storing.done


class _Storing:
    """Requests under way; `done` ends when all are answered, or the connection is lost."""

    def __init__(self, link: Link, count: int) -> None:
        self._link = link
        self._left = count
        self._error: OnwardError | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link.lost.add_done_callback(self._lost)
        if not count:
            self._end()

    def expect(self) -> int:
        request_id = self._link.expect(lambda kind, payload: self._take(request_id, kind, payload))
        return request_id

    def _take(self, request_id: int, kind: int, payload: bytes | bytearray) -> None:
        self._link.forget(request_id)
        self._left -= 1
        if kind == Kind.ERROR:
            self._error = decode_error(payload)
        if not self._left:
            self._end()

    def _lost(self, lost: asyncio.Future[OnwardError]) -> None:
        self._error = lost.result()
        self._end()

    def _end(self) -> None:
        self._link.lost.remove_done_callback(self._lost)
        if self.done.done():
            return
        if self._error is None:
            self.done.set_result(None)
        else:
            fail(self.done, self._error)
