"""The command that gives a group the settings which a member asks for.

A member that joins with other settings than its group has is refused. The refusal carries this
command, with every setting that differs, so that it can be copied to a shell. What the command line
has no option for (an empty filter, a policy with a jitter of its own) is said as a call in Python.
"""

from __future__ import annotations

import shlex

from onward.delivery.record import GroupRecord, GroupWish
from onward.delivery.retry import format_policy
from onward.durations import format_duration

_FLAGS = {"tags": "--tag", "all_tags": "--all-tag", "headers": "--header", "tenants": "--tenant"}
_AT_MOST_ONCE = {True: "--at-most-once", False: "--at-least-once"}


def change_command(wish: GroupWish, record: GroupRecord) -> str:
    """Return the command that changes the group so that the wish no longer differs.

    >>> from onward.delivery.retry import parse_policy
    >>> record = GroupRecord("mailer", mode="ordered")
    >>> change_command(GroupWish(retry=parse_policy("1s,2s,3s"), lease_ms=60_000), record)
    'onward group change mailer --retry 1s,2s,3s --lease 1m'
    """
    name = shlex.quote(record.name)
    if "mode" in wish.differences(record) and "broadcast" in (wish.mode, record.mode):
        return f"onward group delete {name}"
    arguments = _arguments(wish, record)
    if any(not _has_option(key, value) for key, value in arguments.items()):
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return f"Client.change_group({record.name!r}, {given})"
    words = [word for key, value in arguments.items() for word in _options(key, value)]
    return " ".join(["onward group change", name, *map(shlex.quote, words)])


def _arguments(wish: GroupWish, record: GroupRecord) -> dict[str, object]:
    """Return what differs as the arguments of `Client.change_group`."""
    found = wish.differences(record)
    arguments: dict[str, object] = {}
    for name, value in found.items():
        if name == "filter" and wish.filter is not None:
            parts = zip(("tags", "all_tags", "headers"), _parts_of(wish, record), strict=True)
            arguments |= {part: asked for part, asked in parts if asked is not None}
        elif name == "retry" and wish.retry is not None:
            text = format_policy(wish.retry)
            arguments[name] = wish.retry if text.startswith("{") else text
        elif name.endswith("_ms") and isinstance(value, int):
            arguments[name.removesuffix("_ms")] = format_duration(value)
        else:
            arguments[name] = value
    return arguments


def _parts_of(wish: GroupWish, record: GroupRecord) -> list[object]:
    """Return the three parts of the filter: what is asked for, or None where nothing differs."""
    assert wish.filter is not None
    asked = (wish.filter.tags_any, wish.filter.tags_all, wish.filter.headers)
    present = (record.filter.tags_any, record.filter.tags_all, record.filter.headers)
    pairs = zip(asked, present, strict=True)
    return [None if one is None or one == other else one for one, other in pairs]


def _has_option(name: str, value: object) -> bool:
    if name == "retry":
        return isinstance(value, str)
    return name not in _FLAGS or bool(value)


def _options(name: str, value: object) -> list[str]:
    """Return one setting as options of the command line."""
    if isinstance(value, bool):
        plain = name.replace("_", "-")
        given = f"--{plain}" if value else f"--no-{plain}"
        return [_AT_MOST_ONCE[value] if name == "at_most_once" else given]
    if isinstance(value, dict):
        pairs = [f"{key}={_number(one)}" for key, one in value.items()]
        return [word for pair in pairs for word in (_FLAGS[name], pair)]
    if isinstance(value, tuple | list):
        return [word for one in value for word in (_FLAGS[name], str(one))]
    return [f"--{name.replace('_', '-')}", _number(value)]


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
