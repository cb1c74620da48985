"""`onward run`: which App it finds, what it says when there is none, workers that live again."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from onward import App, connect_sync
from onward.cli import workers
from onward.cli.run_app import command, load_app
from onward.cli.workers import WORKER_VARIABLE, Workers
from onward.client import signals

WAIT_S = 60
# The command by itself: nothing here depends on how the command line finds it.
PROGRAM = "import sys; from onward.cli.run_app import command; command(sys.argv[1:])"

SHOP = """
import os
from onward import App

app = App("nowhere:1")
number = 7
text = "not an App"


@app.consumer("orders", group="billing")
async def charge(body: str) -> None:
    await app.publish("bills", f"{body} by {os.getpid()}")
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("shop", "broken"):
        sys.modules.pop(name, None)


# --- which App ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["shop:app", "shop"])
def test_an_app_is_found_by_the_name_of_its_module(shop: Path, target: str) -> None:
    found = load_app(target)
    assert isinstance(found, App)
    assert [work.name for work in found.works] == ["charge"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_shop:app", "there is no module 'no_such_shop'"),
        ("shop.deeper:app", "there is no module 'shop.deeper'"),
        ("shop:other", "module 'shop' has no 'other'"),
        ("shop:number", "'shop:number' is not an onward.App, but of type int"),
        ("shop.py:app", "'shop.py:app' is not MODULE:APP; did you mean shop:app?"),
        ("", "'' is not MODULE:APP"),
        ("shop app", "'shop app' is not MODULE:APP"),
    ],
)
def test_an_app_that_is_not_there_is_wrong_usage_that_names_it(
    shop: Path, target: str, said: str
) -> None:
    with pytest.raises(click.UsageError) as caught:
        load_app(target)
    assert said in caught.value.format_message()


def test_an_error_inside_the_module_is_not_mistaken_for_a_missing_one(shop: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        load_app("broken:app")


def test_a_number_of_workers_that_makes_no_sense_is_refused(shop: Path) -> None:
    with pytest.raises(click.UsageError):
        command.main(["shop:app", "--workers", "0"], standalone_mode=False)


# --- as a process ------------------------------------------------------------------------------


def start(shop: Path, address: str, *options: str, **environ: str) -> subprocess.Popen[bytes]:
    with (shop / "run.lines").open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "shop:app", "--address", address, *options],
            cwd=shop, stderr=stderr, stdin=subprocess.PIPE, env={**os.environ, **environ},
        )  # fmt: skip


def wait_for_bill(address: str, group: str) -> str:
    with connect_sync(address) as mq:
        (bill,) = mq.fetch("bills", group=group, wait="60s")
        bill.ack()
        return bill.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_consumes_until_a_signal_and_leaves_with_zero(
    shop: Path, address: str, number: signal.Signals
) -> None:
    process = start(shop, address)
    try:
        with connect_sync(address) as mq:
            mq.publish("orders", number.name)
        assert wait_for_bill(address, "mail") == f"{number.name} by {process.pid}"
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()
    said = (shop / "run.lines").read_text()
    assert "shop:app starts: charge (billing)" in said
    assert re.search(r"'charge' consumes orders as member '\S+' of group 'billing'", said)
    assert "stopping" in said
    assert "shop:app stopped" in said


def test_a_worker_ends_by_itself_when_its_parent_is_gone(shop: Path, address: str) -> None:
    process = start(shop, address, **{WORKER_VARIABLE: "1"})
    try:
        with connect_sync(address) as mq:
            mq.publish("orders", "orphan")
        assert wait_for_bill(address, "mail") == f"orphan by {process.pid}"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    assert "the parent is gone" in (shop / "run.lines").read_text()


