"""Options that several commands share.

`settings_options` gives a command --config and one flag per setting, and calls it with the loaded
`settings`; a wrong setting is wrong usage (exit 2). `json_option` gives it --json as `as_json`.
"""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

from onward.config import SETTINGS, Setting, find_file, load
from onward.errors import InvalidRequest
from onward.settings import Settings

_Command = TypeVar("_Command", bound=Callable[..., object])

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one line of JSON per row, for machines."
)


def settings_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add --config and a flag for every setting to a command that takes `settings`.

    @click.command()
    @settings_options
    def command(*, settings: Settings) -> None: ...
    """

    @wraps(command)
    def with_settings(**options: Any) -> object:
        named = options.pop("config_path")
        given = {one.name: options.pop(_parameter(one)) for one in _flags()}
        flags = {name: value for name, value in given.items() if value is not None}
        return command(settings=load_settings(named=named, flags=flags), **options)

    decorated: Callable[..., object] = with_settings
    for setting in reversed(_flags()):
        decorated = _flag(setting)(decorated)
    return click.option("--config", "config_path", metavar="FILE", help="Settings file to read.")(
        decorated
    )


def _flags() -> list[Setting]:
    return [setting for setting in SETTINGS.values() if not setting.is_secret]


def load_settings(*, named: str | None, flags: dict[str, object]) -> Settings:
    """Load the settings of this process; a mistake in them is a mistake in how it was called."""
    try:
        return load(
            path=find_file(named=named, environ=os.environ), environ=os.environ, flags=flags
        )
    except InvalidRequest as error:
        raise click.UsageError(str(error), click.get_current_context(silent=True)) from None


def _flag(setting: Setting) -> Callable[[_Command], _Command]:
    metavar = {"_ms": "DURATION", "bytes": "SIZE"}
    kind = next((name for part, name in metavar.items() if part in setting.key), "VALUE")
    default = setting.format(setting.default) or "none"
    text = f"{setting.description.replace('`', '')} [default: {default}]"
    return click.option(setting.flag, _parameter(setting), metavar=kind, help=text)


def _parameter(setting: Setting) -> str:
    return f"setting_{setting.table}_{setting.key}"
