"""`onward explain`: what happened to a message."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from onward.cli.options import json_option
from onward.cli.output import print_json, print_line
from onward.cli.params import Connect, client_options
from onward.cli.read import as_record
from onward.client.explanation import Explanation


@click.command()
@click.argument("message_id", metavar="ID")
@json_option
@client_options
def command(*, connect: Connect, message_id: str, as_json: bool) -> None:
    """Tell what happened to a message: who published it, and how it went in every group.

    Example:  onward explain orders/7
    """
    with connect() as mq:
        life = mq.explain(message_id)
    if as_json:
        print_json(_record(life))
        return
    for line in life.lines():
        print_line(line)


def _record(life: Explanation) -> dict[str, Any]:
    by = life.published_by
    return {
        "id": life.id,
        "message": None if life.message is None else as_record(life.message),
        "node": life.node,
        "durability": life.durability,
        "producer_id": life.producer_id,
        "published_by": None if by is None else msgspec.to_builtins(by),
        "scheduled": msgspec.to_builtins(life.scheduled),
        "became": msgspec.to_builtins(life.became),
        "groups": msgspec.to_builtins(life.groups),
        "is_complete": life.is_complete,
        "asked_at_ms": life.asked_at_ms,
    }
