"""The write path: nothing is answered before its time, nothing twice, nothing out of order."""

import asyncio
from random import Random

import pytest

from onward.broker import producers as producers_module
from onward.broker import publish
from onward.broker.broker import Broker
from onward.broker.producers import WINDOW
from onward.errors import DiskFull
from onward.log.memory_disk import MemoryDisk
from onward.message.batch import encode_batch
from onward.protocol.frames import Kind, frame
from onward.protocol.payloads import Durability, Published, publish_head
from onward.testing.disk import FaultyDisk

from .speaking import HeldCommit, Speaker, open_broker, settings_with, turns


def held(broker: Broker) -> HeldCommit:
    commit = broker._commit
    assert isinstance(commit, HeldCommit)
    return commit


async def test_a_receipt_says_where_the_batch_is() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    assert await speaker.publish("orders", [b"a", b"b"]) == Published(0, 2, Durability.DISK, False)
    assert await speaker.publish("orders", [b"c"]) == Published(2, 3, Durability.DISK, False)
    await broker.stop()


async def test_nothing_is_answered_or_readable_before_the_commit() -> None:
    broker = await open_broker(commit=HeldCommit)
    speaker = await Speaker.to(broker)
    request_id = speaker.say_publish("orders")
    await turns()
    assert speaker.of(request_id) == []
    reading = speaker.say_read("orders")
    await turns()
    assert (speaker.bodies(reading), speaker.end(reading)) == ([], "end")
    held(broker).release()
    await turns()
    assert speaker.answer(request_id) == Published(0, 2, Durability.DISK, False)
    await broker.stop()


async def test_all_that_arrives_during_a_commit_shares_the_next_one() -> None:
    broker = await open_broker(commit=HeldCommit)
    speakers = [await Speaker.to(broker) for _ in range(5)]
    first = speakers[0].say_publish("orders")
    await turns()
    ids = [speaker.say_publish("orders", [b"x"]) for speaker in speakers]
    await turns()
    assert len(held(broker).held) == 1
    held(broker).release()
    await turns()
    assert isinstance(speakers[0].answer(first), Published)
    held(broker).release()
    await turns()
    answers = [speaker.answer(id_) for speaker, id_ in zip(speakers, ids, strict=True)]
    assert answers == [Published(offset, 3, Durability.DISK, False) for offset in range(1, 6)]
    await broker.stop()


async def test_a_repeat_gets_the_receipt_of_the_first() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    first = await speaker.publish("orders", producer_id=7, sequence=1)
    await speaker.publish("orders")
    again = await speaker.publish("orders", producer_id=7, sequence=1)
    assert isinstance(first, Published)
    assert again == first._replace(repeat=True)
    assert len(await speaker.read("orders")) == 2
    await broker.stop()


async def test_a_repeat_that_comes_while_the_first_is_under_way_waits_for_the_same_commit() -> None:
    broker = await open_broker(commit=HeldCommit)
    old, new = await Speaker.to(broker), await Speaker.to(broker)
    first = old.say_publish("orders", producer_id=7, sequence=1)
    await turns()
    old.transport.abort()
    repeat = new.say_publish("orders", producer_id=7, sequence=1)
    await turns()
    assert new.of(repeat) == []
    held(broker).release()
    await turns()
    assert new.answer(repeat) == Published(0, 2, Durability.DISK, True)
    assert old.of(first) == []
    assert broker.catalogue.find("orders").next_offset == 1
    await broker.stop()


