"""Our code on a cluster's workers, and the proof that they can run it.

The pure Python of this version travels as one zip, which goes before whatever a worker has
installed: driver and workers never differ. What is compiled (msgspec, crc32c, pyarrow) cannot
travel so; each worker's Python needs it, most simply by `pip install 'onward[spark]'` there too.

One small job, before any work, finds out whether executors come at all and whether something is
missing on one of them, so that a user reads one sentence now and not a stack trace later.
"""

import atexit
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import onward
from onward.durations import parse_duration_ms
from onward.errors import NotInstalled, OnwardError, Unavailable
from onward.pipeline.failure import plain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_OPTION = "spark.onward.executorWait"
WAIT_DEFAULT = "60s"
PACKAGES = ("onward", "pyspark_onward")
# Importing these is importing all that a reader or a writer needs on a worker.
NEEDED = ("pyarrow", "onward.pipeline.connector")


def ship(spark: "SparkSession") -> None:
    """Give the workers of a session our code, and Spark the format `onward`."""
    folder = Path(tempfile.mkdtemp(prefix="onward-shipped-"))
    # Executors that come late fetch it from here: it must live as long as the program.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    spark.sparkContext.addPyFile(str(pack(folder / "onward.zip")))
    try:
        from onward.pipeline.connector import OnwardSource
    except ImportError as error:
        raise NotInstalled(_missing_here(error)) from error
    spark.dataSource.register(OnwardSource)


def pack(path: Path) -> Path:
    """Write the zip of our packages, as they are on this machine; return its path."""
    source = Path(onward.__file__).parents[1]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for package in PACKAGES:
            for file in sorted((source / package).rglob("*.py")):
                packed.write(file, file.relative_to(source))
    return path


def check_workers(spark: "SparkSession") -> None:
    """Run one small job on the executors; raise when none comes or one lacks something."""
    context = spark.sparkContext
    wait = str(spark.conf.get(WAIT_OPTION, WAIT_DEFAULT))
    tasks = max(2, context.defaultParallelism)
    look = context.parallelize(range(tasks), tasks).mapPartitions(_probe(NEEDED))
    found = _within(parse_duration_ms(wait) / 1000, look.collect)
    if found is None:
        context.cancelAllJobs()
        memory = spark.conf.get("spark.executor.memory", "1g")
        raise Unavailable(
            f"no executor of '{context.master}' ran a task within {wait}: "
            f"no worker may have a core and {memory} of memory free"
        )
    for host, module in found:
        if module:
            raise NotInstalled(
                f"the python of the spark worker on {host} has no module '{module}': "
                "run pip install 'onward[spark]' there"
            )


def _probe(modules: tuple[str, ...]) -> Callable[[Iterable[int]], Iterator[tuple[str, str]]]:
    # A function in a function travels whole: a worker runs it without having our code.
    def probe(_rows: Iterable[int]) -> Iterator[tuple[str, str]]:
        import importlib
        import socket

        missing = ""
        try:
            for module in modules:
                importlib.import_module(module)
        except ImportError as error:
            missing = error.name or str(error)
        yield socket.gethostname(), missing

    return probe


def _within(
    seconds: float, collect: Callable[[], list[tuple[str, str]]]
) -> list[tuple[str, str]] | None:
    """Return what a job finds, None when it does not end in time; its failure in one sentence."""
    found: list[list[tuple[str, str]]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(collect())
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            failed.append(error)

    # Spark's own wait has no end; a thread that is left behind dies with the program.
    job = threading.Thread(target=run, name="onward-probe", daemon=True)
    job.start()
    job.join(seconds)
    if failed:
        raise plain(failed[0]) or _no_probe(failed[0]) from failed[0]
    return found[0] if found else None


def _no_probe(error: BaseException) -> OnwardError:
    line = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
    return Unavailable(f"a first small job failed on the spark workers: {line[:500]}")


def _missing_here(error: ImportError) -> str:
    return f"there is no module '{error.name}': run pip install 'onward[spark]'"
