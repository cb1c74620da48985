"""Recurring schedules that an App declares next to its functions.

    at the start    not there ──▶ set · not as declared ──▶ set anew · as declared ──▶ left alone

The code decides what is published when; an operator decides whether: what is paused stays paused.
A schedule that was declared once and is not any more stays, because the broker does not know whose
it is: those that publish to a topic of this App are named in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from onward.client.bodies import encode_body
from onward.client.client import Client
from onward.client.message_parts import joined_tags, optional_parts
from onward.client.work import Work
from onward.durations import Duration, either_ms
from onward.errors import InvalidRequest
from onward.message.names import check_topic_name
from onward.protocol.operations.schedule import RecurringDescription

logger = logging.getLogger("onward.app")


class RecurringOptions(TypedDict, total=False):
    """The options of `App.recurring` that are those of `Client.set_recurring`."""

    cron: str | None
    zone: str
    every: Duration | None
    every_ms: int | None
    catch_up: Literal["one", "none"]
    key: str | None
    headers: Mapping[str, str] | None
    tag: str | Sequence[str] | None
    trace_id: str | None
    priority: int
    tenant: str | None


@dataclass(frozen=True)
class Declared:
    """A recurring schedule as the code wants it."""

    name: str
    topic: str
    body: object
    options: RecurringOptions

    def is_like(self, present: RecurringDescription) -> bool:
        """Return True if the schedule is as declared; whether it is paused does not count."""
        options = self.options
        headers = options.get("headers")
        wanted = RecurringDescription(
            name=self.name, topic=self.topic, body=encode_body(self.body), key=options.get("key"),
            headers=None if headers is None else dict(headers),
            tag=joined_tags(options.get("tag")), trace_id=options.get("trace_id"),
            priority=options.get("priority", 0), tenant=options.get("tenant"),
            cron=options.get("cron") or "", zone=options.get("zone", "UTC"),
            every_ms=_every_ms(options) or 0,
            catch_up=options.get("catch_up", "one"), start_ms=present.start_ms,
            paused=present.paused, next_at_ms=present.next_at_ms,
        )  # fmt: skip
        return wanted == present


def declared(
    name: str,
    topic: str | None,
    body: object,
    options: RecurringOptions,
    *,
    works: Sequence[Work],
    function: Callable[..., object] | None = None,
) -> Declared:
    """Return the declaration, checked as far as that is possible without a broker.

    Without a topic it is the one that the function consumes.
    """
    if (options.get("cron") is None) == (_every_ms(options) is None):
        raise InvalidRequest(f"recurring {name!r}: say when it comes: either cron or every")
    if topic is None:
        topics = [one for work in works if work.function is function for one in work.topics]
        if len(topics) != 1:
            raise InvalidRequest(
                f"recurring {name!r}: say the topic, or decorate a consumer of one topic "
                "(@app.recurring above @app.consumer)"
            )
        topic = topics[0]
    check_topic_name(topic)
    encode_body(body)
    optional_parts(
        options.get("key"), options.get("headers"), options.get("tag"), options.get("trace_id"),
        options.get("priority", 0), options.get("tenant"),
    )  # fmt: skip
    return Declared(name, topic, body, options)


def _every_ms(options: RecurringOptions) -> int | None:
    return either_ms("every", options.get("every"), options.get("every_ms"))


async def set_declared(
    client: Client, declarations: Sequence[Declared], *, works: Sequence[Work]
) -> None:
    """Set the recurring schedules that are not as declared, and name those that are left over."""
    if not declarations:
        return
    present = {one.name: one for one in await client.recurring()}
    for one in declarations:
        known = present.pop(one.name, None)
        if known is not None and one.is_like(known):
            continue
        paused = known is not None and known.paused
        await client.set_recurring(one.name, one.topic, one.body, paused=paused, **one.options)
        did = "set" if known is None else "changed"
        logger.info("recurring schedule %r %s%s", one.name, did, ": it is paused" * paused)
    topics = {topic for work in works for topic in work.topics}
    for left in present.values():
        if left.topic in topics:
            logger.info(
                "recurring schedule %r publishes to %r, which this app consumes, and is not "
                "declared in it; if it is no longer wanted: onward recurring delete %s",
                left.name, left.topic, left.name,
            )  # fmt: skip
