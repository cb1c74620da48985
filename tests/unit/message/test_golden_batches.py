"""Old bytes must be readable for ever. If one of these fails, the format changed: do not touch the
golden files, give the format a new version."""

import runpy
from pathlib import Path

import pytest

from onward.message.batch import decode_batch, encode_batch

GOLDEN = Path(__file__).parents[2] / "golden"
BATCHES = runpy.run_path(str(GOLDEN / "make.py"))["BATCHES"]


@pytest.mark.parametrize("name", BATCHES)
def test_a_golden_batch_is_read_as_it_was_meant(name: str) -> None:
    batch = decode_batch((GOLDEN / name).read_bytes(), raw_bytes_max=1 << 20)
    meant = dict(BATCHES[name])
    meant.pop("compression", None)
    for field in ("producer_id", "sequence", "time_ms"):
        assert getattr(batch.header, field) == meant.pop(field)
    for column, values in meant.items():
        assert getattr(batch, column) == values


# The bytes of zstd and lz4 may differ from one version of those libraries to the next.
@pytest.mark.parametrize("name", [name for name in BATCHES if "compression" not in BATCHES[name]])
def test_a_golden_batch_is_written_with_the_same_bytes_as_ever(name: str) -> None:
    assert encode_batch(**BATCHES[name]).hex(" ", 8) == (GOLDEN / name).read_bytes().hex(" ", 8)
