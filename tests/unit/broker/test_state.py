"""One state: what a running leader has folded from its own decoded facts is the fold of its log."""

import asyncio
from collections import deque
from random import Random

import pytest

from onward.broker.broker import Broker
from onward.broker.commit import Commit, Done, InlineCommit
from onward.broker.state import State
from onward.client.client import Client
from onward.log.log import Log, Write
from onward.log.memory_disk import MemoryDisk
from onward.log.stream import EntryStream
from onward.message.entry import read_entry
from onward.protocol.payloads import Durability, Published
from onward.testing.clock import ManualClock
from onward.testing.fold import compare_states

from .speaking import Speaker, open_broker, turns
from .test_follower import SETTINGS, client_of, consume_some, has_fired, until

TOPICS = ("orders", "events", "jobs")


class LateCommit(Commit):
    """Performs each of up to three writes some turns of the loop later."""

    in_flight_max = 3

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._random = Random(1)
        self._held: deque[tuple[Write, bool, Done]] = deque()
        self.in_flight = 0

    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        self._held.append((write, sync, done))
        self.in_flight = max(self.in_flight, len(self._held))
        self._loop.call_later(self._random.randint(0, 3) / 1000, self._perform_first)

    def _perform_first(self) -> None:
        write, sync, done = self._held.popleft()
        done(self._perform(write, sync=sync))


class Work:
    """Programs that change the state in every way, some of them at the same time."""

    def __init__(self, broker: Broker, clock: ManualClock, mq: Client, random: Random) -> None:
        self._broker = broker
        self._clock = clock
        self._mq = mq
        self._random = random
        self._sequences: dict[int, int] = {}
        self.repeats = 0

    async def run(self, rounds: int) -> None:
        speakers = [await Speaker.to(self._broker) for _ in range(3)]
        await self._mq.set_recurring("tick", "ticks", "t", every="5s")
        for _ in range(rounds):
            async with asyncio.TaskGroup() as tasks:
                for speaker in speakers:
                    tasks.create_task(self._publish_plain(speaker))
                tasks.create_task(self._publish_by_producers(self._random.choice(speakers)))
                tasks.create_task(self._publish_batches())
                tasks.create_task(self._schedule())
                tasks.create_task(consume_some(self._mq, self._topic(), self._random))
            if self._random.random() < 0.2:
                await self._change_something()
            self._clock.advance(self._random.randint(0, 2_000))
            await asyncio.sleep(0.005)

    def _topic(self) -> str:
        return self._random.choice(TOPICS)

    async def _publish_plain(self, speaker: Speaker) -> None:
        """Publish single messages, which the fast path takes together."""
        ids = [
            speaker.say_publish(
                self._topic(), durability=self._random.choice((Durability.DISK, Durability.MEMORY))
            )
            for _ in range(self._random.randint(1, 5))
        ]
        await until(lambda: all(speaker.of(id_) for id_ in ids))

    async def _publish_by_producers(self, speaker: Speaker) -> None:
        """Publish batches of several producers; some are sent again, at once or later."""
        ids: list[int] = []
        for _ in range(self._random.randint(1, 6)):
            producer_id = self._random.randint(1, 4)
            sequence = self._sequences.get(producer_id, -1)
            if sequence < 0 or self._random.random() < 0.7:
                sequence += 1
                self._sequences[producer_id] = sequence
            else:
                sequence -= self._random.randint(0, min(sequence, 5))
            # The same bytes again: a producer's sequence stands for one batch.
            bodies = [b"%d" % sequence] * (1 + sequence % 4)
            topic = TOPICS[(producer_id + sequence) % len(TOPICS)]
            ids.append(
                speaker.say_publish(topic, bodies, producer_id=producer_id, sequence=sequence)
            )
        await until(lambda: all(speaker.of(id_) for id_ in ids))
        answers = [speaker.answer(id_) for id_ in ids]
        self.repeats += sum(isinstance(one, Published) and one.repeat for one in answers)

    async def _publish_batches(self) -> None:
        count = self._random.randint(1, 20)
        keys = [self._random.choice(("a", "b", None)) for _ in range(count)]
        await self._mq.publish_many(self._topic(), [f"b{n}" for n in range(count)], keys=keys)
        await self._mq.publish(self._topic(), "keyed", key="a", tag="t", priority=1)

    async def _schedule(self) -> None:
        delay_ms = self._random.randint(1, 4_000)
        await self._mq.publish(self._topic(), "later", delay_ms=delay_ms)
        unique = f"u{self._random.randint(0, 3)}"
        await self._mq.publish(
            self._topic(), "unique", delay_ms=delay_ms, unique=unique, replace=True
        )
        if self._random.random() < 0.2:
            await self._mq.cancel_scheduled(unique=unique)

    async def _change_something(self) -> None:
        match self._random.randint(0, 3):
            case 0:
                topic = self._topic()
                await self._mq.create_group(f"of-{topic}", topic, retry="1s", exist_ok=True)
            case 1:
                await self._mq.change_topic("orders", retention="7d")
            case 2:
                await self._mq.create_topic("brief", exist_ok=True)
            case _:
                await self._mq.create_topic("brief", exist_ok=True)
                await self._mq.delete_topic("brief")


def fold(log: Log) -> State:
    """Return the state that all entries of a log make, applied one by one to an empty one."""
    state = State()
    stream = EntryStream(log, 1)
    while stream.has_more:
        entries, start = bytes(stream.read(bytes_max=1 << 20) or b""), 0
        while start < len(entries):
            entry = read_entry(entries, start, position=0)
            assert entry is not None
            state.apply(entry, entries[entry.body_position :][: entry.body_bytes])
            start = entry.end
    return state


@pytest.mark.parametrize("make_commit", [InlineCommit, LateCommit])
@pytest.mark.parametrize("seed", range(6))
async def test_the_shortcuts_of_a_running_leader_agree_with_the_fold(
    seed: int, make_commit: type[Commit]
) -> None:
    random, clock, disk = Random(seed), ManualClock(), MemoryDisk()
    broker = await open_broker(disk, settings=SETTINGS, clock=clock, commit=make_commit)
    async with client_of(broker) as mq:
        work = Work(broker, clock, mq, random)
        await work.run(rounds=random.randint(10, 30))
        if seed % 2:
            clock.advance(60_000)
            await until(lambda: has_fired(broker))
        await turns()
        await broker.publishing.drain()
        broker.log.synced_index = broker.log.next_index - 1
        running, folded = broker.state, fold(broker.log)
        assert folded.entry_count == broker.log.next_index - 1
        assert list(compare_states(running, folded)) == []
        loaded = State.load(running.save())
        assert list(compare_states(loaded, folded)) == []
        assert list(compare_states(running, loaded)) == []
        assert list(compare_states(State.load(folded.save()), folded)) == []
        assert ends_of(running) == ends_of(loaded) == ends_of(folded)
        assert work.repeats
        assert broker.scheduling.fired_count
        if isinstance(broker._commit, LateCommit):
            assert broker._commit.in_flight > 1
    await broker.stop()


def ends_of(state: State) -> dict[str, tuple[int, int]]:
    """Return the offsets at which topics end, and at which the next messages are staged."""
    topics = state.catalogue.by_name.values()
    return {topic.name: (topic.next_offset, topic.staged_offset) for topic in topics}