async def test_a_connection_has_a_limited_number_of_repeats_waiting() -> None:
    broker = await open_broker(commit=HeldCommit)
    speaker = await Speaker.to(broker)
    first = speaker.say_publish("orders", producer_id=7, sequence=1)
    repeats = [speaker.say_publish("orders", producer_id=7, sequence=1) for _ in range(33)]
    await turns()
    assert [speaker.of(id_) for id_ in repeats[:-1]] == [[]] * 32
    assert speaker.answer(repeats[-1]) == "overloaded"
    commit = broker._commit
    assert isinstance(commit, HeldCommit)
    while commit.held:
        commit.release()
        await turns()
    receipt = speaker.answer(first)
    assert isinstance(receipt, Published)
    assert {speaker.answer(id_) for id_ in repeats[:-1]} == {receipt._replace(repeat=True)}
    assert await speaker.publish("orders", producer_id=7, sequence=1) == receipt._replace(
        repeat=True
    )
    assert [session.repeats_waiting for session in broker.sessions] == [0]
    await broker.stop()


async def test_a_repeat_is_known_after_a_restart_with_and_without_a_checkpoint() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    first = await speaker.publish("orders", producer_id=7, sequence=1)
    assert isinstance(first, Published)
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    for _ in range(2):
        broker = await open_broker(disk)
        speaker = await Speaker.to(broker)
        again = await speaker.publish("orders", producer_id=7, sequence=1)
        assert again == first._replace(repeat=True)
        await broker.stop()


async def test_a_repeat_never_claims_to_be_safer_than_it_is() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    options = {"producer_id": 7, "sequence": 1, "durability": Durability.MEMORY}
    assert await speaker.publish("orders", **options) == Published(1, 3, Durability.MEMORY, False)
    assert await speaker.publish("orders", **options) == Published(1, 3, Durability.MEMORY, True)
    await speaker.publish("orders")
    assert await speaker.publish("orders", **options) == Published(1, 3, Durability.DISK, True)
    await broker.stop()


async def test_a_repeat_creates_no_topic_again() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", producer_id=7, sequence=1)
    await speaker.request("topic.delete", topic="orders")
    again = await speaker.publish("orders", producer_id=7, sequence=1)
    assert isinstance(again, Published)
    assert again.repeat
    assert "orders" not in broker.catalogue.by_name
    await broker.stop()


async def test_a_sequence_older_than_the_window_is_a_conflict() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    for sequence in range(2, WINDOW + 2):
        await speaker.publish("orders", producer_id=7, sequence=sequence)
    assert await speaker.publish("orders", producer_id=7, sequence=1) == "conflict"
    await broker.stop()


@pytest.mark.parametrize(
    ("topic", "options", "code"),
    [
        ("no name", {}, "invalid_name"),
        ("orders", {"durability": Durability.QUORUM}, "invalid_request"),
        ("orders", {"durability": 77}, "invalid_request"),
        ("orders", {"producer_id": 1, "sequence": 2**63}, "invalid_request"),
    ],
)
async def test_what_is_refused_creates_nothing(
    topic: str, options: dict[str, int], code: str
) -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    assert await speaker.publish(topic, **options) == code
    assert len(broker.catalogue) == 0
    await broker.stop()


async def test_a_message_that_is_too_large_is_refused_and_creates_nothing() -> None:
    broker = await open_broker(settings=settings_with(topics={"message_bytes_max": 1_000}))
    speaker = await Speaker.to(broker)
    assert await speaker.publish("orders", [bytes(1_001)]) == "message_too_large"
    assert len(broker.catalogue) == 0
    assert isinstance(await speaker.publish("orders", [bytes(900)] * 20), Published)
    await broker.stop()


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
async def test_compression_does_not_carry_a_large_message_past_the_limit(compression: str) -> None:
    broker = await open_broker(settings=settings_with(topics={"message_bytes_max": 5_000}))
    speaker = await Speaker.to(broker)
    large = await speaker.publish("orders", [bytes(6_000)], compression=compression)
    assert large == "message_too_large"
    exact = await speaker.publish("orders", [bytes(5_000)], compression=compression)
    assert isinstance(exact, Published)
    many = await speaker.publish("orders", [bytes(4_000)] * 10, compression=compression)
    assert isinstance(many, Published)
    await broker.stop()


