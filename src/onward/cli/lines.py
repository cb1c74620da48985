"""Events of programs that run for long, as lines on stderr: `2026-11-16 10:00:00 info  started`."""

from __future__ import annotations

import logging
import sys
import time

import click

from onward.cli.output import is_terminal, printable

_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


def log_to_stderr() -> None:
    """Write everything from `info` on to stderr, one line per event."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_Line())
    root = logging.getLogger()
    root.addHandler(stream)
    root.setLevel(logging.INFO)


class _Line(logging.Formatter):
    """One event as one line for people."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = record.levelname.lower()
        text = printable(record.getMessage())
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        word = f"{level:<8}"
        if level in _COLOURS and is_terminal(sys.stderr):
            word = click.style(word, fg=_COLOURS[level])
        return f"{moment} {word} {text}"
