"""A message that kills its process: a dead letter after exactly its attempts, alone."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .conftest import MakeBroker
from .members import PATIENCE_S
from .running import BrokerProcess

ATTEMPTS = 3
MESSAGES = 10

POISON = """
import os, signal
from onward import App, Delivery

app = App()
notes = os.open("notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@app.consumer("jobs", group="work", concurrency={concurrency}, retry="10s,1m")
async def work(delivery: Delivery) -> None:
    os.write(notes, f"{{delivery.text}} {{delivery.attempt}}\\n".encode())
    if delivery.text == "{poison}":
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Worker:
    """`onward run poison:app`, started again whenever it was killed."""

    def __init__(self, folder: Path, broker: BrokerProcess) -> None:
        self.starts = 0
        self._folder = folder
        self._broker = broker
        self._process: subprocess.Popen[bytes] | None = None

    def keep_running(self) -> None:
        if self._process is None or self._process.poll() is not None:
            kept = {k: text for k, text in os.environ.items() if not k.startswith("ONWARD_")}
            program = "from onward.cli import main; main()"
            with (self._folder / "run.txt").open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", program, "run", "poison:app"], cwd=self._folder,
                    env=kept | {"ONWARD_ADDRESS": self._broker.address},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                )  # fmt: skip
            self.starts += 1

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def notes(self) -> Counter[tuple[str, int]]:
        """Return how often each message was begun as which attempt."""
        lines = [line.split() for line in (self._folder / "notes").read_text().splitlines()]
        return Counter((text, int(attempt)) for text, attempt in lines)


@pytest.mark.parametrize(("concurrency", "poison"), [(1, 0), (8, 4)])
async def test_a_message_that_kills_its_process_takes_no_other_with_it(
    make_broker: MakeBroker, tmp_path: Path, concurrency: int, poison: int
) -> None:
    broker = make_broker()
    await broker.start()
    program = POISON.format(concurrency=concurrency, poison=poison)
    (tmp_path / "poison.py").write_text(program)
    worker = Worker(tmp_path, broker)
    try:
        async with broker.connect(timeout="60s") as mq, asyncio.timeout(PATIENCE_S):
            await mq.publish_many("jobs", [str(number) for number in range(MESSAGES)])
            await mq.create_group("work", "jobs", retry="10s,1m")
            while (await mq.group("work")).backlog:
                worker.keep_running()
                await asyncio.sleep(0.05)
            letters = [letter async for letter in mq.dead_letters("work")]
    finally:
        worker.end()
    assert [(letter.offset, letter.attempts) for letter in letters] == [(poison, ATTEMPTS)]
    assert "died with it alone, attempt 3 of 3" in letters[0].cause
    notes = worker.notes()
    assert [notes[str(poison), attempt] for attempt in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert {text for text, _ in notes} == {str(number) for number in range(MESSAGES)}
    if concurrency == 1:
        assert all(notes[str(number), 1] == 1 for number in range(1, MESSAGES))
        assert sum(notes.values()) == MESSAGES - 1 + ATTEMPTS, "no other was run twice"
