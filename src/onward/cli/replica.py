"""`onward replica`: how a node and its copies are."""

from __future__ import annotations

from collections.abc import Iterator

import click

from onward.cli.options import json_option
from onward.cli.output import print_json, print_line, print_rows
from onward.cli.params import Connect, client_options
from onward.durations import format_duration
from onward.types import ReplicaDescription, ReplicationStatus

_COLUMNS = ["replica", "state", "event", "lag events", "lag", "awaited"]


@click.group()
def command() -> None:
    """Show how a replica is, and the replicas of a node.

    Example:  onward replica status
    """


@command.command()
@json_option
@client_options
def status(*, connect: Connect, as_json: bool) -> None:
    """Show the role of a node, how far it is behind its source, and its replicas with their lag.

    Example:  onward replica status --address replica-1:7700
    """
    with connect() as mq:
        replication = mq.replication()
    if as_json:
        print_json(replication)
        return
    rows = [{"name": name, "value": value} for name, value in _facts(replication)]
    print_rows(rows, columns=["name", "value"])
    if replication.replicas:
        print_line("")
        print_rows(map(_row, replication.replicas), columns=_COLUMNS)


def _facts(replication: ReplicationStatus) -> Iterator[tuple[str, object]]:
    yield "node", replication.node
    yield "role", replication.role
    yield "lineage", str(replication.lineage)
    yield "event", f"{replication.event_id:,}"
    if replication.role != "replica":
        return
    yield "source", replication.source
    yield "source event", f"{replication.source_event_id:,}"
    yield "state", replication.state
    yield "lag events", f"{replication.lag_events:,}"
    yield "lag", format_duration(replication.lag_ms)
    yield "source heard", f"{format_duration(replication.heard_ms_ago)} ago"


def _row(replica: ReplicaDescription) -> dict[str, object]:
    return {
        "replica": replica.name,
        "state": "connected" if replica.connected else "away",
        "event": replica.durable_event_id,
        "lag events": replica.lag_events,
        "lag": format_duration(replica.lag_ms),
        "awaited": replica.is_awaited,
    }
