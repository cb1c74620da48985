"""The command line about groups, against a real broker: what it prints and how it ends."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import onward

from .conftest import MakeBroker
from .running import BrokerProcess, free_port, until
from .taking import publish, take

PROGRAM = [sys.executable, "-c", "from onward.cli import main; main()"]
COMMAND_S_MAX = 120


class Terminal:
    """Runs commands as a person would, against one broker."""

    def __init__(self, broker: BrokerProcess) -> None:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("ONWARD_")}
        self.environ = kept | {"ONWARD_ADDRESS": broker.address}

    async def run(self, *arguments: str, code: int = 0) -> str:
        """Return what a command printed; for one that fails what it said on stderr."""
        done = await asyncio.to_thread(
            subprocess.run, [*PROGRAM, *arguments], env=self.environ, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=COMMAND_S_MAX, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stderr if code else done.stdout

    async def json(self, *arguments: str) -> list[dict[str, Any]]:
        printed = await self.run(*arguments, "--json")
        return [json.loads(line) for line in printed.splitlines()]


async def reject_one(mq: onward.Client, *, cause: str) -> None:
    async with mq.consume("orders", group="billing", member="ann") as consumer:
        (one,) = await take(consumer, 1)
        await one.reject(cause)


async def test_the_commands_tell_and_do_what_they_say(make_broker: MakeBroker) -> None:
    broker = make_broker()
    await broker.start()
    shell = Terminal(broker)
    async with broker.connect(name="shop", timeout="60s") as mq:
        await publish(mq, "red", "green", "blue")
        await mq.create_group("billing", "orders")
        await reject_one(mq, cause="no such colour")

        consumed = await shell.json(
            "consume", "orders", "--group", "billing", "--member", "bob", "--count", "1"
        )
        assert [(one["id"], one["body"], one["attempt"]) for one in consumed] == [
            ("orders/1", "green", 1)
        ]
        (group,) = await shell.json("groups")
        assert (group["group"], group["backlog"], group["dead"]) == ("billing", 1, 1)
        table = (await shell.run("groups")).splitlines()
        assert table[1].split()[:4] == ["billing", "shared", "idle", "orders"]

        (group,) = await shell.json("group", "show", "billing")
        assert group["topics"][0]["cursor"] == 2
        shown = await shell.run("group", "show", "billing")
        assert "dead letters" in shown
        assert "orders" in shown

        (letter,) = await shell.json("dead", "list", "billing")
        assert letter["id"] == "orders/0"
        assert (letter["cause"], letter["attempts"], letter["member"]) == (
            "no such colour", 1, "ann",
        )  # fmt: skip
        assert "no such colour" in await shell.run("dead", "list", "billing")

        (life,) = await shell.json("explain", "orders/0")
        assert life["published_by"]["client"] == "shop"
        assert (life["groups"][0]["state"], life["groups"][0]["cause"]) == (
            "dead", "no such colour",
        )  # fmt: skip
        told = await shell.run("explain", "orders/1")
        assert "published by shop" in told
        assert "group billing: acked by bob after" in told

        (would,) = await shell.json("dead", "redrive", "billing", "--dry-run")
        assert (would["count"], would["dry_run"]) == (1, True)
        assert "--yes" in await shell.run("dead", "redrive", "billing", code=2)
        assert (await mq.group("billing")).dead == 1, "nobody said yes"
        (did,) = await shell.json("dead", "redrive", "billing", "--yes")
        assert (did["count"], did["dry_run"]) == (1, False)
        rest = await shell.json("consume", "orders", "--group", "billing", "--count", "2")
        assert sorted(one["body"] for one in rest) == ["blue", "red"]

        (view,) = await shell.json("top", "--once", "--interval", "10ms")
        assert [(one["topic"], one["messages"]) for one in view["topics"]] == [("orders", 3)]
        assert [(one["group"], one["backlog"]) for one in view["groups"]] == [("billing", 0)]
        assert "billing" in await shell.run("top", "--once", "--interval", "10ms")


async def test_a_command_that_cannot_be_done_says_why_and_has_an_exit_code(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    shell = Terminal(broker)
    async with broker.connect(timeout="60s") as mq:
        await publish(mq, "red")
        for arguments in (["group", "show", "nobody"], ["dead", "list", "nobody"]):
            said = await shell.run(*arguments, code=1)
            assert said == "error: group 'nobody' does not exist (unknown_group)\n"
        assert "there is no message 'orders/7'" in await shell.run("explain", "orders/7", code=1)
        assert "--group" in await shell.run("consume", "orders", code=2)
        nowhere = f"127.0.0.1:{free_port()}"
        said = await shell.run("groups", "--address", nowhere, code=3)
        assert "no broker answers" in said


async def test_what_consume_showed_without_acking_it_comes_again(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    shell = Terminal(broker)
    async with broker.connect(timeout="60s") as mq:
        await publish(mq, "red", "green")
        shown = await shell.json("consume", "orders", "--group", "billing", "--no-ack",
                                 "--count", "2")  # fmt: skip
        assert [one["body"] for one in shown] == ["red", "green"]
        assert (await mq.group("billing")).backlog == 2
        again = await shell.json("consume", "orders", "--group", "billing", "--count", "2")
        assert [(one["body"], one["attempt"]) for one in again] == [("red", 1), ("green", 1)]
        assert (await mq.group("billing")).backlog == 0


async def test_the_commands_show_what_retention_will_drop_and_has_dropped(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    shell = Terminal(broker)
    async with broker.connect(timeout="60s") as mq:
        await mq.create_group("idle", "others")
        await mq.create_topic("orders", retention="20s")
        await mq.create_group("billing", "orders")
        assert "EXPIRING" not in await shell.run("groups")
        # Large ones: a segment is closed early when half of it is older than its topics keep.
        await publish(mq, "red" * 30_000, "green" * 30_000)

        async def has(name: str) -> bool:
            return bool(getattr(await mq.group("billing"), name))

        await until(lambda: has("expiring"), within_s=60)
        heading, billing, idle = (await shell.run("groups")).splitlines()
        assert (heading.split()[-1], billing.split()[-1], idle.split()[-1]) == (
            "EXPIRING", "2", "0",
        )  # fmt: skip
        shown = await shell.run("group", "show", "billing")
        assert "retention may drop 2 messages of orders from 20" in shown
        assert (await shell.json("status"))[0]["expiring"] == 2
        assert "not delivered yet; retention may drop it from 20" in (
            await shell.run("explain", "orders/0")
        )
        await mq.change_topic("orders", retention="1s")
        await until(lambda: has("dropped"), within_s=60)
        (group,) = await shell.json("group", "show", "billing")
        (share,) = group["topics"]
        assert (share["backlog"], share["dropped"], share["expiring"]) == (0, 2, 0)
        assert (await shell.run("groups")).splitlines()[0].split()[-1] == "DROPPED"
        assert (await shell.json("status"))[0]["dropped"] == 2
        told = await shell.run("explain", "orders/0")
        assert "it was gone before it was delivered: dropped by retention" in told
    said = "group 'billing': 2 messages of topic 'orders' may be dropped by retention within 20s"
    assert said in broker.output
