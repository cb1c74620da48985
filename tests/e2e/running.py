"""A real broker process, for tests that kill it, stop it, starve it and start it again."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import onward

START_S_MAX = 20.0

SERVE = "from onward.cli import main; main(['serve'])"


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], *, within_s: float = 15.0
) -> None:
    """Return when it is true; raise `TimeoutError` when it does not come true in time."""
    async with asyncio.timeout(within_s):
        while True:
            met = condition()
            if met if isinstance(met, bool) else await met:
                return
            await asyncio.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BrokerProcess:
    """One folder and one port; the process on them comes and goes."""

    def __init__(self, folder: Path, *, log_path: Path, **settings: object) -> None:
        self.folder = folder
        self.log_path = log_path
        self.port = free_port()
        self.settings: dict[str, object] = {
            "log_folder": folder,
            "server_port": self.port,
            "log_disk_reserve_bytes": 0,
            "log_preallocate_bytes": 1 << 20,
            "groups_reclaim_ms": 500,  # tests that are not about it do not wait for it for long
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def pid(self) -> int:
        """The broker itself, also when it runs below strace."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        name = Path(f"/proc/{self.process.pid}/comm").read_text().strip()
        return int(children.split()[0]) if name == "strace" else self.process.pid

    def connect(self, **options: object) -> onward.Client:
        return onward.connect(self.address, **options)  # type: ignore[arg-type]

    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ONWARD_")}
        ours = {f"ONWARD_{name.upper()}": str(value) for name, value in self.settings.items()}
        return kept | ours | {"PYTHONUNBUFFERED": "1"}

    def launch(self, *, wrapper: Sequence[str] = ()) -> None:
        """Start the process without waiting for it to be ready."""
        assert self.process is None, "it runs already"
        command = [*wrapper, sys.executable, "-c", SERVE]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self.environ(), cwd=self.log_path.parent, stdout=log, stderr=log
            )

    async def start(self, *, wrapper: Sequence[str] = ()) -> None:
        """Start the process and return when it takes connections."""
        self.launch(wrapper=wrapper)
        await until(self.accepts_or_ended, within_s=START_S_MAX)
        assert self.is_running, f"the broker did not start:\n{self.output[-2000:]}"

    async def accepts_or_ended(self) -> bool:
        return not self.is_running or await self.accepts()

    async def accepts(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        await asyncio.wait([asyncio.ensure_future(_closed(writer))])
        return True

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def ended(self, *, within_s: float = 20.0) -> int:
        """Wait for the end of the process; return its exit code."""
        assert self.process is not None
        await until(lambda: not self.is_running, within_s=within_s)
        code = self.process.returncode
        self.process = None
        return code

    async def kill(self) -> None:
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)
        await self.ended()

    async def stop(self) -> int:
        """SIGTERM; return the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return await self.ended()

    async def restart(self) -> None:
        """kill -9, and start again."""
        await self.kill()
        await self.start()

    def resident_bytes(self) -> int:
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        """Leave nothing behind, whatever the test did."""
        if self.process is not None:
            if self.process.poll() is None:
                os.kill(self.pid, signal.SIGCONT)
                os.kill(self.pid, signal.SIGKILL)
            self.process.wait(10)
            self.process = None


async def _closed(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.wait_closed()
    except OSError:
        return


def strace(calls: str, fault: str) -> list[str]:
    """Return the beginning of a command that runs the rest of it with a fault in these calls.

    `when=N` in a fault counts the calls of each thread by itself.
    """
    # With the filter in the kernel all other calls are free, but signals are not delivered.
    fast = [] if fault.startswith("signal=") else ["--seccomp-bpf"]
    return [
        "strace", "-f", *fast, "-qq", "-o", "/dev/null",
        "-e", f"trace={calls}", "-e", f"inject={calls}:{fault}",
    ]  # fmt: skip
