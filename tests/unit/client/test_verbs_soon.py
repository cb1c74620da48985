"""Verbs without waiting, and waking an event loop of another kind."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

import onward
from onward.errors import LeaseLost


async def test_every_verb_can_be_given_without_waiting() -> None:
    async with onward.connect("memory:") as mq:
        await mq.publish_many("orders", ["retried", "rejected", "released", "acked"])
        async with mq.consume("orders", group="billing") as consumer:
            retried, rejected, released, acked = await consumer.fetch(4, wait="5s")
            futures = [
                retried.retry_soon(after="1h", cause="later"), rejected.reject_soon("never"),
                released.release_soon(), acked.ack_soon(),
            ]  # fmt: skip
            for future in futures:
                assert await future is None
            with pytest.raises(LeaseLost):
                await retried.reject_soon()
            (again,) = await consumer.fetch(4, wait="5s")
            assert (again.text, again.attempt) == ("released", 1)
            (dead,) = [one async for one in mq.dead_letters("billing")]
            assert (dead.id, dead.cause) == ("orders/1", "never")
            assert (await mq.group("billing")).topics[0].waiting == 1


async def test_a_batch_can_be_settled_without_waiting() -> None:
    async with onward.connect("memory:") as mq:
        await mq.publish_many("orders", ["a", "b"])
        async for batch in mq.consume("orders", group="billing").batches():
            await batch.reject_soon("both")
            break
        assert len([one async for one in mq.dead_letters("billing")]) == 2


def test_threads_settle_without_waiting() -> None:
    with onward.connect_sync("memory:") as mq:
        mq.publish_many("orders", ["retried", "rejected", "released"])
        with mq.consume("orders", group="billing") as consumer:
            retried, rejected, released = consumer.fetch(3, wait="5s")
            futures = [
                retried.retry_soon(after_ms=3_600_000), rejected.reject_soon("never"),
                released.release_soon(),
            ]  # fmt: skip
            assert [future.result(10) for future in futures] == [None, None, None]
            with pytest.raises(LeaseLost):
                released.retry_soon().result(10)
            assert [one.text for one in consumer.fetch(3, wait="5s")] == ["released"]
        mq.publish("bills", "x")
        for batch in mq.consume("bills", group="billing").batches():
            batch.release_soon().result(10)
            break


def test_a_foreign_loop_is_woken_by_a_pipe() -> None:
    reading, writing = os.pipe()
    found: list[str] = []
    with onward.connect_sync("memory:") as mq, mq.consume("orders", group="g") as consumer:
        consumer.on_ready(lambda: os.write(writing, b"."))
        for number in range(300):
            mq.publish_soon("orders", str(number))
        while len(found) < 300:
            assert select.select([reading], [], [], 20)[0], "nobody was woken"
            os.read(reading, 4_096)
            while (delivery := consumer.take_now()) is not None:
                found.append(delivery.text)
                delivery.ack_soon()
    assert found == [str(number) for number in range(300)]
    os.close(reading)
    os.close(writing)


GEVENT = """
from gevent import monkey
monkey.patch_all()
import onward
try:
    with onward.connect_sync("memory:"):
        print("opened")
except onward.InvalidRequest as error:
    print(error)
"""


def test_gevent_is_named_where_it_has_replaced_threads() -> None:
    pytest.importorskip("gevent", reason="gevent is not installed")
    done = subprocess.run(
        [sys.executable, "-c", GEVENT], capture_output=True, text=True, timeout=60, check=False
    )
    assert "gevent has replaced 'threading'" in done.stdout, done.stderr
