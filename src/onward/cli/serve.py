"""`onward serve`: a broker in this terminal.

It says on stderr what it is and where, one line per event after that, and never one per message.

    exit 0    stopped by SIGTERM or ctrl-C          3    the folder or the address is in use
    exit 5    the log is damaged                    74   the disk failed
"""

import errno
import logging
import os
import sys
import time

import click

from onward.broker.broker import Broker
from onward.broker.serve import serve
from onward.cli.options import settings_options
from onward.cli.output import is_terminal, printable
from onward.errors import Unavailable
from onward.settings import Settings
from onward.version import __version__

logger = logging.getLogger("onward.serve")

_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


@click.command()
@settings_options
@click.pass_context
def command(ctx: click.Context, *, settings: Settings) -> None:
    """Run a broker.

    Example:  onward serve --log.folder ./onward-data --server.port 7700
    """
    _log_to_stderr()
    log = settings.log
    logger.info(
        "onward %s starts: folder %s, durability %s, pid %d",
        __version__, log.folder, log.durability, os.getpid(),
    )  # fmt: skip
    try:
        code = serve(settings, ready=lambda broker, port: _say_ready(settings, broker, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        address = f"{settings.server.host}:{settings.server.port}"
        raise Unavailable(
            f"{address} is in use by another program: stop it, or choose --server.port"
        ) from None
    logger.info("stopped")
    ctx.exit(code)


def _say_ready(settings: Settings, broker: Broker, port: int) -> None:
    server = settings.server
    also = f" and {server.unix_socket}" if server.unix_socket else ""
    logger.info("listening on %s:%d%s, node %s", server.host, port, also, broker.node)
    place = "" if port == 7700 else f" --address localhost:{port}"
    logger.info("try it in another terminal: onward publish orders hello%s", place)


def _log_to_stderr() -> None:
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_Line())
    root = logging.getLogger()
    root.addHandler(stream)
    root.setLevel(logging.INFO)


class _Line(logging.Formatter):
    """One event as one line for people: `2026-11-16 10:00:00 info  listening on ...`."""

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
