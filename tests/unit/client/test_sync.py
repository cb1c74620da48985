"""The blocking client: from any thread, with nobody left waiting."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onward import connect_sync
from onward.errors import NotConnected, UnknownTopic
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


def test_a_client_that_is_not_open_or_is_closed_says_so() -> None:
    mq = connect_sync("memory:")
    with pytest.raises(NotConnected):
        mq.publish("orders", b"x")
    mq.open()
    mq.close()
    mq.close()
    with pytest.raises(NotConnected):
        mq.publish("orders", b"x")


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
