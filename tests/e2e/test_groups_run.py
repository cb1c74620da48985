"""`onward run` with workers: SIGTERM lets them finish, and one that is killed is started again."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

import onward

from .conftest import MakeBroker
from .members import PATIENCE_S
from .running import BrokerProcess, until
from .taking import events_of, finish, life_of

WORKERS = 2
CONCURRENCY = 2
MESSAGES = 20

SHOP = """
import asyncio, os, pathlib
from onward import App, Delivery

app = App(stop="10m")
notes = os.open("notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(word, delivery):
    os.write(notes, f"{word} {delivery.text} {os.getpid()} {delivery.attempt}\\n".encode())


@app.consumer("orders", group="billing", concurrency=2, lease="1h")
async def charge(delivery: Delivery) -> None:
    note("began", delivery)
    while not pathlib.Path("gate").exists():
        await asyncio.sleep(0.02)
    note("ended", delivery)
"""


class Note(NamedTuple):
    word: str
    text: str
    pid: int
    attempt: int


class Shop:
    """`onward run shop:app --workers 2`: its functions begin, and end when the gate is open."""

    def __init__(self, folder: Path, broker: BrokerProcess) -> None:
        self.folder = folder
        self._output = folder / "run.txt"
        (folder / "shop.py").write_text(SHOP)
        program = "from onward.cli import main; main()"
        command = [sys.executable, "-c", program, "run", "shop:app", "--workers", str(WORKERS)]
        kept = {name: text for name, text in os.environ.items() if not name.startswith("ONWARD_")}
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=kept | {"ONWARD_ADDRESS": broker.address},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text()

    def pids(self) -> list[int]:
        """Return the workers that were started so far."""
        return [int(pid) for pid in re.findall(r"worker \d+ started: pid (\d+)", self.output)]

    def notes(self, word: str) -> list[Note]:
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line.split() for line in lines]
        return [Note(one, text, int(pid), int(n)) for one, text, pid, n in found if one == word]

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    async def until_running(self) -> None:
        """Wait until as many functions run as may run at once."""
        wanted = WORKERS * CONCURRENCY
        await until(lambda: len(self.notes("began")) == wanted, within_s=PATIENCE_S)

    async def stopped(self) -> int:
        await until(lambda: self.process.poll() is not None, within_s=PATIENCE_S)
        return self.process.returncode

    def end(self) -> None:
        """Leave nothing behind, whatever the test did."""
        if self.process.poll() is None:
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def open_shop(tmp_path: Path) -> Iterator[Callable[[BrokerProcess], Shop]]:
    opened: list[Shop] = []

    def start(broker: BrokerProcess) -> Shop:
        opened.append(Shop(tmp_path, broker))
        return opened[-1]

    yield start
    for shop in opened:
        shop.end()


async def until_workers_wait(mq: onward.Client) -> None:
    """Wait until all workers are members that may be given messages."""

    async def do_wait() -> bool:
        members = [member for group in await mq.groups() for member in group.members]
        return len(members) == WORKERS and all(member.credit for member in members)

    await until(do_wait, within_s=PATIENCE_S)


async def publish_numbers(mq: onward.Client) -> list[str]:
    texts = [str(number) for number in range(MESSAGES)]
    await mq.publish_many("orders", texts)
    return texts


async def test_sigterm_lets_workers_finish_what_runs_and_gives_the_rest_back(
    make_broker: MakeBroker, open_shop: Callable[[BrokerProcess], Shop]
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        shop = open_shop(broker)
        await until_workers_wait(mq)
        texts = await publish_numbers(mq)
        await shop.until_running()
        shop.process.send_signal(signal.SIGTERM)

        async def is_given_back() -> bool:
            (share,) = (await mq.group("billing")).topics
            return share.leased == WORKERS * CONCURRENCY

        # What waited in the workers is given back when they have heard of the signal.
        await until(is_given_back, within_s=PATIENCE_S)
        assert shop.process.poll() is None
        shop.open_gate()
        assert await shop.stopped() == 0, shop.output
        ended = {one.text for one in shop.notes("ended")}
        assert ended == {one.text for one in shop.notes("began")}
        assert len(ended) == WORKERS * CONCURRENCY
        assert (await mq.group("billing")).backlog == MESSAGES - len(ended)
        for text in ended:
            ((did, _),) = events_of(await life_of(mq, f"orders/{text}", "billing"))
            assert did == "acked"
        rest = await finish(mq, MESSAGES - len(ended), group="billing")
        assert rest == sorted((text, 1) for text in texts if text not in ended)


async def test_a_worker_that_is_killed_is_started_again_and_nothing_is_lost(
    make_broker: MakeBroker, open_shop: Callable[[BrokerProcess], Shop]
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        shop = open_shop(broker)
        await until_workers_wait(mq)
        texts = await publish_numbers(mq)
        await shop.until_running()
        killed = shop.notes("began")[0].pid
        hit = [one.text for one in shop.notes("began") if one.pid == killed]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: len(shop.pids()) == WORKERS + 1, within_s=PATIENCE_S)
        assert "signal SIGKILL" in shop.output

        async def has_joined() -> bool:
            members = (await mq.group("billing")).members
            return {one.pid for one in members} == {*shop.pids()} - {killed}

        await until(has_joined, within_s=PATIENCE_S)
        shop.open_gate()

        async def is_finished() -> bool:
            return (await mq.group("billing")).backlog == 0

        await until(is_finished, within_s=PATIENCE_S)
        shop.process.send_signal(signal.SIGTERM)
        assert await shop.stopped() == 0, shop.output
        assert Counter(one.text for one in shop.notes("ended")) == Counter(texts)
        assert killed not in {one.pid for one in shop.notes("ended")}
        for text in hit:
            first, second = [one for one in shop.notes("began") if one.text == text]
            assert (first.attempt, second.attempt) == (1, 2)
            told = events_of(await life_of(mq, f"orders/{text}", "billing"))
            assert [did for did, _ in told] == ["lost", "acked"]
    assert not any(map(is_alive, shop.pids()))


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
