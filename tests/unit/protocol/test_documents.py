"""The bytes in the reference documents are the bytes that the code writes."""

import re
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from onward.message.batch import encode_batch
from onward.protocol.deliveries import ack_frame, delivery_head, recall_frame
from onward.protocol.frames import Kind, frame
from onward.protocol.operations.replicas import (
    SourceState,
    encode_followed,
    encode_source,
    file_head,
)
from onward.protocol.payloads import Durability, publish_head, published_frame

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
STAMP: dict[str, Any] = {"producer_id": 7, "sequence": 1, "time_ms": 1_750_000_000_000}


def shown(document: str, name: str) -> str:
    """Return the bytes of a hex example; what stands two blanks behind them is for people."""
    text = (REFERENCE / document).read_text(encoding="utf-8")
    [block] = re.findall(rf"```hex {name}\n(.*?)```", text, re.DOTALL)
    return bytes.fromhex("".join(line.split("  ")[0] for line in block.splitlines())).hex(" ")


def test_the_batch_in_the_format_document_is_what_is_encoded() -> None:
    batch = encode_batch([b"hello", b"world"], keys=["a", None], **STAMP)
    assert shown("format.md", "batch") == batch.hex(" ")


def test_the_publish_in_the_protocol_document_is_what_is_sent() -> None:
    batch = encode_batch([b"hello"], **STAMP)
    head = publish_head(2, "orders", durability=Durability.DISK, batch_bytes=len(batch))
    assert shown("protocol.md", "publish") == (head + batch).hex(" ")


def test_the_published_in_the_protocol_document_is_what_is_answered() -> None:
    answer = published_frame(2, 100, 12, Durability.DISK)
    assert shown("protocol.md", "published") == answer.hex(" ")


def test_the_delivery_in_the_protocol_document_is_what_is_sent() -> None:
    grants = [(100, 103, 1, 1), (107, 109, 2, 2)]
    head = delivery_head(3, "orders", grants, delivery=9, lease_ms=30_000, entries_bytes=72)
    assert shown("protocol.md", "delivery") == head.hex(" ")


def test_the_ack_in_the_protocol_document_is_what_is_sent() -> None:
    assert shown("protocol.md", "ack") == ack_frame(4, 3, [(9, 100, 103)]).hex(" ")


def test_the_recall_in_the_protocol_document_is_what_is_sent() -> None:
    assert shown("protocol.md", "recall") == recall_frame(3, 5).hex(" ")


def test_the_frames_of_a_replica_in_the_protocol_document_are_what_is_sent() -> None:
    source = encode_source(SourceState(42, 1_750_000_000_123, 1))
    assert shown("protocol.md", "source") == frame(Kind.SOURCE, 1, source).hex(" ")
    followed = encode_followed(41)
    assert shown("protocol.md", "followed") == frame(Kind.FOLLOWED, 1, followed).hex(" ")
    part = file_head(crc32c(b"abc")) + b"abc"
    assert shown("protocol.md", "file") == frame(Kind.FILE, 2, part).hex(" ")


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_frame_is_documented_with_its_number(kind: Kind) -> None:
    text = (REFERENCE / "protocol.md").read_text(encoding="utf-8")
    assert f"| {kind.value} | {kind.name} |" in text
