"""Which offsets an archive copies, a compaction joins and a read takes: arithmetic, no Spark."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.client.sync import SyncClient
from onward.errors import Conflict, InvalidRequest, OffsetOutOfRange, UnknownTopic
from onward.pipeline.jobs import archive, compact
from onward.pipeline.lake import Lake, open_lake
from onward.pipeline.lake_read import Part, Side, look, part_of, side_of
from onward.pipeline.lake_state import Gap, LakeCommit, LakeFile, LakeState, fold
from onward.pipeline.planning import Stretch
from onward.protocol.operations.topics import TopicDescription

EARLIEST, LATEST = Side(), Side(is_latest=True)


def topic(next_offset: int, *, first: int = 0, name: str = "orders") -> TopicDescription:
    return TopicDescription(
        topic=name, number=1, state="active", first_offset=first, next_offset=next_offset
    )


def file(first: int, end: int, *, day: int = 16, size: int = 10, at_ms: int = 0) -> LakeFile:
    path = f"topic=orders/date=2026-11-{day}/{first:020}-{end:020}.parquet"
    return LakeFile(
        path=path, topic="orders", first=first, end=end, bytes=size,
        first_published_at_ms=at_ms, last_published_at_ms=at_ms + 9,
    )  # fmt: skip


def lake(*files: LakeFile, gaps: tuple[Gap, ...] = ()) -> LakeState:
    return fold([LakeCommit(number=1, add=files, gaps=gaps)])


def spans(parts: tuple[Stretch, ...]) -> list[tuple[int, int]]:
    return [(one.first, one.end) for one in parts]


# --- archive -----------------------------------------------------------------------------------


def test_an_archive_begins_where_the_lake_ends():
    plan = archive.plan([topic(25)], lake(file(0, 10)), rows_per_file=10, cores=1)
    assert spans(plan.stretches) == [(10, 18), (18, 25)]
    assert (plan.rows, plan.gaps) == (15, ())
    assert archive.plan([topic(10)], lake(file(0, 10)), rows_per_file=10, cores=1).rows == 0


def test_what_is_gone_before_the_archive_comes_is_a_gap():
    plan = archive.plan([topic(25, first=20)], lake(file(0, 10)), rows_per_file=10, cores=1)
    assert plan.gaps == (Gap("orders", 10, 20),)
    assert spans(plan.stretches) == [(20, 25)]
    assert plan.origins == {"orders": "1@0"}
    all_gone = archive.plan([topic(25, first=25)], LakeState(), rows_per_file=10, cores=1)
    assert (all_gone.gaps, all_gone.stretches) == ((Gap("orders", 0, 25),), ())


def test_a_round_is_bounded_and_every_topic_gets_a_part_of_it():
    many = [topic(1_000, name="busy"), topic(10, name="quiet")]
    plan = archive.plan(many, LakeState(), rows_per_file=10, cores=2)
    assert {one.topic for one in plan.stretches} == {"busy", "quiet"}
    assert plan.rows <= 10 * 2 * archive.FILES_PER_CORE + 2
    assert archive.plan(many, LakeState(), rows_per_file=10, cores=2, rows_max=5).rows <= 6


def test_large_work_is_cut_for_all_cores():
    plan = archive.plan([topic(400_000)], LakeState(), rows_per_file=1_000_000, cores=2)
    assert spans(plan.stretches) == [(0, 200_000), (200_000, 400_000)]


def test_a_topic_that_ends_before_the_lake_is_refused():
    with pytest.raises(Conflict, match="not the one that the lake holds to offset 10"):
        archive.plan([topic(5)], lake(file(0, 10)), rows_per_file=10, cores=1)


@given(st.integers(1, 500), st.integers(0, 300), st.integers(1, 60), st.integers(1, 4))
def test_the_stretches_of_all_rounds_cover_a_topic_once(end: int, gone: int, size: int, cores: int):
    state, seen, gaps = LakeState(), [], []
    while True:
        found = archive.plan(
            [topic(end, first=min(gone, end))], state, rows_per_file=size, cores=cores
        )
        if not found.stretches and not found.gaps:
            break
        seen += [offset for one in found.stretches for offset in range(one.first, one.end)]
        gaps += found.gaps
        assert all(one.rows <= size for one in found.stretches)
        commit = LakeCommit(
            number=state.number + 1, gaps=found.gaps,
            add=tuple(file(one.first, one.end) for one in found.stretches),
        )  # fmt: skip
        state = fold([commit], state=state)
    assert seen == list(range(min(gone, end), end))
    assert gaps == ([Gap("orders", 0, min(gone, end))] if gone else [])


# --- compact -----------------------------------------------------------------------------------


def joined(files: list[LakeFile], bytes_min: int = 25) -> list[tuple[int, int]]:
    return [(part[0].first, part[-1].end) for part in compact.plan(files, bytes_min)]


def test_small_neighbours_become_one_until_it_is_large_enough():
    files = [file(n, n + 1) for n in range(7)]
    assert joined(files) == [(0, 3), (3, 7)]
    assert joined(files[:1]) == []
    assert joined(files[:2]) == [(0, 2)]


def test_large_files_days_and_gaps_part_what_becomes_one():
    large = [file(0, 1), file(1, 2), file(2, 3, size=25), file(3, 4), file(4, 5)]
    assert joined(large) == [(0, 2), (3, 5)]
    days = [file(0, 1), file(1, 2), file(2, 3, day=17), file(3, 4, day=17)]
    assert joined(days) == [(0, 2), (2, 4)]
    gap = [file(0, 1), file(1, 2), file(5, 6), file(6, 7)]
    assert joined(gap) == [(0, 2), (5, 7)]


def test_a_second_compaction_finds_nothing_to_do():
    files = [file(n, n + 1) for n in range(20)]
    after = [
        file(part[0].first, part[-1].end, size=sum(one.bytes for one in part))
        for part in compact.plan(files, 25)
    ]
    assert joined(after) == []


def test_only_what_nothing_names_is_deleted_and_only_when_it_is_old(tmp_path: Path):
    opened = open_lake(tmp_path, create=True)
    small, merged, unnamed = [file(0, 1), file(1, 2)], file(0, 2), file(2, 3)
    for one in (*small, merged, unnamed):
        opened.path(one).parent.mkdir(parents=True, exist_ok=True)
        opened.path(one).write_bytes(b"x")
    opened.commit(add=small)
    opened.commit(add=[merged], remove=[one.path for one in small])
    assert compact.vacuum(opened, grace_ms=3_600_000) == 0
    assert compact.vacuum(opened, grace_ms=0) == 2
    assert [opened.path(one).exists() for one in (*small, merged, unnamed)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert opened.state().removed == {}
    assert compact.vacuum(opened, grace_ms=0, unnamed_ms=0) == 1
    assert opened.path(merged).exists()


# --- read --------------------------------------------------------------------------------------


def test_a_read_meets_at_the_lakes_end_without_gap_or_repeat():
    part = part_of("orders", lake(file(0, 10), file(10, 20)), topic(30, first=5), EARLIEST, LATEST)
    assert (part.first, part.end, part.live_first, part.live_end) == (0, 20, 20, 30)
    assert [one.first for one in part.files] == [0, 10]


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 20))
def test_any_range_is_read_once(first: int, end: int, log_first: int):
    state = lake(file(0, 10), file(10, 20))
    part = part_of(
        "orders", state, topic(30, first=log_first), Side(offsets={"orders": first}),
        Side(offsets={"orders": end}),
    )  # fmt: skip
    offsets = [
        offset
        for one in part.files
        for offset in range(max(one.first, part.first), min(one.end, part.end))
    ]
    offsets += range(part.live_first, part.live_end)
    assert offsets == list(range(first, end))


def test_a_topic_that_is_deleted_is_read_from_the_lake():
    part = part_of("orders", lake(file(0, 10)), None, EARLIEST, LATEST)
    assert (part.end, part.live_first, part.live_end) == (10, 10, 10)
    with pytest.raises(UnknownTopic, match="topic 'orders' does not exist"):
        part_of("orders", LakeState(), None, EARLIEST, LATEST)


def test_a_gap_between_lake_and_log_is_named():
    state, live = lake(file(0, 10)), topic(30, first=15)
    with pytest.raises(OffsetOutOfRange, match="offsets 10 to 14 of topic 'orders' are neither"):
        part_of("orders", state, live, EARLIEST, LATEST)
    with pytest.raises(OffsetOutOfRange, match="offsets 12 to 14"):
        part_of("orders", state, live, Side(offsets={"orders": 12}), LATEST)
    after = part_of("orders", state, live, Side(offsets={"orders": 15}), LATEST)
    before = part_of("orders", state, live, EARLIEST, Side(offsets={"orders": 10}))
    over = part_of("orders", state, live, EARLIEST, LATEST, on_gap="skip")
    assert (after.live_first, before.end) == (15, 10)
    assert (over.end, over.live_first, over.live_end) == (10, 15, 30)


def test_earliest_is_the_first_message_that_is_left():
    begun_late = lake(file(10, 20), gaps=(Gap("orders", 0, 10),))
    assert part_of("orders", begun_late, topic(30, first=20), EARLIEST, LATEST).first == 10
    nothing = part_of("orders", LakeState(), topic(30, first=20), EARLIEST, LATEST)
    assert (nothing.live_first, nothing.live_end) == (20, 30)
    with pytest.raises(OffsetOutOfRange, match="offsets 5 to 9"):
        part_of("orders", begun_late, topic(30, first=20), Side(offsets={"orders": 5}), LATEST)


def test_files_of_other_times_are_not_opened():
    state = lake(file(0, 10, at_ms=100), file(10, 20, at_ms=200), file(20, 30, at_ms=300))
    part = part_of("orders", state, topic(30), Side(time_ms=205), Side(time_ms=300))
    assert [one.first for one in part.files] == [10]


def test_a_gap_of_another_time_does_no_harm():
    state = lake(file(0, 10, at_ms=100), file(20, 30, at_ms=300), gaps=(Gap("orders", 10, 20),))
    live = topic(60, first=50)

    def read(begin: Side, finish: Side = LATEST, since_ms: int | None = 500) -> Part:
        return part_of("orders", state, live, begin, finish, live_since_ms=since_ms)

    assert [one.first for one in read(Side(time_ms=501)).files] == []
    with pytest.raises(OffsetOutOfRange, match="offsets 30 to 49"):
        read(Side(time_ms=301))
    with pytest.raises(OffsetOutOfRange, match="offsets 30 to 49"):
        read(Side(time_ms=501), since_ms=None)
    with pytest.raises(OffsetOutOfRange, match="offsets 10 to 19"):
        read(Side(time_ms=300), Side(time_ms=305))
    assert [one.first for one in read(Side(time_ms=301), Side(time_ms=309)).files] == [20]
    assert [one.first for one in read(EARLIEST, Side(time_ms=105)).files] == [0]


def test_the_ways_to_say_where_a_read_begins():
    def side(bound: object) -> Side:
        return side_of(bound, ["orders"], now_ms=1_000_000)  # type: ignore[arg-type]

    assert side(None) == side("earliest") == Side()
    assert side("latest") == Side(is_latest=True)
    assert side(7) == side({"orders": 7}) == Side(offsets={"orders": 7})
    assert side("1m") == side(timedelta(minutes=1)) == Side(time_ms=940_000)
    assert side(datetime(1970, 1, 1, 0, 1, tzinfo=UTC)) == Side(time_ms=60_000)
    for wrong in ({"refunds": 1}, {"orders": -1}, {"orders": "x"}, 1.5, True, "soon"):
        with pytest.raises(InvalidRequest):
            side(wrong)
    with pytest.raises(InvalidRequest, match="offset 7 is of one topic"):
        side_of(7, ["a", "b"], now_ms=0)


def test_an_offset_that_does_not_exist_yet_is_named():
    for begin, finish in ((Side(offsets={"orders": 31}), LATEST), (EARLIEST, {"orders": 31})):
        end = finish if isinstance(finish, Side) else Side(offsets=finish)
        with pytest.raises(OffsetOutOfRange, match="offset 31 .* it ends before 30"):
            part_of("orders", LakeState(), topic(30), begin, end)


class Quick:
    """A broker whose archive and retention are quicker than whoever looks at lake and topics."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake

    def topics(self) -> list[TopicDescription]:
        state = self._lake.state()
        if state.number < 3:
            end = state.end_of("orders")
            self._lake.commit(add=[file(end, end + 10)])
            return [topic(100, first=end + 5)]
        return [topic(100, first=state.end_of("orders"))]


def test_what_was_archived_and_taken_away_while_one_looked_is_no_gap(tmp_path: Path):
    opened = open_lake(tmp_path, create=True)
    opened.commit(add=[file(0, 10)])
    state, live = look(cast(SyncClient, Quick(open_lake(tmp_path))), opened, ["orders"])
    part = part_of("orders", state, live["orders"], EARLIEST, LATEST)
    assert (part.first, part.end, part.live_first, part.live_end) == (0, 30, 30, 100)


def test_a_topic_that_is_not_the_lakes_is_left_out_unless_it_is_named():
    others = [topic(5), topic(7, name="refunds")]
    fit, left_out = archive.fitting(others, lake(file(0, 10)), wanted=["*"])
    assert ([one.topic for one in fit], list(left_out)) == (["refunds"], ["orders"])
    with pytest.raises(Conflict, match="not the one that the lake holds to offset 10"):
        archive.fitting(others, lake(file(0, 10)), wanted=["*", "orders"])
