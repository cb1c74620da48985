"""topics: single messages to random ones of 100,000 topics, beside the same to one topic.

256 connections, one 200-byte message in flight each, on disk before the ack; the same broker, with
all topics in it, in alternating rounds. The one topic stands as the peer, so the ratio says what
is left of the speed when messages are spread over all topics. Memory is in the details.
"""

import random
import secrets
from collections.abc import Iterator, Sequence
from itertools import cycle

from onward.bench.load import run_load
from onward.bench.peers import started
from onward.bench.publish_sync import BODY, CONNECTIONS, onward_speakers
from onward.bench.report import Options, Report, rounded, typical
from onward.bench.speakers import Speaker, TopicsSpeaker

COUNT = 100_000
SECONDS = 2.0
ROUNDS = 5


def run(options: Options) -> Report:
    """Measure publishes to many topics."""
    count, seconds = options.count or COUNT, options.seconds or SECONDS
    names = [f"topic-{number:07}" for number in range(count)]
    many, one = [], []
    with started("onward", folder=options.folder, keep=options.keep) as server:
        idle_mb = server.resident_mb()
        options.say(f"creating {count:,} topics")
        created = run_load(server.port, _each_once(names), requests=count, warm_up_s=0)
        created_mb = server.resident_mb()
        for _ in range(options.repeat or ROUNDS):
            # Nothing prepared ahead, as with many topics: the generator shall cost the same.
            one.append(run_load(server.port, onward_speakers(ahead=0), seconds=seconds))
            many.append(run_load(server.port, _random(names), seconds=seconds))
            options.say(f"one: {one[-1].per_second:,.0f}/s, many: {many[-1].per_second:,.0f}/s")
        resident_mb = server.resident_mb()
    return Report(
        name="topics",
        unit="messages/s",
        onward=typical([load.per_second for load in many]),
        peers={"one topic": typical([load.per_second for load in one])},
        durability="disk",
        details={
            "topics": count,
            "created_per_second": rounded(created.per_second),
            "idle_mb": rounded(idle_mb),
            "created_mb": rounded(created_mb),
            "resident_mb": rounded(resident_mb),
            "many": many[-1].details(),
            "one": one[-1].details(),
        },
    )


def _each_once(names: Sequence[str]) -> list[Speaker]:
    # Rounded up: the last connections begin again at the front.
    return [
        TopicsSpeaker(cycle(names[number::CONNECTIONS]), [BODY], producer_id=_producer_id())
        for number in range(min(CONNECTIONS, len(names)))
    ]


def _random(names: Sequence[str]) -> list[Speaker]:
    return [
        TopicsSpeaker(_shuffled(names), [BODY], producer_id=_producer_id())
        for _ in range(CONNECTIONS)
    ]


def _shuffled(names: Sequence[str]) -> Iterator[str]:
    while True:
        yield random.choice(names)


def _producer_id() -> int:
    return secrets.randbits(63) | 1
