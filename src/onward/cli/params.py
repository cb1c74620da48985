"""Options of the commands that talk to a broker, and the values they take.

`client_options` gives a command --address, --token and --timeout, and calls it with `connect`: what
opens the client when the command has checked everything else; `async_client_options` does so for a
command that is a coroutine. A value that cannot be read is wrong usage (exit 2), before anything is
connected.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import Any, Protocol

import click

import onward
from onward.client.address import parse_addresses
from onward.client.finding import parse_id
from onward.clock import SystemClock
from onward.durations import parse_ago_ms, parse_duration_ms, parse_instant_ms, parse_size_bytes
from onward.errors import InvalidRequest, NotConnected


class Connect(Protocol):
    """Opens the client of a command; a `file:` folder without a log only with `create`."""

    def __call__(self, *, create: bool = False) -> onward.SyncClient:
        """Return the client."""


class ConnectAsync(Protocol):
    """The same for a command that is a coroutine."""

    def __call__(self, *, create: bool = False) -> onward.Client:
        """Return the client."""


TIMEOUT = "5s"
_OFFSET_MAX = 2**63 - 1


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


class _Start(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """`earliest`, `latest`, an offset, a time, or how long ago."""

    name = "start"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Read a start; a plain number is an offset."""
        if not isinstance(value, str) or value in ("earliest", "latest"):
            return value
        if value.isascii() and value.isdecimal():
            if int(value) > _OFFSET_MAX:
                self.fail(f"there is no offset {value}: the largest is {_OFFSET_MAX}", param, ctx)
            return int(value)
        try:
            if parse_ago_ms(value) is not None:
                return value  # for the broker, whose clock decides
            instant_ms = parse_instant_ms(value, now_ms=0)
            return datetime.fromtimestamp(instant_ms / 1_000, tz=UTC)
        except InvalidRequest:
            self.fail(
                f"{value!r} is no start: write earliest, latest, an offset, a time "
                "(2026-11-16T10:00:00Z) or how long ago (10m)", param, ctx,
            )  # fmt: skip
        except (ValueError, OverflowError, OSError):
            self.fail(f"{value!r} is too far away to be a time", param, ctx)


class _Pair(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """`NAME=VALUE`."""

    name = "pair"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Read a pair; the value may hold more equals signs."""
        if not isinstance(value, str):
            return value
        name, equals, rest = value.partition("=")
        if not name or not equals:
            self.fail(f"{value!r} is no pair: write it as NAME=VALUE", param, ctx)
        return name, rest


class _Which(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """`topic/7`, or `topic/7-12` with both ends."""

    name = "id"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Read the id of a message, or of several in a row."""
        if not isinstance(value, str):
            return value
        front, slash, offsets = value.rpartition("/")
        first, _, last = offsets.partition("-")
        try:
            topic, start = parse_id(f"{front}{slash}{first}")
            _, end = parse_id(f"{front}{slash}{last or first}")
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)
        if end < start:
            self.fail(f"{value!r} ends before it begins", param, ctx)
        return topic, range(start, end + 1)


START = _Start()
PAIR = _Pair()
WHICH = _Which()


def client_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add --address, --token and --timeout to a command that takes `connect`.

    @click.command()
    @client_options
    def command(*, connect: Connect) -> None:
        with connect() as mq: ...
    """

    @wraps(command)
    def with_client(*, address: str, token: str | None, timeout_ms: int, **options: Any) -> object:
        def connect(*, create: bool = False) -> onward.SyncClient:
            refuse_at_once(address)
            return onward.connect_sync(
                address, token=token, name="onward-cli", timeout_ms=timeout_ms, create=create
            )

        return command(connect=connect, **options)

    return _with_options(with_client)


def async_client_options(
    command: Callable[..., Coroutine[Any, Any, object]],
) -> Callable[..., object]:
    """Add --address, --token and --timeout to a coroutine that takes `connect`, and run it.

    @click.command()
    @async_client_options
    async def command(*, connect: ConnectAsync) -> None:
        async with connect() as mq: ...
    """

    @wraps(command)
    def with_client(*, address: str, token: str | None, timeout_ms: int, **options: Any) -> object:
        def connect(*, create: bool = False) -> onward.Client:
            refuse_at_once(address)
            return onward.connect(
                address, token=token, name="onward-cli", timeout_ms=timeout_ms, create=create
            )

        return asyncio.run(command(connect=connect, **options))

    return _with_options(with_client)


def _with_options(command: Callable[..., object]) -> Callable[..., object]:
    decorated = click.option(
        "--timeout", "timeout_ms", type=DURATION, default=TIMEOUT, metavar="DURATION",
        help=f"How long to wait for an answer. [default: {TIMEOUT}]",
    )(_naming_options(command))  # fmt: skip
    decorated = click.option(
        "--token", envvar="ONWARD_TOKEN", metavar="SECRET",
        help="Proof of who you are; better in ONWARD_TOKEN than here.",
    )(decorated)  # fmt: skip
    return click.option(
        "--address", envvar="ONWARD_ADDRESS", default="localhost:7700", metavar="ADDRESS",
        help="Where the broker is: host:port, several with commas, unix:PATH or file:FOLDER. "
        "[default: ONWARD_ADDRESS or localhost:7700]",
    )(decorated)  # fmt: skip


def _naming_options(command: Callable[..., object]) -> Callable[..., object]:
    """Let the errors of a command name its options as they are written on the command line."""

    @wraps(command)
    def with_names(**options: Any) -> object:
        try:
            return command(**options)
        except InvalidRequest as error:
            if type(error) is not InvalidRequest:
                raise  # names a topic or a group, not an option
            text = name_options(str(error), click.get_current_context().command.params)
            raise InvalidRequest(text) from error

    return with_names


def name_options(text: str, params: Sequence[click.Parameter]) -> str:
    """Return the text of an error with the names of fields replaced by the options that set them.

    >>> size = click.Option(["--retention-bytes"])
    >>> name_options("'retention_bytes' is at least 0", [size])
    '--retention-bytes is at least 0'
    """
    for param in params:
        name = (param.name or "").removesuffix("_ms")
        # A name without an underscore is also a word: `member`, `headers`.
        if isinstance(param, click.Option) and "_" in name:
            written = rf"(?<![\w.-])(['\"]?){name}(_ms)?\1(?![\w.=(-])"
            text = re.sub(written, param.opts[0], text)
    return text


def refuse_at_once(address: str) -> None:
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
