"""Nobody is kept waiting by others: fresh messages, keys, members."""

import asyncio
from typing import Any

import pytest

import onward
from onward.broker import choosing as choosing_module
from onward.delivery import lanes as lanes_module

RULES: list[dict[str, Any]] = [
    {}, {"mode": "ordered"}, {"priorities": True}, {"tenants": {}}, {"key_concurrency": 5},
    {"key_rate": 1000.0}, {"tags": ["x"]},
]  # fmt: skip
FAILED = 200


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: next(iter(rule), "plain"))
async def test_fresh_messages_take_turns_with_retries(rule: dict[str, Any]) -> None:
    async with (
        onward.connect("memory:") as mq,
        mq.consume("jobs", group="g", **rule) as consumer,
    ):
        keys = [f"k{number}" for number in range(FAILED)]
        await mq.publish_many("jobs", ["old"] * FAILED, keys=keys, tags=["x"] * FAILED)
        failed = 0
        while failed < FAILED:
            some = await consumer.fetch(FAILED, wait="5s")
            await asyncio.gather(*[one.retry(after="50ms", cause="not yet") for one in some])
            failed += len(some)
        await asyncio.sleep(0.1)
        await mq.publish_many("jobs", ["fresh"] * 5, keys=list("abcde"), tags=["x"] * 5)
        came: list[str] = []
        while came.count("fresh") < 5:
            for one in await consumer.fetch(10, wait="5s"):
                came.append(one.text)
                await one.ack()
        assert len(came) < FAILED // 2, "they came before most of what comes again"


async def test_a_limit_per_key_holds_also_when_the_last_member_has_left() -> None:
    async with onward.connect("memory:") as mq:
        await mq.publish_many("jobs", ["1", "2"], keys=["a", "a"])
        for expected in (1, 0):
            async with mq.consume("jobs", group="g", key_rate=1 / 60) as consumer:
                some = await consumer.fetch(1, wait="200ms")
                assert len(some) == expected
                for one in some:
                    await one.ack()


async def test_a_limit_per_key_counts_what_is_out_when_the_rules_change() -> None:
    async with (
        onward.connect("memory:") as mq,
        mq.consume("jobs", group="g", key_concurrency=1) as consumer,
    ):
        await mq.publish_many("jobs", ["1", "2"], keys=["a", "a"])
        (first,) = await consumer.fetch(1, wait="5s")
        await mq.change_group("g", priorities=True)
        assert await consumer.fetch(1, wait="200ms") == []
        await first.ack()
        assert [one.text for one in await consumer.fetch(1, wait="5s")] == ["2"]


async def test_members_that_name_different_topics_share_what_both_want() -> None:
    async with (
        onward.connect("memory:") as mq,
        mq.consume("a", group="g", credit=100) as ann,
        mq.consume(["a", "b"], group="g", credit=100) as bob,
    ):
        await asyncio.gather(ann.join(), bob.join())
        fetching = [asyncio.create_task(one.fetch(90, wait="5s")) for one in (ann, bob)]
        await asyncio.sleep(0.1)
        await mq.publish_many("a", ["x"] * 90)
        got = await asyncio.gather(*fetching)
        assert min(map(len, got)) >= 30


async def test_leases_that_ran_out_are_counted_also_after_their_member_has_left() -> None:
    async with onward.connect("memory:") as mq:
        await mq.publish("jobs", "x")
        async with mq.consume("jobs", group="g", lease="1s") as consumer:
            assert await consumer.fetch(1, wait="5s")
            group = await mq.group("g")
            while not group.expired_leases:
                await asyncio.sleep(0.1)
                group = await mq.group("g")
        assert (await mq.group("g")).expired_leases == 1


async def test_a_group_whose_view_is_full_of_what_waits_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes_module, "HELD_MAX", 10)
    monkeypatch.setattr(choosing_module, "HELD_MAX", 10)
    async with (
        onward.connect("memory:") as mq,
        mq.consume("jobs", group="g", mode="ordered") as consumer,
    ):
        await mq.publish_many("jobs", range(20), keys=["a"] * 19 + ["b"])
        (first,) = await consumer.fetch(1, wait="5s")
        await first.retry(after="1h")
        assert await consumer.fetch(1, wait="200ms") == []
        said = [one.getMessage() for one in caplog.records if "that all wait" in one.getMessage()]
        assert len(said) == 1
        assert said[0].startswith("group 'g' sees 10 messages of topic 'jobs' that all wait")
