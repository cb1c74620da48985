"""Futures for steps that report their end by a callback.

The write path calls back, because it is hot and a commit has many who wait for it. Operations that
people and programs ask for are coroutines: they await such a step as a future.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from onward.errors import OnwardError

Done = Callable[[OnwardError | None], None]
"""Called once: with None when a step is durable, else with why it is not."""


def future_of(begin: Callable[[Done], object]) -> asyncio.Future[None]:
    """Begin a step at once, and return a future for its end.

    >>> async def main() -> None:
    ...     await future_of(lambda done: done(None))
    >>> asyncio.run(main())
    """
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: OnwardError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    begin(done)
    return future


async def all_of(futures: list[asyncio.Future[None]]) -> None:
    """Wait until every step has ended; raise the error of the first that failed.

    If all of them have ended already, the caller continues without giving up its turn of the loop.
    """
    running = [future for future in futures if not future.done()]
    if running:
        await asyncio.wait(running)
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
