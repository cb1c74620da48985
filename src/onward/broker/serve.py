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
from onward.broker.session import Session
from onward.broker.tasks import Tasks
from onward.config import check
from onward.errors import Corruption, InvalidRequest, OnwardError, Unavailable
from onward.log.disk import FolderLocked
from onward.log.log import DiskFailed, FolderLost
from onward.log.marks import begin_replacement
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


class Node:
    """The broker of this process. A snapshot exchanges it for a new one on the same sockets."""

    broker: Broker

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._descriptors = _raise_descriptor_limit()
        self._tasks = Tasks(logger)
        self.is_stopping = asyncio.Event()
        self.failure: Exception | None = None
        """The disk, the stored bytes or the code failed: nothing may be answered any more."""
        self.refusal: OnwardError | None = None
        """Why the source cannot be followed, ever."""

    def session(self) -> Session:
        """Return a session of the broker that runs; one that has stopped says so to the client."""
        return self.broker.session()

    async def open(self) -> None:
        """Open the broker."""
        follows = self._settings.replica.of or None
        self.broker = await Broker.open(self._settings, on_failure=self._fail, follows=follows)
        _limit_connections(self.broker, self._descriptors)

    async def follow(self) -> None:
        """Begin to follow the source, if this is a replica."""
        if self.broker.gate.is_leading or not self._settings.replica.of:
            return
        # Imported only where a replica runs: it brings the client with it.
        from onward.cluster.replica import Replica

        replica = Replica(self.broker, on_final=self._refuse, on_snapshot=self._exchange_soon)
        self.broker.replica = replica
        logger.info(
            "this node is replica %r of %s: it serves reads and refuses writes",
            replica.name, self._settings.replica.of,
        )  # fmt: skip
        await replica.open()

    async def stop(self) -> None:
        """Stop the broker; an exchange that is under way comes to its end first."""
        await self._tasks.drain()
        if self.failure is None:
            await self.broker.stop()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.is_stopping.set()

    def _refuse(self, error: OnwardError) -> None:
        self.refusal = error
        self.is_stopping.set()

    def _exchange_soon(self) -> None:
        self._tasks.start(self._exchange())

    async def _exchange(self) -> None:
        """Stop the broker, put the snapshot in the place of its log, and open it again.

        Readers are told that the broker stops, and come back.
        """
        if self.is_stopping.is_set():
            return
        try:
            await self._replace_log()
            await self.open()
            await self.follow()
        except Exception as error:  # noqa: BLE001  (a process without a broker must end)
            logger.critical("the log could not be replaced by a snapshot: %s", error)
            self._fail(error)
        else:
            # What the collector was told to leave alone belongs to the old broker.
            gc.unfreeze()
            _tune()
            log = self.broker.log
            logger.info("the log was replaced by a snapshot: next event id %d", log.next_index)

    async def _replace_log(self) -> None:
        disk, folder = self.broker.log.disk, self.broker.log.folder
        try:
            await self.broker.stop()
        except FolderLost:
            raise
        except OSError as error:
            # Without its last checkpoint; but this log is about to go.
            logger.warning("the old log was closed without a checkpoint: %s", error)
        try:
            unlock = disk.lock(f"{folder}/lock")
        except FolderLocked:
            raise Unavailable(f"folder {folder!r} is in use by another broker") from None
        try:
            begin_replacement(disk, folder)
        finally:
            unlock()


async def _serve(settings: Settings, ready: Callable[[Broker, int], None]) -> int:
    node = Node(settings)
    await node.open()
    servers = await _listen(node, settings)
    await node.follow()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, node.is_stopping.set)
    _tune()
    ready(node.broker, servers[0].sockets[0].getsockname()[1])
    await node.is_stopping.wait()
    if node.failure is None:
        logger.info("stopping")
        for server in servers:
            server.close()
        try:
            await node.stop()
        except FolderLost as error:
            logger.critical("what is stored is gone: %s", error)
            return EXIT_FOLDER_LOST
    if node.failure is not None:
        # Nothing may be flushed or answered now: the pages are not to be trusted.
        logging.shutdown()
        os._exit(exit_code(node.failure))
    _remove_socket(settings)
    if node.refusal is not None:
        raise node.refusal
    return 0


async def _listen(node: Node, settings: Settings) -> list[asyncio.Server]:
    loop = asyncio.get_running_loop()
    server = settings.server
    path = server.unix_socket
    if path:
        _check_socket_path(path)
    try:
        servers = [
            await loop.create_server(node.session, server.host, server.port, backlog=BACKLOG)
        ]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        place = f"server.host {server.host!r}, server.port {server.port}"
        raise InvalidRequest(f"{place}: cannot listen there: {_reason(error)}") from None
    if path:
        _remove_socket(settings)
        try:
            servers.append(await loop.create_unix_server(node.session, path, backlog=BACKLOG))
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
