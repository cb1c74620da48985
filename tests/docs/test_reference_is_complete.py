"""The reference names all that there is: methods and arguments, requests, fields, bytes."""

import inspect
import re
from struct import Struct

import pytest

import onward
from onward.broker import broker
from onward.broker.broker import Broker
from onward.broker.housekeeping import SILENT_HEARTBEATS_MAX
from onward.broker.operations.dispatch import RUNNING_MAX, RUNNING_PER_REQUESTER_MAX
from onward.client.reader import ReadBatch
from onward.log import checkpoint, index
from onward.log.memory_disk import MemoryDisk
from onward.message import entry
from onward.message.entry import encode_gap
from onward.protocol import frames
from onward.protocol.operations import OPERATIONS
from onward.settings import LogSettings, Settings

from .examples import ROOT

REFERENCE = ROOT / "docs" / "reference"
PYTHON = (REFERENCE / "python.md").read_text(encoding="utf-8")
PROTOCOL = (REFERENCE / "protocol.md").read_text(encoding="utf-8")
OPERATIONS_PAGE = (REFERENCE / "operations.md").read_text(encoding="utf-8")
FORMAT = (REFERENCE / "format.md").read_text(encoding="utf-8")

CLASSES = [onward.Client, onward.SyncClient, onward.Receipt, onward.BatchReceipt]
CLASSES += [onward.Message, onward.TopicDescription, ReadBatch]
TUPLE_METHODS = {"index"}


def public_names(kind: type) -> list[str]:
    names = [name for name in dir(kind) if not name.startswith("_")]
    return [name for name in names if not (issubclass(kind, tuple) and name in TUPLE_METHODS)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_public_method_and_attribute_is_in_the_reference(kind: type):
    missing = [name for name in public_names(kind) if not re.search(rf"`(await )?{name}\b", PYTHON)]
    assert not missing


@pytest.mark.parametrize("name", public_names(onward.Client))
def test_every_argument_of_the_client_is_in_the_reference(name: str):
    row = re.search(rf"`(?:await )?{name}\(([^)]*)\)", PYTHON)
    assert row, f"{name} has no signature in the reference"
    written = [part.partition("=")[0].strip() for part in row[1].split(",")]
    arguments = list(inspect.signature(getattr(onward.Client, name)).parameters)[1:]
    assert [part for part in written if part not in ("", "*")] == arguments


def test_both_clients_have_the_same_methods():
    assert public_names(onward.Client) == public_names(onward.SyncClient)


def test_every_argument_of_connect_is_in_the_reference():
    for function in (onward.connect, onward.connect_sync):
        for argument in inspect.signature(function).parameters:
            assert f"| `{argument}` |" in PYTHON


async def test_every_request_and_what_it_replies_is_in_the_reference():
    settings = Settings(log=LogSettings(folder="log", preallocate_bytes=0, disk_reserve_bytes=0))
    broker = await Broker.open(settings, disk=MemoryDisk())
    for name in broker.operations.names:
        assert f"\n### {name}\n" in OPERATIONS_PAGE, f"run `make docs`: {name} is not on the page"
    # Operations that are not in the table yet have rows by hand.
    old = getattr(getattr(broker, "requests", None), "operations", {})
    for name in old.keys() - OPERATIONS.keys():
        assert f"\n| {name} |" in PROTOCOL
    for field in broker.status():
        assert f"\n| `{field}` |" in OPERATIONS_PAGE
    await broker.stop()


def test_the_limits_of_requests_are_those_that_the_broker_has():
    limits = f"{RUNNING_PER_REQUESTER_MAX:,} on a connection, {RUNNING_MAX:,} on a node"
    assert limits in PROTOCOL


SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i64": 8, "4 bytes": 4}
TABLES = re.findall(r"\| at \| field \| type \| meaning \|\n\|[-|]+\|\n((?:\|.*\n)+)", FORMAT)


def layout(table: str) -> tuple[list[str], int]:
    """Return the fields of fixed size and their length; each begins where it says."""
    names, at = [], 0
    for line in table.splitlines():
        place, name, kind = [cell.strip() for cell in line.strip("|").split("|")][:3]
        if kind not in SIZES:
            break
        assert place == str(at), f"{name} stands at {at}, not at {place}"
        names.append(name)
        at += SIZES[kind]
    return names, at


@pytest.mark.parametrize(
    ("first_fields", "size"),
    [
        (["magic", "version", "first_index"], index.HEADER.size),
        (["topic", "rows", "first_row"], index.DIRECTORY.size),
        (["topic", "count", "base_offset"], index.ROW.size),
        (["magic", "version", "length"], checkpoint.HEADER.size),
        (["last_index", "last_crc"], len(encode_gap(last_index=0, last_crc=0))),
        (["magic", "length", "crc32c", "previous_crc"], entry.HEADER.size),
        (["length", "kind", "flags"], frames.HEADER.size),
        (["magic", "length", "crc32c", "version"], Struct("<4sIIBBHIIQQq").size),
    ],
    ids=["index", "directory", "row", "checkpoint", "gap", "entry", "frame", "batch"],
)
def test_the_drawn_bytes_are_those_of_the_code(first_fields: list[str], size: int):
    layouts = [layout(table) for table in TABLES]
    assert size in [at for names, at in layouts if names[: len(first_fields)] == first_fields]


def test_the_limit_of_silence_is_the_one_that_the_broker_has():
    beat_s = Settings().server.heartbeat_ms // 1_000
    limits = (ROOT / "docs/operate/limits.md").read_text()
    assert f"| silence | {SILENT_HEARTBEATS_MAX} x {beat_s} s |" in limits


def test_the_torn_tail_is_quoted_as_the_broker_says_it():
    said = re.search(r'"(torn tail: .*)"', inspect.getsource(broker))
    assert said is not None
    page = (ROOT / "docs/operate/trouble.md").read_text()
    assert said[1] % (144, "./onward-data") in page
