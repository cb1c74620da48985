"""Dead letters and their redrive, reset, replay, fork; and what `explain` tells of all of it.

The broker is killed between the steps: what was answered is known afterwards.
"""

import time
from datetime import UTC, datetime

import onward

from .conftest import MakeBroker
from .members import PATIENCE_S
from .running import until
from .taking import events_of, finish, life_of, publish, take

ATTEMPTS = 4


async def fail_until_dead(mq: onward.Client, group: str) -> list[int]:
    """Consume as a member that cannot handle `poison`; return the attempts it had."""
    attempts: list[int] = []
    finished = 0
    async with mq.consume("orders", group=group, member="ann") as consumer:
        while len(attempts) < ATTEMPTS or finished < 2:
            (one,) = await take(consumer, 1)
            if one.text == "poison":
                attempts.append(one.attempt)
                await one.retry(cause=f"cannot handle it, attempt {one.attempt}")
            else:
                finished += 1
                await one.ack()
    return attempts


async def test_a_poison_message_is_dead_after_its_attempts_and_redriven_to_its_group_alone(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(groups_reclaim_ms=0)
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        await publish(mq, "good", "poison", "better")
        await mq.create_group("billing", "orders", retry=f"fixed:0s:{ATTEMPTS}")
        await mq.create_group("audit", "orders")
        assert await fail_until_dead(mq, "billing") == [1, 2, 3, 4]
        everything = [("better", 1), ("good", 1), ("poison", 1)]
        assert await finish(mq, 3, group="audit", member="bob") == everything
        await broker.restart()

        (dead,) = [one async for one in mq.dead_letters("billing", messages=True)]
        assert (dead.id, dead.attempts, dead.member) == ("orders/1", ATTEMPTS, "ann")
        assert dead.cause == "cannot handle it, attempt 4"
        assert dead.message is not None
        assert dead.message.text == "poison"
        assert [one async for one in mq.dead_letters("audit")] == []
        life = await life_of(mq, "orders/1", "billing")
        assert life.state == "dead"
        assert life.cause == dead.cause
        assert events_of(life) == [*[("retried", "ann")] * (ATTEMPTS - 1), ("dead", "ann")]
        assert [event.attempt for event in life.events if event.did == "retried"] == [1, 2, 3]
        assert (await mq.group("billing")).backlog == 0

        assert await mq.redrive("billing", dry_run=True) == 1
        assert (await mq.group("billing")).backlog == 0, "a dry run does nothing"
        assert await mq.redrive("billing") == 1
        await broker.restart()
        assert (await mq.group("billing")).backlog == 1
        assert (await mq.group("audit")).backlog == 0, "it comes back to its group alone"
        assert await finish(mq, 1, group="billing", member="eve") == [("poison", 1)]
        assert [one async for one in mq.dead_letters("billing")] == []
        life = await life_of(mq, "orders/1", "billing")
        assert life.state == "finished"
        assert events_of(life)[ATTEMPTS:] == [("redriven", ""), ("acked", "eve")]
        assert events_of(await life_of(mq, "orders/1", "audit")) == [("acked", "bob")]


async def publish_later(mq: onward.Client, *bodies: str) -> datetime:
    """Publish at a time that is later than everything before it; return that time."""
    now_ms = time.time_ns() // 1_000_000
    await until(lambda: time.time_ns() // 1_000_000 > now_ms + 20, within_s=PATIENCE_S)
    receipt = await mq.publish_many("orders", list(bodies))
    message = await mq.get("orders", receipt.first_offset)
    return datetime.fromtimestamp(message.published_at_ms / 1000, UTC)


async def test_a_group_that_is_reset_to_a_time_gets_everything_since_then_again(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(groups_reclaim_ms=0)
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        await publish_later(mq, "a", "b")
        noon = await publish_later(mq, "c", "d")
        await publish_later(mq, "e")
        for group in ("billing", "audit"):
            assert len(await finish(mq, 5, group=group, member="ann")) == 5
        assert await mq.reset_group("billing", to=noon, dry_run=True) == 3
        assert (await mq.group("billing")).backlog == 0, "a dry run does nothing"
        assert await mq.reset_group("billing", to=noon) == 3
        await broker.restart()
        assert (await mq.group("billing")).topics[0].cursor == 2
        assert (await mq.group("audit")).backlog == 0
        assert (await life_of(mq, "orders/2", "billing")).state == "fresh"
        again = await finish(mq, 3, group="billing", member="bob")
        assert again == [("c", 1), ("d", 1), ("e", 1)]
        assert events_of(await life_of(mq, "orders/2", "billing")) == [
            ("acked", "ann"), ("reset", ""), ("acked", "bob"),
        ]  # fmt: skip
        assert (await life_of(mq, "orders/0", "billing")).state == "finished"
        assert events_of(await life_of(mq, "orders/2", "audit")) == [("acked", "ann")]


async def test_a_replay_delivers_a_window_or_one_message_again_to_one_group(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(groups_reclaim_ms=0)
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        await publish_later(mq, "a", "b")
        start = await publish_later(mq, "c", "d")
        end = await publish_later(mq, "e")
        for group in ("billing", "audit"):
            await finish(mq, 5, group=group, member="ann")
        assert await mq.replay("billing", "orders", start=start, end=end, dry_run=True) == 2
        assert (await mq.group("billing")).backlog == 0, "a dry run does nothing"
        assert await mq.replay("billing", "orders", start=start, end=end) == 2
        assert await mq.replay("billing", "orders/0") == 1
        await broker.restart()
        peeked = await mq.peek("billing", "orders", n=10)
        assert [message.text for message in peeked] == ["a", "c", "d"]
        assert (await mq.group("audit")).backlog == 0
        assert (await life_of(mq, "orders/3", "billing")).state == "ready"
        again = await finish(mq, 3, group="billing", member="bob")
        assert again == [("a", 1), ("c", 1), ("d", 1)]
        assert (await mq.group("billing")).backlog == 0
        told = [events_of(await life_of(mq, f"orders/{n}", "billing")) for n in range(5)]
        once, twice = [("acked", "ann")], [("acked", "ann"), ("replayed", ""), ("acked", "bob")]
        assert told == [twice, once, twice, twice, once]


async def test_a_fork_goes_on_from_where_its_group_was_and_neither_knows_of_the_other(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(groups_reclaim_ms=0)
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        await publish(mq, "a", "b", "c", "d")
        async with mq.consume("orders", group="billing", member="ann") as consumer:
            a, b, c, _ = await take(consumer, 4)
            await a.ack()
            await b.reject("wrong")
            await c.retry(after="0s", cause="busy")
        await mq.fork_group("billing", "trial")
        await broker.restart()
        for group in ("billing", "trial"):
            described = await mq.group(group)
            assert (described.backlog, described.dead) == (2, 1)
        assert await finish(mq, 2, group="trial", member="bob") == [("c", 2), ("d", 1)]
        assert await mq.purge("trial") == 1
        await broker.restart()
        described = await mq.group("billing")
        assert (described.backlog, described.dead) == (2, 1), "the trial changed nothing here"
        assert await finish(mq, 2, group="billing", member="eve") == [("c", 2), ("d", 1)]
        shared = [("retried", "ann")]
        assert events_of(await life_of(mq, "orders/2", "billing")) == [*shared, ("acked", "eve")]
        assert events_of(await life_of(mq, "orders/2", "trial")) == [
            *shared, ("forked", ""), ("acked", "bob"),
        ]  # fmt: skip
        assert (await life_of(mq, "orders/1", "billing")).state == "dead"
        assert events_of(await life_of(mq, "orders/1", "trial"))[-1] == ("purged", "")
