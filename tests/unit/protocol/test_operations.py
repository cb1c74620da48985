"""Every operation of the table is declared whole, once, and used by a client.

What is asserted here holds for whatever is in `OPERATIONS`; a failure names the operation.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect as shapes

from onward.errors import InvalidRequest, ProtocolError
from onward.protocol.frames import Kind
from onward.protocol.operations import (
    OPERATIONS,
    Operation,
    decode_reply,
    decode_request,
    encode_request,
)
from onward.protocol.operations.operation import (
    OP,
    Permission,
    Request,
    frame_operation,
    operation,
    read_group,
    read_topic,
)
from onward.protocol.operations.topics import ChangeTopic, DeleteTopic, DescribeTopic, ListTopics

SOURCE = Path(__file__).resolve().parents[3] / "src" / "onward"
DECLARATIONS = SOURCE / "protocol" / "operations"
HANDLERS = sorted((SOURCE / "broker" / "operations").glob("*.py"))

# --- temporary ---------------------------------------------------------------------------------
# To be emptied when the last operation is in the table; a test below fails for every file that is
# listed without need.
STILL_BUILD_REQUESTS_BY_HAND: set[str] = set()
# -----------------------------------------------------------------------------------------------

PERMITTED_BEFORE = {"member.served": "the CONSUME of its consumer was permitted on this connection"}
"""Operations that need no permission of their own, with the reason."""

each_operation = pytest.mark.parametrize("row", OPERATIONS.values(), ids=lambda row: row.name)
each_request = pytest.mark.parametrize(
    "row",
    [row for row in OPERATIONS.values() if row.frame == Kind.REQUEST],
    ids=lambda row: row.name,
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def literals(path: Path) -> frozenset[str]:
    """Return the texts in a file that are whole literals; examples in docstrings are none."""
    constants = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Constant)]
    return frozenset(node.value for node in constants if isinstance(node.value, str))


@cache
def names(path: Path) -> frozenset[str]:
    """Return all names that a file imports or uses."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found |= {*name.split("."), asname or ""}
    return frozenset(found)


@cache
def used_by_clients() -> frozenset[str]:
    """Return the names that clients use, beyond importing them; a replica is a client, too."""
    paths = [path for part in ("client", "cluster") for path in (SOURCE / part).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(tree(path))]
    bare = {node.id for node in nodes if isinstance(node, ast.Name)}
    return frozenset(bare | {node.attr for node in nodes if isinstance(node, ast.Attribute)})


def fields_of(request: type) -> tuple[shapes.Field, ...]:
    """Return the fields of a payload, whether it is a struct or a named tuple."""
    shape = shapes.type_info(request)
    assert isinstance(shape, shapes.StructType | shapes.NamedTupleType)
    return shape.fields


def places_of(literal: str) -> set[str]:
    files = SOURCE.rglob("*.py")
    return {path.relative_to(SOURCE).as_posix() for path in files if literal in literals(path)}


# --- one declaration ---------------------------------------------------------------------------


@each_operation
def test_an_operation_needs_a_permission_on_fields_that_it_has(row: Operation) -> None:
    assert bool(row.needs) != (row.name in PERMITTED_BEFORE), (
        f"operation {row.name!r} needs no permission"
    )
    fields = {field.name for field in fields_of(row.request)}
    for permission in row.needs:
        assert not permission.field or permission.field in fields, (
            f"operation {row.name!r}: its permission names a field {permission.field!r}, "
            f"which it does not have"
        )


@each_operation
def test_a_reply_is_a_declared_type_with_a_docstring(row: Operation) -> None:
    assert isinstance(row.reply, type), f"operation {row.name!r}: {row.reply!r} is not a class"
    assert row.reply.__doc__, f"operation {row.name!r}: {row.reply.__name__} has no docstring"
    is_struct = issubclass(row.reply, msgspec.Struct)
    # The answer to a frame of its own may be packed.
    is_payload = row.frame != Kind.REQUEST and row.reply.__module__.startswith("onward.protocol.")
    assert is_struct or is_payload, (
        f"operation {row.name!r}: {row.reply.__name__} is neither a struct nor a payload"
    )


