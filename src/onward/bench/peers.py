"""The servers of a comparison: child programs on free ports, each with an empty folder.

    with started("redis", folder=folder) as redis: ... redis.port, redis.resident_mb()

`onward` is a real `onward serve`. Every server puts a message on the disk before it acks it, as
far as it can: what each one really does is written in its `settings` and goes into the report. A
server that is not installed raises `PeerMissing`, which says how to get it.
"""

import contextlib
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from onward.bench.report import rounded
from onward.errors import Unavailable

START_S_MAX = 30.0
STOP_S_MAX = 15.0
_SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")


class PeerMissing(Unavailable):
    """A server or client library of the comparison is not installed."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    port: int
    folder: Path
    settings: str
    child: subprocess.Popen[bytes]

    def resident_mb(self) -> float:
        """Return how much memory it really has, in MB (1,000,000 bytes)."""
        return _memory_mb(self.child.pid, "VmRSS")

    def highest_mb(self) -> float:
        """Return how much memory it had at most since its start, in MB."""
        return _memory_mb(self.child.pid, "VmHWM")

    def children_mb(self) -> float:
        """Return how much memory the programs have that it has started, in MB."""
        total = 0.0
        for tasks in Path(f"/proc/{self.child.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread or a child may end meanwhile
                for child in tasks.read_text(encoding="ascii").split():
                    total += _memory_mb(int(child), "VmRSS")
        return total

    def cpu_seconds(self) -> float:
        """Return the processor time that it has taken so far, in all its threads."""
        stat = Path(f"/proc/{self.child.pid}/stat").read_text(encoding="ascii")
        # The name may have spaces; after it come fields 3 and on: 14 is user, 15 system time.
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End it as a power cut would."""
        self.child.kill()
        self.child.wait(STOP_S_MAX)


