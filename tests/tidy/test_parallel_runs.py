"""How `make test` divides tests between its two processes, tried with pytest itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

PROGRAM = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(8))
def test_it(number):
    with open(os.environ["RECORD"], "a") as record:
        record.write(f"{pathlib.Path(__file__).parent.name} {__file__} {os.getpid()}\\n")

def test_skipped():
    pytest.skip("mkfs.ext4 is not installed")
"""


def run_in_two_processes(folder: Path) -> tuple[list[list[str]], str]:
    """Run a few tests as `make test` does; return rows of (package, file, pid) and the output."""
    shutil.copy(TESTS / "conftest.py", folder / "conftest.py")
    for name in ("spark/test_a.py", "spark/test_b.py", "unit/test_c.py", "unit/test_d.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(PROGRAM)
    environment = {**os.environ, "RECORD": str(folder / "record.txt")}
    environment.pop("PYTEST_ADDOPTS", None)
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--numprocesses", "2"]
    command = [sys.executable, "-m", "pytest", *options, "--dist", "loadscope", str(folder)]
    process = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    rows = [line.split() for line in (folder / "record.txt").read_text().splitlines()]
    return rows, process.stdout


def test_a_file_is_in_one_process_and_so_is_all_that_shares_a_spark(tmp_path: Path) -> None:
    rows, output = run_in_two_processes(tmp_path)
    assert len(rows) == 32
    assert len({pid for _, _, pid in rows}) == 2
    assert len({pid for package, _, pid in rows if package == "spark"}) == 1
    for file in {file for _, file, _ in rows}:
        assert len({pid for _, other, pid in rows if other == file}) == 1
    assert "4 because mkfs.ext4 is not installed" in output
