"""A broker inside this process: for `file:` and `memory:` addresses.

It is the real broker, on the real log, spoken to through the real protocol: only the socket is
missing. A `file:` folder is locked, so nobody else can use it meanwhile. Clients that name the same
`memory:name` in one loop share one broker; the last to close it ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from onward.broker.broker import Broker
from onward.client.address import Address
from onward.client.keeper import BrokerEnded
from onward.client.link import Link
from onward.client.pipe import connect_pipe
from onward.config import check
from onward.errors import Unavailable
from onward.log.disk import OsDisk
from onward.log.inspect import require_log
from onward.log.log import FolderLost
from onward.log.memory_disk import MemoryDisk
from onward.settings import GroupSettings, LogSettings, Settings


class Embedded:
    """A broker that lives as long as its clients."""

    _shared: dict[tuple[int, str], Embedded] = {}  # noqa: RUF012

    def __init__(self, broker: Broker, key: tuple[int, str] | None) -> None:
        self.broker = broker
        self._key = key
        self._users = 1

    @classmethod
    async def open(
        cls, address: Address, *, settings: Settings | None = None, create: bool = True
    ) -> Embedded:
        """Start the broker that `address` names, or join the one that runs.

        Settings that no broker could start with are refused, also where one runs already. Without
        `create` there must be a log in a `file:` folder.
        """
        if address.scheme == "file" and not create:
            require_log(OsDisk(), address.place)
        if settings is not None:
            check(settings, listens=False)
        key = (id(asyncio.get_running_loop()), address.place) if _is_shared(address) else None
        if key is not None and (running := cls._shared.get(key)) is not None:
            return running.join()
        embedded = cls(await _open_broker(address, settings), key)
        if key is not None:
            cls._shared[key] = embedded
        return embedded

    def join(self) -> Embedded:
        """Use it once more: who joins also closes."""
        self._users += 1
        return self

    async def dial(self, make: Callable[[], Link]) -> Link:
        """Connect a new link."""
        if self.broker.failure is not None:
            raise BrokerEnded(f"the broker failed: {self.broker.failure}")
        link = make()
        connect_pipe(link, self.broker.session(), asyncio.get_running_loop())
        return link

    async def close(self) -> None:
        """Leave; the last one stops the broker."""
        self._users -= 1
        if self._users == 0:
            if self._key is not None:
                del self._shared[self._key]
            try:
                await self.broker.stop()
            except (FolderLost, OSError) as error:
                raise Unavailable(f"the broker could not close its log: {error}") from error


def _is_shared(address: Address) -> bool:
    return address.scheme == "memory" and bool(address.place)


async def _open_broker(address: Address, settings: Settings | None) -> Broker:
    if address.scheme == "memory":
        settings = settings or _memory_settings()
        return await Broker.open(_without_reclaim(settings), disk=MemoryDisk())
    settings = _without_reclaim(settings or Settings())
    # The address says where, whatever the settings say besides.
    log = msgspec.structs.replace(settings.log, folder=address.place)
    try:
        return await Broker.open(msgspec.structs.replace(settings, log=log))
    except OSError as error:
        raise Unavailable(f"the log folder {address.place!r} cannot be used: {error}") from error


def _without_reclaim(settings: Settings) -> Settings:
    # Its members end with it: nobody can come back to re-claim anything.
    return msgspec.structs.replace(settings, groups=GroupSettings(reclaim_ms=0))


def _memory_settings() -> Settings:
    # Everything is gone with the process anyway: no reserve, and segments that give space back.
    return Settings(
        log=LogSettings(
            folder="memory", segment_bytes_max=16 << 20, preallocate_bytes=0, disk_reserve_bytes=0
        )
    )
