"""What Spark's Java says behind a command: kept, and not shown.

    with kept_quiet():
        spark = session(...)    its Java, and the Python workers, write to a pipe of ours
    heard()                     the last lines of it, for who must know why it died

A command says itself, in one sentence, what went wrong; a hundred lines of Java before it would
hide that. A program of a user's own has a session that speaks as Spark always does.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LINES_MAX = 200
LINE_BYTES_MAX = 10_000

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)
_heard: deque[str] = deque(maxlen=LINES_MAX)


@contextmanager
def kept_quiet() -> Iterator[None]:
    """Keep to ourselves what the Java of a session says that is started in this block."""
    before = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(before)


def is_quiet() -> bool:
    """Tell whether a Java that starts now is to be kept quiet.

    >>> with kept_quiet():
    ...     is_quiet()
    True
    """
    return _is_quiet.get()


def heard() -> list[str]:
    """Return the last lines that were written to our pipes, oldest first.

    >>> len(heard()) <= LINES_MAX
    True
    """
    return list(_heard)


@contextmanager
def listening() -> Iterator[int]:
    """Give the end of a pipe to write to; it is read until all who have it are gone."""
    reading, writing = os.pipe()
    threading.Thread(target=_listen, args=(reading,), name="onward-java", daemon=True).start()
    try:
        yield writing
    finally:
        os.close(writing)


def _listen(reading: int) -> None:
    with open(reading, "rb") as stream:
        while line := stream.readline(LINE_BYTES_MAX):
            _heard.append(line.decode(errors="replace").rstrip("\n"))
