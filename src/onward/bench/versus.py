"""Onward against its peers under one raw load, in alternating rounds.

Each round starts every server anew on an empty folder: no server profits from what the one before
left behind, and a slow minute of the machine hits all of them.
"""

from collections.abc import Callable, Sequence

from onward.bench.load import Load, run_load
from onward.bench.peers import PeerMissing, Server, program_version, started
from onward.bench.report import Options, Report, typical
from onward.bench.speakers import Speaker

SECONDS = 2.0
ROUNDS = 5

MakeSpeakers = Callable[[], Sequence[Speaker]]


def compare(
    name: str,
    options: Options,
    *,
    speakers: dict[str, MakeSpeakers],
    messages_each: int,
    in_flight: int,
) -> Report:
    """Load each server in turn and report messages per second, of which a request carries some."""
    rounds: dict[str, list[Load]] = {server: [] for server in speakers}
    missing: dict[str, str] = {}
    settings: dict[str, str] = {}
    for number in range(options.repeat or ROUNDS):
        for server_name, make in speakers.items():
            if server_name in missing:
                continue
            try:
                with started(server_name, folder=options.folder, keep=options.keep) as server:
                    settings[server_name] = server.settings
                    load = _measure(server, make(), in_flight, options.seconds or SECONDS)
            except PeerMissing as error:
                missing[server_name] = str(error)
                options.say(f"missing: {error}")
                continue
            rounds[server_name].append(load)
            figure = load.per_second * messages_each
            options.say(f"round {number + 1}: {server_name} {figure:,.0f} messages/s")
    return _report(name, rounds, missing, settings, messages_each)


def _measure(server: Server, speakers: Sequence[Speaker], in_flight: int, seconds: float) -> Load:
    return run_load(
        server.port,
        speakers,
        in_flight=in_flight,
        seconds=seconds,
        server_cpu=server.cpu_seconds,
    )


def _report(
    name: str,
    rounds: dict[str, list[Load]],
    missing: dict[str, str],
    settings: dict[str, str],
    messages_each: int,
) -> Report:
    figures = {
        server: typical([load.per_second * messages_each for load in loads])
        for server, loads in rounds.items()
        if loads
    }
    details = {
        server: {
            "settings": settings[server],
            "rounds": [round(load.per_second * messages_each) for load in loads],
            "server_cpu_us_per_request": [
                round(load.server_cpu_seconds / load.requests * 1e6, 2) for load in loads
            ],
            "last_round": loads[-1].details(),
        }
        for server, loads in rounds.items()
        if loads
    }
    versions = {
        f"{server}-server": program_version(f"{server}-server")
        for server in figures
        if server in ("redis", "nats")
    }
    return Report(
        name=name,
        unit="messages/s",
        onward=figures.pop("onward"),
        peers=figures,
        missing=missing,
        durability="disk",
        details={**details, "servers": versions},
    )
