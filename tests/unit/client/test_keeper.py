"""The keeper: it comes back, and gives up only where trying again is of no use."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from onward.broker.broker import Broker
from onward.client.keeper import Keeper
from onward.client.link import Link
from onward.client.nodes import Node
from onward.client.pipe import connect_pipe
from onward.errors import NotConnected, NotLeader, Unauthenticated
from onward.log.memory_disk import MemoryDisk
from onward.settings import AuthSettings, Settings, Token

from .calling import Cable, calling, settings_with, turns


async def test_each_new_link_is_told_of_and_each_loss() -> None:
    async with calling() as (client, cable, _):
        keeper = client._keeper()
        told: list[bool] = []
        keeper.listen(lambda link: told.append(link is not None))
        cable.cut()
        await turns()
        await keeper.connected(timeout_s=2)
        assert told == [False, True]


async def test_a_link_that_is_lost_is_not_handed_out_though_nobody_was_told_yet() -> None:
    async with calling() as (client, cable, _):
        keeper = client._keeper()
        old = keeper.link
        assert old is not None
        cable.cut()
        await turns(1)
        assert keeper.link is old
        new = await keeper.connected(timeout_s=2)
        assert new is not old
        assert new.is_open


async def test_nobody_there_is_said_when_the_time_is_over() -> None:
    async with calling() as (client, cable, _):
        cable.pull()
        await turns()
        with pytest.raises(NotConnected, match="nobody is there"):
            await client._keeper().connected(timeout_s=0.2)
        assert cable.dialled < 20


async def test_the_first_place_that_answers_is_used() -> None:
    async with calling() as (_, cable, _):

        async def refuse(make: Callable[[], Link]) -> Link:
            raise OSError("no route")

        keeper = Keeper([refuse, cable.dial], name="test", token=None)
        await keeper.open(timeout_s=2)
        assert keeper.link is not None
        await keeper.close()


async def test_a_wrong_token_is_not_tried_again() -> None:
    auth = AuthSettings(tokens=(Token("ann", "secret"),))
    base = settings_with()
    settings = Settings(log=base.log, auth=auth)
    broker = await Broker.open(settings, disk=MemoryDisk())
    cable = Cable(broker)
    keeper = Keeper([cable.dial], name="test", token="guess")
    with pytest.raises(Unauthenticated):
        await keeper.open(timeout_s=2)
    assert cable.dialled == 1
    await broker.stop()


class SilentBroker(asyncio.Protocol):
    """Takes everything and says nothing."""


async def test_a_broker_that_says_nothing_is_given_up() -> None:
    async def dial(make: Callable[[], Link]) -> Link:
        link = make()
        connect_pipe(link, SilentBroker(), asyncio.get_running_loop())
        return link

    keeper = Keeper([dial], name="test", token=None)
    with pytest.raises(NotConnected):
        await keeper.open(timeout_s=0.1)


async def test_a_link_that_is_lost_with_its_welcome_ends_nothing() -> None:
    """The broker says welcome and is gone in the same moment: the keeper tries again."""
    async with calling() as (client, cable, commit):
        await client.publish("orders", b"0")
        commit.is_holding = True
        future = client.publish_soon("orders", b"1")
        await turns()
        real = cable.dial
        lost: list[Link] = []

        async def dial(make: Callable[[], Link]) -> Link:
            link = await real(make)
            if not lost:
                lost.append(link)
                link.ready.add_done_callback(lambda _: link.connection_lost(None))
            return link

        client._keeper()._nodes.listed[:] = [Node("", dial)]
        cable.cut()
        await asyncio.sleep(0.02)
        commit.release()
        assert (await asyncio.wait_for(future, 3)).offset == 1


async def test_a_search_that_is_under_way_when_the_client_closes_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A goodbye may take a second, in which the search for a leader finds another node."""
    async with calling() as (_, cable, _):
        links: list[Link] = []

        async def dial(make: Callable[[], Link]) -> Link:
            links.append(await cable.dial(make))
            return links[-1]

        keeper = Keeper([dial], name="test", token=None)
        await keeper.open(timeout_s=2)
        close = links[0].close

        async def close_slowly() -> None:
            await turns()
            await close()

        monkeypatch.setattr(links[0], "close", close_slowly)
        keeper.need_leader(links[0], NotLeader("another node leads", leader=None))
        while len(links) == 1:
            await turns(1)
        await keeper.close()
        await turns()
        assert [link.is_open for link in links] == [False, False]


async def test_a_keeper_that_fails_tells_those_who_wait() -> None:
    async def dial(make: Callable[[], Link]) -> Link:
        raise RuntimeError("a mistake of ours")

    keeper = Keeper([dial], name="test", token=None)
    with pytest.raises(NotConnected, match="a mistake of ours"):
        await keeper.open(timeout_s=60)


async def test_nobody_there_is_said_with_every_address_that_was_tried() -> None:
    async def refuse(make: Callable[[], Link]) -> Link:
        raise OSError("no route")

    keeper = Keeper([refuse, refuse], name="test", token=None, addresses=["a:7700", "b:7700"])
    with pytest.raises(NotConnected, match="reached at a:7700, b:7700: no route"):
        await keeper.open(timeout_s=0.1)


async def test_a_loss_and_the_return_are_logged_once_each_with_the_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="onward.client")

    def said() -> list[tuple[str, str]]:
        return [
            (record.levelname, record.getMessage().partition(": ")[0])
            for record in caplog.records
            if record.name == "onward.client"
        ]

    async with calling() as (_, cable, _):
        keeper = Keeper([cable.dial], name="test", token=None, addresses=["a:7700"])
        await keeper.open(timeout_s=30)
        assert said() == []
        caplog.clear()
        dialled = cable.dialled
        cable.pull()
        async with asyncio.timeout(30):
            while cable.dialled < dialled + 4:  # noqa: ASYNC110  # a cable tells nobody
                await asyncio.sleep(0.01)
        cable.plug()
        await keeper.connected(timeout_s=30)
        await keeper.close()
        mine = [one for one in said() if "a:7700" in one[1]]
        assert mine == [
            ("WARNING", "connection lost (a:7700)"), ("INFO", "connected again (a:7700)")
        ]  # fmt: skip
