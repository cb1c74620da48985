"""How ranges of messages ended: rows of the system topic `@trace`, the durable truth of groups.

    did           says
    started       the group begins with the topic at `offset`
    acked         `member` finished `ranges`; the slowest of each took `took_ms`
    filtered      the group's filter does not want `ranges`
    retried       `member` asked for `ranges` again at `due_at_ms`; `attempt` have counted so far
    expired       the lease of `ranges` ran out: else like retried
    lost          the connection of their member died with them, `alone`: else like retried
    released      `member` gave `ranges` back that it had started; that counts as no attempt
    dead          `ranges` were rejected or are out of attempts: `cause`, `attempt`, `member`
    skipped       `ranges` ended without being delivered (`cause`: an operator, or retention)
    redriven      the dead letters in `ranges` are delivered again; attempts start again
    purged        the dead letters in `ranges` are removed
    replayed      what is finished of `ranges` is delivered again
    reset         all of the topic again, from `offset` on; what is before it is finished
    forked        the group is now a copy of the group `source`
    moved         `member` of a broadcast group stands at `offset` of the topic with this `number`
    cancelled     the scheduled messages `ranges` of `@schedule` will not fire (`cause`)
    published_by  `producer_id` is `pid` on `host`, called `client`

A row is one JSON object; defaults are left out, fields of later versions are ignored. One row costs
some bytes for a whole range, never for a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from onward.errors import Corruption

DIDS: Final = (
    "started", "acked", "filtered", "retried", "expired", "lost", "released", "dead", "skipped",
    "redriven", "purged", "replayed", "reset", "forked", "moved", "cancelled", "published_by",
)  # fmt: skip
CAUSE_CHARS_MAX: Final = 1_000

_Offset = Annotated[int, msgspec.Meta(ge=0)]


class Trace(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One row: what was done, when, to which ranges of which group."""

    did: str
    at_ms: int
    group: str = ""
    topic: str = ""
    ranges: tuple[tuple[_Offset, _Offset], ...] = ()
    member: str = ""
    attempt: int = 0
    counted: bool = True
    """False: this one is none of `attempt`, the next delivery has its number again."""
    due_at_ms: int = 0
    alone: int = 0
    """At most so many of `ranges` are delivered together, to a member that holds nothing else; 0:
    they come with others."""
    cause: str = ""
    took_ms: tuple[int, ...] = ()
    """One for each range: the slowest of it, from its delivery on."""
    worked_ms: tuple[int, ...] = ()
    """One for each range, from its start on; empty if no message waited long at its member."""
    offset: int = -1
    number: int = 0
    """Of the topic, where its name is not enough; 0: not known."""
    source: str = ""
    producer_id: int = 0
    client: str = ""
    host: str = ""
    pid: int = 0


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Trace)


def encode_rows(rows: Iterable[Trace]) -> list[bytes]:
    """Return the bodies of rows.

    >>> encode_rows([Trace(did="acked", at_ms=1, group="g", topic="t", ranges=((0, 9),))])
    [b'{"did":"acked","at_ms":1,"group":"g","topic":"t","ranges":[[0,9]]}']
    """
    return [_ENCODER.encode(row) for row in rows]


def decode_row(body: bytes | bytearray | memoryview) -> Trace:
    """Return the row of a body; what is no row raises `Corruption`.

    >>> decode_row(b'{"did":"started","at_ms":1,"offset":7,"later":true}').offset
    7
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corruption(f"a row of '@trace' cannot be read: {error}") from None


def short_cause(text: str) -> str:
    """Return a cause that fits into a row, whatever an exception said.

    >>> len(short_cause("x" * 5_000))
    1000
    """
    # Half a surrogate pair is text for Python but not for JSON.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= CAUSE_CHARS_MAX else text[: CAUSE_CHARS_MAX - 1] + "…"
