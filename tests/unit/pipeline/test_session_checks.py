"""What a session finds wrong before any Java starts, and what it would ship."""

import importlib
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pyspark_onward
from onward.errors import InvalidRequest, NotInstalled, Unavailable
from onward.pipeline import sessions, shipping


@pytest.mark.parametrize(
    "master",
    ["", "mesos://a:1", "sc://a:1", "10.0.0.1:7077", "spark://", "spark://a", "spark://a:b"],
)
def test_what_is_no_master_is_refused_by_name(master: str):
    with pytest.raises(InvalidRequest, match="is no spark master"):
        sessions.check_master(master)


def test_a_master_that_does_not_answer_is_named_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound, and not listening: nobody else can be there.
        master = f"spark://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"no spark master answers at '{master}'"):
            sessions.check_master(master)


def test_one_of_several_masters_is_enough():
    with socket.socket() as taken, socket.socket() as listening:
        taken.bind(("127.0.0.1", 0))
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        dead, alive = taken.getsockname()[1], listening.getsockname()[1]
        sessions.check_master(f"spark://127.0.0.1:{dead},127.0.0.1:{alive}")


@pytest.mark.parametrize("memory", ["", "much", "1", "300m", "0g", "1.5g", "-1g"])
def test_memory_that_java_would_not_start_with_is_refused(memory: str):
    with pytest.raises(InvalidRequest, match=f"memory '{memory}' is"):
        sessions.check_memory(memory)


def test_without_pyspark_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match=r"pip install 'onward\[spark\]'"):
        sessions.session()


def test_the_zip_has_our_packages_and_runs(tmp_path: Path):
    path = shipping.pack(tmp_path / "onward.zip")
    with zipfile.ZipFile(path) as packed:
        names = set(packed.namelist())
    assert {"onward/__init__.py", "onward/pipeline/connector.py"} <= names
    assert "pyspark_onward/__init__.py" in names
    assert not [name for name in names if "__pycache__" in name]
    program = (
        f"import sys; sys.path.insert(0, {str(path)!r}); import onward; print(onward.__file__)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert said.stdout.startswith(str(path))


def test_the_module_that_spark_looks_for_has_the_source():
    assert pyspark_onward.DefaultSource.name() == "onward"


def test_without_arrow_the_module_that_spark_looks_for_has_no_source(
    monkeypatch: pytest.MonkeyPatch,
):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "onward.pipeline.connector", None)
        patched.delattr(pyspark_onward, "DefaultSource")
        importlib.reload(pyspark_onward)
        assert not hasattr(pyspark_onward, "DefaultSource")
    importlib.reload(pyspark_onward)
