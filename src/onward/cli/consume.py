"""`onward consume`: messages of topics as a member of a group, for people and for other programs.

What was written and flushed is acked, in this order: a message that was not seen comes again. With
--no-ack nothing is acked, and leaving gives back what was shown, uncounted. Ctrl-C leaves. It is a
coroutine, unlike other commands, so that the acks of all that was shown share one frame.

    text   id, time, key, body on one line, and the attempt if it is not the first
    json   one object per line; a body that is not UTF-8 as `body_base64`
    body   the body and a line break; on a terminal control characters are escaped
    raw    the bytes of the bodies as they are, never on a terminal
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click

import onward
from onward.cli.created import missing_topics_async, no_create_option, note_created, refuse_missing
from onward.cli.output import print_json, print_line, printable
from onward.cli.params import DURATION, START, ConnectAsync, async_client_options
from onward.cli.read import as_record, chosen_format, format_options, write_bodies
from onward.cli.wishes import as_wish, wish_options
from onward.client.consumer import Consumer
from onward.client.delivery import Delivery
from onward.durations import format_instant
from onward.errors import LeaseLost, UnknownGroup

_FETCH_MAX = 1_000
_PATIENCE_MS = 10_000


@click.command()
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--group", required=True, metavar="GROUP", help="The group to be a member of.")
@click.option("--member", metavar="NAME", help="The name of this member. [default: a new one]")
@click.option(
    "--start", type=START, metavar="START",
    help="Where a new group begins: earliest, latest, an offset, 10m (ago) or 2026-11-16T10:00Z.",
)  # fmt: skip
@wish_options
@click.option("--refuse", is_flag=True, help="Exclusive: fail at once instead of standing by.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N messages.")
@click.option(
    "--wait", "wait_ms", type=DURATION, metavar="DURATION",
    help="End when nothing came for this long. [default: never]",
)  # fmt: skip
@click.option(
    "--ack/--no-ack", default=True, help="Ack what was written, or give it back at the end."
)
@no_create_option
@format_options
@async_client_options
async def command(
    *,
    connect: ConnectAsync,
    topics: tuple[str, ...],
    group: str,
    member: str | None,
    start: str | int | datetime | None,
    refuse: bool,
    count: int | None,
    wait_ms: int | None,
    ack: bool,
    no_create: bool,
    form: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Consume topics as a member of a group: each message is shown, then acked.

    Example:  onward consume orders --group billing --count 10
    """
    wish = as_wish(given)
    form = chosen_format(form, as_json=as_json)
    if not ack and count is None:
        raise click.UsageError(
            "--no-ack holds what it shows: say how much with --count", click.get_current_context()
        )
    async with connect(create=not no_create) as mq:
        missing = await missing_topics_async(mq, topics), await _missing_groups(mq, group)
        if no_create:
            refuse_missing(*missing)
        consumer = mq.consume(
            topics, group=group, member=member, start=start, refuse=refuse, **wish
        )
        async with consumer:
            note_created(*missing)
            held = await _consume(consumer, form, count=count, wait_ms=wait_ms, ack=ack)
    # Until here, so that leaving gives back what is not acked, as it was asked to.
    del held


async def _missing_groups(mq: onward.Client, name: str) -> list[str]:
    try:
        await mq.group(name)
    except UnknownGroup:
        return [name]
    return []


async def _consume(
    consumer: Consumer, form: str, *, count: int | None, wait_ms: int | None, ack: bool
) -> list[Delivery]:
    """Show messages until there were enough or nothing came for long; return what is not acked."""
    left = count
    held: list[Delivery] = []
    while left is None or left > 0:
        asked = _FETCH_MAX if left is None else min(left, _FETCH_MAX)
        patience_ms = _PATIENCE_MS if wait_ms is None else wait_ms
        deliveries = await consumer.fetch(asked, wait_ms=patience_ms)
        if not deliveries and wait_ms is not None:
            break
        _write(deliveries, form)
        if ack:
            await _ack(deliveries)
        else:
            held += deliveries
        if left is not None:
            left -= len(deliveries)
    return held


def _write(deliveries: Sequence[Delivery], form: str) -> None:
    if form in ("body", "raw"):
        write_bodies([delivery.body for delivery in deliveries], form)
    for delivery in deliveries:
        if form == "json":
            record = as_record(delivery)
            print_json(record | {"group": delivery.group, "attempt": delivery.attempt})
        elif form == "text":
            print_line(_line(delivery))
    sys.stdout.flush()


def _line(delivery: Delivery) -> str:
    key = "-" if delivery.key is None else printable(delivery.key)
    again = f"  (attempt {delivery.attempt})" if delivery.attempt > 1 else ""
    moment = format_instant(delivery.published_at_ms)
    return f"{delivery.id}  {moment}  {key:<12}  {printable(delivery.body)}{again}"


async def _ack(deliveries: Sequence[Delivery]) -> None:
    """Ack what was shown, all together; what is somebody else's by now will come again."""
    acks = [delivery.ack() for delivery in deliveries]
    outcomes = await asyncio.gather(*acks, return_exceptions=True)
    errors = [one for one in outcomes if isinstance(one, BaseException)]
    lost = [error for error in errors if isinstance(error, LeaseLost)]
    if lost:
        click.echo(f"warning: {len(lost)} leases were lost; they come again", err=True)
    for error in errors:
        if not isinstance(error, LeaseLost):
            raise error
