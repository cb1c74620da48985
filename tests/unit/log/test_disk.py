"""Reads of a real file."""

import errno
import os
from pathlib import Path

import pytest

from onward.log.disk import OsDisk


@pytest.mark.parametrize("supports_nowait", [True, False])
def test_a_read_without_waiting_is_whole_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supports_nowait: bool
) -> None:
    if not supports_nowait:  # as on tmpfs before Linux 6.x

        def refuse(*_: object) -> int:
            raise OSError(errno.EOPNOTSUPP, "not supported")

        monkeypatch.setattr(os, "preadv", refuse)
    (tmp_path / "file").write_bytes(b"0123456789")
    file = OsDisk().open(str(tmp_path / "file"))
    try:
        assert bytes(file.read_now(2, 3) or b"") == b"234"
        assert file.read_now(8, 3) is None
        assert file.read_now(10, 1) is None
    finally:
        file.close()
