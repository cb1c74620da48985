"""The power goes: what was acknowledged as durable is there afterwards.

The file system is told to go down without writing anything more, then mounted again: its state is
what the disk held. Acks that come after the cut has begun do not count, so they are counted before.
"""

import asyncio
import random

from onward.errors import OnwardError

from .conftest import MakeBroker, MakeVolume
from .history import History, read_all
from .running import BrokerProcess, until
from .volume import Volume

CUTS = 5
ACKED_EACH_MIN = 300
"""So many are acknowledged before each cut, however slow the machine is."""


async def publish_and_cut(
    broker: BrokerProcess, volume: Volume, history: History, turn: int, *, durability: str | None
) -> set[str]:
    """Publish for a moment, cut the power; return what was acknowledged before that."""
    history.is_over = False
    async with broker.connect(timeout="2s") as mq:
        publishing = [
            asyncio.ensure_future(history.publish_singles(mq, f"a{turn}", durability=durability)),
            asyncio.ensure_future(
                history.publish_batches(mq, f"b{turn}", size=100, durability=durability)
            ),
        ]
        await until(lambda: len(history.acked) >= ACKED_EACH_MIN, within_s=60)
        await asyncio.sleep(random.Random(turn).uniform(0.0, 0.3))
        acked = set(history.acked)
        volume.cut_power()
        history.is_over = True
        await broker.kill()
        for task in publishing:
            task.cancel()
        await asyncio.wait(publishing)
        await mq.close(drain=False)
    volume.restore_power()
    return acked


async def test_what_was_acked_as_durable_survives_a_power_cut(
    mount_volume: MakeVolume, make_broker: MakeBroker
) -> None:
    volume = mount_volume(megabytes=96)
    broker = make_broker(
        volume.mount_point / "log",
        log_segment_bytes_max=1 << 19,
        log_checkpoint_rows=100,
        log_checkpoint_bytes=1 << 18,
        log_preallocate_bytes=1 << 17,
    )
    acked: set[str] = set()
    for turn in range(CUTS):
        history = History()
        await broker.start()
        acked |= await publish_and_cut(broker, volume, history, turn, durability=None)
    await broker.start()
    async with broker.connect() as mq:
        stored = await read_all(mq)
    assert list(stored) == list(range(len(stored)))
    bodies = set(stored.values())
    assert len(bodies) == len(stored), "something was stored twice"
    lost = acked - bodies
    assert not lost, f"{len(lost)} of {len(acked)} acknowledged are lost"
    assert len(acked) >= CUTS * ACKED_EACH_MIN


async def test_what_was_acked_from_memory_is_lost_in_a_power_cut_so_this_test_can_fail(
    mount_volume: MakeVolume, make_broker: MakeBroker
) -> None:
    volume = mount_volume(megabytes=96)
    broker = make_broker(volume.mount_point / "log", log_interval_ms=60_000)
    await broker.start()
    async with broker.connect() as mq:
        await mq.create_topic("orders")
    acked = await publish_and_cut(broker, volume, History(), 0, durability="memory")
    await broker.start()
    async with broker.connect() as mq:
        try:
            stored = set((await read_all(mq)).values())
        except OnwardError:
            stored = set()
    assert acked - stored, "the power cut had no effect: the other test proves nothing"
