"""System calls that fail, and kills at exactly the N-th of them, by strace."""

import asyncio
import shutil

import pytest

from onward.errors import NotConnected, OnwardError

from .conftest import MakeBroker
from .history import History, read_all
from .running import BrokerProcess, strace, until

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

SMALL: dict[str, object] = {
    "log_segment_bytes_max": 1 << 16,
    "log_preallocate_bytes": 1 << 14,
    "log_checkpoint_rows": 12,
}
EXIT_DISK_FAILED = 74
WRITE = "pwritev2,pwritev,pwrite64"


async def publish_until_it_ends(broker: BrokerProcess, history: History, name: str) -> int:
    """Publish to a broker that is going to end; return its exit code."""
    history.is_over = False
    async with broker.connect(timeout="1s") as mq:
        publishing = [
            asyncio.ensure_future(history.publish_singles(mq, f"{name}a", in_flight=2)),
            asyncio.ensure_future(
                history.publish_batches(mq, f"{name}b", size=5, filler="x" * 300)
            ),
        ]
        try:
            return await broker.ended(within_s=15)
        finally:
            history.is_over = True
            for task in publishing:
                task.cancel()
            await asyncio.wait(publishing)
            await mq.close(drain=False)


async def verify(broker: BrokerProcess, history: History) -> None:
    """Start again, and check that everything acknowledged is there, once, in order."""
    await broker.start()
    async with broker.connect() as mq:
        try:
            stored = await read_all(mq)
        except OnwardError:
            assert not history.acked
            stored = {}
        history.check(stored)
        await mq.publish("after", "it goes on")


@pytest.mark.parametrize("when", [2, 7, 30])
async def test_a_failed_sync_ends_the_broker_without_an_ack_and_loses_nothing(
    make_broker: MakeBroker, when: int
) -> None:
    broker = make_broker(**SMALL)
    await broker.start()
    async with broker.connect() as mq:
        await mq.publish("before", "there")
    await broker.kill()
    # The loop's thread syncs once, at the start; the others count for themselves.
    await broker.start(wrapper=strace("fdatasync", f"error=EIO:when={when}+"))
    history = History()
    assert await publish_until_it_ends(broker, history, "a") == EXIT_DISK_FAILED
    assert "disk failed" in broker.output
    await verify(broker, history)
    async with broker.connect() as mq:
        assert await read_all(mq, "before") == {0: "there"}


async def test_a_failed_write_ends_the_broker_without_an_ack(make_broker: MakeBroker) -> None:
    broker = make_broker(**SMALL)
    await broker.start(wrapper=strace(WRITE, "error=EIO:when=9+"))
    history = History()
    assert await publish_until_it_ends(broker, history, "a") == EXIT_DISK_FAILED
    await verify(broker, history)


CRASHES = [
    *[("fdatasync", when) for when in (2, 3, 40)],
    *[(WRITE, when) for when in (1, 2, 3, 60)],
    *[("rename", when) for when in (1, 2, 3)],
    *[("ftruncate", when) for when in (1, 2, 3)],
    *[("fsync", when) for when in (1, 2, 3)],
    *[("unlink", when) for when in (1, 2)],
    *[("fallocate", when) for when in (1, 4)],
]


async def test_a_kill_at_exactly_the_nth_system_call_loses_nothing_acked(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(**SMALL)
    history = History()
    for number, (call, when) in enumerate(CRASHES):
        broker.launch(wrapper=strace(call, f"signal=KILL:when={when}"))
        # Some calls are made at the start already: then it ends before it is ready.
        await until(broker.accepts_or_ended)
        try:
            await publish_until_it_ends(broker, history, f"{number}")
        except NotConnected:
            await broker.ended()
    await verify(broker, history)
    assert len(history.acked) > 300
