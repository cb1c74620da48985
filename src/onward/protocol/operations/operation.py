"""What an operation is: one declaration, from which everything else derives.

    @operation(needs=manage_group("group"), changes=True, example={"group": "billing"})
    class PauseGroup(Request[GroupDescription], frozen=True, tag="group.pause"):
        group: str

The class is the arguments, with their limits; the parameter of `Request` is the type of the reply;
the tag is the name on the wire, and stands nowhere else as a literal. The broker decodes and checks
a request by its declaration, the client encodes it and decodes the reply by it, the reference and
the tests read it. PUBLISH, READ and CONSUME are frames of their own, with rows in the same table.

A request with a field that its operation does not have is refused: an older broker that ignored
`dry_run` would do what was only to be counted. A reply may have fields that are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec

from onward.protocol.frames import Kind

Action = Literal["read", "write", "manage", "admin"]
Resource = Literal["topic", "group", "node"]
Reply = TypeVar("Reply", covariant=True)
R = TypeVar("R", bound="type[msgspec.Struct]")
Payload = TypeVar("Payload", bound=type)

EVERYTHING = "*"
"""The name of a resource where an operation concerns all of its kind."""
OP = "op"
"""The field of a REQUEST that names the operation."""


class Permission(NamedTuple):
    """What a principal must be allowed to do, and which field of the request names on what."""

    action: Action
    resource: Resource
    field: str = ""
    """Names of topics or groups: a text, a list or the keys of an object. Empty: all of them."""

    def names(self, request: object) -> Iterable[str]:
        """Return the names of the resources that a request concerns.

        A name that is left out stands for all of them, so that it never needs less permission.

        >>> read_topic("topic").names(DescribedTopic(topic="orders"))
        ('orders',)
        >>> read_topic().names(DescribedTopic(topic="orders"))
        ('*',)
        """
        value = getattr(request, self.field) if self.field else EVERYTHING
        if isinstance(value, Collection) and not isinstance(value, str):
            return tuple(value)
        return (value or EVERYTHING,)


def read_topic(field: str = "") -> Permission:
    """Return the permission to read the topics that a field names."""
    return Permission("read", "topic", field)


def write_topic(field: str = "") -> Permission:
    """Return the permission to publish to the topics that a field names."""
    return Permission("write", "topic", field)


def manage_topic(field: str = "") -> Permission:
    """Return the permission to create, change and delete the topics that a field names."""
    return Permission("manage", "topic", field)


def read_group(field: str = "") -> Permission:
    """Return the permission to look at the groups that a field names, and to be a member."""
    return Permission("read", "group", field)


def manage_group(field: str = "") -> Permission:
    """Return the permission to create, change, move and delete the groups that a field names."""
    return Permission("manage", "group", field)


ADMIN = Permission("admin", "node")
"""The permission for what concerns the whole node."""


class Request(
    msgspec.Struct,
    Generic[Reply],
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field=OP,
):
    """The arguments of one operation; the parameter is the type of its reply."""


class Done(msgspec.Struct, frozen=True):
    """A reply that says only that the operation is done."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One row of the table."""

    name: str
    request: type
    """A struct; of PUBLISH, whose payload is packed, a named tuple."""
    reply: type
    needs: tuple[Permission, ...]
    changes: bool
    """It changes something: it needs a leader that can write, and comes to its end."""
    while_full: bool
    """It may be used while the disk is nearly full: it frees space, or takes next to none."""
    any_role: bool
    """It may be used on a node that does not lead: it is about the role of that node."""
    is_repeatable: bool
    """A client repeats it by itself after a lost connection: twice does no harm."""
    running_max: int
    """How many of them may run at the same time on a node."""
    example: Mapping[str, Any]
    """Arguments that are valid, for the reference and the tests."""
    frame: Kind = Kind.REQUEST

    @property
    def summary(self) -> str:
        """Return the sentence that says what it does."""
        return " ".join((self.request.__doc__ or "").partition("\n\n")[0].split())

    def resources(self, request: object) -> Iterator[tuple[Action, Resource, str]]:
        """Yield every permission that a request needs, with the name of its resource."""
        for permission in self.needs:
            for name in permission.names(request):
                yield permission.action, permission.resource, name


_DECLARED: dict[str, Operation] = {}
_BY_REQUEST: dict[type, Operation] = {}


def operation(
    *,
    needs: Permission | tuple[Permission, ...],
    example: Mapping[str, Any],
    changes: bool = False,
    while_full: bool = True,
    any_role: bool = False,
    is_repeatable: bool | None = None,
    running_max: int = 1_000,
) -> Callable[[R], R]:
    """Declare a subclass of `Request` as an operation; what changes nothing is repeatable."""

    def declare(request: R) -> R:
        bases = getattr(request, "__orig_bases__", ())
        _add(
            Operation(
                name=str(request.__struct_config__.tag),
                request=request,
                reply=next(get_args(base)[0] for base in bases if get_args(base)),
                needs=(needs,) if isinstance(needs, Permission) else needs,
                changes=changes,
                while_full=while_full,
                any_role=any_role,
                is_repeatable=not changes if is_repeatable is None else is_repeatable,
                running_max=running_max,
                example=example,
            )
        )
        return request

    return declare


def frame_operation(
    name: str,
    frame: Kind,
    *,
    reply: type,
    needs: Permission | tuple[Permission, ...],
    example: Mapping[str, Any],
    changes: bool = False,
    is_repeatable: bool = False,
) -> Callable[[Payload], Payload]:
    """Declare the payload of a frame of its own as an operation."""

    def declare(request: Payload) -> Payload:
        _add(
            Operation(
                name=name,
                request=request,
                reply=reply,
                needs=(needs,) if isinstance(needs, Permission) else needs,
                changes=changes,
                while_full=False,
                any_role=False,
                is_repeatable=is_repeatable,
                running_max=0,
                example=example,
                frame=frame,
            )
        )
        return request

    return declare


def _add(row: Operation) -> None:
    assert row.name not in _DECLARED, f"operation {row.name!r} is declared twice"
    _DECLARED[row.name] = _BY_REQUEST[row.request] = row


def declared() -> Mapping[str, Operation]:
    """Return the operations of all modules that were imported, by name."""
    return _DECLARED


def operation_of(request: object) -> Operation:
    """Return the declaration of a request, or of a type of requests."""
    return _BY_REQUEST[request if isinstance(request, type) else type(request)]


class DescribedTopic(msgspec.Struct, frozen=True):
    """A request of the examples above."""

    topic: str
