"""Compare one benchmark of this tree with the same benchmark of another commit.

    make bench-compare BASE=main~20 BENCH="consume-ack --seconds 2"

Both trees run on the same machine with the same packages, one after the other, in pairs whose
order alternates (base tree, tree base, ...), so a slow minute of the machine affects both. Each
pair gives one ratio. The result is their median with an interval that contains the true median
with at least 95 % confidence (order statistics: no assumption about the noise).

A ratio above 1 means that this tree is better, whatever the direction of the benchmark. The exit
status is 1 if the whole interval is below 0.95: worse by more than 5 %, beyond doubt. Peers are
left out: they would triple the time and say nothing about the difference.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROUNDS_MIN = 10
WORSE_BELOW = 0.95
TREE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The ratios of all pairs, with their median and its interval."""

    ratios: Sequence[float]

    @property
    def median(self) -> float:
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the median, at 95 % confidence or the widest that the rounds allow.

        >>> Comparison(ratios=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).interval
        (2, 9)
        """
        ordered, count = sorted(self.ratios), len(self.ratios)
        outside = 0
        # One more pair may be left out on each side while the median is beyond it in 2.5 % at most.
        while _tail(count, outside + 2) <= 0.025:
            outside += 1
        return ordered[outside], ordered[count - 1 - outside]

    @property
    def is_worse(self) -> bool:
        """True if the tree is worse by more than 5 %, beyond doubt."""
        return self.interval[1] < WORSE_BELOW


def _tail(count: int, below: int) -> float:
    """Return the probability of fewer than `below` heads in `count` throws of a coin."""
    return sum(math.comb(count, k) for k in range(below)) / 2**count


def compare(base: Path, tree: Path, bench: Sequence[str], *, rounds: int) -> Comparison:
    """Run the benchmark in both trees `rounds` times and compare the pairs."""
    ratios = []
    for number in range(rounds):
        order = [base, tree] if number % 2 == 0 else [tree, base]
        figures = {where: run(where, bench) for where in order}
        (before, _), (after, less_is_better) = figures[base], figures[tree]
        ratios.append(before / after if less_is_better else after / before)
        print(
            f"{number + 1}/{rounds}: base {before:g}, tree {after:g}, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    return Comparison(ratios=ratios)


def run(tree: Path, bench: Sequence[str]) -> tuple[float, bool]:
    """Return Onward's figure of one run, and whether less is better."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    # Without the peers' servers on the path, benchmarks leave the peers out.
    environment["PATH"] = str(Path(sys.executable).parent)
    start = "from onward.cli import main; main()"
    command = [sys.executable, "-c", start, "bench", *bench, "--json"]
    if "--repeat" not in bench:
        command += ["--repeat", "1"]
    with tempfile.TemporaryDirectory(dir=TREE, prefix=".bench-") as folder:
        done = subprocess.run(
            [*command, "--folder", folder],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        sys.exit(f"the benchmark failed in {tree}:\n{done.stderr}")
    record = json.loads(done.stdout.strip().splitlines()[-1])
    return record["onward"], record["details"]["ratio_is"].startswith("best peer")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN, help="pairs, at least 10")
    parser.add_argument("bench", nargs=argparse.REMAINDER, help="the benchmark's name and options")
    options = parser.parse_args()
    if not options.bench:
        parser.error("name a benchmark: make bench-compare BASE=COMMIT BENCH=publish-sync")
    if options.rounds < ROUNDS_MIN:
        parser.error(f"fewer than {ROUNDS_MIN} pairs prove nothing")
    with tempfile.TemporaryDirectory(prefix="onward-base-") as folder:
        extract(options.base, Path(folder))
        result = compare(Path(folder), TREE, options.bench, rounds=options.rounds)
    low, high = result.interval
    print(f"ratio {result.median:.3f} (interval {low:.3f} to {high:.3f}; above 1: better)")
    sys.exit("worse by more than 5 %" if result.is_worse else 0)


def extract(commit: str, folder: Path) -> None:
    """Put the sources of a commit into a folder."""
    archive = subprocess.run(
        ["git", "-C", str(TREE), "archive", commit, "src"], capture_output=True, check=False
    )
    if archive.returncode != 0:
        sys.exit(f"git cannot read {commit!r}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


if __name__ == "__main__":
    main()
