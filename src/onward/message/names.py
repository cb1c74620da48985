"""Which names a topic, a group or a member may have.

    name   = 1 to 128 of  A-Z a-z 0-9 . _ - @    but neither "." nor "..", nor "@" first:
                                                 a topic, a group
    system = "@" name                            only where the caller allows it: a topic
    open   = "@pipeline"  or  "@sink." name      of pipelines: whoever may publish may use them
    member = 1 to 128 printable characters       who it is, for people

The set of Kafka's and "@", so a name is safe in a path and a log line as it is; in a URL "@" is
escaped. A name is
checked where it enters the system (a request, a setting, the client's call), never again after.
"""

import re

from onward.errors import InvalidName

NAME_CHARACTERS_MAX = 128

TRACE_TOPIC = "@trace"
"""How messages ended in groups: the durable state of the groups."""
SCHEDULE_TOPIC = "@schedule"
RECURRING_PREFIX = "@recurring/"
"""Business keys that begin with this are runs of recurring schedules."""
PIPELINE_TOPIC = "@pipeline"
SINK_PREFIX = "@sink."

_NAME = re.compile(r"[A-Za-z0-9._-][A-Za-z0-9._@-]{0,127}\Z")


def check_topic_name(name: str, *, system: bool = False) -> str:
    """Return the name when a topic may have it, else raise `InvalidName` with the broken rule.

    >>> check_topic_name("orders.eu-1")
    'orders.eu-1'
    >>> check_topic_name("@schedule", system=True)
    '@schedule'
    """
    if not isinstance(name, str):
        raise InvalidName(f"a topic name is text, not {type(name).__name__}")
    if name.startswith("@"):
        if not system and is_system_name(name):
            raise InvalidName(
                f"topic name {_shown(name)}: names that begin with '@' are the system's own"
            )
        _check(name[1:], whole=name, what="topic")
    else:
        _check(name, whole=name, what="topic")
    return name


def is_system_name(name: str) -> bool:
    """Tell whether a topic of this name belongs to the broker alone.

    >>> [is_system_name(name) for name in ("orders", "@trace", "@pipeline", "@sink.load-7")]
    [False, True, False, False]
    """
    is_sink = name.startswith(SINK_PREFIX) and name != SINK_PREFIX
    return name.startswith("@") and name != PIPELINE_TOPIC and not is_sink


def check_group_name(name: str) -> str:
    """Return the name when a group may have it, else raise `InvalidName` with the broken rule.

    >>> check_group_name("billing")
    'billing'
    """
    if not isinstance(name, str):
        raise InvalidName(f"a group name is text, not {type(name).__name__}")
    _check(name, whole=name, what="group")
    return name


def check_member_name(name: str) -> str:
    """Return the name when a member may have it, else raise `InvalidName` with the broken rule.

    >>> check_member_name("ann@host-1 (4711)")
    'ann@host-1 (4711)'
    """
    if not isinstance(name, str):
        raise InvalidName(f"a member name is text, not {type(name).__name__}")
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise InvalidName(f"member name {_shown(name)}: {_broken_rule(name)}")
    if not name.isprintable():
        raise InvalidName(f"member name {_shown(name)}: a name has only printable characters")
    return name


def _check(name: str, *, whole: str, what: str) -> None:
    if _NAME.match(name) and name not in (".", ".."):
        return
    raise InvalidName(f"{what} name {_shown(whole)}: {_broken_rule(name)}")


def _broken_rule(name: str) -> str:
    if not name:
        return "a name has at least one character"
    if len(name) > NAME_CHARACTERS_MAX:
        return f"a name has at most {NAME_CHARACTERS_MAX} characters, this one has {len(name)}"
    if name in (".", ".."):
        return "'.' and '..' are not names"
    if name.startswith("@"):
        return "a name does not begin with '@'"
    return "a name has only letters A-Z a-z, digits, '.', '_', '-' and '@'"


def _shown(name: str) -> str:
    # A hostile name must not fill a log line nor write escape codes to a terminal.
    return ascii(name if len(name) <= 40 else name[:37] + "...")
