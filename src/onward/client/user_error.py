"""The traceback of an error in a user's own code: their frames, and none of ours before them.

    user_traceback   a text without any frame of Onward, for a module that cannot be imported
    logged_error     for a logger, without the frames of Onward that called the user's function

Frames of Onward below the user's own stay in a log: there a call of ours has failed.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, TracebackType

import onward

_IMPORTING = ("<frozen importlib", "importlib/__init__.py", "<frozen runpy")


def user_traceback(error: BaseException, *, without: Iterable[ModuleType] = ()) -> str:
    """Return the traceback as Python prints it, without the frames of Onward and `without`.

    >>> print(user_traceback(ZeroDivisionError("division by zero")))
    ZeroDivisionError: division by zero
    """
    described = traceback.TracebackException.from_exception(error)
    _strip(described, (_OURS, *map(_folder, without)))
    return "".join(described.format()).rstrip()


def logged_error(
    error: BaseException,
) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return an error for `exc_info` of a logger, from the first frame that is not of Onward.

    >>> logged_error(ZeroDivisionError("division by zero"))[0].__name__
    'ZeroDivisionError'
    """
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename.startswith(_OURS):
        place = place.tb_next
    # Without a frame of the user's the error is in ours, and all of them are of use.
    return type(error), error, place or error.__traceback__


def _strip(described: traceback.TracebackException, folders: tuple[str, ...]) -> None:
    kept = [frame for frame in described.stack if not _is_left_out(frame.filename, folders)]
    described.stack = traceback.StackSummary.from_list(kept)
    for other in (described.__cause__, described.__context__):
        if other is not None:
            _strip(other, folders)


def _is_left_out(filename: str, folders: tuple[str, ...]) -> bool:
    return filename.startswith(folders) or any(part in filename for part in _IMPORTING)


def _folder(package: ModuleType) -> str:
    # With the separator: a user's package may be called onward_shop.
    return f"{Path(package.__file__ or '').parent}{os.sep}"


_OURS = _folder(onward)
