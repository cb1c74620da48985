"""The frame of the command line: errors on one line, exit codes, safe output, quick start."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import msgspec
import pytest

from onward import cli, errors
from onward.cli import ExitCode, report, run
from onward.cli.output import print_json, print_rows, printable, progress
from onward.protocol.operations.topics import TopicDescription

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine: neither its variables nor a file in the folder."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONWARD_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UnknownTopic("x"), ExitCode.FAILED),
        (errors.LeaseLost("x"), ExitCode.FAILED),
        (errors.ProtocolError("x"), ExitCode.FAILED),
        (errors.NotConnected("x"), ExitCode.UNAVAILABLE),
        (errors.Overloaded("x"), ExitCode.UNAVAILABLE),
        (errors.OutcomeUnknown("x"), ExitCode.OUTCOME_UNKNOWN),
        (errors.Corruption("x"), ExitCode.CORRUPTION),
        (click.UsageError("x"), ExitCode.USAGE),
        (FileNotFoundError(2, "No such file or directory", "a.jsonl"), ExitCode.FAILED),
        (ZeroDivisionError("x"), ExitCode.FAILED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (click.Abort(), ExitCode.INTERRUPTED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_code_says_who_must_act(error: BaseException, code: ExitCode, capsys: Captured):
    assert report(error) == code
    assert capsys.readouterr().err.count("\n") == (code != ExitCode.INTERRUPTED)


def test_an_error_is_one_line_on_stderr_with_its_code(capsys: Captured):
    report(errors.UnknownTopic("topic 'orders' does not exist"))
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: topic 'orders' does not exist (unknown_topic)\n")


def test_an_error_from_a_peer_cannot_write_to_the_terminal(capsys: Captured):
    report(errors.UnknownTopic("\x1b]0;pwned\x07\nsecond line"))
    assert capsys.readouterr().err == "error: \\x1b]0;pwned\\x07\\nsecond line (unknown_topic)\n"


def broken(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `onward config path` fail with an error."""

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("onward.cli.config.find_file", fail)


def test_an_error_out_of_a_task_group_is_told_as_the_error_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    broken(monkeypatch, ExceptionGroup("g", [ExceptionGroup("h", [errors.Stopping("bye")])]))
    assert run(["config", "path"]) == ExitCode.UNAVAILABLE
    assert capsys.readouterr().err == "error: bye (stopping)\n"


def test_a_mistake_of_ours_shows_no_traceback_unless_debug_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    broken(monkeypatch, ZeroDivisionError("oops"))
    assert run(["config", "path"]) == ExitCode.FAILED
    assert capsys.readouterr().err.startswith("error: unexpected ZeroDivisionError: oops")
    with pytest.raises(ZeroDivisionError):
        run(["--debug", "config", "path"])


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["confg"], "did you mean 'config'?"),
        (["config", "show", "--log.foldr", "x"], "--log.folder"),
        (["config", "show", "--server.port", "http"], "server.port"),
        (["config", "show", "--server.host", "0.0.0.0"], "set auth.tokens"),
        (["config", "show", "--config", "nope.toml"], "nope.toml"),
        (["--nope"], "--nope"),
    ],
)
def test_wrong_usage_is_one_line_that_helps(arguments: list[str], hint: str, capsys: Captured):
    assert run(arguments) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert hint in err
    assert "--help'" in err


def test_without_a_command_the_help_is_shown(capsys: Captured):
    assert run([]) == ExitCode.OK
    assert "Commands:" in capsys.readouterr().out


def commands(parent: click.Command, path: str = "onward") -> list[tuple[str, click.Command]]:
    """Return every command below one, with the words one types."""
    found = [(path, parent)]
    if isinstance(parent, click.Group):
        ctx = click.Context(parent)
        for name in parent.list_commands(ctx):
            child = parent.get_command(ctx, name)
            assert child is not None
            found += commands(child, f"{path} {name}")
    return found


@pytest.mark.parametrize(
    ("path", "command"), commands(cli.root), ids=[path for path, _ in commands(cli.root)]
)
def test_the_help_of_every_command_has_an_example(path: str, command: click.Command):
    assert "Example" in (command.help or ""), path
    assert "onward" in (command.help or "").partition("Example")[2], path


def test_every_command_has_the_short_help_of_its_own_first_sentence():
    for name, text in cli.COMMANDS.items():
        command = cli.root.get_command(click.Context(cli.root), name)
        assert command is not None
        assert (command.help or "").startswith(text), name


