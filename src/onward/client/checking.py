"""Checks the options of a consumer where they are written, long before there is a broker.

A program that is started says so then and there, with the name of the function and of the option;
what only a broker knows (which settings a group has already) it says when the consumer joins. The
rules themselves are those of `Client.consume`: nothing is decided here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches

from onward.client.credit import CREDIT_MAX
from onward.client.groups import make_wish
from onward.client.options import ConsumeOptions
from onward.errors import InvalidRequest
from onward.message.names import check_member_name

NAMES = tuple(ConsumeOptions.__annotations__)
OF_THE_MEMBER = frozenset(("member", "credit", "refuse", "apply", "position"))
"""The other ones are settings of the group."""
APP_NAMES = ("concurrency", "ordered", "batch")


def check_options(function: str, options: Mapping[str, object]) -> None:
    """Raise `InvalidRequest` when an option does not exist, or has a value that it cannot have.

    >>> check_options("charge", {"lease": "1m", "retry": "fixed:10s:5"})
    >>> check_options("charge", {"leese": "1m"})
    Traceback (most recent call last):
    onward.errors.InvalidRequest: consumer 'charge' has no option 'leese'; did you mean 'lease'?
    """
    for name in options:
        if name not in NAMES:
            near = get_close_matches(name, (*NAMES, *APP_NAMES), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f": it has {', '.join(NAMES)}"
            raise InvalidRequest(f"consumer {function!r} has no option {name!r}{hint}")
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        _check(function, name, {name: value})
    # Each makes sense by itself; together they may not.
    _check(function, "", given)


def _check(function: str, name: str, options: Mapping[str, object]) -> None:
    try:
        _check_member(options)
        wished = {one: value for one, value in options.items() if one not in OF_THE_MEMBER}
        make_wish(**wished)  # type: ignore[arg-type]
    except (InvalidRequest, TypeError, ValueError, AttributeError) as error:
        where = f", option {name!r}" if name else ""
        raise InvalidRequest(f"consumer {function!r}{where}: {error}") from error


def _check_member(options: Mapping[str, object]) -> None:
    """Check what belongs to one member only."""
    credit, position = options.get("credit"), options.get("position")
    if "member" in options:
        check_member_name(str(options["member"]))
    if credit is not None and (type(credit) is not int or not 1 <= credit <= CREDIT_MAX):
        raise InvalidRequest(f"credit is 1 to {CREDIT_MAX} messages, not {credit!r}")
    for name in ("refuse", "apply"):
        if not isinstance(options.get(name, False), bool):
            raise InvalidRequest(f"{name} is True or False, not {options[name]!r}")
    if position is not None and not isinstance(position, str | os.PathLike):
        raise InvalidRequest(f"position is the path of a file, not {position!r}")
    if position is not None and options.get("mode", "broadcast") != "broadcast":
        raise InvalidRequest("a position is kept only by members of a broadcast")
