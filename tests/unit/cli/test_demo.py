"""`onward demo` is the first thing a new user runs."""

import tempfile
from pathlib import Path

import pytest

from onward.cli import ExitCode, run


@pytest.mark.e2e
def test_the_demo_keeps_its_promises_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(["demo"]) == ExitCode.OK
    out, err = capsys.readouterr()
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
    assert "all of it held" in out
    assert err == ""
    assert list(tmp_path.iterdir()) == []
