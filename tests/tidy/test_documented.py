"""What users can meet is in the reference: settings, errors, commands and options, public names."""

import re
from pathlib import Path

import click
import pytest

import onward
from onward import cli
from onward.config import SETTINGS, Setting
from onward.errors import OnwardError, all_errors

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
PUBLIC_NAMES_MAX = 20


def page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def setting_row(setting: Setting) -> str:
    default = setting.format(setting.default)
    shown = f"`{default}`" if default else "empty"
    return f"| `{setting.name}` | {shown} | {setting.description} |"


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_setting_is_in_the_reference_as_it_is_in_the_code(setting: Setting):
    assert setting_row(setting) in page("config.md").splitlines()


def test_the_reference_has_no_setting_that_does_not_exist():
    documented = re.findall(r"^\| `(\w+\.\w+)` \|", page("config.md"), re.MULTILINE)
    assert documented == list(SETTINGS)


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.code)
def test_every_error_is_in_the_reference_with_its_code(kind: type[OnwardError]):
    rows = [line for line in page("errors.md").splitlines() if line.startswith("|")]
    assert any(f"`{kind.code}`" in row and f"`{kind.__name__}`" in row for row in rows)


@pytest.mark.parametrize("code", cli.ExitCode, ids=lambda code: code.name)
def test_every_exit_code_is_in_the_reference(code: cli.ExitCode):
    assert re.search(rf"^\| {code.value} \|", page("cli.md"), re.MULTILINE)


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


COMMANDS = commands(cli.root)


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_every_command_and_option_is_in_the_reference(path: str, command: click.Command):
    sections = re.split(r"^#+ ", page("cli.md"), flags=re.MULTILINE)
    section = next((text for text in sections if text.startswith(f"`{path}`\n")), None)
    assert section is not None, f"docs/reference/cli.md has no heading `{path}`"
    settings = {setting.flag for setting in SETTINGS.values()}
    for parameter in command.params:
        names = parameter.opts if isinstance(parameter, click.Option) else []
        # Flags of settings are listed once, in config.md.
        missing = [name for name in names if f"`{name}" not in section and name not in settings]
        assert not missing, f"the section of {path} does not name {missing}"
        if isinstance(parameter, click.Argument):
            assert parameter.make_metavar(click.Context(command)).strip("[].") in section


def test_the_public_names_are_few_and_all_in_the_reference():
    assert len(onward.__all__) <= PUBLIC_NAMES_MAX
    text = page("python.md")
    missing = [name for name in onward.__all__ if not re.search(rf"`(onward\.)?{name}\b", text)]
    assert not missing


def test_every_public_name_exists():
    assert all(hasattr(onward, name) for name in onward.__all__)
