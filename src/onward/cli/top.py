"""`onward top`: what a broker does right now: rates, backlogs, members, leases that ran out.

    sample ── interval ── sample ──▶ rates ──▶ screen ──▶ again

Rates are differences of two samples, so the first screen comes after one interval. On a terminal
the screen is drawn anew in place, and `q` ends; into a pipe one after the other is written. With
--once there is one.
"""

from __future__ import annotations

import io
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import msgspec

import onward
from onward.cli.groups import age, position_row, state_of
from onward.cli.options import json_option
from onward.cli.output import is_terminal, print_json, print_line, print_rows
from onward.cli.params import DURATION, Connect, client_options
from onward.cli.status import rounded_size
from onward.clock import SystemClock
from onward.protocol.operations.groups import GroupDescription
from onward.protocol.operations.topics import TopicDescription

_TOPICS = ["topic", "messages", "published/s"]
_GROUPS = [
    "group", "state", "members", "backlog", "oldest", "leased", "dead", "expired", "done/s",
]  # fmt: skip
_MEMBERS = ["member", "group", "state", "leased", "acked", "expired", "acked/s"]
_POSITIONS = ["member", "group", "state", "topic", "offset", "backlog", "oldest", "done/s"]
_CLEAR = "\x1b[H\x1b[2J"
_QUIT = (b"q", b"Q", b"\x04", b"")


class Sample(msgspec.Struct, frozen=True):
    """What the broker said at one moment."""

    at_s: float
    status: Mapping[str, Any]
    topics: Sequence[TopicDescription]
    groups: Sequence[GroupDescription]


class View(msgspec.Struct, frozen=True):
    """What is shown: rows, ranked; made of two samples."""

    node: str
    totals: str
    topics: list[dict[str, object]]
    groups: list[dict[str, object]]
    members: list[dict[str, object]]
    positions: list[dict[str, object]]
    warnings: list[str]


@click.command()
@click.option("--once", is_flag=True, help="Show one screen and end, for scripts.")
@click.option(
    "--interval", "interval_ms", type=DURATION, default="1s", metavar="DURATION",
    help="Time between two screens. [default: 1s]",
)  # fmt: skip
@click.option(
    "--rows", "rows_max", type=click.IntRange(1), default=15, metavar="N",
    help="Rows of each table. [default: 15]",
)  # fmt: skip
@json_option
@client_options
def command(
    *, connect: Connect, once: bool, interval_ms: int, rows_max: int, as_json: bool
) -> None:
    """Show live what a broker does: rates, backlogs, members, leases that ran out.

    Example:  onward top --interval 5s
    """
    with connect() as mq:
        before = _sample(mq)
        is_live = not once and is_terminal()
        with _keys(is_live) as wait_for_quit:
            while not wait_for_quit(interval_ms / 1_000):
                now = _sample(mq)
                view = make_view(before, now, now_ms=SystemClock().now_ms(), rows_max=rows_max)
                _show(view, as_json=as_json, clear=is_live)
                if once:
                    return
                before = now


