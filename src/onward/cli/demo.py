"""`onward demo`: what Onward does, end to end, and verified on the way.

    1   a broker inside this process (`file:`), in a folder that is removed afterwards
    2   a real broker: `onward serve` as a process of its own, killed with SIGKILL and started again
    3   a group on it: two members share the work, one message fails, dies, is redriven, explained
    4   messages that wait: fired, cancelled, moved, counted by the calendar; they survive as well
    5   Spark on top of it: an archive, a reconciliation with its report, an answer to SQL

Each line says what was done and what came of it. What does not come as promised ends the demo with
exit 1. Nothing is left behind: no process, no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import click

import onward
from onward.cli.demo_pipeline import show_pipeline
from onward.cli.output import print_line
from onward.message.batch import encode_batch
from onward.protocol.connection import ClientConnection
from onward.protocol.payloads import (
    Durability,
    Hello,
    Published,
    decode_published,
    publish_head,
)

MANY = 100_000
BATCH = 1_000
BODY = b'{"kind":"reading","sensor":"north-7","celsius":21.25}'
START_S_MAX = 20.0
BAD = 3
"""The offset of the invoice that fails."""
DAY_MS = 86_400_000
BIRTHDAYS = (120, 400, 260, 90, 30)
"""How many greetings fire in a day, in two days ..."""


@click.command()
def command() -> None:
    """Show what Onward does, in less than a minute, and verify it.

    Example:  onward demo
    """
    # The broker dies on purpose: what its clients say of that is a part of the story.
    logging.getLogger("onward").setLevel(logging.ERROR)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onward-demo-") as folder:
        asyncio.run(_tell(folder))
    print_line("")
    print_line(f"all of it held, in {time.monotonic() - started_s:.1f} s")


async def _tell(folder: str) -> None:
    _heading("a broker inside this process: connect('file:...')")
    async with onward.connect(f"file:{folder}/embedded") as mq:
        await _publish_and_read(mq)
        await _follow(mq)
        await _lifetime(mq)
    async with onward.connect(f"file:{folder}/embedded") as mq:
        offsets = [message.offset async for message in mq.read("orders")]
        _check(offsets == list(range(4)), "closed and opened again: orders has its 4 messages")
    _heading("a broker of its own: onward serve")
    await _with_served(f"{folder}/served")


# --- the first broker ---------------------------------------------------------------------------


async def _publish_and_read(mq: onward.Client) -> None:
    topic = await mq.create_topic("orders", retention="7d")
    _check(topic.state == "active", "created topic orders, which keeps messages for 7 days")
    receipt = await mq.publish("orders", {"id": 7, "total": 12.5}, key="7", headers={"shop": "eu"})
    _check(receipt.id == "orders/0", f"published JSON with a key and a header: {_words(receipt)}")
    many = await mq.publish_many("orders", ["text", b"\x00\xff bytes"], keys=["8", None])
    _check(many.first_offset == 1, "published text and bytes as one batch: orders/1 and orders/2")
    message = await mq.get("orders", 0)
    _check(
        message.json() == {"id": 7, "total": 12.5} and message.headers == {"shop": "eu"},
        "got orders/0 by its id: its JSON, its key and its header are as published",
    )


async def _follow(mq: onward.Client) -> None:
    """Read live: the reader waits at the end before the message is there."""
    reader = aiter(mq.read("orders", start="latest", follow=True))
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        coming = tasks.create_task(_next(reader))
        await asyncio.sleep(0.05)
        published_s = time.perf_counter()
        await mq.publish("orders", "live")
        message = await coming
    took_ms = (time.perf_counter() - published_s) * 1_000
    _check(message.body == b"live", f"followed live: a new message came after {took_ms:.1f} ms")


async def _next(reader: AsyncIterator[onward.Message]) -> onward.Message:
    return await anext(reader)


async def _lifetime(mq: onward.Client) -> None:
    topic = await mq.create_topic("passwords", lifetime="1h")
    lives_ms = topic.expires_at_ms - topic.created_at_ms
    _check(abs(lives_ms - 3_600_000) < 1_000, "created topic passwords, which ends after an hour")
    await mq.publish("passwords", "once")
    await mq.delete_topic("passwords")
    ended = [t for t in await mq.topics(ended=True) if t.topic == "passwords"]
    again = await mq.publish("passwords", "again")
    _check(
        [t.state for t in ended] == ["deleted"] and again.offset == 0,
        "ended it early: its name was free again, and its offsets began at 0",
    )


# --- the second broker --------------------------------------------------------------------------


async def _with_served(folder: str) -> None:
    with _serve(folder, port=0) as (process, port):
        async with onward.connect(f"localhost:{port}", name="demo", timeout="20s") as mq:
            _check(True, f"started as process {process.pid} on port {port}")
            await _publish_many(mq)
            await _read_back(mq)
            await asyncio.to_thread(_repeat, port)
            _heading("a group on it: members share the work")
            await _share_work(mq)
            _heading("messages that wait for their time")
            await _schedule(mq)
            await _show_calendar(mq)
            _heading("the broker dies")
            await _survive(mq, process, folder, port)


async def _publish_many(mq: onward.Client) -> None:
    bodies = [BODY] * BATCH
    started_s = time.perf_counter()
    for _ in range(MANY // BATCH):
        receipt = await mq.publish_many("readings", bodies, durability="disk")
    rate = MANY / (time.perf_counter() - started_s)
    last = receipt.first_offset + receipt.count
    _check(
        last == MANY and receipt.durability == "disk",
        f"published {MANY:,} messages, on the disk before each answer: {rate:,.0f}/s",
    )


async def _read_back(mq: onward.Client) -> None:
    started_s = time.perf_counter()
    count = 0
    async for batch in mq.read("readings", start=1_000).batches():
        _check_quietly(batch.first_offset == 1_000 + count, "offsets have no hole")
        count += batch.count
    rate = count / (time.perf_counter() - started_s)
    _check(count == MANY - 1_000, f"read {count:,} of them from offset 1,000 on: {rate:,.0f}/s")
    await asyncio.sleep(0.01)
    moment = datetime.now(tz=UTC)
    await asyncio.sleep(0.01)
    await mq.publish("readings", b"after the moment")
    bodies = [message.body async for message in mq.read("readings", start=moment)]
    _check(
        bodies == [b"after the moment"], f"read from {moment:%H:%M:%S.%f} on: the 1 message since"
    )


def _repeat(port: int) -> None:
    """Send one batch twice, as a client does that lost its connection before the answer came."""
    batch = encode_batch([b"charge the card"], producer_id=4711, sequence=1)
    first, second = (_publish_once(port, batch) for _ in range(2))
    _check(
        not first.repeat and second.repeat and first.base_offset == second.base_offset == 0,
        "sent the same publish on two connections: stored once, and both were told payments/0",
    )


def _publish_once(port: int, batch: bytes) -> Published:
    connection, shared = ClientConnection(), bytearray(65_536)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        link.sendall(connection.hello(Hello(version=1, client="onward-demo")))
        _receive(link, connection, shared)
        head = publish_head(1, "payments", durability=Durability.DISK, batch_bytes=len(batch))
        link.sendall(head + batch)
        return decode_published(_receive(link, connection, shared))


def _receive(link: socket.socket, connection: ClientConnection, shared: bytearray) -> bytes:
    while True:
        received = link.recv_into(connection.buffer(shared))
        _check_quietly(received > 0, "the broker answered")
        for _, _, payload in connection.received(received):
            return bytes(payload)


async def _survive(
    mq: onward.Client, process: subprocess.Popen[bytes], folder: str, port: int
) -> None:
    """Kill the broker while it is published to; start it again; count."""
    acked = asyncio.Event()
    answers: list[onward.Receipt] = []

    async def publish() -> None:
        for number in range(400):
            answers.append(await mq.publish("survivors", f"{number}"))
            if number == 100:
                acked.set()

    async with asyncio.timeout(180), asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(publish())
        await acked.wait()
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        before = len(answers)
        print_line(f"  - killed the broker (SIGKILL) after {before} acked messages, in mid-stream")
        started_s = time.perf_counter()
        with _serve(folder, port=port) as (new, _):
            ready_ms = (time.perf_counter() - started_s) * 1_000
            print_line(f"  - started it again as process {new.pid}: ready after {ready_ms:.0f} ms")
            await publishing
            await _count(mq, answers)
            await _still_wait(mq)
            await _redrive(mq)
            _heading("the data pipeline: topics as tables, in Spark")
            place = f"127.0.0.1:{port}", Path(folder).parent
            await asyncio.to_thread(show_pipeline, *place, check=_check)


async def _count(mq: onward.Client, answers: list[onward.Receipt]) -> None:
    bodies = [message.body async for message in mq.read("survivors")]
    offsets = [receipt.offset for receipt in answers]
    _check(
        bodies == [str(number).encode() for number in range(400)] and offsets == [*range(400)],
        "the client came back by itself: all 400 messages are there, each once, in order",
    )
    readings = await mq.topic("readings")
    payments = await mq.topic("payments")
    _check(
        readings.messages == MANY + 1 and payments.messages == 1,
        f"all {readings.messages:,} readings and the 1 payment are still there",
    )


# --- the group ----------------------------------------------------------------------------------


async def _share_work(mq: onward.Client) -> None:
    """Let two members of one group take turns; one invoice fails as often as it may."""
    await mq.publish_many("invoices", [f"invoice {number}" for number in range(6)])
    await mq.create_group("audit", "invoices")
    audited = await _settle(mq, "audit", ["carl"])
    await mq.create_group("billing", "invoices", retry="20ms,40ms")
    taken = await _settle(mq, "billing", ["ann", "bob"])
    acked = sorted(offset for offset, attempt in taken if offset != BAD)
    _check(
        acked == [0, 1, 2, 4, 5], "group billing: ann and bob share 6 invoices, and acked 5 of them"
    )
    attempts = [attempt for offset, attempt in taken if offset == BAD]
    _check(
        attempts == [1, 2, 3],
        f"invoices/{BAD} failed, was retried after 20 ms and 40 ms, and failed again",
    )
    letters = [letter async for letter in mq.dead_letters("billing")]
    _check(
        [(letter.offset, letter.cause) for letter in letters] == [(BAD, "the bank is closed")]
        and len(audited) == 6,
        f"so it is a dead letter of billing: {letters[0].cause!r}; group audit has acked all 6",
    )


async def _settle(mq: onward.Client, group: str, names: list[str]) -> list[tuple[int, int]]:
    """Work until nothing is left; return the offset and the attempt of all that was delivered."""
    taken: list[tuple[int, int]] = []
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(mq.consume("invoices", group=group, member=name))
            for name in names
        ]
        while (await mq.group(group)).backlog:
            for member in members:
                for delivery in await member.fetch(1, wait="20ms"):
                    taken.append((delivery.offset, delivery.attempt))
                    if group == "billing" and delivery.offset == BAD:
                        await delivery.retry(cause="the bank is closed")
                    else:
                        await delivery.ack()
    return taken


async def _redrive(mq: onward.Client) -> None:
    """Deliver the dead letter again, and tell its whole life."""
    count = await mq.redrive("billing", dry_run=True)
    _check(count == 1, "the dead letter is still there, too; the bank opens, and it is redriven")
    await mq.redrive("billing")
    audit = await mq.group("audit")
    async with mq.consume("invoices", group="billing", member="ann") as ann:
        [delivery] = await ann.fetch(10, wait="30s")
        await delivery.ack()
    billing = await mq.group("billing")
    _check(
        (delivery.offset, delivery.attempt, audit.backlog) == (BAD, 1, 0)
        and (billing.backlog, billing.dead) == (0, 0),
        "it was delivered to billing alone, from attempt 1 on, and acked",
    )
    life = await mq.explain(f"invoices/{BAD}")
    told = life.group("billing")
    did = [] if told is None else [event.did for event in told.events]
    _check_quietly(
        did == ["started", "retried", "retried", "dead", "redriven", "acked"],
        "the life line of a message tells all that happened to it",
    )
    _heading(f"onward explain invoices/{BAD}")
    for line in life.lines():
        print_line(f"  {line}")


# --- the schedule -------------------------------------------------------------------------------


async def _schedule(mq: onward.Client) -> None:
    """Schedule reminders; cancel one, move one, and wait for those that fire."""
    ann = await mq.publish("reminders", "ann", delay="600ms")
    await mq.publish("reminders", "bob", delay="1h", unique="order-8")
    carl = await mq.publish("reminders", "carl", delay="1h")
    _check(
        carl.id == "@schedule/2",
        "scheduled three reminders, durably: ann in 600 ms, bob and carl in an hour",
    )
    [bob] = await mq.cancel_scheduled(unique="order-8", cause="it is paid")
    moved = await carl.reschedule(at=ann.due_at_ms + 200)
    _check(
        (bob.state, moved.state) == ("cancelled", "moved"),
        "cancelled bob's by its business key, order-8, and moved carl's: right after ann's",
    )
    fired = await _fired(mq, 2)
    late_ms = [message.published_at_ms - (message.due_at_ms or 0) for message in fired]
    _check(
        [message.text for message in fired] == ["ann", "carl"] and min(late_ms) >= 0,
        f"ann's and carl's fired in order, none early, {max(late_ms)} ms late at most",
    )
    told = await ann.cancel()
    _check(
        (told.state, told.message_id) == ("fired", "reminders/0"),
        f"cancelled ann's too late, and was told so: {told.state}, it is {told.message_id}",
    )


async def _fired(mq: onward.Client, count: int) -> list[onward.Message]:
    """Wait for so many reminders."""
    found: list[onward.Message] = []
    async with asyncio.timeout(30):
        async for message in mq.read("reminders", follow=True):
            found.append(message)
            if len(found) == count:
                break
    return found


async def _show_calendar(mq: onward.Client) -> None:
    """Schedule many more, over some days, and show how many fire when."""
    now_ms = time.time_ns() // 1_000_000
    at = [now_ms + day * DAY_MS for day, count in enumerate(BIRTHDAYS, 1) for _ in range(count)]
    many = await mq.publish_many("birthdays", ["all the best"] * len(at), at=at)
    calendar = await mq.calendar(topic="birthdays", end="6d", step="1d")
    _check(
        tuple(bar.count for bar in calendar.bars) == BIRTHDAYS,
        f"scheduled {many.count} greetings over 5 days; the calendar, onward schedule calendar:",
    )
    for bar in calendar.bars:
        day = datetime.fromtimestamp(bar.at_ms / 1_000, tz=UTC)
        print_line(f"      {day:%Y-%m-%d}  {bar.count:>3}  {'#' * (bar.count // 10)}")


async def _still_wait(mq: onward.Client) -> None:
    """After the broker has died: what waits still does, and nothing came twice."""
    calendar = await mq.calendar(topic="birthdays", end="6d", step="1d")
    [bob] = await mq.cancel_scheduled("@schedule/1")
    reminders = await mq.topic("reminders")
    _check(
        (calendar.count, bob.state, reminders.messages) == (sum(BIRTHDAYS), "cancelled", 2),
        f"all {calendar.count} greetings still wait, bob's reminder stays cancelled",
    )


@contextlib.contextmanager
def _serve(folder: str, *, port: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `onward serve` in a process of its own; yield it and its port."""
    program = [sys.executable, "-c", "from onward.cli import main; main()", "serve"]
    options = ["--log.folder", folder, "--server.port", str(port), "--server.host", "127.0.0.1"]
    # Neither the settings file of this folder nor the variables of this shell are meant for it.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ONWARD_")}
    lines = f"{folder}.{time.monotonic_ns()}.lines"
    with (
        open(lines, "wb") as stderr,
        subprocess.Popen(
            [*program, "--config", os.devnull, *options], stderr=stderr, env=environ
        ) as process,
    ):
        try:
            yield process, _wait_ready(process, lines)
        finally:
            if process.poll() is None:
                process.terminate()


def _wait_ready(process: subprocess.Popen[bytes], lines: str) -> int:
    deadline_s = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline_s and process.poll() is None:
        with open(lines, encoding="utf-8") as stream:
            found = re.search(r"listening on \S+:(\d+)", stream.read())
        if found:
            return int(found[1])
        time.sleep(0.02)
    with open(lines, encoding="utf-8") as stream:
        raise click.ClickException(f"the broker did not start: {stream.read()[-500:]}")


# --- the story ----------------------------------------------------------------------------------


def _heading(text: str) -> None:
    print_line("")
    print_line(text)


def _check(promise: bool, sentence: str) -> None:
    """Print what was done, or end the demo because it did not come as promised."""
    _check_quietly(promise, sentence)
    print_line(f"  - {sentence}")
    sys.stdout.flush()


def _check_quietly(promise: bool, sentence: str) -> None:
    if not promise:
        raise click.ClickException(f"this was promised and did not hold: {sentence}")


def _words(receipt: onward.Receipt) -> str:
    return f"{receipt.id}, event {receipt.event_id}, durability {receipt.durability}"
