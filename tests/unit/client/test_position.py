"""Positions of broadcasts in a file."""

import threading
from pathlib import Path

from onward.client.position import PositionFile
from onward.delivery.position import Position


def test_writers_that_overlap_lose_no_rename_and_leave_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "ticks.json"
    errors: list[OSError] = []

    def write() -> None:
        place = PositionFile(path, group="prices")
        try:
            for offset in range(50):
                place.write({"ticks": Position(offset, number=5)})
        except OSError as error:
            errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not errors
    assert PositionFile(path, group="prices").load()["ticks"].number == 5
    assert list(tmp_path.iterdir()) == [path]
