"""A lake: a folder with the history of topics, as Parquet files that any engine reads.

    LAKE/topic=<topic>/date=<day>/<first>-<end>-<mark>.parquet    messages, offsets half-open
    LAKE/_onward/lake.json                                        this is a lake, and which kind
    LAKE/_onward/commits/<number>.json                            each change, from 1 on
    LAKE/_onward/snapshots/<number>.json                          the state every 100 commits

Only what the commits name is in the lake: a file without a commit is what a crash left; the same
work writes another one, and `compact` deletes it some day. A commit is written aside, synced and
linked to its number, which fails when the number is taken: so commits have one order, whoever makes
them. Commits are never deleted, they are the lake's history; a snapshot only saves reading
them again.

The folder is on this machine, or on one that all machines of a cluster see at the same path.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from onward.clock import SystemClock
from onward.errors import (
    Conflict,
    Corruption,
    DiskFull,
    Forbidden,
    InvalidRequest,
    OnwardError,
    Unavailable,
)
from onward.pipeline.lake_state import Gap, LakeCommit, LakeFile, LakeState, apply
from onward.version import __version__

FORMAT = 1
SNAPSHOT_EVERY = 100
SNAPSHOTS_KEPT = 3
_TRIES = 100
_INSIDE = "_onward"

T = TypeVar("T")


class _Label(msgspec.Struct, frozen=True):
    """What `lake.json` says."""

    format: int
    made_by: str = ""


def open_lake(path: str | Path, *, create: bool = False) -> Lake:
    """Return the lake of a folder; with `create` a new folder, or an empty one, becomes a lake.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     open_lake(folder, create=True).state().number
    0
    """
    folder = lake_folder(path)
    with said_plainly(folder):
        if not (folder / _INSIDE / "lake.json").exists():
            _begin(folder, create=create)
        label = _read(folder / _INSIDE / "lake.json", _Label)
    if label.format > FORMAT:
        raise InvalidRequest(
            f"the lake {str(folder)!r} has format {label.format}, made by {label.made_by!r}: "
            f"this version of onward knows {FORMAT}"
        )
    return Lake(folder)


def check_lake(path: str | Path) -> None:
    """Raise unless a folder is a lake or can become one; nothing is made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     check_lake(folder)
    """
    folder = lake_folder(path)
    with said_plainly(folder):
        is_lake = (folder / _INSIDE / "lake.json").exists()
        if not is_lake:
            _check_free(folder)
    if is_lake:
        open_lake(folder)


def lake_folder(path: str | Path) -> Path:
    """Return the folder that a user named, absolute.

    >>> str(lake_folder("file:///lake"))
    '/lake'
    """
    text = str(path)
    if not text:
        raise InvalidRequest("a lake is a folder, and none is named")
    scheme, mark, rest = text.partition("://")
    if mark and scheme != "file":
        raise InvalidRequest(
            f"the lake {text!r} is not a folder: name a path, and on a cluster one that all "
            "machines share"
        )
    return Path(rest if mark else text).expanduser().absolute()


class Lake:
    """A lake that was opened: its state, and the way to change it. Made by `open_lake`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lake = open_lake(folder, create=True)
    ...     lake.commit(gaps=[Gap("orders", 0, 5)]).end_of("orders")
    5
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commits = folder / _INSIDE / "commits"
        self._snapshots = folder / _INSIDE / "snapshots"
        self._state: LakeState | None = None

    def state(self) -> LakeState:
        """Return what is in the lake now."""
        with said_plainly(self.folder):
            state = self._state or self._newest_snapshot()
            while (commit := self._commit_after(state.number)) is not None:
                try:
                    state = apply(state, commit)
                except Conflict as error:
                    path = self._commits / _numbered(state.number + 1)
                    raise Corruption(f"commit {str(path)!r} does not fit: {error}") from None
            self._state = state
        return state

    def commit(
        self, *, add: Sequence[LakeFile] = (), remove: Sequence[str] = (),
        gaps: Sequence[Gap] = (), origins: Mapping[str, str] | None = None,
        forget: Sequence[str] = (),
    ) -> LakeState:  # fmt: skip
        """Make one change, durably, and return the state after it.

        `Conflict` says that others changed the lake so that this change is wrong now; what others
        changed elsewhere in it does no harm.
        """
        for _ in range(_TRIES):
            state = self.state()
            commit = LakeCommit(
                number=state.number + 1, at_ms=SystemClock().now_ms(), add=tuple(add),
                remove=tuple(remove), gaps=tuple(gaps), origins=dict(origins or {}),
                forget=tuple(forget),
            )  # fmt: skip
            after = apply(state, commit)
            with said_plainly(self.folder):
                path = self._commits / _numbered(commit.number)
                if _write_once(path, msgspec.json.encode(commit)):
                    self._state = after
                    self._perhaps_snapshot(after)
                    return after
        raise Conflict(f"the lake {str(self.folder)!r} is changed by others all the time")

    def path(self, file: LakeFile) -> Path:
        """Return where a file is."""
        return self.folder / file.path

    def _commit_after(self, number: int) -> LakeCommit | None:
        try:
            return _read(self._commits / _numbered(number + 1), LakeCommit)
        except FileNotFoundError:
            return None

    def _newest_snapshot(self) -> LakeState:
        names = sorted(path.name for path in self._snapshots.glob("[0-9]*.json"))
        for name in reversed(names):
            with suppress(FileNotFoundError):  # somebody else keeps newer ones by now
                return _read(self._snapshots / name, LakeState)
        return LakeState()

    def _perhaps_snapshot(self, state: LakeState) -> None:
        if state.number % SNAPSHOT_EVERY:
            return
        replace_file(self._snapshots / _numbered(state.number), msgspec.json.encode(state))
        for old in sorted(self._snapshots.glob("[0-9]*.json"))[:-SNAPSHOTS_KEPT]:
            old.unlink(missing_ok=True)


