"""A broker that is restarted while jobs run: each of them runs once."""

import asyncio
from collections import Counter

import pytest

import onward

from .conftest import MakeBroker
from .members import PATIENCE_S
from .running import until
from .taking import publish

JOB_S = 3.0
AWAY_S = 1.0


@pytest.mark.parametrize("way", ["stop", "kill"])
async def test_every_job_that_runs_over_a_restart_of_the_broker_runs_once(
    make_broker: MakeBroker, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = make_broker(groups_reclaim_ms=10_000)
    await broker.start()
    app = onward.App(broker.address)
    began: Counter[int] = Counter()
    ended: Counter[int] = Counter()

    @app.consumer("thumbnails", group="imaging", concurrency=4)
    async def resize(delivery: onward.Delivery) -> None:
        began[delivery.offset] += 1
        await asyncio.sleep(JOB_S)
        ended[delivery.offset] += 1

    async with broker.connect(timeout="60s") as mq, asyncio.timeout(PATIENCE_S):
        await publish(mq, *map(str, range(6)), topic="thumbnails")
        running = asyncio.create_task(app.run(signals=False))
        await until(lambda: len(began) == 4)
        await (broker.stop() if way == "stop" else broker.kill())
        await asyncio.sleep(AWAY_S)
        await broker.start()

        async def is_done() -> bool:
            return (await mq.group("imaging")).backlog == 0

        await until(is_done, within_s=PATIENCE_S)
        assert began == ended == Counter(range(6))
        assert "lease" not in caplog.text
        app.stop()
        await running
