"""A busy machine: child programs that use the processors or the disk while a benchmark runs.

    cpu     one child per core, which computes all the time
    disk    one child, which writes 1 MiB and syncs it, again and again

The children end with the `with` block, and by themselves when the benchmark is killed.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from onward.errors import Unavailable

STOP_S_MAX = 15.0
_COMPUTE: Final = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""
_SYNC: Final = """
import os, sys
mebibyte = os.urandom(1 << 20)
with open(sys.argv[2] + "/synced", "wb", buffering=0) as file:
    while os.getppid() == int(sys.argv[1]):
        file.seek(0)
        file.write(mebibyte)
        os.fsync(file.fileno())
"""
LOADS = {"cpu": _COMPUTE, "disk": _SYNC}


@contextlib.contextmanager
def busy(load: str | None, *, folder: Path) -> Iterator[list[int]]:
    """Keep the processors or the disk of `folder` busy; yield the process ids of the children.

    >>> with busy(None, folder=Path(".")) as children:
    ...     children
    []
    """
    if load is None:
        yield []
        return
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="busy-", dir=folder))
        command = [sys.executable, "-c", LOADS[load], str(os.getpid()), place]
        children = []
        for _ in range((os.cpu_count() or 1) if load == "cpu" else 1):
            children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
            stack.callback(_end, children[-1])
        yield [child.pid for child in children]
        for child in children:
            if child.poll() is not None:
                raise Unavailable(f"the {load} load ended early, with status {child.returncode}")


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait(STOP_S_MAX)
