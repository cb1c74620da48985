"""What public calls return can be named, and tools that read annotations can read ours."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import onward
from onward import types
from onward.testing.kit import kit

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "python.md"
ROOTS = (onward.Client, onward.SyncClient, onward.App, kit)
OPENING = frozenset(("__aenter__", "__enter__", "__aiter__", "__iter__", "__getitem__"))
INTERNAL = {
    (onward.App, "running"): "the kit runs an App with it",
    (types.SyncDelivery, "calls"): "the way to the client's thread",
}
NAMES = {name: getattr(onward, name) for name in onward.__all__}
NAMES |= {f"types.{name}": getattr(types, name) for name in types.__all__}
CLASSES = {name: kind for name, kind in NAMES.items() if inspect.isclass(kind)}


def functions(kind: type) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield the public functions and properties of a class."""
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if inspect.isfunction(member) and (not name.startswith("_") or name in OPENING):
            yield name, member


def classes_in(hint: object) -> Iterator[type]:
    """Yield the classes of Onward that an annotation names, however deep."""
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        if hint.__module__.startswith("onward."):
            yield hint
        return
    for part in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from classes_in(part)


def returned_by(kind: type) -> Iterator[tuple[str, type]]:
    """Yield the classes that attributes have and calls return, with their names."""
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if name[0] != "_"}
    for name, function in functions(kind):
        hints[name] = typing.get_type_hints(function).get("return")
    for name, hint in hints.items():
        if (kind, name) not in INTERNAL:
            for found in classes_in(hint):
                yield f"{kind.__name__}.{name}", found


def all_returned() -> dict[type, str]:
    """Return every class that can be reached from the roots, with the call that returns it."""
    found: dict[type, str] = {}
    left = list(ROOTS)
    while left:
        for name, kind in returned_by(left.pop()):
            if kind not in found:
                found[kind] = name
                left.append(kind)
    return found


def test_everything_that_a_public_call_returns_has_a_public_name() -> None:
    found = all_returned()
    assert {types.ScheduledReceipt, types.SyncDelivery, types.GroupLife, types.Outcome} <= set(
        found
    )
    public = {*CLASSES.values(), *ROOTS}
    assert {name: kind for kind, name in found.items() if kind not in public} == {}


def test_every_public_type_is_in_the_reference() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in types.__all__ if not re.search(rf"`{name}\b", text)] == []


def test_a_name_that_is_no_type_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"onward\.types.*'Nothing'"):
        _ = types.Nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(NAMES.keys() - {"__version__"}))
def test_help_is_there_for_every_public_name(name: str) -> None:
    assert pydoc.render_doc(NAMES[name])


def test_help_is_there_for_the_package() -> None:
    assert "connect(" in pydoc.render_doc(onward)
    assert "ScheduledReceipt" in pydoc.render_doc(types)


@pytest.mark.parametrize("name", CLASSES)
def test_signatures_and_annotations_of_every_public_class_can_be_read(name: str) -> None:
    kind = CLASSES[name]
    assert inspect.signature(kind) is not None
    typing.get_type_hints(kind)
    for _, function in functions(kind):
        typing.get_type_hints(function)
        inspect.signature(function, eval_str=True)


@pytest.mark.parametrize(
    "module", ["delivery", "delivery_batch", "scheduled", "schedule_calls", "sync_delivery"]
)
def test_each_client_module_can_be_the_first_that_is_imported(module: str) -> None:
    code = f"import onward.client.{module}, typing, onward; typing.get_type_hints(onward.Delivery)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_types_starts_no_broker() -> None:
    code = "import sys, onward.types; sys.exit('onward.broker.broker' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
