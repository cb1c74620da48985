"""A real standalone cluster from the pip package: one master and workers, each its own process.

Workers have one core and little memory. Everything listens on loopback, on ports the system chose.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyspark

from onward.pipeline.java import find_java

WITHIN_S = 60.0
SPARK_HOME = Path(pyspark.__file__).parent
MASTER_AT = re.compile(r"Starting Spark master at (spark://\S+)")


def until(met: Callable[[], bool], *, what: str, within_s: float = WITHIN_S) -> None:
    """Return when it is true; raise with `what` was waited for when it does not come true."""
    end = time.monotonic() + within_s
    while not met():
        assert time.monotonic() < end, f"waited {within_s} s for {what}"
        time.sleep(0.05)


class Daemon:
    """One process of the cluster and what it says."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.name = name
        self.log_path = folder / f"{name}.txt"
        environ = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        environ |= {
            "JAVA_HOME": find_java(),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [str(SPARK_HOME / "bin" / "spark-class"), *arguments],
                cwd=folder,
                env=environ,
                stdout=log,
                stderr=log,
            )

    @property
    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    def until_says(self, text: str) -> None:
        until(
            lambda: text in self.output or self.process.poll() is not None,
            what=f"{self.name} to say '{text}':\n{self.output[-3000:]}",
        )
        assert self.process.poll() is None, f"{self.name} ended:\n{self.output[-3000:]}"

    def kill(self) -> None:
        """kill -9, with everything that it started: the executors and their Pythons."""
        try:
            ours = psutil.Process(self.process.pid)
            doomed = [ours, *ours.children(recursive=True)]
        except psutil.NoSuchProcess:
            doomed = []
        for one in doomed:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)
        psutil.wait_procs(doomed, timeout=30)


class Cluster:
    """A master and its workers; they register before one can use it."""

    def __init__(self, folder: Path, *, workers: int, memory: str = "1g") -> None:
        self._folder = folder
        self._master = Daemon(
            folder, "master", "org.apache.spark.deploy.master.Master",
            "--host", "127.0.0.1", "--port", "0", "--webui-port", "0",
        )  # fmt: skip
        self.workers: list[Daemon] = []
        try:
            self._master.until_says("I have been elected leader")
            found = MASTER_AT.search(self._master.output)
            assert found, self._master.output
            self.master = found[1]
            self.workers = [self._worker(number, memory) for number in range(workers)]
            for worker in self.workers:
                worker.until_says("Successfully registered with master")
        except BaseException:
            self.end()
            raise

    def _worker(self, number: int, memory: str) -> Daemon:
        return Daemon(
            self._folder, f"worker-{number}", "org.apache.spark.deploy.worker.Worker",
            "--host", "127.0.0.1", "--port", "0", "--webui-port", "0",
            "--cores", "1", "--memory", memory,
            "--work-dir", str(self._folder / f"work-{number}"), self.master,
        )  # fmt: skip

    @property
    def output(self) -> str:
        """What all of them said, executors included: shown when a test fails."""
        logs = [*self._folder.glob("*.txt"), *self._folder.glob("work-*/*/*/stderr")]
        return "\n".join(
            f"--- {path.relative_to(self._folder)}\n{path.read_text(errors='replace')[-2500:]}"
            for path in sorted(logs)
        )

    def end(self) -> None:
        for one in (*self.workers, self._master):
            one.kill()


@contextmanager
def cluster(folder: Path, *, workers: int = 2, memory: str = "1g") -> Iterator[Cluster]:
    """Have a cluster for a while; nothing of it is left behind."""
    made = Cluster(folder, workers=workers, memory=memory)
    try:
        yield made
    finally:
        made.end()