async def test_a_compressed_batch_is_never_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("onward.message.batch.inflate")
    broker = await open_broker(settings=settings_with(topics={"message_bytes_max": 5_000}))
    speaker = await Speaker.to(broker)
    # Of several messages the limit of each is kept by who produces them.
    answer = await speaker.publish("orders", [bytes(6_000), b"x"], compression="zstd")
    assert isinstance(answer, Published)
    await broker.stop()


async def test_a_batch_that_inflates_beyond_the_batch_limit_is_refused() -> None:
    settings = settings_with(topics={"batch_bytes_max": 65_536, "message_bytes_max": 60_000})
    broker = await open_broker(settings=settings)
    speaker = await Speaker.to(broker)
    answer = await speaker.publish("orders", [bytes(50_000)] * 50, compression="zstd")
    assert answer == "message_too_large"
    await broker.stop()


async def test_a_damaged_batch_is_refused_and_creates_nothing() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    batch = bytearray(encode_batch([b"body"]))
    batch[-1] ^= 1
    for bad in (batch, batch[:-8], encode_batch([b"a"]) * 2):
        request_id = speaker.new_id()
        head = publish_head(request_id, "orders", durability=2, batch_bytes=len(bad))
        speaker.transport.write(head + bad)
        await turns()
        assert speaker.answer(request_id) == "protocol_error"
    assert len(broker.catalogue) == 0
    assert isinstance(await speaker.publish("orders"), Published)
    await broker.stop()


async def test_a_topic_is_not_created_by_use_when_that_is_off() -> None:
    broker = await open_broker(settings=settings_with(topics={"auto_create": False}))
    speaker = await Speaker.to(broker)
    assert await speaker.publish("orders") == "unknown_topic"
    await speaker.request("topic.create", topic="orders")
    assert isinstance(await speaker.publish("orders"), Published)
    await broker.stop()


async def test_rules_of_a_topic_are_kept_from_the_moment_they_are_durable() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    for rule, code in (("read-only", "forbidden"), ("closed", "forbidden")):
        await speaker.request("topic.change", topic="orders", rule=rule)
        assert await speaker.publish("orders") == code
    await speaker.request("topic.change", topic="orders", rule="write-only")
    assert isinstance(await speaker.publish("orders"), Published)
    await broker.stop()


async def test_nothing_is_stored_in_a_topic_after_its_end_was_asked_for() -> None:
    broker = await open_broker(commit=HeldCommit)
    speaker = await Speaker.to(broker)
    before = speaker.say_publish("orders", [b"before"])
    await turns()
    held(broker).release()
    delete = speaker.new_id()
    speaker.say(Kind.REQUEST, delete, b'{"op":"topic.delete","topic":"orders"}')
    after = speaker.say_publish("orders", [b"after"])
    await turns()
    assert isinstance(speaker.answer(before), Published)
    assert speaker.answer(after) == "topic_ended"
    held(broker).release()
    await turns()
    assert "orders" not in broker.catalogue.by_name
    await broker.stop()


async def test_when_the_disk_is_full_nothing_was_done_and_the_answer_says_so() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk, commit=HeldCommit)
    speaker = await Speaker.to(broker)
    disk.capacity_bytes = 3 * 4_096
    first = speaker.say_publish("orders", [bytes([1]) * 20_000], producer_id=7, sequence=1)
    await turns()
    meanwhile = speaker.say_publish("orders", [b"relies on the topic"], producer_id=7, sequence=2)
    repeat = speaker.say_publish("orders", [bytes([1]) * 20_000], producer_id=7, sequence=1)
    await turns()
    held(broker).release()
    await turns()
    assert [speaker.answer(id_) for id_ in (first, meanwhile, repeat)] == ["disk_full"] * 3
    assert len(broker.catalogue) == 0
    assert broker.publishing.inflight_bytes == 0
    assert await speaker.publish("orders", producer_id=7, sequence=3) == "disk_full"

    disk.capacity_bytes = 1 << 30
    broker.gate.disk_is_full = False
    again = speaker.say_publish("orders", [b"again"], producer_id=7, sequence=1)
    await turns()
    held(broker).release()
    await turns()
    answer = speaker.answer(again)
    assert isinstance(answer, Published)
    assert (answer.base_offset, answer.repeat) == (0, False)
    await broker.stop()


