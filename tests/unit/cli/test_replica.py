"""`onward replica`, `onward promote` and `onward status` against a source and its replica."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from onward.protocol.operations.replicas import ReplicationStatus

from .conftest import Served

Onward = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Served, str, Served, str]]:
    """Start a source and its replica, each with its address."""
    for name in ("source", "replica"):
        (tmp_path / name).mkdir()
    source = Served(tmp_path / "source", "--log.retention-replicas", "copy-1,copy-2")
    at = source.wait_ready()
    replica = Served(
        tmp_path / "replica", "--replica.of", at, "--replica.name", "copy-1"
    )  # fmt: skip
    yield source, at, replica, replica.wait_ready()
    for served in (source, replica):
        served.process.kill()
        served.process.wait()


def status_of(onward: Onward, address: str) -> ReplicationStatus:
    done = onward("replica", "status", "--json", "--address", address)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    status = msgspec.convert(record, ReplicationStatus)
    assert msgspec.to_builtins(status) == record
    return status


def wait_equal(onward: Onward, source: str, replica: str) -> ReplicationStatus:
    deadline = time.monotonic() + 15
    while True:
        event_id, status = status_of(onward, source).event_id, status_of(onward, replica)
        if status.state == "following" and status.event_id == event_id:
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.05)


def test_the_replica_is_shown_at_both_ends_and_can_be_promoted(
    onward: Onward, pair: tuple[Served, str, Served, str]
):
    _, source, served, replica = pair
    onward("publish", "orders", "a", "b", "--address", source)
    status = wait_equal(onward, source, replica)
    assert (status.role, status.source, status.lag_events) == ("replica", source, 0)
    assert f"this node is replica 'copy-1' of {source}" in served.said

    shown = onward("replica", "status", "--address", replica).stdout.decode()
    assert ["state", "following"] in [line.split() for line in shown.splitlines()]
    table = onward("replica", "status", "--address", source).stdout.decode().splitlines()
    heading, first, second = table[-3:]
    assert heading.split() == ["REPLICA", "STATE", "EVENT", "LAG", "EVENTS", "LAG", "AWAITED"]
    assert first.split()[:2] == ["copy-1", "connected"]
    assert second.split()[:2] == ["copy-2", "away"]
    node = json.loads(onward("status", "--json", "--address", replica).stdout)
    assert (node["role"], node["lineage"], node["lag_events"]) == ("replica", "0", 0)

    # The replica names its source, and the client writes there.
    written = onward("publish", "orders", "c", "--address", replica)
    assert (written.returncode, written.stdout.split()[-3]) == (0, b"orders/2")
    leads = onward("promote", "--address", source)
    assert (leads.returncode, b"leads already" in leads.stderr) == (1, True)

    promoted = onward("promote", "--address", replica)
    assert promoted.returncode == 0, promoted.stderr
    first_line, second_line = promoted.stdout.decode().splitlines()
    lineage = status_of(onward, replica).lineage
    assert f"leads, as history {lineage}" in first_line
    assert second_line == (
        f"the source {source} has stepped down: nothing that it accepted is lost"
    )
    assert status_of(onward, source).role == "retired"
    assert onward("publish", "orders", "c", "--address", replica).returncode == 0


def test_a_promotion_without_the_source_says_what_may_be_lost(
    onward: Onward, pair: tuple[Served, str, Served, str]
):
    served, source, _, replica = pair
    onward("publish", "orders", "a", "--address", source)
    event_id = wait_equal(onward, source, replica).event_id
    served.process.kill()
    served.process.wait()
    done = onward("promote", "--address", replica)
    assert done.returncode == 0, done.stderr
    _, loss = done.stdout.decode().splitlines()
    assert f"what it accepted after event {event_id} is lost here" in loss
    again = onward("promote", "--force", "--address", replica)
    assert (again.returncode, b"leads already" in again.stderr) == (1, True)
