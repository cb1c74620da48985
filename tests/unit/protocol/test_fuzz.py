import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TARGET = Path(__file__).parents[2] / "fuzz" / "fuzz_protocol.py"
FUZZ = runpy.run_path(str(TARGET))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_damaged_bytes_raise_nothing_but_errors_of_ours(seed: int) -> None:
    FUZZ["run_seeded"](7_000, seed)


def test_sound_bytes_are_taken_by_the_fuzz_target() -> None:
    """Without this, a target that refuses everything at the door would look safe."""
    batch = FUZZ["seeds"]()[-1]
    with pytest.raises(Exception, match="checksum"):
        FUZZ["_batch"](batch[2:-9] + b"\x01" + batch[-8:], 0)
    FUZZ["_batch"](batch[2:], 0)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed; the seeded run above was done instead",
)
def test_atheris_finds_nothing_in_a_bounded_run(tmp_path: Path) -> None:
    for number, seed in enumerate(FUZZ["seeds"]()):
        (tmp_path / f"seed-{number}").write_bytes(seed)
    done = subprocess.run(
        [sys.executable, str(TARGET), "-runs=20000", "-max_len=1024", "-seed=7", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
