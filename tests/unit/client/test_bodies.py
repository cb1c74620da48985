"""Bodies: bytes stay, text is UTF-8, the rest is JSON."""

import datetime
import math
import re
from dataclasses import dataclass

import msgspec
import pytest

import onward
from onward.client.bodies import encode_bodies, encode_body
from onward.client.signature import converter
from onward.errors import InvalidRequest
from onward.testing.kit import kit


@dataclass
class Reading:
    degrees: float


@pytest.mark.parametrize(
    ("body", "encoded"),
    [
        (b"raw", b"raw"),
        (bytearray(b"raw"), b"raw"),
        (memoryview(b"raw"), b"raw"),
        ("grüße", "grüße".encode()),
        ("", b""),
        ({"id": 7}, b'{"id":7}'),
        ([1, None, True], b"[1,null,true]"),
        (7, b"7"),
        (None, b"null"),
        (datetime.date(2026, 1, 1), b'"2026-01-01"'),
        ({datetime.date(2026, 1, 1): None}, b'{"2026-01-01":null}'),
        ([None, msgspec.Raw(b"[null]")], b"[null,[null]]"),
    ],
)
def test_a_body_becomes_bytes(body: object, encoded: bytes) -> None:
    assert encode_body(body) == encoded
    assert encode_bodies([b"first", body]) == [b"first", encoded]


def test_bytes_are_not_copied() -> None:
    body = b"raw"
    assert encode_body(body) is body


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_not_is_refused_wherever_it_is(number: float) -> None:
    for body, place in (
        (number, "$"), ({"a": number}, "$.a"), ([None, {"a": (1, number)}], "$[1].a[1]"),
        (Reading(number), "$.degrees"),
    ):  # fmt: skip
        told = re.escape(f"cannot hold {number} (at {place}): JSON has no such number")
        with pytest.raises(InvalidRequest, match=told):
            encode_body(body)


@pytest.mark.parametrize("body", [object(), {"a": object()}, {1j: 2}, "\ud800"])
def test_what_json_cannot_say_is_refused(body: object) -> None:
    with pytest.raises(InvalidRequest, match="a body is"):
        encode_body(body)


def test_a_value_that_json_cannot_express_is_named_with_its_place() -> None:
    for body, place in (
        (object(), "$"), ({"a": object()}, "$.a"), (["unencodable", {"b": (1, {3: {2j}})}], ""),
        ([Point(1), {"b": (1, object())}], "$[1].b[1]"), (Holder(object()), "$.value"),
    ):  # fmt: skip
        told = "'object' cannot be encoded as JSON" + re.escape(f" (at {place})")
        with pytest.raises(InvalidRequest, match=told if place else "a body is"):
            encode_body(body)


# --- what a function may take can be published -------------------------------------------------


class Point(msgspec.Struct):
    x: int
    note: str | None = None


@dataclass
class Holder:
    value: object


def pydantic_models() -> tuple[type, type]:
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

    class Order(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        id: int
        at: datetime.datetime | None = None
        net: float = pydantic.Field(1.5, alias="netAmount")

    @pydantic.dataclasses.dataclass
    class Line:
        weight: float = pydantic.Field(alias="w")

    return Order, Line


def test_a_dataclass_and_a_struct_come_back_as_they_were() -> None:
    for body in (Reading(1.5), Point(7), [Point(1), Point(2, "b")]):
        kind = list[Point] if isinstance(body, list) else type(body)
        assert converter(kind, owner="test")(encode_body(body)) == body


def test_a_pydantic_model_comes_back_as_it_was_alone_and_inside_of_others() -> None:
    order_type, line_type = pydantic_models()
    order, line = (
        order_type(id=7, at=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), netAmount=2.5),
        line_type(w=3.5),
    )
    for body, kind in ((order, order_type), ([order, order], list[order_type]), (line, line_type)):  # type: ignore[valid-type]
        assert converter(kind, owner="test")(encode_body(body)) == body
    assert msgspec.json.decode(encode_body({"order": order}))["order"]["netAmount"] == 2.5


def test_a_number_that_json_has_not_is_found_in_a_pydantic_model() -> None:
    order_type, _ = pydantic_models()
    with pytest.raises(InvalidRequest, match=r"cannot hold inf \(at \$\.order\.netAmount\)"):
        encode_body({"order": order_type(id=7, netAmount=math.inf)})


async def test_every_way_to_publish_takes_a_pydantic_model() -> None:
    order_type, _ = pydantic_models()
    order, body = order_type(id=7), encode_body(order_type(id=7))
    async with onward.connect("memory:") as mq:
        await mq.publish("orders", order)
        await mq.publish_soon("orders", order)
        await mq.publish_many("orders", [order, b"raw"])
        await mq.set_recurring("tick", "orders", order, every="1h")
        scheduled = await mq.publish("orders", order, delay="1h")
        found = [message.body async for message in mq.read("orders")]
        assert found == [body, body, body, b"raw"]
        assert (await scheduled.status()).body == body


def test_the_blocking_client_and_the_kit_take_a_pydantic_model() -> None:
    order_type, _ = pydantic_models()
    app, taken = onward.App(), []

    async def charge(order: order_type) -> None:  # type: ignore[valid-type]
        taken.append(order)

    charge.__annotations__["order"] = order_type
    app.consumer("orders", group="billing")(charge)
    with kit(app) as k:
        assert k.deliver("orders", order_type(id=1)).did == "acked"
        k.mq.publish_soon("orders", order_type(id=2)).result()
        k.idle()
    assert [order.id for order in taken] == [1, 2]