@contextmanager
def said_plainly(path: Path) -> Iterator[None]:
    """Turn what the system says of a folder or a file into one of our errors."""
    try:
        yield
    except PermissionError as error:
        where = error.filename or path
        raise Forbidden(f"no permission for {str(where)!r} of the lake {str(path)!r}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFull(f"no space left for the lake {str(path)!r}") from error
        raise Unavailable(f"the lake {str(path)!r} cannot be used: {error}") from error


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    aside = _write_aside(path, content)
    aside.replace(path)
    sync_folder(path.parent)


def aside_of(path: Path) -> Path:
    """Return a name beside a file that nobody else has, for writing it before it is renamed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.aside")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _begin(folder: Path, *, create: bool) -> None:
    if not create and not folder.exists():
        raise InvalidRequest(f"there is no lake at {str(folder)!r}")
    _check_free(folder)
    if not create:
        raise InvalidRequest(f"{str(folder)!r} is empty: there is no lake in it yet")
    for name in ("commits", "snapshots"):
        (folder / _INSIDE / name).mkdir(parents=True, exist_ok=True)
    label = _Label(FORMAT, f"onward {__version__}")
    _write_once(folder / _INSIDE / "lake.json", msgspec.json.encode(label))
    sync_folder(folder)


def _check_free(folder: Path) -> None:
    """Raise when something else than a lake is there."""
    if folder.exists() and not folder.is_dir():
        raise InvalidRequest(f"{str(folder)!r} is not a folder")
    foreign = [one.name for one in folder.iterdir()] if folder.exists() else []
    if [name for name in foreign if name != _INSIDE]:
        raise InvalidRequest(f"{str(folder)!r} is not an onward lake and is not empty")


def _numbered(number: int) -> str:
    return f"{number:012}.json"


def _read(path: Path, kind: type[T]) -> T:
    content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise Corruption(f"{str(path)!r} of the lake cannot be read: {error}") from None


def _write_aside(path: Path, content: bytes) -> Path:
    aside = aside_of(path)
    with aside.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return aside


def _write_once(path: Path, content: bytes) -> bool:
    """Write a file unless it is there; tell whether it was written."""
    aside = _write_aside(path, content)
    try:
        path.hardlink_to(aside)
    except FileExistsError:
        # A network file system may have made the link and lost the answer.
        return aside.stat().st_nlink > 1
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV):
            raise _no_links(path) from error
        raise
    finally:
        aside.unlink()
        sync_folder(path.parent)
    return True


def _no_links(path: Path) -> OnwardError:
    return InvalidRequest(
        f"the folder {str(path.parent)!r} has no hard links, and a lake needs them: "
        "use another file system"
    )
