"""`onward config`: what is set, where it came from, and what could be set."""

import os

import click

from onward.cli.options import json_option, settings_options
from onward.cli.output import print_line, print_rows
from onward.config import FILE_PLACES, SETTINGS, Setting, find_file, rows
from onward.settings import Settings


@click.group()
def command() -> None:
    """Show the settings, and where each one comes from.

    Example:  onward config show
    """


@command.command()
@json_option
@settings_options
def show(*, settings: Settings, as_json: bool) -> None:
    """Show every setting: its name, its value, and where the value came from.

    Example:  ONWARD_SERVER_PORT=7701 onward config show --json
    """
    listed = [
        # Machines get the number, people the way they would write it.
        {"name": s.name, "value": v if as_json else s.format(v), "source": source}
        for s, v, source in rows(settings)
    ]
    print_rows(listed, columns=["name", "value", "source"], as_json=as_json)


@command.command()
@click.option("--config", "named", metavar="FILE", help="Settings file to read.")
def path(*, named: str | None) -> None:
    """Say which settings file is read.

    Example:  onward config path
    """
    found = find_file(named=named, environ=os.environ)
    if found is None:
        places = ", ".join(map(str, FILE_PLACES))
        raise click.ClickException(f"there is no settings file; looked for {places}")
    print_line(str(found))


@command.command()
def example() -> None:
    """Print a settings file with everything in it, commented out.

    Example:  onward config example > onward.toml
    """
    print_line("# Settings of Onward. Remove the # before what you want to change.")
    table = ""
    for setting in SETTINGS.values():
        if setting.table != table:
            table = setting.table
            print_line("")
            print_line(f"[{table}]")
        print_line(f"# {setting.description}")
        print_line(f"# {setting.key} = {_toml(setting)}")


def _toml(setting: Setting) -> str:
    if isinstance(setting.default, tuple):
        return "[]"
    text = setting.format(setting.default)
    is_literal = isinstance(setting.default, bool) or text.isdecimal()
    return text if is_literal else f'"{text}"'
