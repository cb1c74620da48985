"""Clients that are measured one after another, in alternating rounds, each on a server of its own.

Each round starts every server anew on an empty folder: no client profits from what the one before
left behind, and a slow minute of the machine hits all of them. The name of a client begins with
its server's: `redis-py+hiredis` runs against `redis`. A peer that is missing is said once and left
out; Onward itself is never missing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from onward.bench.peers import PeerMissing, Server, program_version, started
from onward.bench.report import Options

T = TypeVar("T")

_PROGRAMS = {"redis": "redis-server", "nats": "nats-server", "postgresql": "postgres"}


@dataclass(kw_only=True)
class Seen(Generic[T]):
    """What one client reached, round by round."""

    settings: str = ""
    rounds: list[T] = field(default_factory=list)


@dataclass(kw_only=True)
class Compared(Generic[T]):
    """What all clients reached."""

    seen: dict[str, Seen[T]]
    missing: dict[str, str] = field(default_factory=dict)

    def figures(self, figure: Callable[[list[T]], float]) -> dict[str, float]:
        """Return one figure for each client that was measured."""
        return {name: figure(one.rounds) for name, one in self.seen.items() if one.rounds}

    def versions(self) -> dict[str, str]:
        """Return the versions of the peers' servers."""
        names = {server_of(name) for name, one in self.seen.items() if one.rounds}
        programs = [_PROGRAMS[name] for name in sorted(names) if name in _PROGRAMS]
        return {name: program_version(name) for name in programs}


def alternate(
    clients: Mapping[str, Callable[[Server], T]],
    options: Options,
    *,
    rounds: int,
    say: Callable[[T], str],
) -> Compared[T]:
    """Let each client measure itself against a new server, round by round."""
    compared = Compared(seen={name: Seen[T]() for name in clients})
    for _ in range(options.repeat or rounds):
        for name, measure in clients.items():
            if name not in compared.missing:
                _round(name, measure, compared, options, say)
    return compared


def server_of(client: str) -> str:
    """Return the server that a client speaks with.

    >>> server_of("redis-py+hiredis"), server_of("onward")
    ('redis', 'onward')
    """
    return client.partition("-")[0].partition("+")[0]


def _round(
    name: str,
    measure: Callable[[Server], T],
    compared: Compared[T],
    options: Options,
    say: Callable[[T], str],
) -> None:
    try:
        with started(server_of(name), folder=options.folder, keep=options.keep) as server:
            found = measure(server)
    except PeerMissing as error:
        compared.missing[name] = str(error)
        options.say(f"missing: {error}")
        return
    compared.seen[name].settings = server.settings
    compared.seen[name].rounds.append(found)
    options.say(f"{name}: {say(found)}")
