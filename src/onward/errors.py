"""Every error of Onward, sorted by who must act.

    OnwardError
    ├── InvalidRequest         change the request
    │   ├── UnknownTopic
    │   ├── UnknownGroup
    │   ├── InvalidName
    │   ├── MessageTooLarge
    │   ├── Forbidden
    │   └── Unauthenticated
    ├── Conflict               the world moved: look again; .command may say what helps
    │   ├── LeaseLost
    │   ├── AlreadyExists
    │   ├── OffsetOutOfRange
    │   └── TopicEnded
    ├── Unavailable            nothing was done: try later
    │   ├── NotLeader          .leader says who is, when known
    │   ├── Overloaded         .retry_after_ms says when
    │   ├── NotConnected
    │   ├── DiskFull
    │   ├── Stopping
    │   └── NotInstalled
    ├── OutcomeUnknown         perhaps done: look, or repeat if twice does no harm
    ├── ProtocolError          a peer broke the protocol
    └── Corruption             stored bytes are wrong: stop; an operator must look

Each class has one stable code, the same on the wire, in metrics and in the CLI. The text is lower
case and names the thing: `topic 'orders' does not exist`. Codes are never renamed or used again.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar


class OnwardError(Exception):
    """What all errors of Onward have in common: a stable code and a sentence for people.

    >>> UnknownTopic("topic 'orders' does not exist").code
    'unknown_topic'
    """

    code: ClassVar[str] = "error"
    # The attributes that travel with the error beside its code and its sentence.
    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message or self.code.replace("_", " ")


class InvalidRequest(OnwardError):
    """The request can never succeed as it is: change it."""

    code = "invalid_request"


class UnknownTopic(InvalidRequest):
    """The topic does not exist, and was not to be created."""

    code = "unknown_topic"


class UnknownGroup(InvalidRequest):
    """The group does not exist, and was not to be created."""

    code = "unknown_group"


class InvalidName(InvalidRequest):
    """A name has characters or a length that names may not have."""

    code = "invalid_name"


class MessageTooLarge(InvalidRequest):
    """A message or a batch is larger than the broker takes."""

    code = "message_too_large"


class Forbidden(InvalidRequest):
    """We know who asks, and they may not."""

    code = "forbidden"


class Unauthenticated(InvalidRequest):
    """We do not know who asks: the token is missing or wrong."""

    code = "unauthenticated"


class Conflict(OnwardError):
    """The request was right for a world that has moved on: look again.

    `command` is the command that resolves it, where it does not resolve itself; empty otherwise.

    >>> Conflict("group 'a' has lease 1m, not 30s", command="onward group change a").command
    'onward group change a'
    """

    code = "conflict"
    fields = ("command",)

    def __init__(self, message: str = "", *, command: str = "") -> None:
        super().__init__(message)
        self.command = command


class LeaseLost(Conflict):
    """The lease ran out or was given to someone else before the answer came."""

    code = "lease_lost"


class AlreadyExists(Conflict):
    """What was to be created is there already."""

    code = "already_exists"


class OffsetOutOfRange(Conflict):
    """The offset is no longer, or not yet, in the log."""

    code = "offset_out_of_range"


class TopicEnded(Conflict):
    """The topic was deleted while it was being read or written."""

    code = "topic_ended"


class Unavailable(OnwardError):
    """Nothing was done; the same request may succeed later."""

    code = "unavailable"


class NotLeader(Unavailable):
    """Another node leads; `leader` is its address, or None while there is none.

    >>> NotLeader("this node follows", leader="10.0.0.2:7700").leader
    '10.0.0.2:7700'
    """

    code = "not_leader"
    fields = ("leader",)

    def __init__(self, message: str = "", *, leader: str | None = None) -> None:
        super().__init__(message)
        self.leader = leader


class Overloaded(Unavailable):
    """A limit is reached; trying again before `retry_after_ms` have passed is of no use.

    >>> Overloaded("too many unanswered bytes", retry_after_ms=50).retry_after_ms
    50
    """

    code = "overloaded"
    fields = ("retry_after_ms",)

    def __init__(self, message: str = "", *, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class NotConnected(Unavailable):
    """There is no connection, and nothing of the request was sent."""

    code = "not_connected"


class DiskFull(Unavailable):
    """The disk has only its reserve left; reading still works."""

    code = "disk_full"


class Stopping(Unavailable):
    """The broker is shutting down and takes no new work."""

    code = "stopping"


class NotInstalled(Unavailable):
    """A program or a package that this needs is not on the machine; the sentence says which."""

    code = "not_installed"


class OutcomeUnknown(OnwardError):
    """Perhaps it was done, perhaps not: look, or repeat if twice does no harm."""

    code = "outcome_unknown"


class ProtocolError(OnwardError):
    """A peer sent what the protocol does not allow; the connection is over."""

    code = "protocol_error"


class Corruption(OnwardError):
    """Stored bytes are not what was written: stop, an operator must look."""

    code = "corruption"


def to_wire(error: OnwardError) -> dict[str, object]:
    """Turn an error into what travels.

    >>> to_wire(Overloaded("try later", retry_after_ms=50))
    {'code': 'overloaded', 'message': 'try later', 'retry_after_ms': 50}
    """
    wire: dict[str, object] = {"code": error.code, "message": str(error)}
    for name in error.fields:
        if (value := getattr(error, name)) != "":
            wire[name] = value
    return wire


def from_wire(wire: Mapping[str, object]) -> OnwardError:
    """Turn what travelled into an error; one with a code of a later version is an OnwardError.

    >>> from_wire({"code": "lease_lost", "message": "lease 7 ran out"})
    LeaseLost('lease 7 ran out')
    """
    code = wire.get("code")
    message = str(wire.get("message") or "")
    if code == NotLeader.code:
        leader = wire.get("leader")
        return NotLeader(message, leader=leader if isinstance(leader, str) else None)
    if code == Overloaded.code:
        wait_ms = wire.get("retry_after_ms")
        return Overloaded(message, retry_after_ms=wait_ms if isinstance(wait_ms, int) else 0)
    if code == Conflict.code:
        return Conflict(message, command=str(wire.get("command") or ""))
    kind = _BY_CODE.get(code) if isinstance(code, str) else None
    if kind is None:
        return OnwardError(f"{message} ({code})" if code else message)
    return kind(message)


def all_errors() -> tuple[type[OnwardError], ...]:
    """Return every error class, parents before children, as drawn above.

    >>> all_errors()[:2]
    (<class 'onward.errors.OnwardError'>, <class 'onward.errors.InvalidRequest'>)
    """
    return tuple(_walk(OnwardError))


def _walk(kind: type[OnwardError]) -> Iterator[type[OnwardError]]:
    yield kind
    for child in kind.__subclasses__():
        # Users may derive their own errors: those have no code on the wire.
        if child.__module__ == __name__:
            yield from _walk(child)


_BY_CODE: dict[str, type[OnwardError]] = {kind.code: kind for kind in _walk(OnwardError)}
