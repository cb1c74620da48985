"""What a benchmark says in the end: one figure for Onward, one for each peer, and a ratio.

    ratio = onward / best peer     best peer = the highest figure
    ratio = best peer / onward     best peer = the lowest figure, where less is better

Above 1 Onward is ahead. Without any peer there is no ratio (null).
The figures of several rounds become one by their median: a disturbed round changes nothing.
"""

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import onward

_PACKAGES = (
    "uvloop", "msgspec", "crc32c", "redis", "hiredis", "nats-py", "greenstalk", "asyncpg",
)  # fmt: skip

PERCENTILES = (50, 90, 99, 99.9, 100)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What may be asked of a benchmark; None leaves it to the benchmark."""

    folder: Path
    seconds: float | None = None
    count: int | None = None
    repeat: int | None = None
    log_bytes: int | None = None
    busy: str | None = None
    """What else the machine does meanwhile: one of `busy.LOADS`."""
    keep: bool = False
    say: Callable[[str], None] = lambda text: None
    """Told what happens meanwhile, for people."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of one benchmark."""

    name: str
    unit: str
    onward: float
    durability: str
    less_is_better: bool = False
    peers: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """How many times the best peer's figure Onward's is.

        >>> Report(name="x", unit="s", onward=2, durability="disk", peers={"a": 1, "b": 3}).ratio
        0.667
        """
        if not self.peers or not self.onward:
            return None
        if self.less_is_better:
            return round(min(self.peers.values()) / self.onward, 3)
        return round(self.onward / max(self.peers.values()), 3)

    @property
    def ratio_is(self) -> str:
        """How the ratio is made."""
        return "best peer / onward" if self.less_is_better else "onward / best peer"

    @property
    def figure(self) -> float:
        """Onward's figure, with as many digits as it deserves."""
        return rounded(self.onward)

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the peers."""
        return {name: rounded(figure) for name, figure in self.peers.items()}

    def record(self) -> dict[str, object]:
        """Return the line for machines."""
        return {
            "name": self.name,
            "unit": self.unit,
            "onward": self.figure,
            "peers": self.figures,
            "ratio": self.ratio,
            "durability": self.durability,
            "missing": dict(self.missing),
            "details": {
                "ratio_is": self.ratio_is,
                **self.details,
                "machine": machine(),
            },
        }


def rounded(figure: float) -> float:
    """Return a figure with as many digits as it deserves.

    >>> rounded(123456.7), rounded(1.23456)
    (123457, 1.235)
    """
    return round(figure) if abs(figure) >= 1000 else round(figure, 3)


def typical(figures: Sequence[float]) -> float:
    """Return the median of the rounds.

    >>> typical([3, 1, 100])
    3
    """
    return median(figures)


def percentiles_ms(latencies_ns: Sequence[int]) -> dict[str, float]:
    """Return the percentiles of latencies, in milliseconds.

    >>> percentiles_ms([1_000_000, 2_000_000, 9_000_000])["p50"]
    2.0
    """
    if not latencies_ns:
        return {}
    ordered = sorted(latencies_ns)
    ranks = {share: math.ceil(len(ordered) * share / 100) for share in PERCENTILES}
    return {f"p{share:g}": round(ordered[rank - 1] / 1e6, 3) for share, rank in ranks.items()}


def machine() -> dict[str, object]:
    """Return what the figures depend on: the machine, its load, and the versions."""
    return {
        "cpus": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {"onward": onward.__version__} | _packages(),
    }


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found
