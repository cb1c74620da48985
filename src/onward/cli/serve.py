"""`onward serve`: a broker in this terminal.

It says on stderr what it is and where, one line per event after that, and never one per message.

    exit 0    stopped by SIGTERM or ctrl-C          2    a setting is wrong, or cannot be here
    exit 1    a replica has another history than its source
    exit 3    the folder or the address is in use
    exit 5    the log is damaged                    74   the disk failed
"""

import errno
import logging
import os
import sys

import click

from onward.broker.broker import Broker
from onward.broker.serve import serve
from onward.cli.lines import log_to_stderr
from onward.cli.options import settings_options
from onward.cli.output import is_terminal
from onward.errors import InvalidRequest, Unavailable
from onward.settings import Settings
from onward.version import __version__

logger = logging.getLogger("onward.serve")


@click.command()
@settings_options
@click.pass_context
def command(ctx: click.Context, *, settings: Settings) -> None:
    """Run a broker.

    Example:  onward serve --log.folder ./onward-data --server.port 7700
    """
    log_to_stderr(level=settings.server.log_level, form=settings.server.log_format)
    log = settings.log
    logger.info(
        "onward %s starts: folder %s, durability %s, settings from %s, pid %d",
        __version__, log.folder, log.durability, _settings_file(settings), os.getpid(),
    )  # fmt: skip
    try:
        code = serve(settings, ready=lambda broker, port: _say_ready(settings, broker, port))
    except InvalidRequest as error:
        # Right as settings go, and wrong on this machine.
        raise click.UsageError(str(error), ctx) from None
    except (FileExistsError, NotADirectoryError) as error:
        raise click.UsageError(f"log.folder {log.folder!r} is a file, not a folder", ctx) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        address = f"{settings.server.host}:{settings.server.port}"
        raise Unavailable(
            f"{address} is in use by another program: stop it, or choose --server.port"
        ) from None
    logger.info("stopped")
    ctx.exit(code)


def _settings_file(settings: Settings) -> str:
    """Return the file that was read, for the first line of the log."""
    files = {source for source in settings.sources.values() if source.startswith("file ")}
    return files.pop() if files else "no file"


def _say_ready(settings: Settings, broker: Broker, port: int) -> None:
    server = settings.server
    also = f" and {server.unix_socket}" if server.unix_socket else ""
    logger.info("listening on %s:%d%s, node %s", server.host, port, also, broker.node)
    if not is_terminal(sys.stderr) or settings.auth.tokens:
        # Under a service manager the hint is noise; with tokens it would fail as it stands.
        return
    place = "" if port == 7700 else f" --address localhost:{port}"
    logger.info("try it in another terminal: onward publish orders hello%s", place)