@contextlib.contextmanager
def started(
    name: str, *, folder: Path, keep: bool = False, options: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server with a new folder inside `folder`; stop it and remove that folder after."""
    # Wherever its program is started: some are not started here.
    place = Path(tempfile.mkdtemp(prefix=f"onward-bench-{name}-", dir=folder)).resolve()
    try:
        with running(name, place=place, options=options) as server:
            yield server
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
        # The next one waits for its own syncs, not for what this one left to be written.
        os.sync()


@contextlib.contextmanager
def running(
    name: str, *, place: Path, options: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server on a folder that may have something in it; stop it after."""
    port = free_port()
    command, settings = COMMANDS[name](port, place, options or {})
    with open(place / "output.txt", "ab") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    server = Server(name, port, place, settings, child)
    try:
        wait_for(server)
        yield server
    except Unavailable:
        raise
    except Exception as error:
        # The folder is removed soon: what the server said last would be lost with it.
        raise Unavailable(f"{error} ({_last_words(server)})") from error
    finally:
        _stop(child)


def wait_for(server: Server) -> None:
    """Return when the server takes connections."""
    give_up_at = time.monotonic() + START_S_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
        except OSError:
            _check_lives(server)
            if time.monotonic() > give_up_at:
                raise Unavailable(f"{server.name} did not start in {START_S_MAX:g} s") from None
            time.sleep(0.005)
        else:
            return


def free_port() -> int:
    """Return a port that nobody uses now.

    >>> free_port() > 1023
    True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str) -> str:
    """Return the path of an installed program, or say that it is missing."""
    # Debian keeps postgresql's programs in a folder of their version, the highest one last.
    more = [*sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True), *_SBIN]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(more))
    if found is None:
        raise PeerMissing(f"{name} is not installed (make setup-bench)")
    return found


def program_version(name: str) -> str:
    """Return what a program says about its version."""
    output = subprocess.run(
        [program(name), "-v" if name == "beanstalkd" else "--version"],
        capture_output=True, text=True, check=False, timeout=STOP_S_MAX,
    )  # fmt: skip
    match = re.search(r"\d+(\.\d+)+", output.stdout + output.stderr)
    return match[0] if match else "unknown"


REDIS_PY = "redis-py"
"""redis-py as `pip install redis` gives it, which parses in Python: the peer of the ratio."""
REDIS_PY_HIREDIS = "redis-py+hiredis"
"""The same with its C parser, which is much faster: shown beside, not part of the ratio; only
`jobs`, which compares whole systems at their best, counts it."""


def redis_parser(client: str) -> type:
    """Return the parser of one of the two; raise `PeerMissing` when it is not installed."""
    if not find_spec("redis"):
        raise PeerMissing("redis-py is not installed (make setup-bench)")
    if client == REDIS_PY_HIREDIS and not find_spec("hiredis"):
        raise PeerMissing("hiredis is not installed (make setup-bench)")
    from redis._parsers import _AsyncHiredisParser, _AsyncRESP2Parser

    parser: type = _AsyncHiredisParser if client == REDIS_PY_HIREDIS else _AsyncRESP2Parser
    return parser


def beside(
    figures: dict[str, float],
    *,
    onward: float,
    less_is_better: bool = False,
    names: Collection[str] = (REDIS_PY_HIREDIS,),
) -> dict[str, object]:
    """Take what is not in the ratio out of the peers' figures, and say how Onward compares.

    >>> peers = {"redis-py": 10.0, "redis-py+hiredis": 20.0}
    >>> beside(peers, onward=50.0), peers
    ({'redis-py+hiredis': {'figure': 20.0, 'ratio': 2.5}}, {'redis-py': 10.0})
    """
    found: dict[str, object] = {}
    for name in names:
        if name in figures:
            figure = figures.pop(name)
            ratio = figure / onward if less_is_better else onward / figure
            found[name] = {"figure": rounded(figure), "ratio": round(ratio, 3)}
    return found


Command = tuple[list[str], str]


def _onward(port: int, place: Path, options: Mapping[str, str]) -> Command:
    given = {"server.port": str(port), "log.folder": str(place / "log"), **options}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    start = "import sys; from onward.cli import main; main(['serve', *sys.argv[1:]])"
    chosen = ", ".join(f"{name}={value}" for name, value in options.items())
    return [sys.executable, "-c", start, *flags], f"durability disk {chosen}".strip()


def _redis(port: int, place: Path, options: Mapping[str, str]) -> Command:
    # A rewrite of its file in the middle of a short run would be bad luck, not a property.
    given = {
        "appendonly": "yes", "appendfsync": "always", "save": "",
        "auto-aof-rewrite-percentage": "0", **options,
    }  # fmt: skip
    flags = [word for name, value in given.items() for word in (f"--{name}", value)]
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(place)]
    return [program("redis-server"), *where, *flags], "appendonly yes, appendfsync always"


def _nats(port: int, place: Path, options: Mapping[str, str]) -> Command:
    config = place / "nats.conf"
    # Before 2.10 it cannot be told to sync before it acks; it does so every two minutes.
    numbers = program_version("nats-server").split(".")
    can_sync = [int(number) for number in numbers[:2]] >= [2, 10]
    sync = "sync_interval: always" if can_sync else ""
    store = f'jetstream {{ store_dir: "{place}", max_file_store: 50GB\n {sync} }}'
    config.write_text(f"listen: 127.0.0.1:{port}\n{store}\n", encoding="utf-8")
    settings = sync or "sync_interval 2m, the only way of this version: acked before on disk"
    return [program("nats-server"), "-c", str(config)], f"file storage, {settings}"


def _beanstalkd(port: int, place: Path, options: Mapping[str, str]) -> Command:
    where = ["-l", "127.0.0.1", "-p", str(port), "-b", str(place)]
    sync_ms = options.get("sync_ms", "0")
    synced = f"at most every {sync_ms} ms" if int(sync_ms) else "after every write"
    command = [program("beanstalkd"), *where, "-f", sync_ms]
    return command, f"binlog, fsync {synced} (-f {sync_ms})"


def _postgresql(port: int, place: Path, options: Mapping[str, str]) -> Command:
    given = {
        "listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": "",
        "max_connections": "200", "shared_buffers": "256MB", "autovacuum_naptime": "1s", **options,
    }  # fmt: skip
    flags = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
    start = _as_postgres(place)
    made = subprocess.run(
        [*start, program("initdb"), "-D", str(place / "pg"), "-U", "postgres", "-A", "trust"],
        cwd=place.anchor, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if made.returncode:
        said = (made.stderr.strip().splitlines() or ["nothing"])[-1]
        raise PeerMissing(
            f"postgresql cannot be started in {place}, initdb said: {said} (user 'postgres' must "
            "reach that folder: --folder chooses another one)"
        )
    command = [*start, program("postgres"), "-D", str(place / "pg"), *flags]
    return command, "fsync on, synchronous_commit on, autovacuum each second"


def _as_postgres(place: Path) -> list[str]:
    """Return what starts a program as user postgres: it refuses to run as root."""
    if os.geteuid() != 0:
        return []
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        raise PeerMissing("there is no user 'postgres' (make setup-bench)") from None
    os.chown(place, user.pw_uid, user.pw_gid)
    switch = ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
    return [program("setpriv"), *switch]


COMMANDS: dict[str, Callable[[int, Path, Mapping[str, str]], Command]] = {
    "onward": _onward,
    "redis": _redis,
    "nats": _nats,
    "beanstalkd": _beanstalkd,
    "postgresql": _postgresql,
}


def _memory_mb(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(match[1]) * 1024 / 1e6 if match else 0.0  # one that ends has no memory any more


def _check_lives(server: Server) -> None:
    if server.child.poll() is not None:
        raise Unavailable(f"{server.name} did not start ({_last_words(server)})")


def _last_words(server: Server) -> str:
    said = (server.folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    last = said.strip().splitlines()[-1:] or ["nothing"]
    code = server.child.poll()
    state = "runs" if code is None else f"ended with {code}"
    return f"{server.name} {state}, and said last: {last[0]}"


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
