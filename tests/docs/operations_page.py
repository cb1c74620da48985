"""Renders docs/reference/operations.md from the table of operations; `make docs` writes the page.

    declaration ─▶ msgspec.inspect: fields, types, limits, defaults ─┐
    its source  ─▶ ast: the text below each field ───────────────────┴─▶ Markdown

An operation has a section of its own. Types that requests and replies consist of are listed once,
at the end of the page. A request field without a text has that of the same field (name, type and
whether it is required) of another request in its module, if there is exactly one such text.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as shapes

from onward.protocol.frames import Kind
from onward.protocol.operations import OPERATIONS, Operation
from onward.protocol.operations.operation import OP, Permission

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "operations.md"
COMMAND = "make docs"

_HEAD = f"""# Operations

<!-- Written by `{COMMAND}` from src/onward/protocol/operations/: change the declarations. -->

Everything that can be asked of a broker, from the table that the broker and the clients use.
[The protocol](protocol.md#requests) says how requests and replies travel, and what is true of many
operations.

An operation that *changes* something is answered when the change is durable. One that is *repeated*
is sent again by our clients when the connection was lost before its reply: twice does no harm. An
object is shown with the name that its type has in Python.
"""
_RECORDS = (
    shapes.StructType,
    shapes.NamedTupleType,
    shapes.DataclassType,
    shapes.TypedDictType,
)
_PACKED_KINDS = {Kind.PUBLISH, Kind.ACK}
"""Frames whose payload is not JSON."""


class Undocumented(Exception):
    """The page cannot be written because a declaration lacks something."""


def render(operations: Iterable[Operation]) -> str:
    """Return the page about some operations."""
    return _Page(operations).text()


class _Page:
    def __init__(self, operations: Iterable[Operation]) -> None:
        self._operations = sorted(operations, key=_section_of)
        self._types: list[type] = []
        """The types to list, in the order in which they are first used."""

    def text(self) -> str:
        parts = [_HEAD, "\n".join(self._overview())]
        for section, rows in groupby(self._operations, key=_section_of):
            parts.append("\n".join(self._section(section, list(rows))))
        parts.append("\n".join(self._type_sections()))
        return "\n".join(parts).rstrip() + "\n"

    def _overview(self) -> Iterator[str]:
        rows = [
            (
                _link(row.name),
                row.summary,
                "yes" if row.changes else "no",
                "yes" if row.is_repeatable else "no",
            )
            for row in self._operations
        ]
        yield from _table(("operation", "summary", "changes", "repeated"), rows)

    def _section(self, section: str, rows: Sequence[Operation]) -> Iterator[str]:
        yield f"## {_heading(section)}\n"
        for row in rows:
            try:
                yield from self._operation(row)
            except Undocumented as error:
                raise Undocumented(f"operation {row.name!r}: {error}") from None

    # --- one operation -----------------------------------------------------------------------

    def _operation(self, row: Operation) -> Iterator[str]:
        yield f"### {row.name}\n"
        yield f"{_description(row.request)}\n"
        if row.frame != Kind.REQUEST:
            kind = row.frame.name
            yield f"It is a frame of its own: [{kind}](protocol.md#{kind.lower()}).\n"
        fields = _fields(row.request)
        if fields:
            rows = [self._request_field(row, field) for field in fields]
            yield from _table(("field", "type", "default", "meaning"), rows)
        needs = "; ".join(_permission(need, fields) for need in row.needs)
        yield f"- Permission: {needs or 'none of its own'}."
        yield f"- Changes something: {_changes(row)}."
        yield f"- Repeated by clients: {'yes' if row.is_repeatable else 'no'}."
        if row.running_max:
            yield f"- At the same time: {row.running_max:,} on a node."
        yield f"- Reply: {self._type(shapes.type_info(row.reply))}."
        if row.frame not in _PACKED_KINDS:
            yield f"\n```json\n{_example(row)}\n```"
        yield ""

    def _request_field(self, row: Operation, field: shapes.Field) -> tuple[str, ...]:
        meaning = _field_texts(row.request).get(field.name) or self._text_of_others(row, field)
        return f"`{field.encode_name}`", self._type(field.type), _default(field), meaning

    # --- types -------------------------------------------------------------------------------

    def _type_sections(self) -> Iterator[str]:
        yield "## Types\n"
        # Rendering a type may append others that it consists of.
        for shape in self._types:
            yield from self._type_section(shape)

    def _type_section(self, shape: type) -> Iterator[str]:
        yield f"### {self._type_heading(shape)}\n"
        yield f"{_description(shape)}\n"
        kind, texts = shapes.type_info(shape), _field_texts(shape)
        if isinstance(kind, shapes.NamedTupleType) or getattr(kind, "array_like", False):
            yield "It is an array with these in their order.\n"
        rows = [
            (
                f"`{field.encode_name}`",
                self._type(field.type) + _default_of_type(field),
                texts.get(field.name, ""),
            )
            for field in _fields(shape)
        ]
        if getattr(kind, "tag_field", None):
            rows.insert(0, (f"`{kind.tag_field}`", f"`{json.dumps(kind.tag)}`", "Names the type."))
        if rows:
            yield from _table(("field", "type", "meaning"), rows)

    def _type(self, kind: shapes.Type) -> str:
        """Return how the page names a type; note the types that it is to list."""
        match kind:
            case _ if isinstance(kind, _RECORDS):
                return self._listed(kind.cls)
            case shapes.UnionType(types=types):
                literals = [word for each in types for word in _literals(each)]
                others = [self._type(each) for each in types if not _literals(each)]
                return _alternatives(literals + others)
            case shapes.ListType(item_type=item) | shapes.VarTupleType(item_type=item):
                return f"list of {_plural(self._type(item))}{_count_limits(kind, 'items')}"
            case shapes.TupleType(item_types=items):
                return f"array ({', '.join(map(self._type, items))})"
            case shapes.DictType(value_type=value):
                return f"object of {_plural(self._type(value))}{_count_limits(kind, 'fields')}"
            case shapes.CustomType(cls=cls):
                return f"`{cls.__name__}` ({_description(cls).partition('. ')[0].rstrip('.')})"
            case _:
                return _scalar(kind)

    def _listed(self, shape: type) -> str:
        if shape not in self._types:
            if shape.__name__ in [other.__name__ for other in self._types]:
                raise Undocumented(f"another type is called {shape.__name__}, too")
            self._types.append(shape)
        return f"[{shape.__name__}](#{_anchor(self._type_heading(shape))})"

    def _type_heading(self, shape: type) -> str:
        """Return the heading of a type: no operation may have the same anchor."""
        anchors = {_anchor(row.name) for row in self._operations}
        name = shape.__name__
        return f"{name} (type)" if _anchor(name) in anchors else name

    def _text_of_others(self, row: Operation, field: shapes.Field) -> str:
        """Return the one text of the same field in the requests of a module, or nothing."""
        texts = {
            text
            for other in self._operations
            if other.request.__module__ == row.request.__module__
            and (text := _field_texts(other.request).get(field.name))
            and any(_is_same(field, each) for each in _fields(other.request))
        }
        return texts.pop() if len(texts) == 1 else ""


def _scalar(kind: shapes.Type) -> str:
    match kind:
        case shapes.IntType():
            return f"integer{_number_limits(kind)}"
        case shapes.FloatType():
            return f"number{_number_limits(kind)}"
        case shapes.StrType(pattern=pattern):
            matching = f", matching `{pattern}`" if pattern else ""
            return f"text{_count_limits(kind, 'characters')}{matching}"
        case shapes.BytesType():
            return f"text, base64{_count_limits(kind, 'bytes')}"
        case shapes.BoolType():
            return "boolean"
        case shapes.NoneType():
            return "null"
        case shapes.LiteralType() | shapes.EnumType():
            return _alternatives(_literals(kind))
        case shapes.AnyType() | shapes.RawType():
            return "any"
    raise Undocumented(f"the page has no words for the type {kind}")


def _literals(kind: shapes.Type) -> list[str]:
    """Return the values that a type lists, as JSON."""
    match kind:
        case shapes.LiteralType(values=values):
            return [f"`{json.dumps(value)}`" for value in values]
        case shapes.EnumType(cls=cls):
            return [f"`{json.dumps(member.value)}`" for member in cls]
    return []


# --- words -------------------------------------------------------------------------------------


def _permission(need: Permission, fields: Sequence[shapes.Field]) -> str:
    if need.resource == "node":
        return "administer the node"
    if not need.field:
        return f"{need.action} all {need.resource}s"
    field = next((field for field in fields if field.name == need.field), None)
    if field is None:
        raise Undocumented(f"its permission names a field {need.field!r} that it does not have")
    if isinstance(field.type, shapes.ListType | shapes.VarTupleType | shapes.DictType):
        return f"{need.action} each {need.resource} in `{field.encode_name}`"
    empty = "" if field.required else f", or all {need.resource}s where it is empty"
    return f"{need.action} the {need.resource} that `{field.encode_name}` names{empty}"


def _changes(row: Operation) -> str:
    if not row.changes:
        return "no"
    if row.any_role:
        return "yes; also on a node that does not lead"
    return "yes" if row.while_full else "yes; refused while the disk is nearly full"


def _example(row: Operation) -> str:
    head = {OP: row.name} if row.frame == Kind.REQUEST else {}
    return json.dumps(head | msgspec.to_builtins(row.example), ensure_ascii=False)


def _default(field: shapes.Field) -> str:
    if field.required:
        return "required"
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return "left out"
    return f"`{msgspec.json.encode(value).decode()}`"


def _default_of_type(field: shapes.Field) -> str:
    """Return the default of a field unless it is empty, zero, false or null."""
    text = _default(field)
    is_plain = text in ("required", "left out", "`null`", "`false`", '`""`', "`[]`", "`{}`")
    return "" if is_plain or text in ("`0`", "`0.0`") else f", default {text}"


def _number_limits(kind: shapes.IntType | shapes.FloatType) -> str:
    least = kind.ge if kind.gt is None else f"more than {kind.gt:,}"
    most = kind.le if kind.lt is None else f"less than {kind.lt:,}"
    return _limits(least, most)


def _count_limits(kind: Any, unit: str) -> str:
    limits = _limits(kind.min_length or None, kind.max_length)
    return f"{limits} {unit}" if limits else ""


def _limits(least: float | str | None, most: float | str | None) -> str:
    """Return the limits of a number as they follow its type.

    >>> _limits(0, 2**53), _limits(None, 1_000), _limits("more than 0", None)
    (', 0 to 2^53', ', at most 1,000', ', more than 0')
    """
    words = [each for each in (least, most) if isinstance(each, str)]
    if not words and least is not None and most is not None:
        return f", {_figure(least)} to {_figure(most)}"
    if least is not None and not isinstance(least, str):
        words.append(f"at least {_figure(least)}")
    if most is not None and not isinstance(most, str):
        words.append(f"at most {_figure(most)}")
    return "".join(f", {word}" for word in words)


def _figure(number: Any) -> str:
    """Return a number, a large power of two as one: `2^63 - 1`."""
    sign, size = ("-", -number) if number < 0 else ("", number)
    if isinstance(size, int) and size >= 2**31 - 1:
        for value, minus in ((size, ""), (size + 1, " - 1")):
            if value.bit_count() == 1:
                return f"{sign}2^{value.bit_length() - 1}{minus}"
    return f"{number:,}"


def _plural(words: str) -> str:
    """Return what a list has many of: `texts`, but `integer, at least 0` as it is."""
    return f"{words}s" if words in ("text", "integer", "number", "boolean") else words


def _alternatives(words: Sequence[str]) -> str:
    *first, last = sorted(words, key=lambda word: word == "null")
    comma = "," if any("," in word for word in first) else ""
    return f"{', '.join(first)}{comma} or {last}" if first else last


def _link(name: str) -> str:
    return f"[{name}](#{_anchor(name)})"


def _anchor(heading: str) -> str:
    """Return the anchor that a heading gets, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


# --- what the source says ------------------------------------------------------------------------


def _section_of(row: Operation) -> str:
    """Return the module that declares an operation; frames of their own stand together."""
    return row.request.__module__ if row.frame == Kind.REQUEST else ""


def _heading(section: str) -> str:
    if not section:
        return "Frames of their own"
    first_line = inspect.cleandoc(sys.modules[section].__doc__ or "").partition("\n")[0]
    if not first_line:
        raise Undocumented(f"{section} declares operations and has no docstring")
    return first_line.partition(":")[0].rstrip(".")


def _description(shape: type) -> str:
    """Return the docstring of a type without its examples."""
    paragraphs = inspect.cleandoc(vars(shape).get("__doc__") or "").split("\n\n")
    texts = [" ".join(each.split()) for each in paragraphs if not each.startswith(">>>")]
    if not texts or not texts[0]:
        raise Undocumented(f"{shape.__name__} has no docstring")
    return "\n\n".join(texts)


def _fields(shape: type) -> Sequence[shapes.Field]:
    kind = shapes.type_info(shape)
    return kind.fields if isinstance(kind, _RECORDS) else ()


@cache
def _field_texts(shape: type) -> dict[str, str]:
    """Return the text below each field in the source of a type, with those that it inherits."""
    texts: dict[str, str] = {}
    for each in reversed(shape.__mro__):
        texts |= _texts_in_source(each.__module__, each.__name__)
    return texts


@cache
def _texts_in_source(module: str, name: str) -> dict[str, str]:
    path = Path(getattr(sys.modules[module], "__file__", None) or "")
    if path.suffix != ".py":
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    body = classes[0].body if classes else []
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _is_same(field: shapes.Field, other: shapes.Field) -> bool:
    is_like = (field.name, field.required) == (other.name, other.required)
    return is_like and _without_null(field.type) == _without_null(other.type)


def _without_null(kind: shapes.Type) -> Sequence[shapes.Type]:
    kinds = kind.types if isinstance(kind, shapes.UnionType) else (kind,)
    return [each for each in kinds if not isinstance(each, shapes.NoneType)]


if __name__ == "__main__":
    PAGE.write_text(render(OPERATIONS.values()), encoding="utf-8")
    print(f"wrote {PAGE.name}")