@contextmanager
def _keys(is_live: bool) -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for a time, and returns True as soon as `q` is pressed."""
    if not is_live or not sys.stdin.isatty():
        yield _sleep
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: _is_quit(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _is_quit(descriptor: int, seconds: float) -> bool:
    deadline_s = time.monotonic() + seconds
    while (left_s := deadline_s - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left_s)[0] and os.read(descriptor, 64) in _QUIT:
            return True
    return False


def _sample(mq: onward.SyncClient) -> Sample:
    return Sample(time.monotonic(), mq.status(), mq.topics(), mq.groups())


def make_view(before: Sample, now: Sample, *, now_ms: int, rows_max: int) -> View:
    """Return what two samples show, the busiest first."""
    elapsed_s = max(now.at_s - before.at_s, 1e-3)
    return View(
        node=str(now.status.get("node", "")),
        totals=_totals(before, now, elapsed_s),
        topics=_topic_rows(before, now, elapsed_s)[:rows_max],
        groups=_group_rows(before, now, elapsed_s, now_ms)[:rows_max],
        members=_member_rows(before, now, elapsed_s)[:rows_max],
        positions=_position_rows(before, now, elapsed_s, now_ms)[:rows_max],
        warnings=_warnings(before, now),
    )


def _totals(before: Sample, now: Sample, elapsed_s: float) -> str:
    """Return one line about the whole broker: rates, what waits, and the disk."""
    ends = {topic.number: topic.next_offset for topic in before.topics}
    published = sum(topic.next_offset - ends.get(topic.number, 0) for topic in now.topics)
    finished = sum(map(_finished, now.groups)) - sum(map(_finished, before.groups))
    status = now.status
    return (
        f"published {_rate(published, elapsed_s):,}/s   done {_rate(finished, elapsed_s):,}/s   "
        f"backlog {sum(group.backlog for group in now.groups):,}   "
        f"dead {sum(group.dead for group in now.groups):,}   "
        f"scheduled {status.get('scheduled', 0):,} ({status.get('due_now', 0):,} due)   "
        f"disk free {rounded_size(int(status.get('disk_free_bytes', 0)))}"
    )


def _topic_rows(before: Sample, now: Sample, elapsed_s: float) -> list[dict[str, object]]:
    """Topics ranked by volume: what comes in now, then what is kept."""
    ends = {topic.number: topic.next_offset for topic in before.topics}
    rows: list[dict[str, object]] = [
        {
            "topic": topic.topic, "messages": topic.messages,
            "published/s": _rate(topic.next_offset - ends.get(topic.number, 0), elapsed_s),
        }
        for topic in now.topics
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row["published/s"], row["messages"]), reverse=True)


def _group_rows(
    before: Sample, now: Sample, elapsed_s: float, now_ms: int
) -> list[dict[str, object]]:
    """Groups ranked by what waits for them."""
    finished = {group.group: _finished(group) for group in before.groups}
    rows: list[dict[str, object]] = [
        {
            "group": group.group, "state": state_of(group),
            "members": group.member_count, "backlog": group.backlog,
            "oldest": age(group.oldest_at_ms, now_ms=now_ms),
            "leased": sum(share.leased for share in group.topics),
            "dead": group.dead, "expired": group.expired_leases,
            "done/s": _rate(
                _finished(group) - finished.get(group.group, _finished(group)), elapsed_s
            ),
        }
        for group in now.groups
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row["backlog"], row["done/s"]), reverse=True)


def _member_rows(before: Sample, now: Sample, elapsed_s: float) -> list[dict[str, object]]:
    acked = {(g.group, one.member): one.acked for g in before.groups for one in g.members}
    rows: list[dict[str, object]] = [
        {
            "member": one.member, "group": group.group, "state": one.state,
            "leased": one.leased, "acked": one.acked, "expired": one.expired,
            "acked/s": _rate(one.acked - acked.get((group.group, one.member), 0), elapsed_s),
        }
        for group in now.groups
        for one in group.members
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row["acked/s"], row["leased"]), reverse=True)


def _position_rows(
    before: Sample, now: Sample, elapsed_s: float, now_ms: int
) -> list[dict[str, object]]:
    """Members of broadcasts ranked by what is left for them; those that nobody knows last."""
    offsets = {
        (group.group, one.member, one.topic): one.offset
        for group in before.groups
        for one in group.positions
    }
    listed = [(group.group, one) for group in now.groups for one in group.positions]
    listed.sort(key=lambda row: -1 if row[1].backlog is None else row[1].backlog, reverse=True)
    rows = []
    for name, one in listed:
        last = offsets.get((name, one.member, one.topic), one.offset)
        rate = None if one.offset is None or last is None else _rate(one.offset - last, elapsed_s)
        rows.append(position_row(one, now_ms=now_ms) | {"group": name, "done/s": rate})
    return rows


def _warnings(before: Sample, now: Sample) -> list[str]:
    """Say which groups lost leases since the last sample: members that take and do not answer."""
    expired = {group.group: group.expired_leases for group in before.groups}
    more = {group.group: group.expired_leases - expired.get(group.group, 0) for group in now.groups}
    return [
        f"group {name}: {count:,} {'lease' if count == 1 else 'leases'} ran out"
        for name, count in more.items()
        if count > 0
    ]


def _finished(group: GroupDescription) -> int:
    """Return a number that grows by one with every message that is finished."""
    return sum(share.end - share.backlog for share in group.topics)


def _rate(count: int, elapsed_s: float) -> float:
    # A topic that was deleted and made again begins at 0, and a reset makes finished ones less.
    return round(max(0, count) / elapsed_s, 1)


def _show(view: View, *, as_json: bool, clear: bool) -> None:
    if as_json:
        print_json(view)
        return
    if clear and isinstance(sys.stdout, io.TextIOWrapper):
        # The whole screen is one write, so that it does not flicker.
        sys.stdout.reconfigure(line_buffering=False)
        sys.stdout.write(_CLEAR)
    moment = time.strftime("%H:%M:%S", time.gmtime())
    print_line(f"onward top   {view.node}   {moment} UTC{'   q quits' if clear else ''}")
    print_line(view.totals)
    for rows, columns in (
        (view.topics, _TOPICS), (view.groups, _GROUPS), (view.members, _MEMBERS),
        (view.positions, _POSITIONS),
    ):  # fmt: skip
        if rows:
            print_line("")
            print_rows(rows, columns=columns)
    for warning in view.warnings:
        print_line(f"warning: {warning}")
    sys.stdout.flush()
