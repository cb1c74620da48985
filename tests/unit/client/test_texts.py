"""Texts that UTF-8 cannot express, and texts over the limits, are refused by every call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

import onward
from onward.client.message_parts import HEADER_VALUE_BYTES_MAX, HEADERS_BYTES_MAX
from onward.errors import InvalidName, InvalidRequest
from onward.testing.kit import kit

LONE = "ab\udc80"
LONG = "k" * 32_768

CALLS: dict[str, tuple[str, Callable[[onward.Client], Any]]] = {
    "publish key": ("key", lambda mq: mq.publish("t", "x", key=LONE)),
    "publish tag": ("tag", lambda mq: mq.publish("t", "x", tag=["a", LONE])),
    "publish trace_id": ("trace_id", lambda mq: mq.publish("t", "x", trace_id=LONE)),
    "publish tenant": ("tenant", lambda mq: mq.publish("t", "x", tenant=LONE)),
    "publish header name": ("header", lambda mq: mq.publish("t", "x", headers={LONE: "a"})),
    "publish header value": ("header 'a'", lambda mq: mq.publish("t", "x", headers={"a": LONE})),
    "publish unique": ("unique", lambda mq: mq.publish("t", "x", delay="1h", unique=LONE)),
    "publish delayed": ("key", lambda mq: mq.publish("t", "x", delay="1h", key=LONE)),
    "publish_many keys": ("key", lambda mq: mq.publish_many("t", ["x", "y"], keys=["ü", LONE])),
    "publish_many tags": ("tag", lambda mq: mq.publish_many("t", ["x"], tags=[LONE])),
    "publish_many tenants": ("tenant", lambda mq: mq.publish_many("t", ["x"], tenants=[LONE])),
    "publish_many trace_ids": (
        "trace_id", lambda mq: mq.publish_many("t", ["x"], trace_ids=[LONE]),
    ),
    "publish_many headers": (
        "header 'a'", lambda mq: mq.publish_many("t", ["x"], headers=[{"a": LONE}]),
    ),
    "publish_many header names": (
        "header", lambda mq: mq.publish_many("t", ["x", "y"], headers=[None, {LONE: "a"}]),
    ),
    "publish_many uniques": (
        "unique", lambda mq: mq.publish_many("t", ["x"], delay="1h", uniques=[LONE]),
    ),
    "cancel_scheduled": ("unique", lambda mq: mq.cancel_scheduled(unique=["a", LONE])),
    "cancel_scheduled cause": ("cause", lambda mq: mq.cancel_scheduled([1], cause=LONE)),
    "reschedule": ("unique", lambda mq: mq.reschedule(unique=LONE, delay="1h")),
    "scheduled": ("unique", lambda mq: mq.scheduled(unique=LONE)),
    "set_recurring name": ("name", lambda mq: mq.set_recurring(LONE, "t", "x", every="1h")),
    "set_recurring key": ("key", lambda mq: mq.set_recurring("n", "t", "x", every="1h", key=LONE)),
    "set_recurring tag": ("tag", lambda mq: mq.set_recurring("n", "t", "x", every="1h", tag=LONE)),
    "set_recurring headers": (
        "header 'a'",
        lambda mq: mq.set_recurring("n", "t", "x", every="1h", headers={"a": LONE}),
    ),
    "pause_recurring": ("name", lambda mq: mq.pause_recurring(LONE)),
    "create_topic": ("retention_group", lambda mq: mq.create_topic("t", retention_group=LONE)),
    "topics": ("prefix", lambda mq: mq.topics(prefix=LONE)),
    "create_group tags": ("tags", lambda mq: mq.create_group("g", "t", tags=["a", LONE])),
    "create_group headers": ("headers", lambda mq: mq.create_group("g", "t", headers={"a": LONE})),
    "create_group tenants": ("tenants", lambda mq: mq.create_group("g", "t", tenants={LONE: 2})),
    "find key": ("key", lambda mq: mq.find("t", key=LONE)),
    "find trace_id": ("trace_id", lambda mq: mq.find("t", trace_id=LONE)),
    "find text": ("text", lambda mq: mq.find("t", text=LONE)),
    "find header name": ("header", lambda mq: mq.find("t", headers={LONE: "a"})),
    "find header value": ("header 'a'", lambda mq: mq.find("t", headers={"a": LONE})),
    "dead_letters": ("text", lambda mq: anext(mq.dead_letters("g", text=LONE))),
    "redrive": ("text", lambda mq: mq.redrive("g", text=LONE)),
    "redrive offsets": ("text", lambda mq: mq.redrive("g", topic="t", offsets=[0], text=LONE)),
    "purge": ("text", lambda mq: mq.purge("g", text=LONE, dry_run=True)),
    "hold_group": ("holder", lambda mq: mq.hold_group("g", holder=LONE)),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
async def test_a_lone_surrogate_is_refused_and_the_field_is_named(call: str) -> None:
    field, made = CALLS[call]
    async with onward.connect("memory:", timeout="5s") as mq:
        with pytest.raises(InvalidRequest, match=rf"{field}.*(lone surrogate|not valid Unicode)"):
            await made(mq)
        assert not await mq.has_topic("t") or (await mq.topic("t")).messages == 0


async def test_a_lone_surrogate_is_refused_in_publish_soon_and_in_consume() -> None:
    async with onward.connect("memory:", timeout="5s") as mq:
        with pytest.raises(InvalidRequest, match="key"):
            mq.publish_soon("t", "x", key=LONE)
        with pytest.raises(InvalidRequest, match="tags"):
            mq.consume("t", group="g", tags=LONE)
        for wrong in ("topic", "group", "member"):
            names = {"group": "g", "member": "m"} | {wrong: LONE}
            topic = names.pop("topic", "t")
            with pytest.raises(InvalidName, match=wrong):
                mq.consume(topic, **names)  # type: ignore[arg-type]


async def test_a_cause_with_a_lone_surrogate_is_refused_and_settles_nothing() -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda held: held.reject(LONE),
        lambda held: held.retry(cause=LONE),
        lambda held: held.reject_soon(LONE),
        lambda held: held.retry_soon(cause=LONE),
    ]
    async with onward.connect("memory:", timeout="5s") as mq:
        await mq.publish("t", "x")
        async with mq.consume("t", group="g") as consumer:
            (delivery,) = await consumer.fetch(1, wait="5s")
            for settle in calls:
                for held in (delivery, delivery.batch):
                    with pytest.raises(InvalidRequest, match="cause is not valid Unicode"):
                        await settle(held)
            await delivery.reject("late")
        assert [letter.cause async for letter in mq.dead_letters("g")] == ["late"]


def test_the_blocking_delivery_refuses_a_cause_with_a_lone_surrogate() -> None:
    with onward.connect_sync("memory:", timeout="5s") as mq:
        mq.publish("t", "x")
        with mq.consume("t", group="g") as consumer:
            (delivery,) = consumer.fetch(1, wait="5s")
            with pytest.raises(InvalidRequest, match="cause is not valid Unicode"):
                delivery.reject(LONE)
            with pytest.raises(InvalidRequest, match="cause is not valid Unicode"):
                delivery.reject_soon(LONE).result(5)
            delivery.ack()
        with pytest.raises(InvalidRequest, match="text is not valid Unicode"):
            list(mq.dead_letters("g", text=LONE))


@pytest.mark.parametrize("error", [ValueError(LONE), onward.Reject(LONE)])
async def test_an_exception_with_a_lone_surrogate_is_a_cause_that_shows_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The log has the exception as it is, and a report of pytest-xdist cannot carry that.
    monkeypatch.setattr(logging.getLogger("onward.app"), "disabled", True)
    app = onward.App("nowhere:1")

    @app.consumer("t", group="g", retry="none")
    async def fail(body: str) -> None:
        raise error

    async with kit(app) as k:
        assert (await k.deliver("t", "x")).did == "dead"
        (letter,) = await k.dead()
        assert letter.cause.endswith(r"ab\udc80")


@pytest.mark.parametrize("field", ["name", "token"])
def test_a_client_is_not_made_with_a_lone_surrogate(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        onward.connect("memory:", **{field: LONE})  # type: ignore[arg-type]


def test_the_blocking_client_refuses_a_lone_surrogate() -> None:
    with onward.connect_sync("memory:", timeout="5s") as mq:
        with pytest.raises(InvalidRequest, match="key"):
            mq.publish("t", "x", key=LONE)
        with pytest.raises(InvalidRequest, match="tenant"):
            mq.publish_soon("t", "x", tenant=LONE).result()


@pytest.mark.parametrize("headers", [[("a", "b")], "a=b", {"a": 1}, {1: "a"}, {"a": None}])
async def test_headers_that_are_none_are_refused(headers: Any) -> None:
    async with onward.connect("memory:", timeout="5s") as mq:
        with pytest.raises(InvalidRequest, match="header"):
            await mq.publish("t", "x", headers=headers)
        with pytest.raises(InvalidRequest, match="header"):
            await mq.publish_many("t", ["x"], headers=[headers])


async def test_a_column_with_a_wrong_value_says_where_it_is_and_what_is_wanted() -> None:
    wrong: list[tuple[str, list[Any], str]] = [
        (
            "headers",
            [None, [("a", "b")]],
            r"headers holds a list \(at \[1\]\): .* a dict of text to",
        ),
        ("keys", ["a", 7], r"keys holds a int \(at \[1\]\): each of them is text, or None"),
        ("priorities", ["1", 2], r"priorities holds a str \(at \[0\]\): .* from 0 to 255"),
    ]
    async with onward.connect("memory:", timeout="5s") as mq:
        for name, column, told in wrong:
            with pytest.raises(InvalidRequest, match=told):
                await mq.publish_many("t", ["x", "y"], **{name: column})  # type: ignore[call-overload]


# --- limits: those of publish are those of publish_many ----------------------------------------

COLUMNS = {"key": "keys", "tag": "tags", "trace_id": "trace_ids", "tenant": "tenants"}
OVER: list[tuple[dict[str, Any], str]] = [
    ({"a": "v" * (HEADER_VALUE_BYTES_MAX + 1)}, "header 'a' has 65537 characters; 65536"),
    ({"a": b"v" * (HEADER_VALUE_BYTES_MAX + 1)}, "header 'a' has 65537 bytes; 65536"),
    ({"a": "ü" * (HEADER_VALUE_BYTES_MAX // 2 + 1)}, "header 'a' has 65538 bytes; 65536"),
    ({str(n): "v" * 50_000 for n in range(6)}, f"300006 bytes; {HEADERS_BYTES_MAX}"),
    ({LONG: "v"}, "name of a header has 32768 characters; 32767"),
]


@pytest.mark.parametrize("field", COLUMNS)
async def test_a_text_over_the_limit_is_refused_alone_and_in_a_batch(field: str) -> None:
    async with onward.connect("memory:", timeout="5s") as mq:
        with pytest.raises(InvalidRequest, match=f"{field} has 32768 characters; 32767"):
            await mq.publish("t", "x", **{field: LONG})  # type: ignore[call-overload]
        with pytest.raises(InvalidRequest, match=f"{field} has 32768 characters; 32767"):
            await mq.publish_many("t", ["x", "y", "z"], **{COLUMNS[field]: ["a", None, LONG]})  # type: ignore[call-overload]
        most = "k" * 32_767
        await mq.publish_many("t", ["x", "y"], **{COLUMNS[field]: [most, None]})  # type: ignore[call-overload]


@pytest.mark.parametrize("length", [513, 32_768])
async def test_a_business_key_over_the_limit_is_told_the_limit(length: int) -> None:
    unique = "u" * length
    calls: list[Callable[[onward.Client], Any]] = [
        lambda mq: mq.publish("t", "x", delay="1h", unique=unique),
        lambda mq: mq.publish_many("t", ["x", "y"], delay="1h", uniques=[None, unique]),
        lambda mq: mq.cancel_scheduled(unique=unique),
        lambda mq: mq.reschedule(unique=unique, delay="1h"),
        lambda mq: mq.scheduled(unique=unique),
    ]
    async with onward.connect("memory:", timeout="5s") as mq:
        for call in calls:
            with pytest.raises(InvalidRequest, match=f"unique has {length} characters; 512 are"):
                await call(mq)
        await mq.publish("t", "x", delay="1h", unique="u" * 512)


@pytest.mark.parametrize(("headers", "told"), OVER, ids=[told for _, told in OVER])
async def test_headers_over_a_limit_are_refused_alone_and_in_a_batch(
    headers: dict[str, Any], told: str
) -> None:
    async with onward.connect("memory:", timeout="5s") as mq:
        with pytest.raises(InvalidRequest, match=told):
            await mq.publish("t", "x", headers=headers)
        with pytest.raises(InvalidRequest, match=told):
            await mq.publish_many("t", ["x", "y"], headers=[None, headers])


async def test_headers_at_the_limits_are_stored() -> None:
    most = {str(n): "v" * (HEADER_VALUE_BYTES_MAX - 1) for n in range(4)}
    async with onward.connect("memory:") as mq:
        await mq.publish("t", "x", headers=most)
        await mq.publish_many("t", ["x"], headers=[most])
        assert [one.headers async for one in mq.read("t")] == [most, most]


async def test_a_priority_that_is_none_is_refused_alone_and_in_a_batch() -> None:
    async with onward.connect("memory:", timeout="5s") as mq:
        for wrong in (256, -1, True, "1"):
            with pytest.raises(InvalidRequest, match="priorit"):
                await mq.publish("t", "x", priority=wrong)  # type: ignore[call-overload]
            with pytest.raises(InvalidRequest, match="priorit"):
                await mq.publish_many("t", ["x"], priorities=[wrong])  # type: ignore[call-overload]