async def test_a_failed_sync_answers_nothing_and_ends_the_broker() -> None:
    disk = FaultyDisk(Random(1))
    failures: list[Exception] = []
    broker = await open_broker(disk, on_failure=failures.append)
    speaker = await Speaker.to(broker)
    disk.fail("sync")
    request_id = speaker.say_publish("orders")
    await turns()
    assert speaker.of(request_id) == []
    assert speaker.is_lost
    assert len(failures) == 1
    await broker.stop()
    names = disk.list_folder("log")
    # The one of the empty log, from the start; none that vouches for what the disk refused.
    kept = [name for name in names if name.startswith("checkpoint")]
    assert kept in ([], ["checkpoint-00000000000000000000-0"])


async def test_an_overloaded_broker_refuses_in_order_and_takes_in_order() -> None:
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    broker = await open_broker(settings=settings, commit=HeldCommit)
    speaker = await Speaker.to(broker)
    large, small = [bytes(70_000)], [b"small"]
    first = speaker.say_publish("orders", large, producer_id=7, sequence=1)
    await turns()
    refused = [speaker.say_publish("orders", small, producer_id=7, sequence=n) for n in (2, 3)]
    await turns()
    held(broker).release()
    await turns()
    # Sent before the refusals were heard of, when there is room again.
    late = speaker.say_publish("orders", small, producer_id=7, sequence=4)
    await turns()
    assert isinstance(speaker.answer(first), Published)
    assert [speaker.answer(id_) for id_ in (*refused, late)] == ["overloaded"] * 3
    again = [speaker.say_publish("orders", small, producer_id=7, sequence=n) for n in (2, 3, 4)]
    await turns()
    held(broker).release()
    await turns()
    offsets = [speaker.answer(id_) for id_ in again]
    assert [one.base_offset for one in offsets if isinstance(one, Published)] == [1, 2, 3]
    await broker.stop()


async def test_producers_of_one_connection_are_refused_each_in_its_own_order() -> None:
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    broker = await open_broker(settings=settings, commit=HeldCommit)
    speaker = await Speaker.to(broker)
    small = [b"small"]
    speaker.say_publish("orders", [bytes(70_000)], producer_id=7, sequence=1)
    await turns()
    refused = speaker.say_publish("orders", small, producer_id=7, sequence=5)
    await turns()
    assert speaker.answer(refused) == "overloaded"
    held(broker).release()
    await turns()
    # Neither a smaller nor a larger number of another producer lets this one go on out of turn.
    others = [
        speaker.say_publish("orders", small, producer_id=id_, sequence=n)
        for id_, n in ((8, 2), (9, 900))
    ]
    late = speaker.say_publish("orders", small, producer_id=7, sequence=6)
    await turns()
    held(broker).release()
    await turns()
    assert all(isinstance(speaker.answer(id_), Published) for id_ in others)
    assert speaker.answer(late) == "overloaded"
    again = [speaker.say_publish("orders", small, producer_id=7, sequence=n) for n in (5, 6)]
    await turns()
    held(broker).release()
    await turns()
    found = [speaker.answer(id_) for id_ in again]
    assert [one.base_offset for one in found if isinstance(one, Published)] == [3, 4]
    await broker.stop()


@pytest.mark.slow
async def test_the_producers_that_are_refused_do_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publish, "HELD_MAX", 3)
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    broker = await open_broker(settings=settings, commit=HeldCommit)
    speaker = await Speaker.to(broker)
    speaker.say_publish("orders", [bytes(70_000)], producer_id=7, sequence=1)
    await turns()
    for producer_id in range(100, 120):
        refused = speaker.say_publish("orders", [b"x"], producer_id=producer_id, sequence=1)
        await turns()
        assert speaker.answer(refused) == "overloaded"
    (session,) = broker.sessions
    assert len(session.held_sequences) <= 3
    held(broker).release()
    await broker.stop()


