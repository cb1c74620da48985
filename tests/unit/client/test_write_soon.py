"""Frames of members that share a connection leave together, and before a program goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from onward.client.link import Link

from .calling import calling


class RecordingTransport(asyncio.Transport):
    """Remembers each write, as a socket would see it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.writes.append(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return 0


async def connected(members: int) -> tuple[Link, RecordingTransport]:
    link, transport = Link(name="test", token=None), RecordingTransport()
    link.connection_made(transport)
    transport.writes.clear()
    link.member_count = members
    return link, transport


async def test_frames_of_several_members_leave_in_one_write_before_their_tasks_go_on() -> None:
    link, transport = await connected(members=3)
    seen: list[list[bytes]] = []

    async def member(frame: bytes) -> None:
        link.write_soon(frame)
        assert link.has_unsent
        await asyncio.sleep(0)
        seen.append(list(transport.writes))

    await asyncio.gather(member(b"a"), member(b"b"), member(b"c"))
    assert seen == [[b"abc"]] * 3


async def test_the_frame_of_a_single_member_leaves_at_once() -> None:
    link, transport = await connected(members=1)
    link.write_soon(b"a")
    assert transport.writes == [b"a"]


async def test_a_write_takes_along_what_waits_and_keeps_the_order() -> None:
    link, transport = await connected(members=2)
    link.write_soon(b"a")
    link.write(b"b")
    await asyncio.sleep(0)
    assert transport.writes == [b"ab"]


async def test_a_connection_that_is_lost_drops_what_waits() -> None:
    link, transport = await connected(members=2)
    link.write_soon(b"a")
    link.connection_lost(None)
    await asyncio.sleep(0)
    assert transport.writes == []
    assert not link.has_unsent


async def test_members_are_counted_while_they_are_joined() -> None:
    async with calling() as (client, _, _):
        async with client.consume("orders", group="g", member="ann") as ann:
            await ann.join()
            link = ann._membership._seat.link
            assert link.member_count == 1
            async with client.consume("orders", group="g", member="bob") as bob:
                await bob.join()
                assert link.member_count == 2
            assert link.member_count == 1
        assert link.member_count == 0
