"""The load beside a benchmark is real, and ends with it."""

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from onward.bench.busy import LOADS, busy
from onward.cli.bench import command
from onward.errors import Unavailable


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _wait_until_used(pids: list[int], *, ticks: int) -> None:
    give_up_at = time.monotonic() + 30
    while any(_cpu_ticks(pid) < ticks for pid in pids):
        assert time.monotonic() < give_up_at, "a child of the load does nothing"
        time.sleep(0.01)


def test_each_core_computes_until_the_block_ends(tmp_path: Path):
    with busy("cpu", folder=tmp_path) as children:
        assert len(children) == os.cpu_count()
        _wait_until_used(children, ticks=10)
    assert not any(map(_is_running, children))


def test_a_mebibyte_is_synced_until_the_block_ends(tmp_path: Path):
    with busy("disk", folder=tmp_path) as children:
        give_up_at = time.monotonic() + 30
        while not [one for one in tmp_path.glob("*/synced") if one.stat().st_size == 1 << 20]:
            assert time.monotonic() < give_up_at, "nothing is written"
            time.sleep(0.01)
    assert not any(map(_is_running, children))
    assert not list(tmp_path.iterdir())


def test_a_load_ends_when_the_benchmark_raises(tmp_path: Path):
    with pytest.raises(KeyError), busy("cpu", folder=tmp_path) as children:
        raise KeyError("the benchmark failed")
    assert not any(map(_is_running, children))


def test_a_load_that_does_not_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LOADS, "cpu", "raise SystemExit(3)")
    load = busy("cpu", folder=tmp_path)
    for pid in load.__enter__():
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(Unavailable, match="status 3"):
        load.__exit__(None, None, None)


def test_only_delay_lateness_has_a_load():
    result = CliRunner().invoke(command, ["publish-sync", "--busy", "cpu"])
    assert result.exit_code == 2
    assert "delay-lateness only" in result.output
