"""`run FILE`: a program of your own, with the session ready.

    # count.py
    orders = spark.read.format("onward").option("topic", "orders").load()
    print(orders.groupBy("tag").count().collect())

The file finds `spark` and `place` as its names, its own arguments in `sys.argv`, and modules beside
it can be imported, as if Python ran it. What it raises is its own.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.errors import InvalidRequest
from onward.pipeline import runs
from onward.pipeline.place import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_file(
    spark: SparkSession,
    *,
    place: Place,
    file: str,
    arguments: Sequence[str] = (),
    run: runs.Run | None = None,
) -> dict[str, Any]:
    """Run a Python file; return the names that it leaves behind."""
    path = Path(file)
    if not path.is_file():
        raise InvalidRequest(f"there is no file {file!r} to run")
    with runs.using(run, place, job="run", file=file) as run, _as_program(path, arguments):
        names = {"spark": spark, "place": place, "run": run}
        try:
            return runpy.run_path(str(path), init_globals=names, run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            return {}


@contextmanager
def _as_program(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search
