"""Brokers that are wrong on purpose: the checker must notice each of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from onward.broker.broker import Broker
from onward.broker.producers import UNDER_WAY
from onward.broker.session import Session
from onward.errors import Overloaded
from onward.log import span
from onward.log.log import Write
from onward.message.entry import Entry, read_header
from onward.testing.commit import SimulatedCommit


class AckBeforeSync(SimulatedCommit):
    """Says that it is on the disk when it is only written."""

    def sync(self, write: Write) -> None:
        pass


def forget_repeats(broker: Broker) -> None:
    """Stores a batch again when it comes again."""
    find = broker.producers.find

    def find_under_way(producer_id: int, sequence: int) -> tuple[int, int] | None:
        stored = find(producer_id, sequence)
        return stored if stored is not None and stored[0] == UNDER_WAY else None

    broker.producers.find = find_under_way


def forget_order(broker: Broker) -> None:
    """Takes what comes after something that it refused for now."""
    publishing = broker.publishing
    publishing._inflight_bytes_max = 2_000

    def refuse_alone(session: Session, producer_id: int, sequence: int) -> None:
        if publishing.inflight_bytes > publishing._inflight_bytes_max:
            raise Overloaded("too many bytes are under way", retry_after_ms=100)

    publishing._check_load = refuse_alone


@contextmanager
def without_checksums() -> Iterator[None]:
    """Serves what the disk gives, whatever it is."""

    def believe(buffer: bytes, start: int, *, position: int) -> Entry | None:
        return read_header(buffer, start, position=position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span, "read_entry", believe)
        yield
