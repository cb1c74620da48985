"""Rows on a terminal: they fit its width, and no word is broken."""

import io
import sys
from collections.abc import Callable

import pytest

from onward.cli.output import print_rows


class Screen(io.StringIO):
    """A terminal that keeps what was written."""

    def isatty(self) -> bool:
        return True


Shown = Callable[..., list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Return the lines that rows are on a terminal."""

    def show(*rows: dict[str, object], columns: list[str], width: int = 80) -> list[str]:
        screen = Screen()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", screen)
            patched.setenv("TERM", "xterm")
            patched.setenv("COLUMNS", str(width))
            print_rows(rows, columns=columns)
        return screen.getvalue().splitlines()

    return show


def test_on_a_terminal_the_longest_text_is_cut_and_nothing_is_wrapped(shown: Shown):
    columns = [
        "group", "mode", "state", "topics", "members", "backlog", "oldest", "leased", "waiting",
        "dead",
    ]  # fmt: skip
    row = {
        "group": "billing-share", "mode": "exclusive", "state": "active",
        "topics": ",".join(f"orders-{n}" for n in range(20)), "members": 1, "backlog": 123_456,
        "oldest": "59m", "leased": 7, "waiting": 0, "dead": 0,
    }  # fmt: skip
    heading, line = shown(row, columns=columns)
    assert max(len(heading), len(line)) <= 80
    cells = line.split()
    assert cells[:3] == ["billing-share", "exclusive", "active"]
    assert cells[3].startswith("orders-")
    assert cells[3].endswith("…")
    assert cells[4:] == ["1", "123456", "59m", "7", "0", "0"]


def test_moments_and_ids_are_whole_on_a_terminal(shown: Shown):
    columns = ["id", "fires", "topic", "key", "unique", "bytes"]
    moment = "2030-01-01T00:00:00.000Z"
    row = {
        "id": "@schedule/123", "fires": moment, "topic": "reminders-of-all-customers",
        "key": "customer-0123456789", "unique": "order-0123456789", "bytes": 12,
    }  # fmt: skip
    heading, line = shown(row, columns=columns)
    assert heading.split()[:5] == ["ID", "FIRES", "TOPIC", "KEY", "UNIQUE"]
    assert len(line) <= 80
    assert line.split()[:2] == ["@schedule/123", moment]


def test_what_fits_is_as_in_a_pipe(shown: Shown):
    lines = shown({"topic": "orders", "messages": 7}, columns=["topic", "messages"])
    assert lines == ["TOPIC   MESSAGES", "orders         7"]


def test_wide_characters_count_twice(shown: Shown):
    lines = shown({"a": "注文", "b": 1}, {"a": "abcd", "b": 2}, columns=["a", "b"])
    assert lines == ["A     B", "注文  1", "abcd  2"]


def test_settings_are_shown_whole(shown: Shown):
    lines = shown({"name": "tenants", "value": "x" * 200}, columns=["name", "value"])
    assert lines[1].endswith("x" * 200)


def test_a_huge_cell_and_a_tiny_terminal_are_no_trouble(shown: Shown):
    row = {"a": "x" * 9, "b": "y" * 1_000_000, "c": 1}
    assert shown(row, columns=["a", "b", "c"], width=5)[1] == "xxxxxxxxx  yyy…  1"
    assert shown(columns=["a", "b"], width=5) == ["A  B"]
