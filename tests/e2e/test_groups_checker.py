"""The checker of the torture finds each promise that is broken, and nothing in what is right."""

from pathlib import Path

import pytest

from onward.delivery.trace import Trace

from .members import MemberProcess, check_member
from .running import BrokerProcess

RIGHT = "joined active\ngot 0 1\ngot 1 1\ndone 0\ngot 2 1\njoined active\ngot 1 2\ngot 2 1\n"


def row(did: str, start: int, end: int) -> Trace:
    return Trace(did=did, at_ms=0, group="G", topic="T", ranges=((start, end),))


ROWS = [row("acked", 0, 1), row("lost", 1, 2), row("acked", 1, 3)]


def check(folder: Path, notes: str, rows: list[Trace], *, broker_kills: int = 1) -> None:
    broker = BrokerProcess(folder / "log", log_path=folder / "log.txt")
    member = MemberProcess(broker, group="G", topic="T", member="ann", folder=folder)
    member.notes.write_text(notes)
    check_member(member, rows, stored=3, broker_kills=broker_kills)


def test_what_is_right_passes_also_when_a_kill_cut_a_line(tmp_path: Path) -> None:
    check(tmp_path, RIGHT, ROWS)
    check(tmp_path, RIGHT.replace("got 2 1\njoined", "got 2 1\ngot 1joined"), ROWS)


@pytest.mark.parametrize(
    ("notes", "rows", "kills", "found"),
    [
        (RIGHT.replace("got 2 1\n", ""), ROWS, 1, "1 are lost"),
        (RIGHT, ROWS, 0, "2 came 2 times"),
        (RIGHT, [*ROWS, row("acked", 0, 1)], 1, "finished twice"),
        (RIGHT, [*ROWS, row("dead", 2, 3)], 1, "dead"),
        (RIGHT + "got 0 1\n", ROWS, 1, "0 came again after its ack"),
        (RIGHT.replace("got 1 2", "got 1 3"), ROWS, 1, "attempt=3"),
        (RIGHT, ROWS[:2], 1, "2 are not finished"),
    ],
    ids=["lost", "unexplained", "acked twice", "dead", "after its ack", "attempt", "unfinished"],
)
def test_a_broken_promise_is_found(
    tmp_path: Path, notes: str, rows: list[Trace], kills: int, found: str
) -> None:
    with pytest.raises(AssertionError, match=found):
        check(tmp_path, notes, rows, broker_kills=kills)
