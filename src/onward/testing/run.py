"""What all simulations share: how a run begins, how it is summed up, and how it fails."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from onward.errors import OnwardError

T = TypeVar("T")

TRACE_LINES_MAX = 300
VIOLATIONS_SHOWN_MAX = 10
PEACE_S_MAX = 30


class SimulationFailed(AssertionError):
    """A run broke a promise: the text says which, how to replay it, and what led to it."""


@dataclass(frozen=True)
class Summary:
    """What a run was like."""

    seed: int
    simulated_ms: int
    counts: Counter[str]
    digest: int
    """The same for two runs if everything that clients saw was the same."""

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"seed {self.seed}: {self.simulated_ms / 1000:.0f} s simulated; {counts}"


def failure_text(violations: list[str], *, seed: int, lines: Iterable[str]) -> str:
    """Return what a failure says: what is wrong, how to run it again, and what happened."""
    shown = _each_rule_first(violations)[:VIOLATIONS_SHOWN_MAX]
    if len(violations) > len(shown):
        shown.append(f"... and {len(violations) - len(shown)} more")
    return "\n".join([*shown, f"replay: make sim SEED={seed}", "what happened:", *lines])


def _each_rule_first(violations: list[str]) -> list[str]:
    """Return violations with one of each rule in front: one fault often breaks a rule many times.

    >>> _each_rule_first(["G3: a", "G3: b", "G9: a"])
    ['G3: a', 'G9: a', 'G3: b']
    """
    firsts: dict[str, str] = {}
    for violation in violations:
        firsts.setdefault(violation.partition(":")[0], violation)
    shown = list(firsts.values())
    return [*shown, *(one for one in violations if one not in shown)]


async def within(what: str, work: Awaitable[T]) -> T:
    """Peace is when everything works within 30 seconds."""
    try:
        async with asyncio.timeout(PEACE_S_MAX):
            return await work
    except TimeoutError:
        raise SimulationFailed(f"I13: in peace, {what}: not in time") from None
    except OnwardError as error:
        raise SimulationFailed(f"I13: in peace, {what}: {error}") from error


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect no cycles: when that happens depends on what ran before, and leases hang on it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()


@contextmanager
def fixed_identity() -> Iterator[None]:
    """Give this machine one name and one number: both are in the first frame of a client."""
    names: tuple[tuple[Any, str, Callable[[], object]], ...] = (
        (os, "getpid", lambda: 1),
        (socket, "gethostname", lambda: "simulated"),
    )
    before = [getattr(module, name) for module, name, _ in names]
    for module, name, fixed in names:
        setattr(module, name, fixed)
    try:
        yield
    finally:
        for (module, name, _), real in zip(names, before, strict=True):
            setattr(module, name, real)
