"""publish-sync: many connections that each wait for their ack before they send the next message.

256 connections, one 200-byte message in flight each, on disk before the ack. The peer is a Redis
stream (XADD) with `appendfsync always`. One raw load generator speaks both protocols, so the
servers are compared and not their client libraries. Every Onward connection is a producer of its
own, with a real producer id and sequence: the broker finds repeats as it would in earnest.
"""

import secrets

from onward.bench.report import Options, Report
from onward.bench.speakers import OnwardSpeaker, RedisSpeaker, Speaker
from onward.bench.versus import compare

CONNECTIONS = 256
BODY = bytes(range(200))
AHEAD = 1_500
"""Requests that each connection has prepared: enough for warm-up and 2 s at 150,000 a second."""


def run(options: Options) -> Report:
    """Measure single messages per second."""
    return compare(
        "publish-sync",
        options,
        speakers={"onward": onward_speakers, "redis": redis_speakers},
        messages_each=1,
        in_flight=1,
    )


def onward_speakers(*, ahead: int = AHEAD) -> list[Speaker]:
    """Return speakers for Onward: each is a producer of its own."""
    return [
        OnwardSpeaker("bench", [BODY], producer_id=secrets.randbits(63) | 1, ahead=ahead)
        for _ in range(CONNECTIONS)
    ]


def redis_speakers() -> list[Speaker]:
    """Return speakers for Redis."""
    return [RedisSpeaker("bench", [BODY]) for _ in range(CONNECTIONS)]
