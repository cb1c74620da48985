"""`onward run`: an App as a program, in this process or in several that are started again.

With `--workers` this process only keeps the others alive (`workers`). The module is not called
`run`: that is the name of a function of its package.

    exit 0    stopped by SIGTERM or ctrl-C: functions have ended, their acks are durable
    exit 2    there is no such module or App, or what it asks for is wrong: no use to try again
    exit 3    no broker answers
    exit 7    a group has other settings than the App: the line before names the command that helps
    exit 130  a second signal: nothing was waited for
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING

import click

from onward.cli.lines import LEVELS, log_as_configured
from onward.cli.workers import EXIT_CONFLICT, EXIT_WRONG, WORKER_VARIABLE, supervise
from onward.client.user_error import user_traceback
from onward.errors import Conflict, InvalidRequest, UnknownGroup, UnknownTopic

if TYPE_CHECKING:
    from onward.client.app import App

logger = logging.getLogger("onward.run")

PROGRAM = "from onward.cli import main; main()"


@click.command()
@click.argument("app", metavar="MODULE:APP")
@click.option(
    "--workers", type=click.IntRange(1, 1_000), default=1, metavar="N",
    help="How many processes. [default: 1, which is this one]",
)  # fmt: skip
@click.option(
    "--address", envvar="ONWARD_ADDRESS", metavar="ADDRESS",
    help="Where the broker is, whatever the App says. [default: ONWARD_ADDRESS, or as it says]",
)  # fmt: skip
@click.option(
    "--apply", is_flag=True, help="Give groups the settings of the App, where they have other ones."
)
@click.option(
    "--log-level", type=click.Choice(LEVELS), envvar="ONWARD_LOG_LEVEL",
    help="Which events of Onward are logged; debug: each message. [default: info, or as the "
    "program configures logging]",
)  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context,
    *,
    app: str,
    workers: int,
    address: str | None,
    apply: bool,
    log_level: str | None,
) -> None:
    """Run the consumers of an App.

    Example:  onward run shop:app --workers 4
    """
    # As `python -m` does: a program is where it is called.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found = load_app(app)
    except click.UsageError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, it is about the user's module
        click.echo(user_traceback(error, without=[click]), err=True)
        raise click.ClickException(f"{app!r} cannot be imported: see above") from None
    # Only now: the module may configure logging, and that holds.
    log_as_configured(log_level)
    found.apply |= apply
    if workers == 1:
        ctx.exit(_run(found, app, address))
    given = [] if address is None else ["--address", address]
    given += ["--apply"] if apply else []
    given += ["--log-level", log_level] if log_level else []
    ctx.exit(asyncio.run(supervise([sys.executable, "-c", PROGRAM, "run", app, *given], workers)))


def load_app(target: str) -> App:
    """Import the App that `module:name` names; what is wrong with that is wrong usage."""
    module_name, _, name = target.partition(":")
    name = name or "app"
    plain = module_name.removesuffix(".py").replace(os.sep, ".").strip(".")
    if plain != module_name or not all(part.isidentifier() for part in plain.split(".")):
        hint = f"; did you mean {plain}:{name}?" if plain and plain != module_name else ""
        raise _wrong(f"{target!r} is not MODULE:APP{hint}")
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise _wrong(f"there is no module {error.name!r} here or among what is installed") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise _wrong(f"module {module_name!r} has no {name!r}")
        found = getattr(found, part)
    from onward.client.app import App

    if not isinstance(found, App):
        raise _wrong(f"{target!r} is not an onward.App, but of type {type(found).__name__}")
    return found


def _run(app: App, target: str, address: str | None) -> int:
    functions = ", ".join(f"{work.name} ({work.group})" for work in app.works)
    logger.info("%s starts: %s, pid %d", target, functions or "no functions", os.getpid())
    if os.environ.get(WORKER_VARIABLE):
        app.on_start(lambda: _stop_with_parent(app))
    try:
        app.main(address=address)
    except (UnknownGroup, UnknownTopic):
        # Somebody deleted it while we ran: the next start may find it.
        raise
    except InvalidRequest as error:
        logger.error("%s cannot run: %s (%s)", target, error, error.code)
        return EXIT_WRONG
    except Conflict as error:
        if not error.command:
            raise
        logger.error(
            "%s cannot run: %s; or start with `onward run %s --apply`, and the code decides (%s)",
            target, error, target, error.code,
        )  # fmt: skip
        return EXIT_CONFLICT
    logger.info("%s stopped", target)
    return 0


def _stop_with_parent(app: App) -> None:
    """Stop when the parent is gone, however it went: it holds the other end of our stdin."""
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()

    def read() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            logger.warning("the parent is gone: stopping")
            app.stop()

    loop.add_reader(stdin, read)


def _wrong(text: str) -> click.UsageError:
    return click.UsageError(text, click.get_current_context(silent=True))
