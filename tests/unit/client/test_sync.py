"""The blocking client: from any thread, with nobody left waiting."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onward import connect_sync
from onward.client import producer
from onward.client.sync import SyncClient
from onward.errors import InvalidRequest, NotConnected, Overloaded, UnknownTopic
from onward.settings import LogSettings, Settings


def test_everything_works_without_async() -> None:
    with connect_sync("memory:") as mq:
        mq.create_topic("orders", lifetime="1h")
        assert mq.publish("orders", {"id": 7}).offset == 0
        assert mq.publish_many("orders", ["a", "b"]).first_offset == 1
        assert mq.publish_soon("orders", b"later").result(5).offset == 3
        assert [message.offset for message in mq.read("orders", start=1)] == [1, 2, 3]
        assert [batch.count for batch in mq.read("orders").batches()] == [1, 2, 1]
        assert mq.get("orders", 2).body == b"b"
        assert mq.topic("orders").next_offset == 4
        assert mq.change_topic("orders", rule="read-only").rule == "read-only"
        assert [topic.topic for topic in mq.topics()] == ["orders"]
        mq.delete_topic("orders")
        assert not mq.has_topic("orders")
        assert mq.status()["published"] == 4


def test_errors_come_out_where_the_call_was_made() -> None:
    with connect_sync("memory:") as mq, pytest.raises(UnknownTopic):
        mq.topic("orders")


def test_many_threads_share_one_client() -> None:
    with connect_sync("memory:") as mq, ThreadPoolExecutor(8) as threads:
        receipts = list(threads.map(lambda number: mq.publish("orders", str(number)), range(200)))
        assert sorted(receipt.offset for receipt in receipts) == list(range(200))


def test_what_a_publish_was_given_may_be_changed_for_the_next_one() -> None:
    headers, body = {"n": ""}, {"n": 0}
    with connect_sync("memory:") as mq:
        futures = []
        for number in range(50):
            headers["n"], body["n"] = str(number), number
            futures.append(mq.publish_soon("orders", body, headers=headers))
        assert [future.result(5).offset for future in futures] == list(range(50))
        messages = list(mq.read("orders"))
        assert [message.headers for message in messages] == [{"n": str(n)} for n in range(50)]
        assert [message.json() for message in messages] == [{"n": n} for n in range(50)]


def test_a_body_that_nobody_can_say_is_told_by_the_future() -> None:
    with connect_sync("memory:") as mq, pytest.raises(InvalidRequest):
        mq.publish_soon("orders", object()).result(5)


def test_a_client_that_is_not_open_or_is_closed_says_so() -> None:
    mq = connect_sync("memory:")
    with pytest.raises(NotConnected):
        mq.publish("orders", b"x")
    mq.open()
    mq.close()
    mq.close()
    with pytest.raises(NotConnected):
        mq.publish("orders", b"x")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_to_open_a_client_of_its_own() -> None:
    with connect_sync("memory:") as mq:
        child = multiprocessing.get_context("fork").Process(target=use_in_child, args=(mq,))
        child.start()
        child.join(10)
        try:
            assert child.exitcode == 0
        finally:
            child.kill()
        assert mq.publish("orders", b"the parent goes on").offset == 0


def use_in_child(mq: SyncClient) -> None:
    with pytest.raises(NotConnected, match="before a fork"):
        mq.publish("orders", b"x")
    with pytest.raises(NotConnected, match="before a fork"):
        mq.publish_soon("orders", b"x")
    mq.close()
    with mq:
        assert mq.publish("orders", b"of the child").offset == 0


def test_a_connection_that_cannot_be_made_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(NotConnected):
        connect_sync("127.0.0.1:1", timeout="200ms").open()
    assert threading.active_count() == before


def test_a_thread_that_follows_is_told_when_another_closes() -> None:
    mq = connect_sync("memory:")
    mq.open()
    mq.publish("orders", b"a")
    seen = threading.Event()
    ended: list[BaseException | None] = []

    def follow() -> None:
        try:
            for _ in mq.read("orders", follow=True):
                seen.set()
        except NotConnected as error:
            ended.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    assert seen.wait(5)
    mq.close()
    thread.join(5)
    assert not thread.is_alive()
    assert len(ended) == 1


def test_a_loop_that_is_left_early_leaves_nothing_open() -> None:
    with connect_sync("memory:") as mq:
        mq.publish_many("orders", [b"a", b"b"])
        for _ in mq.read("orders", follow=True):
            break
        assert mq.topic("orders").readers == 0


def test_a_file_address_decides_where_whatever_the_settings_say(tmp_path: Path) -> None:
    log = LogSettings(folder=str(tmp_path / "other"), disk_reserve_bytes=0)
    folder = tmp_path / "here"
    with connect_sync(f"file:{folder}", settings=Settings(log=log)) as mq:
        mq.publish("orders", b"a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_publishes_of_one_thread_that_do_not_wait_keep_their_order() -> None:
    with connect_sync("memory:") as mq:
        futures = [mq.publish_soon("orders", str(number)) for number in range(500)]
        assert [future.result(5).offset for future in futures] == list(range(500))


def test_publishes_that_do_not_wait_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer, "WAITING_BYTES_MAX", 1_000)
    with connect_sync("memory:") as mq:
        assert mq._loop is not None
        all_asked = threading.Event()
        mq._loop.call_soon_threadsafe(all_asked.wait)
        futures = [mq.publish_soon("orders", bytes(2_000)) for _ in range(3)]
        all_asked.set()
        assert futures[0].result(5).offset == 0
        assert [type(future.exception(5)) for future in futures[1:]] == [Overloaded] * 2
