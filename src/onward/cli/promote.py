"""`onward promote`: make a replica the leader.

exit 0    it leads                       1    it leads already
exit 3    it cannot be reached           7    its source answers and does not step down
"""

from __future__ import annotations

import click

from onward.cli.options import json_option
from onward.cli.output import counted, print_json, print_line
from onward.cli.params import Connect, client_options
from onward.durations import format_duration
from onward.types import Promoted, ReplicationStatus


@click.command()
@click.option(
    "--force", is_flag=True,
    help="Promote even though the source answers and does not step down; what it accepts is lost.",
)  # fmt: skip
@json_option
@client_options
def command(*, connect: Connect, force: bool, as_json: bool) -> None:
    """Make a replica the leader: its source steps down first, if it answers.

    The node at --address is promoted. It prints the new history, and what may be lost.

    Example:  onward promote --address replica-1:7700
    """
    with connect() as mq:
        before = mq.replication()
        promoted = mq.promote(force=force)
    if as_json:
        print_json(promoted)
        return
    print_line(
        f"node {promoted.node} leads, as history {promoted.lineage}, "
        f"which begins after event {promoted.event_id:,}"
    )
    print_line(_loss(before, promoted))


def _loss(before: ReplicationStatus, promoted: Promoted) -> str:
    """Return what became of the source, and what may be lost."""
    if before.role != "replica":
        return "it had stepped down: what another node has accepted since then is not here"
    if promoted.source_stepped_down:
        return f"the source {before.source} has stepped down: nothing that it accepted is lost"
    missing = max(0, before.source_event_id - promoted.event_id)
    known = f"at least {counted(missing, 'event')} of it" if missing else "none of it is known"
    return (
        f"the source {before.source} has not stepped down: what it accepted after event "
        f"{promoted.event_id:,} is lost here ({known}; it was last heard "
        f"{format_duration(before.heard_ms_ago)} ago). Do not start it again as a leader: clients "
        f"that have not been here would write to it"
    )
