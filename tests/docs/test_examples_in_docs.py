"""What the documentation shows is true: every example is run, and prints what the page says."""

import asyncio
import gc
from pathlib import Path

import pytest

import onward
from onward.config import load
from onward.settings import LogSettings, Settings

from .conftest import Served
from .examples import GUIDE, ROOT, Shell, name_of, run_console, run_python, run_sh, settings_files

README = ROOT / "README.md"
COMMAND_LINE = ROOT / "docs" / "guide" / "command-line.md"
SECOND_COPY = ROOT / "docs" / "guide" / "second-copy.md"
TROUBLE = ROOT / "docs" / "operate" / "trouble.md"
PAGES = sorted([README, *(ROOT / "docs").rglob("*.md")])
WITH_PYTHON = [path for path in PAGES if "\n```python\n" in path.read_text(encoding="utf-8")]
WITH_BROKER = [p for p in WITH_PYTHON if "localhost:7700" in p.read_text(encoding="utf-8")]
WITHOUT_BROKER = [path for path in WITH_PYTHON if path not in WITH_BROKER]
PYSPARK_OWN = pytest.mark.filterwarnings("ignore:unclosed.*socket:ResourceWarning")
"""PySpark leaves what py4j opened to the garbage collector."""
SHOP = """\
import onward

app = onward.App()


@app.consumer("orders", group="billing")
def charge(order: dict[str, int]) -> None:
    if order["id"] == 9:
        app.stop()
"""
WITH_SETTINGS = [path for path in PAGES if settings_files(path)]


@pytest.mark.parametrize("path", WITHOUT_BROKER, ids=name_of)
def test_the_python_of_a_page_does_what_the_page_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert run_python(path, address="nowhere:1") > 0


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=PYSPARK_OWN if "pyspark" in path.read_text("utf-8") else ())
        for path in WITH_BROKER
    ],
    ids=name_of,
)
def test_the_python_of_a_page_with_a_broker_does_what_the_page_says(
    path: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert run_python(path, address=address) > 0
    gc.collect()  # what a page leaves open is its own fault, not that of the next test


def test_every_page_of_the_guide_has_examples_that_are_run():
    assert set(GUIDE) <= {*WITH_PYTHON, COMMAND_LINE}


def test_the_commands_of_the_readme_work_as_they_stand(shell: Shell, tmp_path: Path):
    (tmp_path / "lines.jsonl").write_text('{"id": 8}\n{"id": 9}\n')
    assert run_sh(README, shell) >= 4


def test_the_commands_of_the_guide_print_what_it_says(shell: Shell, tmp_path: Path):
    (tmp_path / "lines.jsonl").write_text('{"id": 8}\n{"id": 9}\n')
    (tmp_path / "shop.py").write_text(SHOP)
    assert run_console(COMMAND_LINE, shell) > 10


def test_a_second_copy_is_kept_and_promoted_as_the_page_says(
    shell: Shell, address: str, tmp_path: Path
):
    (tmp_path / "replica").mkdir()
    options = ("--replica.of", address, "--replica.name", "copy-1")
    replica = Served(tmp_path / "replica", *options)
    try:
        addresses = {"localhost:7700": address, "localhost:7701": replica.wait_ready()}
        assert run_console(SECOND_COPY, shell, addresses) >= 8
    finally:
        assert replica.stop() == 0


def test_the_repair_of_a_damaged_log_goes_as_the_page_says(tmp_path: Path):
    folder = tmp_path / "onward-data"
    asyncio.run(_publish_three(folder))
    _damage(folder / "00000000000000000001.log", b"second")
    assert run_console(TROUBLE, Shell(tmp_path, address="nowhere:1")) >= 4


@pytest.mark.parametrize("path", WITH_SETTINGS, ids=name_of)
def test_the_settings_of_a_page_are_settings(path: Path, tmp_path: Path):
    for number, text in enumerate(settings_files(path)):
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        assert load(path=file, environ={}).sources


async def _publish_three(folder: Path) -> None:
    # Without space taken ahead, so that little has to be read.
    settings = Settings(log=LogSettings(folder=str(folder), preallocate_bytes=0))
    async with onward.connect(f"file:{folder}", settings=settings) as mq:
        for body in ("first", "second", "third"):
            await mq.publish("orders", body)


def _damage(segment: Path, body: bytes) -> None:
    """Change one bit of the entry with this body."""
    stored = bytearray(segment.read_bytes())
    stored[stored.index(body)] ^= 1
    segment.write_bytes(stored)