def run_to_end(shop: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    program = "from onward.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "run", *arguments],
        cwd=shop, capture_output=True, text=True, timeout=WAIT_S, check=False,
        env={**os.environ, **environ},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "last_line"),
    [
        ("def inner():\n    1 / 0\n\ninner()\n", "ZeroDivisionError: division by zero"),
        ("import no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("app = = 7\n", "SyntaxError: invalid syntax"),
        ("import onward\napp = onward.App()\n@app.consumer('', group='g')\ndef f(body): ...\n",
         "InvalidName"),
    ],
)  # fmt: skip
def test_an_error_of_the_users_module_is_shown_with_their_own_lines_alone(
    shop: Path, module: str, last_line: str
) -> None:
    (shop / "boom.py").write_text(module)
    ended = run_to_end(shop, "boom:app")
    assert ended.returncode == 1
    assert last_line in ended.stderr
    assert f'File "{shop}/boom.py", line' in ended.stderr
    assert "error: 'boom:app' cannot be imported: see above" in ended.stderr
    for ours in ("onward/cli", "onward/client", "click", "importlib"):
        assert ours not in ended.stderr


CONFIGURED = """
import logging
logging.basicConfig(level=logging.DEBUG, format="MINE %(levelname)s %(name)s %(message)s")
"""


def end_after_a_bill(shop: Path, address: str, *options: str) -> str:
    process = start(shop, address, *options)
    try:
        with connect_sync(address) as mq:
            mq.publish("orders", options[-1] if options else "plain")
        wait_for_bill(address, "mail")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()
    return (shop / "run.lines").read_text()


def test_the_logging_that_a_program_configures_holds(shop: Path, address: str) -> None:
    (shop / "shop.py").write_text(CONFIGURED + SHOP)
    lines = [line for line in end_after_a_bill(shop, address).splitlines() if "onward" in line]
    assert lines
    assert all(line.startswith("MINE ") for line in lines)
    assert any(line.startswith("MINE DEBUG onward.app 'charge': orders/") for line in lines)


def test_a_level_can_be_chosen(shop: Path, address: str) -> None:
    assert "'charge': orders/" in end_after_a_bill(shop, address, "--log-level", "debug")
    assert end_after_a_bill(shop, address, "--log-level", "error") == ""


def test_it_says_that_it_waits_for_a_broker(shop: Path) -> None:
    process = start(shop, "localhost:1")
    try:
        deadline = time.monotonic() + WAIT_S
        while "no broker at localhost:1 yet, trying again" not in read_lines(shop):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


SLOW = """
import asyncio
from onward import App

app = App("nowhere:1")


@app.consumer("naps", group="sleeper")
async def nap(body: str) -> None:
    await app.publish("bills", f"{body} began")
    await asyncio.sleep(600)
"""


