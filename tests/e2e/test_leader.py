"""Clients that know a source and its replica go on when the source dies and the replica leads."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import pytest

import onward
from onward.errors import OnwardError
from onward.protocol.operations.replicas import Promote, Promoted, ShowReplication

from .conftest import MakeBroker
from .history import read_all
from .running import BrokerProcess, until

BEFORE = 200
"""Messages that are acked and replicated before the source dies."""


async def start_both(make_broker: MakeBroker) -> tuple[BrokerProcess, BrokerProcess]:
    source = make_broker()
    await source.start()
    replica = make_broker(replica_of=source.address, replica_name="copy")
    await replica.start()
    return source, replica


async def promote(node: BrokerProcess, *, force: bool = False) -> Promoted:
    async with node.connect(timeout="60s") as mq:
        return await mq._call(Promote(force=force))


async def caught_up(node: BrokerProcess, source: BrokerProcess) -> None:
    async with node.connect() as copy, source.connect() as mq:

        async def is_equal() -> bool:
            event_id = (await mq._call(ShowReplication())).event_id
            return (await copy._call(ShowReplication())).event_id == event_id

        await until(is_equal)


class Programs:
    """A publisher, a member of a group and a reader, which never hear of what happens."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.receipts: dict[str, onward.Receipt] = {}
        self.errors: list[OnwardError] = []
        self.consumed: Counter[str] = Counter()
        self.read: list[tuple[int, str]] = []

    def connect(self) -> onward.Client:
        return onward.connect(self._address, timeout="60s")

    async def publish(self) -> None:
        async with self.connect() as mq:
            for number in range(1_000_000):
                body = str(number)
                try:
                    self.receipts[body] = await mq.publish("orders", body)
                except OnwardError as error:
                    self.errors.append(error)
                await asyncio.sleep(0.001)

    async def consume(self) -> None:
        async with self.connect() as mq, mq.consume("orders", group="billing") as consumer:
            async for delivery in consumer:
                self.consumed[delivery.text] += 1
                try:
                    await delivery.ack()
                except OnwardError:
                    continue  # it comes again

    async def follow(self) -> None:
        async with self.connect() as mq:
            async for message in mq.read("orders", follow=True):
                self.read.append((message.offset, message.text))


def check(
    programs: Programs, promoted: Promoted, stored: dict[int, str], *, of_source: int
) -> None:
    """Everything that was acknowledged and replicated is there, once, and was handed out.

    Of the receipts those up to the number `of_source` may be of the source.
    """
    bodies = Counter(stored.values())
    assert max(bodies.values()) == 1, "something is stored twice"
    for number, (body, receipt) in enumerate(programs.receipts.items()):
        if stored.get(receipt.offset) != body:
            assert bodies[body] == 0, f"{body} is at another offset than its receipt says"
            assert receipt.event_id > promoted.event_id, f"{body} was replicated, and is lost"
            assert number <= of_source, f"{body} was acknowledged by the new leader, and is lost"
    assert bodies.keys() <= programs.consumed.keys()
    assert all(programs.consumed[str(number)] == 1 for number in range(BEFORE))
    surviving = [one for one in programs.read if stored.get(one[0]) == one[1]]
    assert surviving == sorted(stored.items()), "a reader has missed a message, or got it twice"


@pytest.mark.parametrize("is_killed", [True, False])
async def test_everything_goes_on_at_the_promoted_replica(
    make_broker: MakeBroker, is_killed: bool
) -> None:
    source, replica = await start_both(make_broker)
    programs = Programs(f"{source.address},{replica.address}")
    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(programs.publish())
        running = [group.create_task(programs.consume()), group.create_task(programs.follow())]
        await until(lambda: len(programs.consumed) > BEFORE, within_s=30)
        await caught_up_to(replica, programs, BEFORE)
        if is_killed:
            await source.kill()
        of_source = len(programs.receipts)
        promoted = await promote(replica)
        assert promoted.source_stepped_down != is_killed
        count = len(programs.receipts)
        await until(lambda: len(programs.receipts) > count + 200, within_s=60)
        publishing.cancel()
        await asyncio.wait([publishing])
        async with replica.connect() as mq:
            stored = await read_all(mq)
        await until(lambda: stored.keys() <= {offset for offset, _ in programs.read})
        await until(lambda: set(stored.values()) <= programs.consumed.keys(), within_s=60)
        for task in running:
            task.cancel()
    assert programs.errors == []
    check(programs, promoted, stored, of_source=of_source)
    if not is_killed:
        acknowledged = {one.offset: body for body, one in programs.receipts.items()}
        assert acknowledged.items() <= stored.items(), "a source that stepped down loses nothing"


async def caught_up_to(replica: BrokerProcess, programs: Programs, count: int) -> None:
    """Wait until the replica has the acks of the first messages."""
    async with replica.connect() as mq:

        async def is_acked() -> bool:
            found = await mq.groups()
            return bool(found) and (await mq.group("billing")).topics[0].cursor >= count

        await until(is_acked, within_s=30)


async def test_an_old_source_that_comes_back_is_not_used_any_more(make_broker: MakeBroker) -> None:
    source, replica = await start_both(make_broker)
    address = f"{source.address},{replica.address}"
    async with onward.connect(address, timeout="30s") as mq:
        await mq.publish("orders", "0")
        await caught_up(replica, source)
        await source.kill()
        promoted = await promote(replica)
        await mq.publish("orders", "1")
        await source.start()
        async with onward.connect(address) as other:
            # It names both, so it sees that one of the two leaders has an older history.
            assert (await other.publish("orders", "2")).offset == 2

        async def is_retired() -> bool:
            async with source.connect() as old:
                return (await old._call(ShowReplication())).role == "retired"

        await until(is_retired)
        assert [message.text async for message in mq.read("orders")] == ["0", "1", "2"]
        assert promoted.lineage.epoch == 1


async def test_an_app_and_a_blocking_client_go_on(make_broker: MakeBroker) -> None:
    source, replica = await start_both(make_broker)
    address = f"{source.address},{replica.address}"
    app = onward.App(address)
    done: list[str] = []

    @app.consumer("orders", group="billing")
    async def bill(body: str) -> None:
        done.append(body)

    mq = onward.connect_sync(address, timeout="30s")
    await asyncio.to_thread(mq.open)
    running = asyncio.ensure_future(app.run(signals=False))
    await asyncio.to_thread(mq.publish, "orders", "0")
    await until(lambda: done == ["0"])
    await caught_up(replica, source)
    await source.kill()
    waiting = asyncio.ensure_future(asyncio.to_thread(mq.publish, "orders", "1"))
    await promote(replica)
    assert (await waiting).offset == 1
    await until(lambda: "1" in done, within_s=30)
    await asyncio.to_thread(mq.close)
    app.stop()
    await running


async def test_a_command_finds_the_leader(make_broker: MakeBroker) -> None:
    source, replica = await start_both(make_broker)
    for address in (
        f"{replica.address},{source.address}",
        f"{source.address},{replica.address}",
        replica.address,
    ):
        program = "import sys; from onward.cli import main; main(sys.argv[1:])"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, "publish", "orders", "hello", "--address", address
        )
        assert await process.wait() == 0
    async with source.connect() as mq:
        assert (await mq.topic("orders")).next_offset == 3
