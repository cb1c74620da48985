"""compact: small files of the lake become larger ones, and what nothing names any more goes.

    onward pipeline compact --lake /data/lake

    neighbours of one topic and day, each smaller than `bytes_min` ──▶ one file ──▶ ONE commit

Nobody notices: the same messages are there before and after, and an archive may go on meanwhile.
A file that was replaced stays for a grace, for readers may be using it; one that no commit ever
named, which is what a crash leaves, stays for a day, for somebody may be about to name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from onward.clock import SystemClock
from onward.durations import Duration, duration_ms
from onward.errors import InvalidRequest
from onward.pipeline import runs
from onward.pipeline.lake import Lake, open_lake, said_plainly
from onward.pipeline.lake_files import check_there, merge_files
from onward.pipeline.lake_state import LakeFile, LakeState
from onward.pipeline.tasks import run_tasks
from onward.pipeline.window import choose_topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BYTES_MIN = 64 << 20
UNNAMED_KEPT = "1d"


@dataclass(frozen=True)
class Compacted:
    """What a run of `compact` has done; files, rows and bytes are those of the chosen topics."""

    files_before: int
    files_after: int
    rows: int
    bytes: int
    merged: int = 0
    """Files that became part of larger ones."""
    deleted: int = 0
    """Files that nothing names any more, and that are gone now."""


def compact(
    spark: SparkSession,
    *,
    lake: str,
    topics: Sequence[str] = (),
    bytes_min: int = BYTES_MIN,
    grace: Duration = "1h",
    run: runs.Run | None = None,
) -> Compacted:
    """Merge neighbouring files that are smaller than `bytes_min`, and clean up.

    compact(spark, lake="/data/lake", topics=["orders"])
    """
    if bytes_min < 1:
        raise InvalidRequest("bytes_min is a number of bytes from 1 on")
    grace_ms = duration_ms(grace, "grace")
    opened = open_lake(lake)
    state = opened.state()
    chosen = choose_topics({*state.files, *state.gaps}, topics)
    before = _files_of(state, chosen)
    work = [part for topic in chosen for part in plan(state.files.get(topic, ()), bytes_min)]
    if work:
        added = _merge(spark, opened, work)
        removed = [file.path for part in work for file in part]
        state = opened.commit(add=added, remove=removed)
    deleted = vacuum(opened, grace_ms=grace_ms)
    after = _files_of(state, chosen)
    done = Compacted(
        files_before=len(before), files_after=len(after),
        rows=sum(file.rows for file in after), bytes=sum(file.bytes for file in after),
        merged=sum(map(len, work)), deleted=deleted,
    )  # fmt: skip
    if run is not None:
        run.progress(rows=sum(file.rows for part in work for file in part), files=done.files_after)
        run.result(files_before=done.files_before, files_after=done.files_after, rows=done.rows,
                   bytes=done.bytes, deleted=deleted)  # fmt: skip
    return done


def plan(files: Sequence[LakeFile], bytes_min: int) -> list[tuple[LakeFile, ...]]:
    """Return which files of one topic become one: small neighbours of a day, until it is enough.

    >>> small = [LakeFile(path=f"d/{n}", topic="t", first=n, end=n + 1, bytes=5) for n in range(3)]
    >>> [[file.first for file in part] for part in plan(small, 10)], plan(small, 5)
    ([[0, 1, 2]], [])
    """
    found: list[tuple[LakeFile, ...]] = []
    for neighbours in _neighbours(files, bytes_min):
        parts: list[list[LakeFile]] = [[]]
        for file in neighbours:
            if sum(one.bytes for one in parts[-1]) >= bytes_min:
                parts.append([])
            parts[-1].append(file)
        # What is left over at the end is small again: better with the part before it.
        if len(parts) > 1 and sum(one.bytes for one in parts[-1]) < bytes_min:
            parts[-2:] = [parts[-2] + parts[-1]]
        found += [tuple(part) for part in parts if len(part) > 1]
    return found


def vacuum(lake: Lake, *, grace_ms: int, unnamed_ms: int | None = None) -> int:
    """Delete the files that the lake does not name any more, when they are old enough."""
    now_ms = SystemClock().now_ms()
    unnamed_ms = duration_ms(UNNAMED_KEPT) if unnamed_ms is None else unnamed_ms
    deleted = 0
    with said_plainly(lake.folder):
        # First the folder, then the state: a file that is named in between is known by then.
        found = {str(path.relative_to(lake.folder)): path for path in _parquet_files(lake.folder)}
        state = lake.state()
        named = {file.path for files in state.files.values() for file in files}
        old = [path for path, at_ms in state.removed.items() if now_ms - at_ms >= grace_ms]
        never = [
            path
            for path in found.keys() - named - state.removed.keys()
            if now_ms - _written_at_ms(found[path], else_ms=now_ms) >= unnamed_ms
        ]
        for path in sorted(found.keys() & {*old, *never}):
            found[path].unlink(missing_ok=True)
            deleted += 1
        if old:
            lake.commit(forget=old)
    return deleted


def _neighbours(files: Sequence[LakeFile], bytes_min: int) -> Iterator[list[LakeFile]]:
    """Give runs of small files that lie side by side in one folder."""
    run: list[LakeFile] = []
    for is_small, some in groupby(files, key=lambda file: file.bytes < bytes_min):
        for file in some if is_small else ():
            if run and (run[-1].end != file.first or run[-1].folder != file.folder):
                yield run
                run = []
            run.append(file)
        if run:
            yield run
        run = []


def _merge(
    spark: SparkSession, lake: Lake, work: Sequence[tuple[LakeFile, ...]]
) -> list[LakeFile]:  # fmt: skip
    """Let tasks write the larger files; none of them counts yet."""
    merged = run_tasks(spark, partial(merge_files, str(lake.folder)), work)
    files = [file for some in merged for file in some]
    check_there(lake, files)
    return files


def _files_of(state: LakeState, topics: Sequence[str]) -> list[LakeFile]:
    return [file for topic in topics for file in state.files.get(topic, ())]


def _parquet_files(folder: Path) -> Iterator[Path]:
    """Give every file of messages, finished or aside, whether it is named or not."""
    yield from folder.glob("topic=*/date=*/*.parquet")
    yield from folder.glob("topic=*/date=*/.*.aside")


def _written_at_ms(path: Path, *, else_ms: int) -> int:
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return else_ms
