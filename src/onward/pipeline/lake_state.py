"""What a lake holds: a fold of its commits, without files.

    state + commit ──▶ state

One rule is kept by every commit: the files and the gaps of a topic lie side by side and cover its
offsets from 0 to the lake's end, so nothing is missing unseen and nothing is there twice. A commit
that would break the rule does not fit: two who archive the same messages at the same time cannot
both be right, and the second one finds out here.

    archive    adds files at the end, and gaps for what retention took before it came
    compact    removes files and adds one in their place
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from onward.errors import Conflict
from onward.protocol.operations.topics import TopicDescription


class LakeFile(msgspec.Struct, frozen=True, kw_only=True):
    """One Parquet file of a lake: neighbouring messages of one topic and one day.

    >>> LakeFile(path="p", topic="orders", first=3, end=10, bytes=99).rows
    7
    """

    path: str
    """Below the lake's folder."""
    topic: str
    first: int
    end: int
    bytes: int
    first_published_at_ms: int = 0
    """The earliest of its messages."""
    last_published_at_ms: int = 0
    """The latest of its messages."""

    @property
    def rows(self) -> int:
        """How many messages it has."""
        return self.end - self.first

    @property
    def folder(self) -> str:
        """The folder of its topic and day."""
        return self.path.rpartition("/")[0]


class Gap(msgspec.Struct, frozen=True, order=True):
    """Messages of a topic that were gone before they could be archived: `first` to before `end`.

    >>> Gap("orders", 0, 10).end
    10
    """

    topic: str
    first: int
    end: int


