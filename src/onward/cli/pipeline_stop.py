"""Ctrl-C and SIGTERM while a job runs on Spark: one line, and nothing is left behind.

    a job with an end     the first signal leaves it, stops Spark, and the command ends with 130
    a job without one     the first signal asks it to end, which is its good end; the second leaves

Spark's own answer to ctrl-C speaks to Java on a connection that waits for an answer already, and
tells of it on fifty lines. So Spark is stopped from a thread of its own, and what the job raises
while it is left is ctrl-C, whatever it is called.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

NUMBERS = (signal.SIGINT, signal.SIGTERM)
LINE = "stopped; run it again to go on"
ANEW = "stopped; what is written stays, and run again it is written again: --run-id prevents that"
AGAIN = "stopped; what is delivered stays so, and run again it is delivered again"
INTERRUPTED = 130


class Stop:
    """Hears signals for one job; called, it tells whether the job is to end.

    >>> Stop()()
    False
    """

    def __init__(self, line: str = LINE) -> None:
        self._line = line
        self._is_gentle = False
        self._is_asked = False
        self._is_left = False
        self._ending: threading.Thread | None = None

    def __call__(self) -> bool:
        """Tell whether somebody wants the job to end."""
        return self._is_asked

    def listen(self, *, is_gentle: bool = False) -> None:
        """Hear signals from now on, also when Spark has put its own ears there."""
        self._is_gentle = is_gentle
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                signal.signal(number, self._hear)

    @contextmanager
    def in_one_line(self) -> Iterator[None]:
        """Hear signals in this block, and end the command with one line when one has left it."""
        before = {number: signal.getsignal(number) for number in NUMBERS}
        quiet_before = logging.root.manager.disable
        self.listen()
        try:
            yield
        except BaseException:
            if not self._is_left:
                raise
            if self._ending is not None:
                self._ending.join()
            click.echo(self._line, err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        finally:
            logging.disable(quiet_before)
            if threading.current_thread() is threading.main_thread():
                for number, one in before.items():
                    signal.signal(number, one)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_gentle and not self._is_asked:
            self._is_asked = True
            return
        self._is_asked = True
        if not self._is_left:
            self._is_left = True
            # py4j and Spark tell of every connection that ends now.
            logging.disable(logging.CRITICAL)
            from onward.pipeline.sessions import stop_soon

            self._ending = stop_soon()
        raise KeyboardInterrupt
