"""The traceback of a user's own module: their frames, and none of ours."""

from __future__ import annotations

import traceback
from pathlib import Path

import click

import onward

_OURS = tuple(str(Path(one.__file__ or "").parent) for one in (onward, click))
_IMPORTING = ("<frozen importlib", "importlib/__init__.py", "<frozen runpy")


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error as Python prints it, without the frames of Onward.

    >>> print(user_traceback(ZeroDivisionError("division by zero")))
    ZeroDivisionError: division by zero
    """
    described = traceback.TracebackException.from_exception(error)
    _strip(described)
    return "".join(described.format()).rstrip()


def _strip(described: traceback.TracebackException) -> None:
    kept = [frame for frame in described.stack if not _is_ours(frame.filename)]
    described.stack = traceback.StackSummary.from_list(kept)
    for other in (described.__cause__, described.__context__):
        if other is not None:
            _strip(other)


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS) or any(part in filename for part in _IMPORTING)
