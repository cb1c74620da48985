"""SIGTERM and SIGINT: the first asks a program to end, another one insists.

Who starts programs often sends one and the same wish twice, to the process and to its group. So
signals within a moment of the first are the same one; nobody presses ctrl-C that quickly.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAME_S = 0.1
NUMBERS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_signals(first: Callable[[], object], again: Callable[[], object]) -> Iterator[None]:
    """Have the first signal call one thing and later ones another; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    first_at: list[float] = []

    def take() -> None:
        if not first_at:
            first_at.append(loop.time())
            first()
        elif loop.time() - first_at[0] >= SAME_S:
            again()

    before = [signal.getsignal(number) for number in NUMBERS]
    for number in NUMBERS:
        loop.add_signal_handler(number, take)
    try:
        yield
    finally:
        for number, previous in zip(NUMBERS, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, previous)
