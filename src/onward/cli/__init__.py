"""The command line: one file per command, loaded only when it is called.

A command is a module `onward.cli.NAME` with a click command called `command`, and one line in
COMMANDS. So `onward serve` imports neither rich nor the other commands, and `onward --help` none.

    a command returns                exit 0
    ... raises an OnwardError        one line on stderr, `error: text (code)`; exit by its family
    ... raises a click.UsageError    one line on stderr that names the page of help; exit 2
    ... raises anything else         one line on stderr; the traceback only with --debug; exit 1

Exit codes are the ones of ExitCode, and documented in docs/reference/cli.md.
"""

import io
import os
import re
import select
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from enum import IntEnum
from importlib import import_module
from typing import NoReturn

import click

import onward
from onward.cli.output import printable
from onward.errors import Conflict, Corruption, OnwardError, OutcomeUnknown, Unavailable

COMMANDS = {
    "serve": "Run a broker.",
    "publish": "Publish messages: one per argument, or one per line of a file or a pipe.",
    "read": "Read the messages of a topic, and follow it live.",
    "topics": "List, create, show, change and delete topics.",
    "consume": "Consume topics as a member of a group: each message is shown, then acked.",
    "run": "Run the consumers of an App.",
    "groups": "List the groups: how far they are, who is there, what waits and what is dead.",
    "group": "Show, create, change, pause, move and delete one group.",
    "schedule": "List, show, cancel and move what waits for its time, and show the calendar.",
    "recurring": "List, show, set, pause, resume and delete messages that come again.",
    "dead": "List, redrive, export and purge the dead letters of a group.",
    "find": "Find messages of a topic by key, trace id, header, text and time, or one by its id.",
    "explain": "Tell what happened to a message: who published it, and how it went in every group.",
    "sql": "Ask in SQL about messages and what became of them; without QUERY at a prompt.",
    "pipeline": "Archive, ask, replay and load messages with Spark.",
    "top": "Show live what a broker does: rates, backlogs, members, leases that ran out.",
    "status": "Show how a broker is: its log, its disk, its connections, its counts.",
    "replica": "Show how a replica is, and the replicas of a node.",
    "promote": "Make a replica the leader: its source steps down first, if it answers.",
    "log": "Check, show and repair the log of a stopped broker.",
    "config": "Show the settings, and where each one comes from.",
    "bench": "Run the benchmark NAME; `list` names them all, `all` runs them all.",
    "demo": "Show what Onward does, in less than a minute, and verify it.",
}
"""Name and short help of every command, in the order of the help page."""


# click says "integer range" to people who mistyped a number.
_NOT_A_NUMBER = re.compile(r"is not a valid (integer|float)( range)?")


class ExitCode(IntEnum):
    """What a command says to the shell when it ends."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    OUTCOME_UNKNOWN = 4
    CORRUPTION = 5
    UNSETTLED = 6
    CONFLICT = 7
    DISK_FAILED = 74
    INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code."""
    _fill_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets its number, not a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    if "_ONWARD_COMPLETE" in os.environ:
        sys.exit(_complete(os.environ["_ONWARD_COMPLETE"]))
    code = run(sys.argv[1:] if arguments is None else arguments)
    sys.exit(code)


def _complete(instruction: str) -> int:
    """Print what a shell asks for: the script to source, or the words that fit."""
    from click.shell_completion import shell_complete

    return shell_complete(root, {"obj": {}}, "onward", "_ONWARD_COMPLETE", instruction)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    >>> run(["--version"])
    onward 0.1.0
    0
    """
    options: dict[str, bool] = {}
    try:
        # Not click's own main(): it would turn a closed pipe and ctrl-C into exits of its own.
        with root.make_context("onward", list(arguments), obj=options) as ctx:
            root.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except (Exception, KeyboardInterrupt) as error:
        if options.get("debug"):
            raise
        return report(_first_cause(error))
    return ExitCode.OK


def _fill_closed_streams() -> None:
    """What a shell has closed (`>&-`) is empty, or unheard: no socket may get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number is the one that was closed.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def report(error: BaseException) -> int:
    """Print one line about an error on stderr and return the exit code that goes with it.

    >>> report(Corruption("segment 7 is damaged")) == ExitCode.CORRUPTION
    True
    """
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    if isinstance(error, BrokenPipeError) and _nobody_reads_stdout():
        # Who read our output has seen enough (`onward read orders | head`): that is no failure.
        return ExitCode.OK
    text, code = _describe(error)
    if text:
        click.echo(f"{click.style('error:', fg='red')} {printable(text)}", err=True)
    return code


class LazyGroup(click.Group):
    """A group that knows the names of its commands, and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        # A module `run` would hide the function of that name in this package.
        module = "run_app" if cmd_name == "run" else cmd_name
        command = import_module(f"onward.cli.{module}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the called command, or suggest the nearest."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"there is no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(onward.__version__, message="%(prog)s %(version)s")
@click.option(
    "--debug", is_flag=True, envvar="ONWARD_DEBUG", help="Show the traceback of an error."
)
@click.pass_context
def root(ctx: click.Context, *, debug: bool) -> None:
    """Onward: a message platform.

    Example:  onward config show
    """
    ctx.obj["debug"] = debug
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _describe(error: BaseException) -> tuple[str, ExitCode]:
    match error:
        case OnwardError():
            return f"{error} ({error.code})", _family(error)
        case KeyboardInterrupt() | click.Abort():
            return "", ExitCode.INTERRUPTED
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "onward"
            text = _NOT_A_NUMBER.sub("is not a number", error.format_message()).rstrip(".")
            return f"{text[:1].lower()}{text[1:]} (see '{path} --help')", ExitCode.USAGE
        case click.ClickException():
            return error.format_message(), ExitCode.FAILED
        case OSError(strerror=str(reason)):
            place = f" {error.filename!r}" if error.filename else ""
            return f"{reason.lower()}{place}", ExitCode.FAILED
    kind = type(error).__name__
    return f"unexpected {kind}: {error} (run `onward --debug` to see where)", ExitCode.FAILED


def _family(error: OnwardError) -> ExitCode:
    match error:
        case Unavailable():
            return ExitCode.UNAVAILABLE
        case OutcomeUnknown():
            return ExitCode.OUTCOME_UNKNOWN
        case Corruption():
            return ExitCode.CORRUPTION
        case Conflict() if error.command:
            return ExitCode.CONFLICT
    return ExitCode.FAILED


def _first_cause(error: BaseException) -> BaseException:
    # A task group wraps what went wrong in it; one line can tell one cause, the first.
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _nobody_reads_stdout() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):
        return False
    # Else the interpreter flushes the closed pipe once more at exit, and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
