"""`onward demo` is the first thing a new user runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.e2e
def test_the_demo_keeps_its_promises_and_leaves_nothing_behind(
    tmp_path: Path,
):
    # As a program of its own: it starts a Spark session, of which a process has only one.
    done = subprocess.run(
        [sys.executable, "-c", "from onward.cli import main; main()", "demo"],
        env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    assert "published 100,000 messages" in out
    assert "invoices/3 failed, was retried" in out
    assert "so it is a dead letter of billing" in out
    assert "cancelled bob's by its business key" in out
    assert "fired in order, none early" in out
    assert f"  400  {'#' * 40}" in out
    assert "killed the broker" in out
    assert "900 greetings still wait, bob's reminder stays cancelled" in out
    assert "it was delivered to billing alone" in out
    assert "onward explain invoices/3" in out
    assert "after 3 attempts: the bank is closed" in out
    assert "redriven: to be delivered again" in out
    assert "archived readings and invoices: 100,007 messages" in out
    assert "read lake and live log as one table: 100,002 offsets" in out
    assert "0 missing, 0 repeated" in out
    assert "readings      100,002" in out
    assert "all of it held" in out
    assert err == ""
    assert list(tmp_path.iterdir()) == []
