"""publish-bulk: a few connections that send batches of 1,000 messages, several at a time.

Messages of 200 bytes, on disk before the ack. The peer is a Redis stream with `appendfsync always`
that gets pipelines of 1,000 XADD commands: what Redis has in place of a batch.
"""

import secrets

from onward.bench.report import Options, Report
from onward.bench.speakers import OnwardSpeaker, RedisSpeaker, Speaker
from onward.bench.versus import compare

CONNECTIONS = 4
IN_FLIGHT = 4
MESSAGES = 1_000
BODY = bytes(range(200))


def run(options: Options) -> Report:
    """Measure messages per second in batches."""
    return compare(
        "publish-bulk",
        options,
        speakers={"onward": onward_speakers, "redis": redis_speakers},
        messages_each=MESSAGES,
        in_flight=IN_FLIGHT,
    )


def onward_speakers() -> list[Speaker]:
    """Return speakers for Onward: each is a producer of its own."""
    return [
        OnwardSpeaker(
            "bench", [BODY] * MESSAGES, producer_id=secrets.randbits(63) | 1, in_flight=IN_FLIGHT
        )
        for _ in range(CONNECTIONS)
    ]


def redis_speakers() -> list[Speaker]:
    """Return speakers for Redis."""
    return [RedisSpeaker("bench", [BODY] * MESSAGES) for _ in range(CONNECTIONS)]
