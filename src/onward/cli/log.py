"""`onward log`: the log of a stopped broker, for people: check, dump, repair.

    check    reads everything and says what is wrong; changes nothing          exit 5 when damaged
    dump     prints entries, one line each; changes nothing
    repair   mends without loss; with --accept-loss puts gaps where entries are damaged

They take the lock of the folder, so that no broker changes it meanwhile; --running reads without
it, and then the end of the log is on the move. On a file system that is mounted read-only, check
and dump share the lock file if there is one, and else go on without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import click
import msgspec

from onward.broker.catalogue import TopicRecord
from onward.broker.state import State
from onward.cli import ExitCode
from onward.cli.options import json_option
from onward.cli.output import counted, print_json, print_line, print_rows, progress
from onward.cli.params import confirm
from onward.cli.read import as_line, as_record
from onward.durations import format_instant
from onward.errors import Corruption, UnknownTopic
from onward.log.check import Check, Ending, SegmentReport
from onward.log.checkpoint import read_checkpoints
from onward.log.disk import OsDisk, ReadOnlyDisk
from onward.log.inspect import Damage, Lost, Walk, lock_folder, require_log
from onward.log.repair import losses, needs_repair, reopen, repair, require_repairable
from onward.message.batch import RAW_BYTES_MAX, batches_of, decode_batch, messages_of
from onward.message.entry import CARRIED_TOPIC, Entry, Kind, entry_heads
from onward.message.message import Message

_COLUMNS = ["segment", "entries", "messages", "gaps", "bytes", "index", "state"]
_KINDS = {int(kind): kind.name.lower().replace("_", " ") for kind in Kind}
_WITH_JSON = (
    Kind.TOPIC_CREATED, Kind.TOPIC_CHANGED, Kind.TOPIC_DELETED, Kind.GROUP_CHANGED,
    Kind.RECURRING_CHANGED, Kind.RETAINED, Kind.LINEAGE,
)  # fmt: skip

_running_option = click.option(
    "--running", is_flag=True, help="Read without the lock, while a broker uses the folder."
)
_folder_argument = click.argument("folder", callback=lambda _ctx, _param, text: _plain(text))


def _plain(folder: str) -> str:
    return folder.rstrip("/") or "/"


@click.group()
def command() -> None:
    """Check, show and repair the log of a stopped broker.

    Example:  onward log check ./onward-data
    """


@command.command()
@_folder_argument
@_running_option
@json_option
@click.pass_context
def check(ctx: click.Context, *, folder: str, running: bool, as_json: bool) -> None:
    """Verify every entry of every segment, and the files beside them.

    Example:  onward log check ./onward-data
    """
    disk = ReadOnlyDisk()
    with _kept_still(disk, folder, running=running):
        found = _check(disk, folder)
        names = topic_names(disk, folder) | found.names
    _show(found, names, as_json=as_json)
    if found.is_damaged:
        if not as_json:
            print_line(f"the log is damaged: see 'onward log repair {folder}'")
        ctx.exit(ExitCode.CORRUPTION)


@command.command()
@_folder_argument
@click.option(
    "--segment", type=int, metavar="INDEX", help="Only the segment that begins with this."
)
@click.option("--from-index", type=int, default=0, metavar="N", help="Begin with this index.")
@click.option("--topic", metavar="TOPIC", help="Only entries of this topic: its name or number.")
@click.option("--bodies", is_flag=True, help="Print the messages of each entry as well.")
@_running_option
@json_option
def dump(
    *,
    folder: str,
    segment: int | None,
    from_index: int,
    topic: str | None,
    bodies: bool,
    running: bool,
    as_json: bool,
) -> None:
    """Print the entries of the log, one line each.

    Example:  onward log dump ./onward-data --topic orders --bodies
    """
    disk = ReadOnlyDisk()
    with _kept_still(disk, folder, running=running):
        dumping = _Dumping(topic_names(disk, folder), bodies=bodies, as_json=as_json)
        walk = Walk(disk, folder, from_index=from_index or segment or 0)
        for one in walk.segments:
            if segment is not None and one.first_index != segment:
                continue
            for step in walk.steps(one):
                if isinstance(step, Damage):
                    dumping.print_damage(step, is_missing=one is walk.missing)
                elif step[0].index >= from_index:
                    dumping.print_entry(*step, only=topic)
            one.close()
    dumping.require_topic(topic)


@command.command("repair")
@_folder_argument
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Replace what is damaged or missing by gaps: what was there is lost.",
)
@click.pass_context
def repair_log(ctx: click.Context, *, folder: str, yes: bool, accept_loss: bool) -> None:
    """Repair what can be repaired; what would be lost is shown first.

    Example:  onward log repair ./onward-data
    """
    disk = OsDisk()
    with _locked(disk, folder):
        found = _check(disk, folder)
        if not needs_repair(found):
            print_line("nothing to repair")
            return
        names = topic_names(disk, folder) | found.names
        _show(found, names, as_json=False)
        lost = bool(losses(found) or found.missing)
        require_repairable(found)
        _say_endings(found.endings, names)
        if lost and not accept_loss:
            print_line("with --accept-loss what is damaged is replaced by gaps, and lost for good")
        sys.stdout.flush()
        confirm(_question(found, lost=lost and accept_loss), yes=yes)
        for sentence in repair(disk, found, accept_loss=accept_loss):
            print_line(sentence)
    if lost and not accept_loss:
        print_line(
            "damaged entries are left as they are: they are never served, "
            "and a broker that must read them to start will not"
        )
        ctx.exit(ExitCode.CORRUPTION)
    _verify(disk, folder)


def _question(found: Check, *, lost: bool) -> str:
    if not lost:
        return f"repair {found.folder}?"
    if not found.endings:
        return f"repair {found.folder} and give up what is damaged?"
    last_index = found.endings[0].last_index
    return f"repair {found.folder}, give up what is damaged, and end the log at index {last_index}?"


def _say_endings(endings: list[Ending], names: dict[int, str]) -> None:
    """Say what giving up the end of a log costs: more than what was in it."""
    for ending in endings:
        print_line(
            f"{ending.name} was the newest segment: without it the log ends at index "
            f"{ending.last_index}. Whatever came after that is lost, and its offsets and event ids "
            f"are given again to other messages: restore the file from a copy if there is one"
        )
        for line in _offsets(ending.lost, names):
            print_line(line)


def _verify(disk: OsDisk, folder: str) -> None:
    """Open the log as a broker would, and read all of it once more."""
    next_index = reopen(disk, folder)
    with _locked(disk, folder):
        found = _check(disk, folder)
    if found.is_damaged:
        raise Corruption(f"{folder} is still damaged: {'; '.join(found.problems) or 'run check'}")
    print_line(f"repaired: the log is sound, its next index is {next_index}")


@contextmanager
def _kept_still(disk: ReadOnlyDisk, folder: str, *, running: bool) -> Iterator[None]:
    """Keep brokers away from a folder that is only read, unless `running`."""
    if running:
        require_log(disk, folder)
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(disk, folder))
        except FileNotFoundError:
            click.echo(
                f"note: {folder!r} is on a read-only file system and has no lock file: it is read "
                "without a lock",
                err=True,
            )
        yield


@contextmanager
def _locked(disk: OsDisk, folder: str) -> Iterator[None]:
    unlock = lock_folder(disk, folder)
    try:
        yield
    finally:
        unlock()


def _check(disk: OsDisk, folder: str) -> Check:
    found = Check(disk, folder)
    with progress("checking", total=found.bytes) as advance:
        found.run(advance=advance)
    return found


def topic_names(disk: OsDisk, folder: str) -> dict[int, str]:
    """Return the names of topics that the newest checkpoint knows, by number."""
    for checkpoint in read_checkpoints(disk, folder):
        if checkpoint.state:
            catalogue = State.load(checkpoint.state).catalogue
            ended = {ending.number: ending.name for ending in catalogue.ended}
            return ended | {number: topic.name for number, topic in catalogue.by_number.items()}
    return {}


# --- check -------------------------------------------------------------------------------------


def _show(found: Check, names: dict[int, str], *, as_json: bool) -> None:
    if as_json:
        for report in found.reports:
            print_json({**asdict(report), "state": _state(report)})
        print_json(
            {"folder": found.folder, "damaged": found.is_damaged, "problems": found.problems}
        )
        return
    rows = [
        {**asdict(report), "segment": report.path.rsplit("/", 1)[-1], "state": _state(report)}
        for report in found.reports
    ]
    print_rows(rows, columns=_COLUMNS)
    for report in found.reports:
        for damage in report.damages:
            for line in _describe(damage, names, is_missing=report.is_missing):
                print_line(line)
    nameless = sorted(found.topics - names.keys())
    if nameless and losses(found):
        print_line(
            f"topics without a name: {', '.join(map(str, nameless))}; when their creation is in "
            "what is lost, the rest of their messages can no longer be reached either"
        )
    for problem in found.problems:
        print_line(problem)


def _state(report: SegmentReport) -> str:
    if report.is_missing:
        return "missing"
    if report.is_damaged:
        return "damaged"
    return "torn tail" if report.damages else "ok"


def _describe(damage: Damage, names: dict[int, str], *, is_missing: bool = False) -> Iterator[str]:
    place = f"{damage.path.rsplit('/', 1)[-1]}: bytes {damage.position} to {damage.end}"
    if damage.kind == "torn":
        yield f"{place} were never confirmed; the next start saves them aside and cuts them"
    elif damage.kind == "trailing":
        yield f"{place} belong to no entry; nothing is lost with them"
    else:
        last = damage.next_index - 1
        span = f"entry {last}" if damage.entries == 1 else f"entries {damage.first_index} to {last}"
        yield f"{place} are {'missing' if is_missing else 'damaged'}; lost: {span}"
    yield from _offsets(damage.lost, names)


def _offsets(given: list[Lost], names: dict[int, str]) -> Iterator[str]:
    for lost in given:
        name = names.get(lost.topic, f"number {lost.topic}")
        yield f"    topic {name}: offsets {lost.first_offset} to {lost.end_offset - 1}"


# --- dump --------------------------------------------------------------------------------------


class _Dumping:
    """Prints entries; learns the names of topics on the way."""

    def __init__(self, names: dict[int, str], *, bodies: bool, as_json: bool) -> None:
        self._names = names
        self._bodies = bodies
        self._as_json = as_json
        self._seen: set[int] = set()
        """The numbers of the topics whose entries were there."""

    def require_topic(self, only: str | None) -> None:
        """Raise when the wanted topic has neither a name nor an entry in what was read."""
        numbers = self._seen | self._names.keys()
        if only is not None and only not in {*self._names.values(), *map(str, numbers)}:
            raise UnknownTopic(f"no topic {only!r} is in what was read of this log")

    def print_entry(self, entry: Entry, body: memoryview, *, only: str | None) -> None:
        """Print one entry, if it is of the wanted topic."""
        if entry.kind == Kind.TOPIC_CREATED:
            record = msgspec.json.decode(body, type=TopicRecord)
            self._names[record.number] = record.name
        number = entry.topic % CARRIED_TOPIC
        name = self._names.get(number, "")
        self._seen.add(number)
        if only is not None and only not in (name, str(number)):
            return
        said = _said(entry, body)
        messages = self._messages(entry, body, name)
        if self._as_json:
            listed = [as_record(message) for message in messages]
            print_json(_record(entry, name) | said | ({"messages": listed} if listed else {}))
            return
        print_line(_line(entry, name, said))
        for message in messages:
            sys.stdout.write(f"    {as_line(message)}\n")

    def print_damage(self, damage: Damage, *, is_missing: bool) -> None:
        """Print where entries should be and are not."""
        if self._as_json:
            print_json({"damage": asdict(damage)})
            return
        for line in _describe(damage, self._names, is_missing=is_missing):
            print_line(line)

    def _messages(self, entry: Entry, body: memoryview, name: str) -> Iterator[Message]:
        if self._bodies and entry.kind == Kind.CARRIED:
            for head in entry_heads(body):
                end = head.body_position + head.body_bytes
                yield from self._messages(head, body[head.body_position : end], name)
        if not self._bodies or entry.kind != Kind.MESSAGES:
            return
        offset = entry.base_offset
        for start, header in batches_of(body, 0, len(body)):
            batch = decode_batch(body, start, raw_bytes_max=RAW_BYTES_MAX)
            yield from messages_of(
                batch, topic=name or str(entry.topic), base_offset=offset,
                published_at_ms=entry.time_ms, event_id=entry.index,
            )  # fmt: skip
            offset += header.count


def _said(entry: Entry, body: memoryview) -> dict[str, Any]:
    """Return what an entry says that is not about messages."""
    if entry.kind in _WITH_JSON:
        return {"says": msgspec.json.decode(body)}
    return {}


def _record(entry: Entry, name: str) -> dict[str, object]:
    fields: dict[str, object] = entry._asdict()
    return fields | {"kind": _kind(entry), "name": name}


def _line(entry: Entry, name: str, said: dict[str, Any]) -> str:
    text = f"{entry.index:>8}  {format_instant(entry.time_ms)}  {_kind(entry):<13}"
    if entry.kind == Kind.MESSAGES:
        last = entry.base_offset + entry.count - 1
        offsets = f"{entry.base_offset}" if entry.count == 1 else f"{entry.base_offset} to {last}"
        text += f"  {name or entry.topic}/{offsets}"
    elif entry.kind == Kind.CARRIED:
        text += f"  {name or entry.topic - CARRIED_TOPIC}: {counted(entry.count, 'message')}"
        text += f" from {entry.base_offset} on"
    elif said:
        text += f"  {msgspec.json.encode(said['says']).decode()}"
    return f"{text}  ({entry.length} bytes at {entry.position})"


def _kind(entry: Entry) -> str:
    return _KINDS.get(entry.kind, f"kind {entry.kind}")
