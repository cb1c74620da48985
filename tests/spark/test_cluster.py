"""On a real cluster: the code travels by itself, and the death of a worker changes no result."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.pipeline.place import Place

from .cluster import Cluster, cluster, until
from .cluster_program import ROWS

WITHIN_S = 180.0
PROGRAM = Path(__file__).with_name("cluster_program.py")


@pytest.fixture(scope="module")
def small_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), workers=2) as made:
        yield made


def disturbed(program: "subprocess.Popen[str]", folder: Path, small_cluster: Cluster) -> None:
    """Kill a worker when the last job is in its middle, then let it go on."""

    def is_in_its_middle() -> bool:
        return len([*folder.glob("started-*-0")]) == 2 or program.poll() is not None

    until(is_in_its_middle, what="the tasks of the last job to begin", within_s=WITHIN_S)
    small_cluster.workers[0].kill()
    (folder / "go").touch()


@pytest.fixture(scope="module")
def found(
    small_cluster: Cluster, place: Place, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, object]:
    """Run the program once, with a worker killed in the middle of its last job."""
    folder = tmp_path_factory.mktemp("work")
    command = [sys.executable, str(PROGRAM), small_cluster.master, place.servers, str(folder)]
    with (
        (folder / "stderr.txt").open("w") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=folder
        ) as program,
    ):
        try:
            disturbed(program, folder, small_cluster)
            said, _ = program.communicate(timeout=WITHIN_S)
        finally:
            program.kill()
    wrong = f"{small_cluster.output}\n--- the driver\n{(folder / 'stderr.txt').read_text()[-4000:]}"
    assert program.returncode == 0, wrong
    result: dict[str, object] = json.loads(said.splitlines()[-1])
    result["attempts"] = sorted(path.name for path in folder.glob("started-*"))
    return result


def test_the_workers_run_the_code_that_the_driver_sent(found: dict[str, list[str]]):
    assert len(found["code"]) == 1
    assert "onward.zip" in found["code"][0]


def test_executors_that_never_come_are_told_in_one_sentence(found: dict[str, str]):
    assert (
        "ran a task within 2s: no worker may have a core and 64g of memory free"
        in (found["refused"])
    )


def test_what_workers_wrote_is_read_by_workers_each_message_once(found: dict[str, object]):
    assert found["read"] == [ROWS, ROWS]


def test_the_archive_made_on_a_cluster_has_each_message_once(found: dict[str, object]):
    assert found["archived"] == ROWS
    assert found["lake"] == [ROWS, ROWS]


def test_jobs_on_a_cluster_count_each_message_once(found: dict[str, object]):
    assert found["stats"] == [ROWS, ROWS]
    assert found["reconciled"] == [ROWS, ROWS, 0]
    assert found["replayed"] == [ROWS // 2] * 3


def test_a_worker_that_is_killed_in_the_middle_of_a_job_changes_nothing(found: dict[str, object]):
    assert found["copied"] == [ROWS, ROWS]
    # Both tasks had begun, one of them on the dead worker, and was done again.
    assert len(found["attempts"]) == 3
