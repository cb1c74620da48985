"""Options of the commands that talk to a broker, and the values they take.

`client_options` gives a command --address, --token and --timeout, and calls it with `connect`: what
opens the client when the command has checked everything else. A value that cannot be read is wrong
usage (exit 2), before anything is connected.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

import onward
from onward.client.address import parse_addresses
from onward.clock import SystemClock
from onward.durations import parse_duration_ms, parse_instant_ms, parse_size_bytes
from onward.errors import InvalidRequest, NotConnected

Connect = Callable[[], onward.SyncClient]

TIMEOUT = "5s"


class _Read(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A value that one of the `parse_` functions reads."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Read a text; what is read already stays."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)


def _instant(text: str) -> int:
    return 0 if text == "never" else parse_instant_ms(text, now_ms=SystemClock().now_ms())


DURATION = _Read("duration", parse_duration_ms)
SIZE = _Read("size", parse_size_bytes)
INSTANT = _Read("time", _instant)


def client_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add --address, --token and --timeout to a command that takes `connect`.

    @click.command()
    @client_options
    def command(*, connect: Connect) -> None:
        with connect() as mq: ...
    """

    @wraps(command)
    def with_client(*, address: str, token: str | None, timeout_ms: int, **options: Any) -> object:
        def connect() -> onward.SyncClient:
            _refuse_at_once(address)
            return onward.connect_sync(address, token=token, name="onward-cli", timeout=timeout_ms)

        return command(connect=connect, **options)

    decorated = click.option(
        "--timeout", "timeout_ms", type=DURATION, default=TIMEOUT, metavar="DURATION",
        help=f"How long to wait for an answer. [default: {TIMEOUT}]",
    )(with_client)  # fmt: skip
    decorated = click.option(
        "--token", envvar="ONWARD_TOKEN", metavar="SECRET",
        help="Proof of who you are; better in ONWARD_TOKEN than here.",
    )(decorated)  # fmt: skip
    return click.option(
        "--address", envvar="ONWARD_ADDRESS", default="localhost:7700", metavar="ADDRESS",
        help="Where the broker is: host:port, several with commas, unix:PATH or file:FOLDER. "
        "[default: ONWARD_ADDRESS or localhost:7700]",
    )(decorated)  # fmt: skip


def _refuse_at_once(address: str) -> None:
    """Say so when nothing listens there: a person at a terminal is not to wait for a time-out."""
    places = parse_addresses(address)
    for place in places:
        if place.scheme != "tcp":
            return
        try:
            socket.create_connection((place.place, place.port), timeout=1).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            pass
        return
    raise NotConnected(
        f"no broker answers at {address}: is it running? ('onward serve' starts one)"
    )


def confirm(question: str, *, yes: bool) -> None:
    """Ask before what cannot be undone; where nobody can answer, --yes is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"{question} say --yes when nobody can be asked", click.get_current_context()
        )
    click.confirm(question, abort=True, err=True)