async def test_a_refused_sequence_that_never_comes_again_holds_nobody_up_for_long() -> None:
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    broker = await open_broker(settings=settings, commit=HeldCommit)
    speaker = await Speaker.to(broker)
    speaker.say_publish("orders", [bytes(70_000)], producer_id=7, sequence=1)
    await turns()
    given_up = speaker.say_publish("orders", producer_id=7, sequence=2)
    await turns()
    held(broker).release()
    await turns()
    assert speaker.answer(given_up) == "overloaded"
    once = speaker.say_publish("orders", producer_id=7, sequence=3)
    await turns()
    assert speaker.answer(once) == "overloaded"
    twice = speaker.say_publish("orders", producer_id=7, sequence=3)
    await turns()
    held(broker).release()
    await turns()
    assert isinstance(speaker.answer(twice), Published)
    await broker.stop()


async def test_a_connection_with_too_many_unanswered_bytes_is_not_read() -> None:
    settings = settings_with(server={"connection_bytes_max": 65_536})
    broker = await open_broker(settings=settings, commit=HeldCommit)
    speaker = await Speaker.to(broker)
    for _ in range(100):
        speaker.say_publish("orders", [bytes(30_000)])
        await turns(3)
    assert broker.publishing.inflight_bytes < 200_000
    for _ in range(100):
        if held(broker).held:
            held(broker).release()
        await turns()
    assert broker.catalogue.find("orders").next_offset == 100
    assert broker.publishing.inflight_bytes == 0
    await broker.stop()


async def test_memory_and_interval_do_not_wait_for_a_sync_and_say_what_they_reached() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    disk.fail("sync")
    answer = await speaker.publish("orders", durability=Durability.MEMORY)
    assert answer == Published(1, 3, Durability.MEMORY, False)
    assert broker.log.synced_index == 2
    broker.fail(RuntimeError("enough"))
    await broker.stop()


async def test_large_batches_of_one_commit_become_several_entries() -> None:
    broker = await open_broker(MemoryDisk(), commit=HeldCommit)
    speaker = await Speaker.to(broker)
    ids = [speaker.say_publish("orders", [bytes(300_000)]) for _ in range(4)]
    await turns(200)
    held(broker).release()
    await turns(200)
    while held(broker).held:
        held(broker).release()
        await turns(100)
    answers = [speaker.answer(id_) for id_ in ids]
    assert [a.base_offset for a in answers if isinstance(a, Published)] == [0, 1, 2, 3]
    assert len({a.event_id for a in answers if isinstance(a, Published)}) == 4
    await broker.stop()


