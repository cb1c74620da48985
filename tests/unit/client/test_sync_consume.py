"""Consuming with the blocking client: the same promises, in threads."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from onward import connect_sync
from onward.client.sync import SyncClient
from onward.errors import Conflict, InvalidRequest, LeaseLost, NotConnected, UnknownGroup

WAIT_S = 60


def test_each_message_is_given_and_acked_without_async() -> None:
    with connect_sync("memory:") as mq:
        mq.publish_many("orders", ["a", "b", "c"], keys=["x", None, None])
        seen = []
        for delivery in mq.consume("orders", group="billing", member="ann"):
            seen.append((delivery.text, delivery.key, delivery.attempt))
            assert (delivery.group, delivery.member) == ("billing", "ann")
            delivery.ack()
            if len(seen) == 3:
                break
        assert seen == [("a", "x", 1), ("b", None, 1), ("c", None, 1)]
        assert mq.group("billing").backlog == 0
        assert mq.group("billing").members == ()


def test_every_verb_does_what_it_says() -> None:
    with connect_sync("memory:") as mq, mq.consume("orders", group="g", retry="fixed:0s") as member:
        mq.publish("orders", b"x")
        (first,) = member.fetch(wait="60s")
        first.renew()
        first.retry(after=0, cause="not now")
        (second,) = member.fetch(wait="60s")
        assert (second.attempt, second.is_lost, second.lease > first.lease) == (2, False, True)
        second.release()
        (third,) = member.fetch(wait="60s")
        assert third.attempt == 2
        third.reject("never")
        with pytest.raises(LeaseLost):
            third.ack()
        assert [letter.cause for letter in mq.dead_letters("g")] == ["never"]
        assert mq.redrive("g") == 1
        (again,) = member.fetch(wait="60s")
        again.ack()
        assert "orders/0" in repr(again)


def test_leaving_the_loop_gives_back_what_was_not_settled() -> None:
    with connect_sync("memory:") as mq:
        mq.publish_many("orders", [b"a", b"b"])
        for delivery in mq.consume("orders", group="billing"):
            assert delivery.body == b"a"
            break
        again = [mq.fetch("orders", group="billing", wait="60s")[0] for _ in range(2)]
        assert sorted(one.body for one in again) == [b"a", b"b"]
        assert [one.attempt for one in again] == [1, 1]


def test_batches_are_columns_with_verbs() -> None:
    with connect_sync("memory:") as mq:
        mq.publish_many("orders", [b"a", b"b", b"c"], keys=["x", "y", "z"])
        for batch in mq.consume("orders", group="billing").batches():
            assert (batch.topic, batch.count, len(batch)) == ("orders", 3, 3)
            assert (batch.bodies, batch.keys) == ([b"a", b"b", b"c"], ["x", "y", "z"])
            assert batch.offsets == [0, 1, 2]
            batch.renew()
            batch.messages()[0].reject("bad")
            batch.ack()
            break
        assert (mq.group("billing").backlog, mq.group("billing").dead) == (0, 1)


@pytest.mark.parametrize("verb", ["retry", "reject", "release"])
def test_a_batch_can_be_settled_as_a_whole(verb: str) -> None:
    with connect_sync("memory:") as mq:
        mq.publish_many("orders", [b"a", b"b"])
        for batch in mq.consume("orders", group="billing").batches():
            getattr(batch, verb)()
            break
        group = mq.group("billing")
        assert group.dead == (2 if verb == "reject" else 0)
        assert group.backlog == (0 if verb == "reject" else 2)


def test_a_fetch_that_finds_nothing_returns_nothing() -> None:
    with connect_sync("memory:") as mq:
        mq.create_topic("orders")
        assert mq.fetch("orders", group="billing", wait="1ms") == []


def test_threads_of_one_client_share_the_work_of_a_group() -> None:
    with connect_sync("memory:") as mq, ThreadPoolExecutor(4) as threads:
        mq.publish_many("orders", [str(number) for number in range(40)])
        together = threading.Barrier(4)

        def work(_: int) -> list[str]:
            done = []
            with mq.consume("orders", group="billing", credit=1) as member:
                together.wait(WAIT_S)
                while mq.group("billing").backlog:
                    for delivery in member.fetch(wait="10ms"):
                        done.append(delivery.text)
                        delivery.ack()
            return done

        parts = list(threads.map(work, range(4)))
        assert sorted(int(text) for part in parts for text in part) == list(range(40))


def test_a_thread_that_consumes_is_told_when_another_closes() -> None:
    mq = connect_sync("memory:")
    mq.open()
    mq.publish("orders", b"a")
    seen, ended = threading.Event(), []

    def work() -> None:
        try:
            for delivery in mq.consume("orders", group="billing"):
                delivery.ack()
                seen.set()
            ended.append("left")
        except NotConnected:
            ended.append("told")

    thread = threading.Thread(target=work)
    thread.start()
    assert seen.wait(WAIT_S)
    mq.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert ended in (["left"], ["told"])


def test_calls_about_groups_return_what_the_asynchronous_ones_do() -> None:
    with connect_sync("memory:") as mq:
        mq.publish_many("orders", [b"a", b"b", b"c"])
        assert mq.create_group("billing", "orders", lease="1m").lease_ms == 60_000
        assert mq.change_group("billing", retry="none").retry.limit == 1
        mq.pause_group("billing")
        assert [one.paused for one in mq.groups(topic="orders")] == [True]
        mq.resume_group("billing")
        assert [one.body for one in mq.peek("billing", "orders", n=1)] == [b"a"]
        assert mq.skip("billing", "orders/0") == 1
        assert mq.replay("billing", "orders", [0], dry_run=True) == 1
        assert mq.fork_group("billing", "trial").backlog == 2
        assert mq.reset_group("billing", to="latest") == 0
        mq.set_member("billing", "ann", offline=True)
        assert [one.offset for one in mq.find("orders", text="b")] == [1]
        assert mq.explain("orders/0").group("billing") is not None
        assert mq.purge("billing") == 0
        mq.delete_group("trial")
        with pytest.raises(UnknownGroup):
            mq.group("trial")


def test_the_help_of_a_call_says_what_it_does() -> None:
    assert SyncClient.peek.__name__ == "peek"
    assert (SyncClient.peek.__doc__ or "").startswith("Return the messages that would be")


def test_a_client_that_is_open_stays_as_it_is_when_it_is_opened() -> None:
    with connect_sync("memory:") as mq:
        mq.publish("orders", "x")
        mq.open()
        assert mq.has_topic("orders")


def test_what_is_wrong_with_a_consumer_is_said_where_it_is_made() -> None:
    with connect_sync("memory:") as mq:
        with pytest.raises(InvalidRequest):
            mq.consume([], group="billing")
        with pytest.raises(InvalidRequest):
            mq.consume("orders", group="billing", credit=0)


def test_a_consumer_says_what_the_broker_told_it_at_its_join() -> None:
    with connect_sync("memory:") as mq:
        first = mq.consume("reports", group="printer", mode="exclusive", lease="1m", member="ann")
        second = mq.consume(["reports"], group="printer", retry="ladder")
        assert (first.mode, first.lease_ms, first.retry_limit, first.is_joined) == ("", 0, 0, False)
        first.join()
        second.join()
        assert (first.group, first.topics, first.member) == ("printer", ("reports",), "ann")
        assert (first.mode, first.lease_ms) == ("exclusive", 60_000)
        assert first.retry_limit == mq.group("printer").retry.limit
        assert (first.at_most_once, first.is_joined) == (False, True)
        assert (first.is_standby, second.is_standby) == (False, True)
        first.close()
        assert not first.is_joined


def test_joining_says_why_that_is_not_possible() -> None:
    with connect_sync("memory:") as mq:
        mq.consume("reports", group="printer", mode="exclusive").join()
        late = mq.consume("reports", group="printer", refuse=True)
        with pytest.raises(Conflict):
            late.join()


def test_another_thread_stops_a_loop_and_what_was_taken_can_still_be_settled() -> None:
    with connect_sync("memory:") as mq, ThreadPoolExecutor(1) as threads:
        mq.publish("orders", "a")
        taken, stopped = threading.Event(), threading.Event()
        consumer = mq.consume("orders", group="billing")

        def work() -> list[str]:
            seen = []
            for delivery in consumer:
                taken.set()
                assert stopped.wait(WAIT_S)
                seen.append((delivery, delivery.text))
            assert [delivery.is_settled for delivery, _ in seen] == [False]
            for delivery, _ in seen:
                delivery.ack()
            consumer.close()
            return [text for _, text in seen]

        ended = threads.submit(work)
        assert taken.wait(WAIT_S)
        mq.publish_many("orders", ["b", "c"])
        consumer.stop()
        stopped.set()
        assert ended.result(WAIT_S) == ["a"]
        assert mq.group("billing").backlog == 2
        with pytest.raises(InvalidRequest, match="closed"):
            consumer.join()


def test_a_thread_that_waits_for_messages_is_woken_by_stop() -> None:
    with connect_sync("memory:") as mq, ThreadPoolExecutor(1) as threads:
        mq.create_topic("orders")
        with mq.consume("orders", group="billing") as consumer:
            waiting = threads.submit(consumer.take, 10)
            consumer.stop()
            assert waiting.result(WAIT_S) == []
            assert consumer.fetch(wait="1m") == []
            with pytest.raises(InvalidRequest, match="stopped"):
                consumer.join()


def test_a_signal_handler_may_stop_the_consumer_of_its_own_thread() -> None:
    with connect_sync("memory:") as mq:
        mq.publish_many("orders", ["a", "b"])
        with mq.consume("orders", group="billing", credit=1) as consumer:
            before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
            try:
                seen = []
                for delivery in consumer:
                    with mq._lock:  # where a thread is when it gives work to the client
                        signal.raise_signal(signal.SIGUSR1)
                    seen.append(delivery.text)
                    delivery.ack()
                assert seen == ["a"]
            finally:
                signal.signal(signal.SIGUSR1, before)


def test_stopping_after_the_client_is_closed_is_no_error() -> None:
    mq = connect_sync("memory:")
    mq.open()
    consumer = mq.consume("orders", group="billing")
    mq.close()
    consumer.stop()
    consumer.close()


def test_messages_at_hand_are_taken_without_waiting() -> None:
    with connect_sync("memory:") as mq, mq.consume("orders", group="billing") as consumer:
        mq.publish_many("orders", ["a", "b", "c"])
        found = consumer.take(1)
        while (delivery := consumer.take_now()) is not None:
            found.append(delivery)
        assert [one.text for one in found] == ["a", "b", "c"]
        found[0].batch.ack()
        assert [one.is_settled for one in found] == [True, True, True]
        with pytest.raises(InvalidRequest):
            consumer.take(0)


def test_acks_without_waiting_are_futures_that_any_thread_may_wait_for() -> None:
    with connect_sync("memory:") as mq, ThreadPoolExecutor(4) as threads:
        mq.publish_many("orders", [str(number) for number in range(100)])
        deliveries = mq.fetch("orders", group="billing", n=100, wait="60s")
        futures = list(threads.map(lambda one: one.ack_soon(), deliveries))
        assert all(isinstance(future, Future) for future in futures)
        assert [future.result(WAIT_S) for future in futures] == [None] * len(deliveries)
        assert all(delivery.is_settled for delivery in deliveries)
        assert mq.group("billing").backlog == 100 - len(deliveries)
        with pytest.raises(LeaseLost, match="settled already"):
            deliveries[0].ack_soon().result(WAIT_S)


def test_an_ack_without_waiting_is_durable_before_the_consumer_has_left() -> None:
    with connect_sync("memory:") as mq:
        mq.publish("orders", "a")
        for delivery in mq.consume("orders", group="billing"):
            future = delivery.ack_soon()
            break
        assert future.result(0) is None
        assert mq.group("billing").backlog == 0


def test_a_batch_says_whose_it_is_and_is_acked_without_waiting() -> None:
    with connect_sync("memory:") as mq:
        mq.publish_many("orders", ["a", "b"])
        for batch in mq.consume("orders", group="billing", member="ann").batches():
            assert (batch.group, batch.member, batch.is_lost) == ("billing", "ann", False)
            assert batch.lease > 0
            assert "orders" in repr(batch)
            assert batch.ack_soon().result(WAIT_S) is None
            break
        assert mq.group("billing").backlog == 0


def test_what_is_known_of_a_delivery_is_still_known_after_the_client() -> None:
    mq = connect_sync("memory:")
    mq.open()
    mq.publish_many("orders", ["a", "b"])
    done, left = mq.fetch("orders", group="billing", n=2, wait="60s")
    done.ack()
    mq.close()
    assert (done.is_settled, left.is_lost) == (True, True)
    with pytest.raises(NotConnected):
        left.ack_soon()


def test_a_delivery_can_be_looked_at_where_its_future_tells_that_it_is_done() -> None:
    seen: list[object] = []
    looked = threading.Event()
    with connect_sync("memory:") as mq:
        mq.publish("orders", "a")
        (delivery,) = mq.fetch("orders", group="g")

        def look(_: object) -> None:
            seen.append((delivery.is_settled, delivery.is_lost))
            looked.set()

        delivery.ack_soon().add_done_callback(look)
        assert looked.wait(60)
    assert seen == [(True, False)]