class LakeCommit(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a lake, all of it or nothing.

    >>> LakeCommit(add=(LakeFile(path="p", topic="orders", first=0, end=7, bytes=9),)).number
    0
    """

    number: int = 0
    at_ms: int = 0
    add: tuple[LakeFile, ...] = ()
    remove: tuple[str, ...] = ()
    """Paths of files that are part of the lake no more."""
    forget: tuple[str, ...] = ()
    """Paths that were removed before, and whose files are deleted by now."""
    gaps: tuple[Gap, ...] = ()
    origins: dict[str, str] = {}
    """Which topic of which broker a name stands for: a topic that was created again is another."""


class LakeState(msgspec.Struct, frozen=True, kw_only=True):
    """All that is in a lake after a commit.

    >>> LakeState().end_of("orders")
    0
    """

    number: int = 0
    files: dict[str, tuple[LakeFile, ...]] = {}
    """By topic, in the order of their offsets."""
    gaps: dict[str, tuple[Gap, ...]] = {}
    origins: dict[str, str] = {}
    removed: dict[str, int] = {}
    """Paths that were part of the lake, and when they went."""

    def end_of(self, topic: str) -> int:
        """Return the first offset that the lake does not have yet."""
        parts = [part[-1].end for part in (self.files.get(topic), self.gaps.get(topic)) if part]
        return max(parts, default=0)

    def first_of(self, topic: str) -> int:
        """Return the first offset that can be read; the lake's end when there is none."""
        files = self.files.get(topic)
        return files[0].first if files else self.end_of(topic)

    def files_between(self, topic: str, first: int, end: int) -> list[LakeFile]:
        """Return the files that hold any offset from `first` to before `end`."""
        return [file for file in self.files.get(topic, ()) if file.first < end and file.end > first]

    def gaps_between(self, topic: str, first: int, end: int) -> list[Gap]:
        """Return the gaps that touch any offset from `first` to before `end`."""
        return [gap for gap in self.gaps.get(topic, ()) if gap.first < end and gap.end > first]


class _Part(NamedTuple):
    first: int
    end: int


def apply(state: LakeState, commit: LakeCommit) -> LakeState:
    """Return the state after a commit; `Conflict` when it does not fit to the one before.

    >>> file = LakeFile(path="p", topic="orders", first=0, end=7, bytes=9)
    >>> apply(LakeState(), LakeCommit(number=1, add=(file,))).end_of("orders")
    7
    """
    if commit.number != state.number + 1:
        raise Conflict(f"commit {commit.number} of the lake does not follow {state.number}")
    files = dict(state.files)
    gaps = dict(state.gaps)
    gone = _gone(state, commit)
    for topic in {file.topic for file in (*commit.add, *gone.values())}:
        kept = [file for file in files.get(topic, ()) if file.path not in gone]
        kept += [file for file in commit.add if file.topic == topic]
        files[topic] = tuple(sorted(kept, key=_first))
    for topic in {gap.topic for gap in commit.gaps}:
        more = [gap for gap in commit.gaps if gap.topic == topic]
        gaps[topic] = tuple(sorted([*gaps.get(topic, ()), *more]))
    for topic in _topics_of(commit, gone.values()):
        _check_cover(topic, files.get(topic, ()), gaps.get(topic, ()), end=state.end_of(topic))
    back = {*commit.forget, *(file.path for file in commit.add)}
    removed = {path: at for path, at in state.removed.items() if path not in back}
    removed |= dict.fromkeys(gone, commit.at_ms)
    return LakeState(
        number=commit.number, files=files, gaps=gaps, removed=removed,
        origins=_origins(state, commit),
    )  # fmt: skip


def fold(commits: Iterable[LakeCommit], *, state: LakeState | None = None) -> LakeState:
    """Return the state after all of these commits.

    >>> fold([LakeCommit(number=1, gaps=(Gap("orders", 0, 5),))]).end_of("orders")
    5
    """
    found = state or LakeState()
    for commit in commits:
        found = apply(found, commit)
    return found


def check_same(topic: TopicDescription, state: LakeState) -> None:
    """Raise unless a topic is the one that the lake holds under its name, or holds not at all.

    >>> check_same(TopicDescription(topic="orders", number=1, state="active"), LakeState())
    """
    if not is_same(topic, state):
        raise Conflict(
            f"topic {topic.topic!r} is not the one that the lake holds to offset "
            f"{state.end_of(topic.topic)}: it was deleted and created again, or its broker is "
            "another one; use another lake for it"
        )


def is_same(topic: TopicDescription, state: LakeState) -> bool:
    """Tell whether a topic is the one that the lake holds under its name, or holds not at all.

    >>> is_same(TopicDescription(topic="orders", number=1, state="active"), LakeState())
    True
    """
    origin = state.origins.get(topic.topic, origin_of(topic))
    return origin == origin_of(topic) and state.end_of(topic.topic) <= topic.next_offset


def origin_of(topic: TopicDescription) -> str:
    """Return what tells a topic from another one that had or will have its name.

    >>> origin_of(TopicDescription(topic="orders", number=7, state="active", created_at_ms=99))
    '7@99'
    """
    return f"{topic.number}@{topic.created_at_ms}"


def _first(file: LakeFile) -> int:
    return file.first


def _gone(state: LakeState, commit: LakeCommit) -> dict[str, LakeFile]:
    """Return the files that a commit removes, by path."""
    if not commit.remove:
        return {}
    asked = set(commit.remove)
    gone = {
        file.path: file for files in state.files.values() for file in files if file.path in asked
    }
    for path in commit.remove:
        if path not in gone:
            raise Conflict(f"file {path!r} is not in the lake any more")
    return gone


def _topics_of(commit: LakeCommit, gone: Iterable[LakeFile]) -> set[str]:
    topics = {file.topic for file in (*commit.add, *gone)}
    return topics | {gap.topic for gap in commit.gaps}


def _check_cover(
    topic: str, files: Sequence[LakeFile], gaps: Sequence[Gap], *, end: int
) -> None:  # fmt: skip
    """Raise unless files and gaps lie side by side from 0 on, to `end` at least."""
    parts = [_Part(file.first, file.end) for file in files]
    parts = sorted(parts + [_Part(gap.first, gap.end) for gap in gaps])
    if any(part.first >= part.end for part in parts):
        raise Conflict(f"the lake's parts of topic {topic!r} have at least one offset each")
    for before, part in pairwise([_Part(0, 0), *parts, _Part(max(end, _last(parts)), 0)]):
        if part.first < before.end:
            raise Conflict(f"the lake has offset {part.first} of topic {topic!r} already")
        if part.first > before.end:
            raise Conflict(f"the lake has no offset {before.end} of topic {topic!r}")


def _last(parts: Sequence[_Part]) -> int:
    return parts[-1].end if parts else 0


def _origins(state: LakeState, commit: LakeCommit) -> dict[str, str]:
    for topic, origin in commit.origins.items():
        if state.origins.get(topic, origin) != origin:
            raise Conflict(f"topic {topic!r} is not the one that the lake holds")
    return {**state.origins, **commit.origins}
