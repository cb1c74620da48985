"""Events of programs that run for long, as lines on stderr.

text   2026-11-16T10:00:00.123+01:00 info     listening on 127.0.0.1:7700
json   {"at": "2026-11-16T10:00:00.123+01:00", "level": "info", "logger": ..., "text": ...}
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime
from typing import Literal

import click

from onward.cli.output import is_terminal, printable

_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}

Level = Literal["debug", "info", "warning", "error"]

LEVELS = ("debug", "info", "warning", "error")


def log_as_configured(level: str | None) -> None:
    """Log to stderr, unless the user's program has configured logging: then that holds.

    A level that is asked for holds for our own events in either case.
    """
    own = logging.getLogger("onward")
    if not logging.getLogger().handlers and not own.handlers:
        log_to_stderr()
    if level is not None:
        own.setLevel(level.upper())


def log_to_stderr(*, level: Level = "info", form: Literal["text", "json"] = "text") -> None:
    """Write every event from `level` on to stderr, one line each."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_JsonLine() if form == "json" else _Line())
    root = logging.getLogger()
    root.addHandler(stream)
    root.setLevel(level.upper())


class _Line(logging.Formatter):
    """One event as one line for people."""

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        text = printable(record.getMessage())
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        word = f"{level:<8}"
        if level in _COLOURS and is_terminal(sys.stderr):
            word = click.style(word, fg=_COLOURS[level])
        return f"{_moment(record)} {word} {text}"


class _JsonLine(logging.Formatter):
    """One event as one JSON object, for programs that collect logs."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "at": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event)


def _moment(record: logging.LogRecord) -> str:
    """Return the local time with milliseconds and its distance from UTC."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