def test_ctrl_c_says_what_it_waits_for_and_the_second_one_leaves(shop: Path, address: str) -> None:
    (shop / "shop.py").write_text(SLOW)
    process = start(shop, address)
    try:
        with connect_sync(address) as mq:
            mq.publish("naps", "a nap")
        assert wait_for_bill(address, "mail") == "a nap began"
        with connect_sync(address) as mq:
            (member,) = mq.group("sleeper").members
        assert (member.function, member.pid) == ("nap", process.pid)
        process.send_signal(signal.SIGINT)
        wanted = "stopping: waits for 1 call, at most 30s; press again to leave at once"
        deadline = time.monotonic() + WAIT_S
        while wanted not in read_lines(shop):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(signals.SAME_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    finally:
        process.kill()
        process.communicate()


def read_lines(shop: Path) -> str:
    return (shop / "run.lines").read_text()


# --- workers -----------------------------------------------------------------------------------

# Says its pid in a file, then waits for a signal.
PATIENT = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
place = pathlib.Path(sys.argv[1]) / str(os.getpid())
place.with_suffix(".new").write_text(os.environ["ONWARD_WORKER"])
place.with_suffix(".new").rename(place)
while True:
    signal.pause()
"""


def patient(folder: Path, code: int = 0) -> Workers:
    return Workers([sys.executable, "-c", PATIENT, str(folder), str(code)])


def pids(folder: Path) -> dict[int, str]:
    """Return which workers have said that they are ready: pid and number."""
    return {int(one.name): one.read_text() for one in folder.iterdir() if one.name.isdigit()}


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110  # other processes tell nobody
            await asyncio.sleep(0.01)


async def test_a_worker_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "PAUSE_S_MIN", 0.001)
    caplog.set_level(logging.INFO)
    crew = patient(tmp_path)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for number in (1, 2):
            group.create_task(crew.keep_alive(number))
        await until(lambda: len(pids(tmp_path)) == 2)
        victim = next(pid for pid, number in pids(tmp_path).items() if number == "1")
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(pids(tmp_path)) == 3)
        crew.stop()
    assert sorted(pids(tmp_path).values()) == ["1", "1", "2"]
    assert crew.ended_well
    assert "worker 1 ended with signal SIGKILL; the next one starts in" in caplog.text


async def test_a_worker_that_fails_to_stop_well_is_told_by_the_exit_code(tmp_path: Path) -> None:
    crew = patient(tmp_path, code=3)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(crew.keep_alive(1))
        await until(lambda: len(pids(tmp_path)) == 1)
        crew.stop()
    assert not crew.ended_well


async def test_a_stop_during_the_pause_waits_for_no_new_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "PAUSE_S_MIN", 3_600.0)
    monkeypatch.setattr(workers, "PAUSE_S_MAX", 3_600.0)
    crew = Workers([sys.executable, "-c", "raise SystemExit(1)"])
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(crew.keep_alive(1))
        await until(lambda: "ended with exit code 1" in caplog.text)
        crew.stop()


async def test_a_worker_whose_app_is_wrong_ends_them_all_and_none_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The first that makes the folder is wrong, as soon as the other one is ready.
    wrong = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "wrong").mkdir()
except FileExistsError:
    pass
else:
    while not any(one.name.isdigit() for one in folder.iterdir()):
        time.sleep(0.01)
    sys.exit(2)
"""
    command = [sys.executable, "-c", wrong + PATIENT, str(tmp_path), "0"]
    async with asyncio.timeout(WAIT_S):
        assert await workers.supervise(command, 2) == 2
    assert len(pids(tmp_path)) == 1
    assert "its app cannot run as it is" in caplog.text
    assert "the next one starts" not in caplog.text


def test_an_app_that_asks_for_what_is_wrong_ends_with_two_and_says_why(
    shop: Path, address: str
) -> None:
    (shop / "shop.py").write_text(
        SHOP + "\n\n@app.on_start\nasync def begin():\n    await app.publish('', 'no topic')\n"
    )
    process = start(shop, address)
    try:
        assert process.wait(WAIT_S) == 2
    finally:
        process.kill()
        process.communicate()
    assert "shop:app cannot run: " in (shop / "run.lines").read_text()


def test_a_group_with_other_settings_ends_all_workers_with_its_own_code_and_apply_changes_it(
    shop: Path, address: str
) -> None:
    changed = SHOP.replace(
        '"orders", group="billing"', '"sums", group="ledger", retry="1s,2s,3s,4s"'
    )
    (shop / "shop.py").write_text(changed)
    with connect_sync(address) as mq:
        mq.create_group("ledger", "sums", retry="1s,2s,3s")
    ended = run_to_end(shop, "shop:app", "--workers", "2", "--address", address)
    assert ended.returncode == 7
    assert "run `onward group change ledger --retry 1s,2s,3s,4s`" in ended.stderr
    assert "onward run shop:app --apply" in ended.stderr
    assert "the next one starts" not in ended.stderr
    process = start(shop, address, "--apply")
    try:
        with connect_sync(address) as mq:
            mq.publish("sums", "applied")
        assert wait_for_bill(address, "mail") == f"applied by {process.pid}"
    finally:
        process.kill()
        process.communicate()
    with connect_sync(address) as mq:
        assert mq.group("ledger").retry.limit == 5


async def test_workers_that_do_not_listen_are_ended(tmp_path: Path) -> None:
    deaf = PATIENT.replace("lambda *_: sys.exit(int(sys.argv[2]))", "signal.SIG_IGN")
    crew = Workers([sys.executable, "-c", deaf, str(tmp_path)])
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(crew.keep_alive(1))
        await until(lambda: len(pids(tmp_path)) == 1)
        crew.stop()
        crew.kill()
    assert not crew.ended_well


async def test_signals_reach_workers_through_their_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PATIENT, str(tmp_path), "0"]
    async with asyncio.timeout(WAIT_S):
        supervising = asyncio.ensure_future(workers.supervise(command, 2))
        await until(lambda: len(pids(tmp_path)) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await supervising == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