def test_config_show_tells_where_each_value_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    Path("onward.toml").write_text('[log]\nfolder = "here"\n')
    monkeypatch.setenv("ONWARD_SERVER_PORT", "7701")
    assert run(["config", "show", "--json", "--log.retention-ms", "1d"]) == ExitCode.OK
    shown = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert shown["log.folder"]["source"] == "file onward.toml"
    assert shown["server.port"] == {
        "name": "server.port",
        "value": 7701,
        "source": "environment ONWARD_SERVER_PORT",
    }
    assert shown["log.retention_ms"]["source"] == "flag --log.retention-ms"
    assert shown["server.host"]["source"] == "default"


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_config_show_does_not_show_secrets(
    extra: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    monkeypatch.setenv("ONWARD_AUTH_TOKENS", "ann:s3cret")
    assert run(["config", "show", *extra]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "ann:***" in out
    assert "s3cret" not in out


def test_config_path_says_which_file_is_read(capsys: Captured):
    assert run(["config", "path"]) == ExitCode.FAILED
    Path("onward.toml").write_text("")
    assert run(["config", "path"]) == ExitCode.OK
    assert capsys.readouterr().out == "onward.toml\n"


def test_the_example_file_is_a_file_of_defaults(capsys: Captured):
    assert run(["config", "example"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    # Remove the # as a reader would: before what looks like a value.
    text = "\n".join(line.removeprefix("# ") if " = " in line else line for line in lines)
    assert tomllib.loads(text)["log"]["segment_bytes_max"] == "1GiB"
    Path("onward.toml").write_text(text)
    assert run(["config", "show", "--json"]) == ExitCode.OK
    sources = [json.loads(line)["source"] for line in capsys.readouterr().out.splitlines()]
    assert set(sources) == {"file onward.toml"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 漢字 🎉", "plain äöü 漢字 🎉"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\nc\td\x00\x7f", "a\\rb\\nc\\td\\x00\\x7f"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        (b"\xff\xfe", "\\xff\\xfe"),
        (b"\xff".decode(errors="surrogateescape"), "\\xff"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_could_act_on_a_terminal_is_shown_not_executed(text: str | bytes, shown: str):
    assert printable(text) == shown
    shown.encode()


def test_json_lines_are_safe_and_mean_the_same(capsys: Captured):
    body = "\x1b[31m \x9b \x7f \u202e \udcff \u2028 ä"
    print_json({"body": body})
    line = capsys.readouterr().out
    assert json.loads(line) == {"body": body}
    assert printable(line.rstrip("\n")) == line.rstrip("\n")


def test_a_reply_is_printed_with_the_fields_that_it_has_on_the_wire(capsys: Captured):
    topic = TopicDescription(topic="a\x9b", number=1, state="active")
    print_json(topic)
    print_json({"found": [topic]})
    alone, within = capsys.readouterr().out.splitlines()
    assert json.loads(alone) == msgspec.to_builtins(topic)
    assert json.loads(within) == {"found": [msgspec.to_builtins(topic)]}
    assert "\\u009b" in alone


def test_rows_in_a_pipe_are_plain_aligned_columns(capsys: Captured):
    rows = [{"topic": "orders", "count": 10}, {"topic": "[b]a\x1b[0m", "count": None}]
    print_rows(rows, columns=["topic", "count"])
    assert capsys.readouterr().out.splitlines() == [
        "TOPIC        COUNT",
        "orders          10",
        "[b]a\\x1b[0m      -",
    ]


def test_rows_for_machines_are_lines_of_json(capsys: Captured):
    print_rows([{"topic": "orders", "count": 10, "x": 1}], columns=["topic"], as_json=True)
    assert capsys.readouterr().out == '{"topic": "orders"}\n'


def test_no_rows_are_a_heading_for_people_and_nothing_for_machines(capsys: Captured):
    print_rows([], columns=["topic"])
    print_rows([], columns=["topic"], as_json=True)
    assert capsys.readouterr().out == "TOPIC\n"


def test_progress_is_silent_when_nobody_looks(capsys: Captured):
    with progress("publishing", total=2) as advance:
        advance(2)
    assert capsys.readouterr() == ("", "")


def onward(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    program = [sys.executable, "-c", "from onward.cli import main; main()", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)


def test_the_process_leaves_with_the_exit_code():
    assert onward("--version").returncode == ExitCode.OK
    assert onward("confg").returncode == ExitCode.USAGE


def test_nobody_reading_the_output_is_no_failure():
    program = f"{sys.executable} -c 'from onward.cli import main; main()' config example"
    script = f"set -o pipefail; for _ in 1 2 3 4 5; do {program} | true || exit 9; done"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_help_page_imports_no_command_and_no_rich():
    program = (
        "import sys\nfrom onward.cli import run\nrun(['--help'])\n"
        "heavy = ('rich', 'asyncio', 'onward.cli.config', 'onward.config', 'onward.broker')\n"
        "sys.exit(' '.join(name for name in heavy if name in sys.modules) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_gets_a_table_and_its_cells_are_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    monkeypatch.setattr("onward.cli.output.is_terminal", lambda *_: True)
    print_rows([{"topic": "[bold]orders[/bold]", "n": 7}], columns=["topic", "n"])
    out = capsys.readouterr().out
    heading, row = out.splitlines()
    assert heading.split() == ["TOPIC", "N"]
    assert row.split() == ["[bold]orders[/bold]", "7"]
