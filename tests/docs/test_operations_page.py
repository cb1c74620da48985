"""The page of operations is what the table gives; protocol.md has no second copy of it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pytest

from onward.protocol.frames import Kind
from onward.protocol.operations import OPERATIONS
from onward.protocol.operations.operation import (
    ADMIN,
    Operation,
    Permission,
    Request,
    manage_group,
    manage_topic,
    read_topic,
)

from .examples import ROOT
from .operations_page import COMMAND, PAGE, Undocumented, render

PROTOCOL = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
REQUESTS = PROTOCOL.partition("\n## Requests\n")[2].partition("\n## Errors\n")[0]


def test_the_page_is_what_the_table_gives():
    written = PAGE.read_text(encoding="utf-8")
    assert written == render(OPERATIONS.values()), f"{PAGE.name} is out of date: run `{COMMAND}`"


def test_every_heading_of_the_page_has_an_anchor_of_its_own():
    headings = re.findall(r"^#+ (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = Counter(re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    assert not [anchor for anchor, count in anchors.items() if count > 1]


def test_an_operation_of_the_table_has_no_row_by_hand():
    by_hand = re.findall(r"^\| ([a-z]+\.[a-z_]+|status) \|", REQUESTS, re.MULTILINE)
    doubled = sorted(OPERATIONS.keys() & set(by_hand))
    assert not doubled, f"these are in {PAGE.name}: delete their rows in protocol.md: {doubled}"


# --- how a declaration is rendered ---------------------------------------------------------------


class Place(NamedTuple):
    """A place in a topic."""

    topic: str
    offset: int


class Choice(msgspec.Struct, tag_field="kind", tag="fixed"):
    """A choice."""

    delay_ms: Annotated[int, msgspec.Meta(gt=0)] = 5
    """How long it waits."""


class Moved(msgspec.Struct):
    """The reply of an operation.

    >>> Moved(places=[]).places
    []
    """

    places: list[Place]
    found: msgspec.Raw = msgspec.Raw(b"null")


class Move(Request[Moved], frozen=True, tag="made.up"):
    """Move something.

    A second paragraph.
    """

    topics: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1_000)]
    """The topics
    that are moved."""
    ends: dict[str, Annotated[int, msgspec.Meta(ge=-1)]] = msgspec.field(default_factory=dict)
    group: Annotated[str, msgspec.Meta(max_length=128)] = ""
    to: Literal["earliest", "latest"] | Choice | None = None
    number: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | msgspec.UnsetType = msgspec.UNSET
    body: bytes = b"a|b"
    rate: float = msgspec.field(default=1.5, name="key_rate")


class MoveBack(Request[Moved], frozen=True, tag="made.back"):
    """Move something back."""

    topics: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1_000)]
    ends: dict[str, int] = msgspec.field(default_factory=dict)


def made_up(request: type[msgspec.Struct] = Move, **others: Any) -> Operation:
    given: dict[str, Any] = {
        "name": str(request.__struct_config__.tag), "request": request, "reply": Moved,
        "needs": (manage_topic("topics"), manage_group("group"), ADMIN), "changes": True,
        "while_full": False, "any_role": False, "is_repeatable": False, "running_max": 7,
        "example": {"topics": ["orders"]},
    }  # fmt: skip
    return Operation(**(given | others))


def section(page: str, heading: str) -> str:
    return page.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]


def test_fields_have_type_limits_default_and_meaning():
    rows = section(render([made_up()]), "made.up").splitlines()
    assert "Move something." in rows
    assert "A second paragraph." in rows
    for row in (
        "| `topics` | list of texts, 1 to 1,000 items | required | The topics that are moved. |",
        "| `ends` | object of integer, at least -1 | `{}` |  |",
        '| `group` | text, at most 128 characters | `""` |  |',
        '| `to` | `"earliest"`, `"latest"`, [Choice](#choice) or null | `null` |  |',
        "| `number` | integer, 0 to 2^63 - 1 | left out |  |",
        '| `body` | text, base64 | `"YXxi"` |  |',
        "| `key_rate` | number | `1.5` |  |",
    ):
        assert row in rows


def test_an_operation_has_its_permission_its_promises_and_an_example():
    rows = section(render([made_up()]), "made.up").splitlines()
    for row in (
        (
            "- Permission: manage each topic in `topics`; manage the group that `group` names, "
            "or all groups where it is empty; administer the node."
        ),
        "- Changes something: yes; refused while the disk is nearly full.",
        "- Repeated by clients: no.",
        "- At the same time: 7 on a node.",
        "- Reply: [Moved](#moved).",
        '{"op": "made.up", "topics": ["orders"]}',
    ):
        assert row in rows


def test_types_are_listed_once_with_those_that_they_consist_of():
    page = render([made_up(), made_up(MoveBack, needs=(read_topic(),))])
    assert page.count("\n### Moved\n") == page.count("\n### Place\n") == 1
    assert "| `places` | list of [Place](#place) |  |" in section(page, "Moved")
    assert ">>>" not in page
    assert "array" in section(page, "Place")
    assert '| `kind` | `"fixed"` | Names the type. |' in section(page, "Choice")
    assert "| `delay_ms` | integer, more than 0, default `5` | How long it waits. |" in page


def test_a_field_has_the_text_of_the_same_field_of_another_request():
    back = section(render([made_up(), made_up(MoveBack, needs=(ADMIN,))]), "made.back")
    assert "| required | The topics that are moved. |" in back
    assert "| `ends` | object of integers | `{}` |  |" in back


def test_a_frame_of_its_own_is_linked_and_its_packed_payload_has_no_json():
    page = render([made_up(frame=Kind.PUBLISH), made_up(MoveBack, frame=Kind.READ, needs=(ADMIN,))])
    assert "## Frames of their own" in page
    assert "[PUBLISH](protocol.md#publish)" in page
    assert "```json" not in section(page, "made.up")
    assert '\n{"topics": ["orders"]}\n' in section(page, "made.back")


class Silent(Request[Moved], frozen=True, tag="made.silent"):
    group: str


@pytest.mark.parametrize(
    ("row", "lack"),
    [
        (made_up(Silent, needs=(ADMIN,)), "operation 'made.silent': Silent has no docstring"),
        (
            made_up(needs=(Permission("read", "topic", "topic"),)),
            "operation 'made.up': its permission names a field 'topic' that it does not have",
        ),
        (
            replace(made_up(), reply=set),
            "operation 'made.up': the page has no words for the type SetType",
        ),
    ],
    ids=["docstring", "permission", "type"],
)
def test_a_declaration_that_lacks_something_is_named(row: Operation, lack: str):
    with pytest.raises(Undocumented, match=re.escape(lack)):
        render([row])