@each_operation
def test_the_summary_is_one_sentence(row: Operation) -> None:
    assert row.summary.endswith("."), f"operation {row.name!r}: {row.summary!r} has no full stop"
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", row.summary)
    assert len(sentences) == 1, f"operation {row.name!r} is summed up in several: {sentences}"


@each_request
def test_the_example_of_a_request_is_valid(row: Operation) -> None:
    payload = msgspec.json.encode({OP: row.name, **row.example})
    try:
        request = decode_request(payload)
    except InvalidRequest as error:
        pytest.fail(f"operation {row.name!r}: its example is not valid: {error}")
    assert type(request) is row.request
    assert decode_request(encode_request(request)) == request


@each_operation
def test_the_example_has_the_fields_of_the_payload(row: Operation) -> None:
    assert row.example.keys() <= {field.encode_name for field in fields_of(row.request)}
    is_packed = not issubclass(row.request, msgspec.Struct)
    # msgspec makes a named tuple from a sequence.
    payload = list(row.example.values()) if is_packed else dict(row.example)
    try:
        msgspec.convert(payload, row.request)
    except msgspec.ValidationError as error:
        pytest.fail(f"operation {row.name!r}: its example is not valid: {error}")


@each_operation
def test_an_operation_can_run_at_all(row: Operation) -> None:
    if row.frame == Kind.REQUEST:
        assert row.running_max >= 1, f"operation {row.name!r} may never run"


# --- stands once -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "." in name])
def test_the_name_of_an_operation_stands_in_one_file(name: str) -> None:
    """A name without a dot is an ordinary word as well, such as the command `onward status`."""
    places = places_of(name)
    assert len(places) == 1, f"operation {name!r} stands in several files: {sorted(places)}"
    assert places.pop().startswith("protocol/operations/")


@each_request
def test_a_client_uses_the_request_of_an_operation(row: Operation) -> None:
    assert row.request.__name__ in used_by_clients(), (
        f"operation {row.name!r}: no client uses {row.request.__name__}"
    )


def test_the_field_that_names_the_operation_stands_in_one_file() -> None:
    assert places_of(OP) - STILL_BUILD_REQUESTS_BY_HAND == {"protocol/operations/operation.py"}


def test_every_exception_is_still_needed() -> None:
    needless = STILL_BUILD_REQUESTS_BY_HAND - places_of(OP)
    assert not needless, f"take these out of STILL_BUILD_REQUESTS_BY_HAND: {sorted(needless)}"


def test_every_module_of_declarations_is_in_the_table() -> None:
    declaring = {path.stem for path in DECLARATIONS.glob("*.py")} - {"__init__", "operation"}
    prefix = "onward.protocol.operations."
    imported = {row.request.__module__.removeprefix(prefix) for row in OPERATIONS.values()}
    requests = {path for path in declaring if "Request" in names(DECLARATIONS / f"{path}.py")}
    assert requests <= imported, f"__init__.py does not import {sorted(requests - imported)}"


@each_request
def test_one_method_is_marked_as_the_handler_of_an_operation(row: Operation) -> None:
    marks = [
        ast.unparse(node.args[0])
        for path in HANDLERS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "answers"
    ]
    count = marks.count(row.request.__name__)
    assert count == 1, (
        f"operation {row.name!r} has {count} handlers in broker/operations/: "
        f"mark one with @answers({row.request.__name__})"
    )


@pytest.mark.parametrize("path", HANDLERS, ids=lambda path: path.name)
def test_handlers_know_no_session(path: Path) -> None:
    assert "Session" not in names(path), f"{path.name}: a handler knows its requester only"
    assert "session" not in names(path), f"{path.name}: a handler knows its requester only"


