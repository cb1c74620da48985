"""Which event loop programs run on that leave the choice to us."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes a loop: uvloop's where it is installed, else asyncio's own.

    >>> with asyncio.Runner(loop_factory=loop_factory()) as runner:
    ...     runner.run(asyncio.sleep(0, "done"))
    'done'
    """
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on a loop of its own.

    >>> run(asyncio.sleep(0, "done"))
    'done'
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
