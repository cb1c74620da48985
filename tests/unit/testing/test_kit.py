"""The test kit: a message in, its outcome out, and time that passes when it is told to."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from onward import App, Reject, Retry
from onward.client.delivery import Delivery
from onward.errors import Conflict, InvalidRequest, UnknownGroup
from onward.testing.kit import NotSettled, kit


def shop() -> App:
    """An App with two groups: one that takes everything, one that is choosy."""
    app = App("nowhere:1")

    @app.consumer("orders", group="billing")
    async def charge(order: dict[str, int]) -> None:
        if order["amount"] < 0:
            raise Reject("a negative amount")
        if order["amount"] == 0:
            raise ValueError("nothing to pay")

    @app.consumer("orders", group="gifts", tags="gift")
    def wrap(order: dict[str, int]) -> None: ...

    return app


async def test_a_message_is_delivered_to_every_group_and_each_says_how_it_went() -> None:
    async with kit(shop()) as k:
        outcome = await k.deliver("orders", {"amount": 7}, tag="gift")
        assert outcome.did == "acked"
        assert outcome.id == "orders/0"
        plain = await k.deliver("orders", {"amount": 7})
        assert (plain["billing"].did, plain["gifts"].did) == ("acked", "filtered")
        assert plain.did == "acked, filtered"


async def test_failures_are_outcomes_with_their_cause() -> None:
    async with kit(shop()) as k:
        retried = (await k.deliver("orders", {"amount": 0}, tag="gift"))["billing"]
        assert (retried.did, retried.cause) == ("retried", "ValueError: nothing to pay")
        assert retried.due_at_ms == k.clock.now_ms() + 10_000
        dead = (await k.deliver("orders", {"amount": -1}, tag="gift"))["billing"]
        assert (dead.did, dead.cause) == ("dead", "a negative amount")
        unreadable = await k.deliver("orders", "no JSON", tag="gift")
        assert "the body is not what 'charge' takes" in unreadable["billing"].cause


async def test_dead_letters_come_with_their_messages() -> None:
    async with kit(shop()) as k:
        await k.deliver("orders", {"amount": -1}, key="ann")
        (letter,) = await k.dead("orders", group="billing")
        assert letter.cause == "a negative amount"
        assert letter.message is not None
        assert letter.message.key == "ann"
        assert await k.dead(group="gifts") == []
        assert len(await k.dead()) == 1


async def test_retries_come_when_time_passes_each_at_its_time() -> None:
    app, attempts = App(), []

    @app.consumer("orders", group="billing", retry="10s,1m,1h")
    async def charge(delivery: Delivery) -> None:
        attempts.append((delivery.attempt, k.clock.now_ms() - began_ms))
        raise OSError("the bank is down")

    async with kit(app) as k:
        began_ms = k.clock.now_ms()
        assert (await k.deliver("orders", b"x")).did == "retried"
        await k.advance("9s")
        assert attempts == [(1, 0)]
        await k.advance("1s")
        assert attempts == [(1, 0), (2, 10_000)]
        await k.advance("1d")
        assert attempts[2:] == [(3, 70_000), (4, 3_670_000)]
        assert (await k.outcome("orders/0")).did == "dead"
        assert [letter.attempts for letter in await k.dead()] == [4]
        assert k.clock.now_ms() - began_ms == 86_410_000


async def test_a_retry_that_names_its_time_is_kept_waiting_until_then() -> None:
    app, seen = App(), []

    @app.consumer("orders", group="billing")
    async def charge(delivery: Delivery) -> None:
        seen.append(delivery.attempt)
        if len(seen) == 1:
            raise Retry("at night", at=k.clock.now_ms() + 3_600_000, count=False)

    async with kit(app) as k:
        await k.deliver("orders", b"x")
        await k.advance("59m")
        assert seen == [1]
        await k.advance("1m")
        assert seen == [1, 1]


async def test_a_message_that_a_function_publishes_can_be_asked_for() -> None:
    app = App()

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None:
        await app.publish("bills", body)

    @app.consumer("bills", group="mail")
    async def send(body: bytes) -> None: ...

    async with kit(app) as k:
        await k.deliver("orders", b"x")
        assert (await k.outcome("bills/0"))["mail"].did == "acked"


async def test_a_key_that_failed_parks_alone_and_goes_on_in_order_when_its_time_comes() -> None:
    app, seen = App(), []

    @app.consumer("orders", group="billing", ordered=True, concurrency=4, retry="10s,10s")
    async def charge(body: str, delivery: Delivery) -> None:
        seen.append(body)
        if body == "a1" and delivery.attempt == 1:
            raise OSError("not now")

    async with kit(app) as k:
        assert (await k.deliver("orders", "a1", key="a")).did == "retried"
        await k.mq.publish("orders", "a2", key="a")
        assert (await k.deliver("orders", "b1", key="b")).did == "acked"
        assert seen == ["a1", "b1"]
        await k.advance("10s")
        assert seen == ["a1", "b1", "a1", "a2"]


async def test_the_rate_of_a_key_is_kept_by_the_time_that_passes() -> None:
    app, seen = App(), []

    @app.consumer("orders", group="billing", key_rate=0.1)
    async def charge(body: str) -> None:
        seen.append((body, k.clock.now_ms() - began_ms))

    async with kit(app) as k:
        began_ms = k.clock.now_ms()
        await k.mq.publish_many("orders", ["1", "2", "3"], keys=["a"] * 3)
        await k.advance("1m")
        assert [body for body, _ in seen] == ["1", "2", "3"]
        assert seen[1][1] - seen[0][1] >= 10_000
        assert seen[2][1] - seen[1][1] >= 10_000


async def test_groups_that_broadcast_or_deliver_at_most_once_are_waited_for_too() -> None:
    app, seen = App(), []

    @app.consumer("orders", group="caches", mode="broadcast")
    async def forget(body: bytes) -> None:
        await asyncio.sleep(0)
        seen.append("caches")

    @app.consumer("orders", group="metrics", at_most_once=True)
    async def count(body: bytes) -> None:
        await asyncio.sleep(0)
        seen.append("metrics")

    async with kit(app) as k:
        assert (await k.deliver("orders", b"x")).did == "acked"
        assert sorted(seen) == ["caches", "metrics"]


async def test_dead_letters_are_those_of_all_groups_that_have_some() -> None:
    app = shop()
    app.consumer("orders", group="caches", mode="broadcast")(lambda body: None)
    app.consumer("returns", group="caches")(lambda body: None)
    async with kit(app) as k:
        await k.deliver("orders", {"amount": -1})
        assert [letter.id for letter in await k.dead()] == ["orders/0"]
        assert [letter.id for letter in await k.dead("orders")] == ["orders/0"]
        with pytest.raises(InvalidRequest, match="broadcast"):
            await k.dead(group="caches")


async def test_what_is_not_settled_in_time_is_named() -> None:
    app, may_end = App(), asyncio.Event()

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None:
        await may_end.wait()

    async with kit(app) as k:
        with pytest.raises(NotSettled, match="orders/0 was not settled by billing"):
            await k.deliver("orders", b"x", timeout="1ms")
        may_end.set()


async def test_a_failed_assertion_comes_out_as_it_is() -> None:
    with pytest.raises(AssertionError, match="as it is"):
        async with kit(shop()):
            raise AssertionError("as it is")


async def test_an_app_that_cannot_join_says_why() -> None:
    app = App()
    app.consumer("orders", group="billing", mode="exclusive", refuse=True)(lambda body: None)
    app.consumer("refunds", group="billing", refuse=True)(lambda body: None)
    with pytest.raises(Conflict):
        async with kit(app):
            raise AssertionError("never entered")


async def test_an_app_can_be_tested_again_and_again() -> None:
    app = shop()
    for _ in range(3):
        async with kit(app) as k:
            assert (await k.deliver("orders", {"amount": 7}, tag="gift")).id == "orders/0"


def test_a_test_without_a_loop_has_the_same_calls() -> None:
    with kit(shop()) as k:
        assert k.deliver("orders", {"amount": 7}, tag="gift").did == "acked"
        assert k.deliver("orders", {"amount": 0}, tag="gift")["billing"].did == "retried"
        k.advance("10s")
        k.idle()
        assert k.outcome("orders/1")["billing"].attempt == 2
        assert k.deliver("orders", {"amount": -1})["billing"].did == "dead"
        assert [letter.offset for letter in k.dead("orders", group="billing")] == [2]
        assert k.mq.topic("orders").messages == 3
        assert k.clock.now_ms() == k.mq.group("billing").created_at_ms + 10_000


def test_a_test_without_a_loop_is_told_what_ended_the_app() -> None:
    app = App()

    @app.consumer("orders", group="billing")
    async def charge(body: bytes) -> None:
        await app.mq.delete_group("billing")

    def deliver() -> None:
        with kit(app) as k:
            k.deliver("orders", b"x")

    with pytest.raises(UnknownGroup, match="'billing' was deleted"):
        deliver()


def test_a_mistake_is_raised_in_the_thread_of_the_test() -> None:
    with pytest.raises(InvalidRequest, match="no consumer"), kit(App()):
        raise AssertionError("never entered")


async def test_what_is_scheduled_fires_when_time_passes_each_at_its_time() -> None:
    app, got = App(), []

    @app.consumer("orders", group="billing")
    async def charge(body: str) -> None:
        got.append((body, k.clock.now_ms() - began_ms))

    async with kit(app) as k:
        began_ms = k.clock.now_ms()
        await k.mq.publish("orders", "third", at=k.now() + timedelta(hours=1))
        await k.mq.publish("orders", "first", delay="10s")
        await k.mq.publish("orders", "second", delay="20s")
        await k.advance("9s")
        assert got == []
        await k.advance("1m")
        assert got == [("first", 10_000), ("second", 20_000)]
        assert (await k.outcome("orders/0")).did == "acked"
        await k.advance("1d")
        assert got[2:] == [("third", 3_600_000)]


async def test_what_was_cancelled_does_not_fire_and_does_not_stop_time() -> None:
    app, got = App(), []

    @app.consumer("orders", group="billing")
    async def charge(body: str) -> None:
        got.append(body)

    async with kit(app) as k:
        await k.mq.publish("orders", "never", delay="10s", unique="order-7")
        await k.mq.cancel_scheduled(unique="order-7")
        await k.advance("1h")
        assert got == []
        assert k.now() == datetime(2026, 1, 1, 1, tzinfo=UTC)


async def test_every_recurring_run_comes_at_its_time() -> None:
    app, got = App(), []

    @app.consumer("ticks", group="clock")
    async def tick(body: str) -> None:
        got.append(k.clock.now_ms() - began_ms)

    async with kit(app) as k:
        began_ms = k.clock.now_ms()
        await k.mq.set_recurring("tick", "ticks", "", every="10m")
        await k.advance("1h")
        assert got == [600_000 * number for number in range(1, 7)]


def test_the_schedule_fires_without_async_too() -> None:
    app, got = App(), []

    @app.consumer("orders", group="billing")
    def charge(body: str) -> None:
        got.append(body)

    with kit(app) as k:
        k.mq.publish("orders", "later", delay="10s")
        k.advance("1m")
        assert got == ["later"]
        assert k.now() == datetime(2026, 1, 1, 0, 1, tzinfo=UTC)


def test_dead_letters_of_a_topic_are_those_of_the_groups_that_consume_it() -> None:
    app = App()

    @app.consumer("mails", group="mailer", retry="none")
    async def send(body: str) -> None:
        raise ValueError(body)

    @app.consumer("orders", group="billing", retry="none")
    async def charge(body: str) -> None:
        raise ValueError(body)

    with kit(app) as k:
        k.deliver("mails", "a")
        k.deliver("orders", "b")
        assert [letter.id for letter in k.dead("mails")] == ["mails/0"]
        assert {letter.id for letter in k.dead()} == {"mails/0", "orders/0"}


def test_a_topic_that_no_function_takes_is_an_error() -> None:
    app = App()

    @app.consumer("mails", group="mailer")
    async def send(body: str) -> None: ...

    with kit(app) as k:
        with pytest.raises(InvalidRequest, match="'mailz'; did you mean 'mails'"):
            k.deliver("mailz", "a")
        with pytest.raises(InvalidRequest, match="no function of this app consumes"):
            k.dead("mailz")
        assert not k.mq.has_topic("mailz")


def test_what_was_acked_says_in_which_attempt() -> None:
    app, failures = App(), [Retry("not now", after="1s", count=False), ValueError("no")]

    @app.consumer("mails", group="mailer", retry="1s,1s")
    async def send(body: str) -> None:
        if body == "bad" and failures:
            raise failures.pop(0)

    with kit(app) as k:
        assert k.deliver("mails", "good")["mailer"].attempt == 1
        uncounted = k.deliver("mails", "bad")["mailer"]
        assert (uncounted.did, uncounted.attempt) == ("retried", 1)
        k.advance("1s")
        failed = k.outcome("mails/1")["mailer"]
        assert (failed.did, failed.attempt) == ("retried", 1)
        k.advance("1s")
        acked = k.outcome("mails/1")["mailer"]
        assert (acked.did, acked.attempt) == ("acked", 2)


def test_a_run_of_a_recurring_schedule_is_explained_by_its_name() -> None:
    app = App()

    @app.recurring("report", cron="0 9 * * *", body="daily")
    @app.consumer("reports", group="reporter")
    async def report(body: str) -> None: ...

    with kit(app) as k:
        k.mq.publish("reports", "late", delay="2h")
        k.advance("1d")
        lives = [k.mq.explain(f"reports/{offset}") for offset in (0, 1)]
        origins = [life.scheduled.recurring for life in lives if life.scheduled is not None]
        assert origins == ["", "report"]
        assert "scheduled by the recurring schedule 'report' at" in "\n".join(lives[1].lines())