async def test_publishes_to_many_topics_share_a_commit_and_each_gets_its_own_receipt() -> None:
    broker = await open_broker(commit=HeldCommit)
    speakers = [await Speaker.to(broker) for _ in range(3)]
    said = []
    for number in range(40):
        # Of each connection some stand together; of each topic there are several, large and small.
        speaker, topic = speakers[number // 2 % 3], f"topic-{number % 15}"
        body = bytes([number]) * (5_000 if number % 7 == 0 else number)
        said.append((speaker, topic, body, speaker.say_publish(topic, [body])))
    await turns()
    while held(broker).held:
        held(broker).release()
        await turns()
    assert broker.publishing.published_count == 40
    stored = {topic: await speakers[0].read(topic) for _, topic, _, _ in said}
    assert sum(map(len, stored.values())) == 40
    for speaker, topic, body, request_id in said:
        answer = speaker.answer(request_id)
        assert isinstance(answer, Published)
        assert stored[topic][answer.base_offset] == body
    await broker.stop()


async def test_a_topic_that_ended_and_was_created_again_gets_what_is_published_from_then_on() -> (
    None
):
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("others")
    for life in (b"first", b"second"):
        answers = [await speaker.publish("orders", [life]) for _ in range(3)]
        assert [a.base_offset for a in answers if isinstance(a, Published)] == [0, 1, 2]
        assert await speaker.read("orders") == [life] * 3
        await speaker.request("topic.delete", topic="orders")
        assert isinstance(await speaker.publish("others"), Published)
    await broker.stop()


async def test_a_topic_whose_creation_was_refused_is_created_by_the_next_publish() -> None:
    broker = await open_broker(commit=HeldCommit)
    speaker = await Speaker.to(broker)
    refused = speaker.say_publish("orders")
    await turns()
    held(broker).held.pop()[2](DiskFull("the disk is full"))
    await turns()
    broker.gate.disk_is_full = False
    stored = speaker.say_publish("orders")
    await turns()
    held(broker).release()
    await turns()
    assert speaker.answer(refused) == "disk_full"
    assert speaker.answer(stored) == Published(0, 2, Durability.DISK, False)
    assert await speaker.read("orders") == [b"body"]
    await broker.stop()


async def test_a_stopping_broker_answers_what_it_took_and_takes_nothing_new() -> None:
    broker = await open_broker(commit=HeldCommit)
    speaker = await Speaker.to(broker)
    taken = speaker.say_publish("orders")
    await turns()
    stopping = asyncio.ensure_future(broker.stop())
    await turns()
    refused = speaker.say_publish("orders")
    await turns()
    held(broker).release()
    await stopping
    await turns()
    assert isinstance(speaker.answer(taken), Published)
    assert speaker.answer(refused) == "stopping"
    assert speaker.frames[-1][0] == Kind.GOODBYE
    assert speaker.is_lost


async def test_one_broken_client_costs_nobody_else_anything() -> None:
    broker = await open_broker()
    good, bad = await Speaker.to(broker), await Speaker.to(broker)
    bad.transport.write(frame(250, 1, b"no such kind"))
    bad.transport.write(b"garbage" * 100)
    await turns()
    assert bad.is_lost
    assert isinstance(await good.publish("orders"), Published)
    await broker.stop()


async def test_a_refused_publish_leaves_no_trace_of_its_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a flood of made-up producers would push those out whose repeats must be known."""
    monkeypatch.setattr(producers_module, "PRODUCERS_MAX", 8)
    broker = await open_broker(settings=settings_with(topics={"message_bytes_max": 100}))
    speaker = await Speaker.to(broker)
    first = await speaker.publish("orders", producer_id=1, sequence=1)
    assert isinstance(first, Published)
    for producer_id in range(100, 120):
        stamp = {"producer_id": producer_id, "sequence": 1}
        assert await speaker.publish("orders", [bytes(101)], **stamp) == "message_too_large"
        assert await speaker.publish("not a name", **stamp) == "invalid_name"
        batch = bytearray(encode_batch([b"x"], **stamp))
        batch[-1] ^= 1
        head = publish_head(producer_id, "orders", durability=2, batch_bytes=len(batch))
        speaker.transport.write(head + batch)
        await turns()
        broker.gate.disk_is_full = True
        assert await speaker.publish("orders", **stamp) == "disk_full"
        broker.gate.disk_is_full = False
    assert list(broker.producers.windows) == [1]
    again = await speaker.publish("orders", producer_id=1, sequence=1)
    assert again == first._replace(repeat=True)
    await broker.stop()


async def test_a_publish_that_the_disk_refused_leaves_no_trace_of_its_producer() -> None:
    broker = await open_broker(commit=HeldCommit)
    speaker = await Speaker.to(broker)
    request_id = speaker.say_publish("orders", producer_id=7, sequence=1)
    await turns()
    assert len(broker.producers) == 1
    held(broker).held.pop()[2](DiskFull("the disk is full"))
    await turns()
    assert speaker.answer(request_id) == "disk_full"
    assert len(broker.producers) == 0
    await broker.stop()
