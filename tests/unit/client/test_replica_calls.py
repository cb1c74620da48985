"""The calls about copies of a node, on a node that stands alone: replicas are in tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest

import onward
from onward.errors import InvalidRequest, NotLeader


async def test_a_node_that_stands_alone_leads_and_has_no_replicas() -> None:
    async with onward.connect("memory:") as mq:
        await mq.publish("orders", "a")
        replication = await mq.replication()
        assert (replication.role, str(replication.lineage)) == ("leader", "0")
        assert replication.event_id == (await mq.status())["next_event_id"] - 1
        assert replication.replicas == []


async def test_a_leader_cannot_be_promoted() -> None:
    async with onward.connect("memory:") as mq:
        with pytest.raises(InvalidRequest, match="leads already"):
            await mq.promote(force=True)


async def test_who_has_stepped_down_refuses_writes_and_serves_reads(tmp_path: Path) -> None:
    for _ in range(2):
        async with onward.connect(f"file:{tmp_path / 'log'}", timeout="500ms") as mq:
            if not await mq.has_topic("orders"):
                await mq.publish("orders", "a")
                await mq.step_down()
            with pytest.raises(NotLeader, match="has stepped down"):
                await mq.create_topic("refunds")
            assert [message.text async for message in mq.read("orders")] == ["a"]
            assert (await mq.status())["role"] == "retired"


async def test_stepping_down_twice_replies_the_same() -> None:
    async with onward.connect("memory:") as mq:
        await mq.publish("orders", "a")
        assert await mq.step_down() == await mq.step_down()


async def test_who_has_stepped_down_leads_again_only_by_force() -> None:
    async with onward.connect("memory:") as mq:
        stepped_down = await mq.step_down()
        with pytest.raises(InvalidRequest, match="with force it leads again"):
            await mq.promote()
        promoted = await mq.promote(force=True)
        assert (promoted.lineage.epoch, promoted.event_id) == (1, stepped_down.event_id)
        assert not promoted.source_stepped_down
        await mq.publish("orders", "a")
        assert (await mq.replication()).lineage == promoted.lineage


async def test_the_status_of_a_node_says_which_history_it_has() -> None:
    async with onward.connect("memory:") as mq:
        await mq.step_down()
        lineage = (await mq.promote(force=True)).lineage
        status = await mq.status()
        assert (status["role"], status["lineage"]) == ("leader", f"1-{lineage.id}")
        assert (status["lag_events"], status["lag_ms"]) == (0, 0)


def test_the_blocking_client_has_these_calls() -> None:
    with onward.connect_sync("memory:") as mq:
        mq.step_down()
        assert mq.promote(force=True).lineage == mq.replication().lineage