# --- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "error", "said"),
    [
        (b'{"op": "topic.vanish"}', InvalidRequest, "there is no such operation"),
        (b'{"topic": "orders"}', InvalidRequest, "there is no such operation"),
        (b'{"op": 7}', InvalidRequest, "there is no such operation"),
        (b'["status"]', InvalidRequest, "the REQUEST is not understood"),
        (
            b'{"op": "topic.delete", "topic": "orders", "dry_run": true}',
            InvalidRequest,
            "operation 'topic.delete' has no field 'dry_run'",
        ),
        (b'{"op": "topic.delete"}', InvalidRequest, "`topic`"),
        (b'{"op": "topic.delete", "topic": 7}', InvalidRequest, "Expected `str`, got `int`"),
        (b'{"op": "topic.list", "limit": 0}', InvalidRequest, "'limit' is at least 1"),
        (b'{"op": "topic.list", "limit": 10001}', InvalidRequest, "'limit' is at most 10,000"),
        (b"{", ProtocolError, "not JSON"),
        (b'{"op": "\xff"}', ProtocolError, "not JSON"),
        (b'{"op":' + b"[" * 100_000, ProtocolError, "nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(payload: bytes, error: type, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        decode_request(payload)


def test_fields_at_their_defaults_are_not_sent() -> None:
    assert encode_request(ListTopics()) == b'{"op":"topic.list"}'
    assert encode_request(ChangeTopic(topic="orders", rule=None)) == (
        b'{"op":"topic.change","topic":"orders"}'
    )


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (DescribeTopic(topic="\ud800"), "topic is not valid Unicode"),
        (DescribeTopic(topic=object()), "topic cannot be sent"),  # type: ignore[arg-type]
    ],
)
def test_a_field_that_cannot_be_sent_is_named(request_: Request[Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        encode_request(request_)


def test_a_reply_may_have_fields_that_are_not_known() -> None:
    reply = decode_reply(b'{"topic": "orders", "since": 7}', DeleteTopic(topic="orders"))
    assert reply.topic == "orders"
    with pytest.raises(ProtocolError):
        decode_reply(b'{"topic": 7}', DeleteTopic(topic="orders"))


# --- declaring ---------------------------------------------------------------------------------


class Named(msgspec.Struct):
    topic: str | None = ""
    topics: list[str] = []
    ends: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


@pytest.mark.parametrize(
    ("permission", "request_", "resources"),
    [
        (read_topic("topic"), Named(topic="orders"), ("orders",)),
        (read_topic("topics"), Named(topics=["a", "b"]), ("a", "b")),
        (read_topic("ends"), Named(ends={"a": 1, "b": -1}), ("a", "b")),
        (read_topic("topics"), Named(), ()),
        (read_topic(), Named(), ("*",)),
    ],
)
def test_a_permission_is_about_the_resources_that_a_field_names(
    permission: Permission, request_: Named, resources: tuple[str, ...]
) -> None:
    assert permission.names(request_) == resources


@pytest.mark.parametrize(
    ("permission", "request_"),
    [
        (read_topic("topic"), Named(topic="")),
        (read_topic("topic"), Named(topic=None)),
        (read_topic("ends"), Named()),
    ],
    ids=["empty", "null", "left out"],
)
def test_a_name_that_is_left_out_stands_for_all(permission: Permission, request_: Named) -> None:
    assert permission.names(request_) == ("*",)


def test_an_operation_with_several_permissions_yields_each_with_its_resources() -> None:
    row = OPERATIONS["topic.describe"]
    needs = (read_topic("topic"), read_group())
    both = Operation(**{**vars(row), "needs": needs})
    assert list(both.resources(DescribeTopic(topic="orders"))) == [
        ("read", "topic", "orders"),
        ("read", "group", "*"),
    ]


def test_a_name_is_declared_once() -> None:
    before = dict(OPERATIONS)

    class Again(Request[Named], frozen=True, tag="status"):
        """Say it again."""

    with pytest.raises(AssertionError, match="'status' is declared twice"):
        operation(needs=read_topic(), example={})(Again)
    with pytest.raises(AssertionError, match="'status' is declared twice"):
        frame_operation("status", Kind.READ, reply=Named, needs=read_topic(), example={})(Again)
    assert before == OPERATIONS
