"""Jobs of seconds: a worker that comes later gets its part of them."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import MakeBroker
from .members import PATIENCE_S
from .running import BrokerProcess, until

SLOW = """
import asyncio, os
from onward import App

app = App()
notes = os.open("notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@app.consumer("jobs", group="work", concurrency=1)
async def work(body: str) -> None:
    os.write(notes, f"{os.getpid()} {body}\\n".encode())
    await asyncio.sleep(2)
"""

LOOP = """
import asyncio, os
from onward import connect

notes = os.open("notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


async def main() -> None:
    async with connect(os.environ["ONWARD_ADDRESS"]) as mq:
        async for job in mq.consume("jobs", group="work", credit=8):
            os.write(notes, f"{os.getpid()} {job.text}\\n".encode())
            await asyncio.sleep(2)
            await job.ack()


asyncio.run(main())
"""


class Workers:
    """Processes that run the same App, and what they noted."""

    def __init__(self, folder: Path) -> None:
        (folder / "slow.py").write_text(SLOW)
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, broker: BrokerProcess, *program: str) -> subprocess.Popen[bytes]:
        kept = {k: text for k, text in os.environ.items() if not k.startswith("ONWARD_")}
        program = program or ("from onward.cli import main; main()", "run", "slow:app")
        with (self._folder / "run.txt").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", *program], cwd=self._folder,
                env=kept | {"ONWARD_ADDRESS": broker.address},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def begun(self) -> list[tuple[int, str]]:
        path = self._folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), line.split()[1]) for line in lines]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(PATIENCE_S)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.end()


async def test_a_second_worker_shares_the_jobs_of_the_first(
    make_broker: MakeBroker, workers: Workers
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="60s") as mq, asyncio.timeout(PATIENCE_S):
        await mq.create_topic("jobs")
        await mq.create_group("work", "jobs")
        first = workers.start(broker)
        await mq.publish_many("jobs", [str(number) for number in range(6)])
        await until(lambda: len(workers.begun()) == 1, within_s=PATIENCE_S)
        second = workers.start(broker)
        while (await mq.group("work")).backlog:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    count = Counter(pid for pid, _ in workers.begun())
    assert sum(count.values()) == 6, "none was run twice"
    # The first may do one or two while the second one starts.
    assert count[second.pid] >= 2
    assert count[first.pid] >= 2


async def test_a_second_worker_gets_what_the_first_has_fetched_already(
    make_broker: MakeBroker, workers: Workers
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="60s") as mq, asyncio.timeout(PATIENCE_S):
        await mq.create_topic("jobs")
        await mq.create_group("work", "jobs")
        await mq.publish_many("jobs", [str(number) for number in range(6)])
        first = workers.start(broker, LOOP)
        await until(lambda: len(workers.begun()) == 1, within_s=PATIENCE_S)
        assert (await mq.group("work")).members[0].leased == 6, "it has all of them"
        second = workers.start(broker, LOOP)
        while (await mq.group("work")).backlog:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    count = Counter(pid for pid, _ in workers.begun())
    assert sum(count.values()) == 6, "none was run twice"
    assert min(count[first.pid], count[second.pid]) >= 2


async def test_a_worker_that_takes_the_place_of_a_killed_one_shares_the_jobs(
    make_broker: MakeBroker, workers: Workers
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="60s") as mq, asyncio.timeout(PATIENCE_S):
        await mq.create_topic("jobs")
        await mq.create_group("work", "jobs")
        killed, other = workers.start(broker), workers.start(broker)
        await mq.publish_many("jobs", [str(number) for number in range(10)])
        await until(lambda: len({pid for pid, _ in workers.begun()}) == 2, within_s=PATIENCE_S)
        killed.kill()
        third = workers.start(broker)
        while (await mq.group("work")).backlog:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    count = Counter(pid for pid, _ in workers.begun())
    assert min(count[other.pid], count[third.pid]) >= 2
