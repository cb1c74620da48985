"""A broker as a process: sockets, signals, exit codes.

SIGTERM, SIGINT   stop in order: answer what was taken, leave a checkpoint, exit 0
SIGHUP            the same: the terminal was closed
folder deleted    exit 73 at once, within seconds
the disk fails    exit 74 at once, with nothing answered that is not known to be durable
a bug             exit 1 at once, just so, with its traceback in the log
corruption        exit 5, with the command to run
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from onward.broker.broker import Broker
from onward.config import check
from onward.errors import Corruption, InvalidRequest, Unavailable
from onward.log.log import DiskFailed, FolderLost
from onward.loops import run
from onward.settings import Settings

logger = logging.getLogger("onward.serve")

EXIT_FOLDER_LOST = 73
EXIT_DISK_FAILED = 74
EXIT_BUG = 1
EXIT_CORRUPTION = 5
BACKLOG = 1024
# Kept back from connections: the log's segments, its indexes and folders are files too.
DESCRIPTORS_KEPT = 64
PROBE_S = 1.0


def serve(settings: Settings, *, ready: Callable[[Broker, int], None] | None = None) -> int:
    """Run a broker until it is told to stop; return the exit code.

    `ready` is called once with the broker and its port, when clients can connect.
    """
    check(settings)
    return run(_serve(settings, ready or (lambda broker, port: None)))


def exit_code(error: Exception) -> int:
    """Return how a broker that failed ends: nobody shall replace a disk for a bug of ours.

    >>> exit_code(DiskFailed("no")), exit_code(Corruption("bad")), exit_code(KeyError("oops"))
    (74, 5, 1)
    """
    if isinstance(error, Corruption):
        return EXIT_CORRUPTION
    if isinstance(error, FolderLost):
        return EXIT_FOLDER_LOST
    return EXIT_DISK_FAILED if isinstance(error, DiskFailed) else EXIT_BUG


async def _serve(settings: Settings, ready: Callable[[Broker, int], None]) -> int:
    stop = asyncio.Event()
    failed: list[Exception] = []

    def on_failure(error: Exception) -> None:
        failed.append(error)
        stop.set()

    descriptors = _raise_descriptor_limit()
    broker = await Broker.open(settings, on_failure=on_failure)
    _limit_connections(broker, descriptors)
    servers = await _listen(broker, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    _tune()
    ready(broker, servers[0].sockets[0].getsockname()[1])
    await stop.wait()
    if failed:
        # Nothing may be flushed or answered now: the pages are not to be trusted.
        logging.shutdown()
        os._exit(exit_code(failed[0]))
    logger.info("stopping")
    for server in servers:
        server.close()
    try:
        await broker.stop()
    except FolderLost as error:
        logger.critical("what is stored is gone: %s", error)
        return EXIT_FOLDER_LOST
    _remove_socket(settings)
    return 0


async def _listen(broker: Broker, settings: Settings) -> list[asyncio.Server]:
    loop = asyncio.get_running_loop()
    server = settings.server
    path = server.unix_socket
    if path:
        _check_socket_path(path)
    try:
        servers = [
            await loop.create_server(broker.session, server.host, server.port, backlog=BACKLOG)
        ]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        place = f"server.host {server.host!r}, server.port {server.port}"
        raise InvalidRequest(f"{place}: cannot listen there: {_reason(error)}") from None
    if path:
        _remove_socket(settings)
        try:
            servers.append(await loop.create_unix_server(broker.session, path, backlog=BACKLOG))
        except OSError as error:
            raise InvalidRequest(
                f"server.unix_socket {path!r}: cannot listen there: {_reason(error)}"
            ) from None
    return servers


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _check_socket_path(path: str) -> None:
    """Refuse a path on which somebody listens, or where something else is: that is not ours."""
    if _answers(path):
        raise Unavailable(f"the socket {path} is in use")
    if os.path.lexists(path) and not _is_socket(path):
        raise InvalidRequest(f"server.unix_socket {path!r} exists and is no socket")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _remove_socket(settings: Settings) -> None:
    path = settings.server.unix_socket
    if path and _is_dead_socket(path):
        Path(path).unlink(missing_ok=True)


def _is_dead_socket(path: str) -> bool:
    """Tell whether a socket file is left over: nobody answers on it."""
    if not _is_socket(path):
        # To connect to a file that is no socket is refused just so.
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _answers(path: str) -> bool:
    """Tell whether somebody listens on a Unix socket, however busy."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except (TimeoutError, BlockingIOError):
            return True
        except OSError:
            return False
    return True


def _raise_descriptor_limit() -> int:
    """Let this process open as many files as the system allows it; return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _limit_connections(broker: Broker, descriptors: int) -> None:
    """Take no connection for which the log would have to go without a file."""
    allowed = max(1, descriptors - DESCRIPTORS_KEPT)
    if allowed < broker.connections_max:
        logger.warning(
            "at most %d connections, not %d: this process may open %d files",
            allowed, broker.connections_max, descriptors,
        )  # fmt: skip
        broker.connections_max = allowed


def _tune() -> None:
    """What was loaded stays: let the collector look only at what is new, and seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
