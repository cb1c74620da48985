"""Who may not do something is told so, and nothing happened; who may is served, also beside them.

A second policy, which denies by principal, action and name, stands in for scopes of tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest

from onward.broker import routes as routes_module
from onward.broker.broker import Broker
from onward.broker.permissions import Policy
from onward.broker.session import Session
from onward.errors import Forbidden, OnwardError
from onward.protocol.frames import Kind
from onward.protocol.operations.operation import Action, Resource
from onward.protocol.operations.topics import DescribeTopic
from onward.protocol.payloads import Published, decode_end, decode_error
from onward.settings import AuthSettings, Token
from onward.testing.clock import ManualClock

from .asking import Operator, until
from .speaking import Speaker, open_broker, settings_with, turns
from .waiting import HOUR_MS, Schedule

WRITE_ORDERS = "'bob' has no permission to write topic 'orders'"
READ_ORDERS = "'bob' has no permission to read topic 'orders'"
COLUMNS: list[dict[str, Any]] = [{}, {"keys": ["k"]}]


class Denying(Policy):
    """Denies what it is told to, and everything to those whom no token names."""

    def __init__(self) -> None:
        self.denied: set[tuple[str, Action, Resource, str]] = set()

    def deny(self, principal: str, action: Action, resource: Resource, name: str) -> None:
        self.denied.add((principal, action, resource, name))

    def allows(self, principal: str, action: Action, resource: Resource, name: str) -> bool:
        is_known = principal in ("ann", "bob")
        return is_known and (principal, action, resource, name) not in self.denied


class CountedSession(Session):
    """Counts what did not take the fast path."""

    received_count = 0

    def receive(self, received: bytes) -> None:
        self.received_count += 1
        super().receive(received)


@pytest.fixture
def policy() -> Denying:
    return Denying()


@pytest.fixture
async def broker(policy: Denying, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    tokens = tuple(Token(name, f"secret of {name}") for name in ("ann", "bob"))
    settings = settings_with(auth=AuthSettings(tokens=tokens))
    broker = await open_broker(settings=settings, policy=policy)
    monkeypatch.setattr(broker, "session", partial(CountedSession, broker))
    yield broker
    await broker.stop()


@pytest.fixture
async def ann(broker: Broker) -> Speaker:
    return await Speaker.to(broker, token="secret of ann")


@pytest.fixture
async def bob(broker: Broker) -> Speaker:
    return await Speaker.to(broker, token="secret of bob")


def session_of(broker: Broker, principal: str) -> CountedSession:
    (session,) = (session for session in broker.sessions if session.principal == principal)
    assert isinstance(session, CountedSession)
    return session


async def refusal(speaker: Speaker, request_id: int) -> str:
    """Return the text of the `Forbidden` that a request got. The connection goes on."""
    await until(lambda: speaker.of(request_id))
    ((kind, payload),) = speaker.of(request_id)
    assert kind == Kind.ERROR
    error = decode_error(payload)
    assert isinstance(error, Forbidden)
    ping = speaker.new_id()
    speaker.say(Kind.PING, ping)
    await until(lambda: speaker.of(ping))
    return str(error)


async def refused(operator: Operator, op: str, **fields: Any) -> str:
    return await refusal(operator.speaker, operator.say(op, **fields))


def say_consume(speaker: Speaker, group: str, *topics: str, **fields: Any) -> int:
    request_id = speaker.new_id()
    consume = {"group": group, "topics": topics, "credit": 10, **fields}
    speaker.say(Kind.CONSUME, request_id, msgspec.json.encode(consume))
    return request_id


async def join(speaker: Speaker, group: str, *topics: str, **fields: Any) -> int:
    """Become a member; return the id of the consumer."""
    request_id = say_consume(speaker, group, *topics, **fields)
    await until(lambda: speaker.of(request_id))
    assert [kind for kind, _ in speaker.of(request_id)] == [Kind.REPLY]
    return request_id


def message_count(broker: Broker, topic: str) -> int:
    return broker.catalogue.find(topic).next_offset


# --- publish ---------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", COLUMNS, ids=["plain", "keyed"])
async def test_who_may_not_write_a_topic_neither_creates_it_nor_stores_anything(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker, columns: dict[str, Any]
) -> None:
    policy.deny("bob", "write", "topic", "orders")
    assert await refusal(bob, bob.say_publish("orders", producer_id=7, **columns)) == WRITE_ORDERS
    assert "orders" not in broker.catalogue.by_name
    assert 7 not in broker.producers.windows
    assert isinstance(await ann.publish("orders", producer_id=8, **columns), Published)
    assert await refusal(bob, bob.say_publish("orders", producer_id=7, **columns)) == WRITE_ORDERS
    assert message_count(broker, "orders") == 1
    assert isinstance(await bob.publish("bills", producer_id=7, **columns), Published)


@pytest.mark.parametrize("columns", COLUMNS, ids=["plain", "keyed"])
async def test_a_route_that_one_principal_has_is_no_permission_for_another(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker, columns: dict[str, Any]
) -> None:
    policy.deny("bob", "write", "topic", "orders")
    for sequence in (1, 2):
        for speaker, producer_id, topic in ((ann, 7, "orders"), (bob, 8, "bills")):
            receipt = speaker.publish(topic, producer_id=producer_id, sequence=sequence, **columns)
            assert isinstance(await receipt, Published)
    by_name = {name: session_of(broker, name) for name in ("ann", "bob")}
    before = {name: session.received_count for name, session in by_name.items()}
    for sequence in range(3, 13):
        of_ann = ann.say_publish("orders", producer_id=7, sequence=sequence, **columns)
        of_bob = bob.say_publish("orders", producer_id=8, sequence=sequence, **columns)
        await turns()
        assert isinstance(ann.answer(of_ann), Published)
        assert bob.answer(of_bob) == "forbidden"
    # Those of ann took the fast path, each of bob's was checked.
    assert by_name["ann"].received_count == before["ann"]
    assert by_name["bob"].received_count == before["bob"] + 10
    assert message_count(broker, "orders") == 12
    assert isinstance(await bob.publish("bills", producer_id=8, sequence=13, **columns), Published)
    assert by_name["bob"].received_count == before["bob"] + 10


async def test_two_principals_who_may_publish_alternately_over_the_fast_path(
    broker: Broker, ann: Speaker, bob: Speaker
) -> None:
    speakers = {"ann": ann, "bob": bob}
    for number, speaker in enumerate(speakers.values()):
        await speaker.publish("orders", producer_id=7 + number, sequence=1)
    before = [session_of(broker, name).received_count for name in speakers]
    for sequence in range(2, 12):
        for number, speaker in enumerate(speakers.values()):
            receipt = await speaker.publish("orders", producer_id=7 + number, sequence=sequence)
            assert isinstance(receipt, Published)
    assert [session_of(broker, name).received_count for name in speakers] == before
    assert message_count(broker, "orders") == 22


async def test_a_permission_that_was_withdrawn_ends_the_routes_that_it_opened(
    broker: Broker, policy: Denying, bob: Speaker
) -> None:
    for sequence in (1, 2):
        await bob.publish("orders", producer_id=7, sequence=sequence)
    policy.deny("bob", "write", "topic", "orders")
    broker.publishing.routes.forget()
    request_id = bob.say_publish("orders", producer_id=7, sequence=3)
    assert await refusal(bob, request_id) == WRITE_ORDERS
    assert message_count(broker, "orders") == 2


async def test_a_repeat_of_what_was_stored_is_refused_like_everything_else(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker
) -> None:
    """The receipt would say where the message of somebody else is."""
    policy.deny("bob", "write", "topic", "orders")
    await ann.publish("orders", producer_id=7, sequence=1)
    assert await bob.publish("orders", producer_id=7, sequence=1) == "forbidden"


async def test_the_routes_of_all_principals_together_have_a_limit(
    broker: Broker, ann: Speaker, bob: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_module, "ROUTES_MAX", 10)
    routes = broker.publishing.routes
    counts = []
    for number in range(30):
        for speaker in (ann, bob):
            await speaker.publish(f"topic-{number}")
            counts.append(len(routes.of("ann")) + len(routes.of("bob")))
    assert max(counts) == 10
    assert routes.of("ann") is session_of(broker, "ann").routes


# --- read and consume ------------------------------------------------------------------------


async def test_who_may_not_read_a_topic_gets_nothing_of_it_and_does_not_create_it(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker
) -> None:
    policy.deny("bob", "read", "topic", "orders")
    assert await refusal(bob, bob.say_read("orders", follow=True)) == READ_ORDERS
    assert "orders" not in broker.catalogue.by_name
    await bob.publish("orders", [b"hello"])
    assert await refusal(bob, bob.say_read("orders")) == READ_ORDERS
    assert await ann.read("orders") == [b"hello"]
    await bob.publish("bills", [b"bill"])
    assert await bob.read("bills") == [b"bill"]


@pytest.mark.parametrize(
    ("resource", "name"), [("group", "billing"), ("topic", "orders"), ("topic", "bills")]
)
async def test_who_may_not_read_a_group_and_its_topics_is_no_member(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker, resource: Resource, name: str
) -> None:
    policy.deny("bob", "read", resource, name)
    text = f"'bob' has no permission to read {resource} {name!r}"
    assert await refusal(bob, say_consume(bob, "billing", "orders", "bills")) == text
    assert "billing" not in broker.consuming.groups.by_name
    assert not broker.catalogue.by_name.keys() & {"orders", "bills"}
    await join(ann, "billing", "orders", "bills")
    assert await refusal(bob, say_consume(bob, "billing", "orders", "bills")) == text
    assert len(broker.consuming.members_of("billing")) == 1


async def test_who_names_no_topics_must_be_allowed_to_read_all_of_the_group(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker
) -> None:
    policy.deny("bob", "read", "topic", "orders")
    await join(ann, "billing", "bills", "orders")
    assert await refusal(bob, say_consume(bob, "billing")) == READ_ORDERS
    assert len(broker.consuming.members_of("billing")) == 1


async def test_a_member_that_may_not_read_a_topic_that_its_group_gets_is_ended(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker
) -> None:
    policy.deny("bob", "read", "topic", "orders")
    await join(ann, "billing", "bills")
    of_bob, of_ann = await join(bob, "billing"), await join(ann, "billing")
    await Operator(ann).ask("group.change", group="billing", topics_add=["orders"])
    await ann.publish("orders", [b"secret"])
    await until(lambda: len(bob.of(of_bob)) == 2)
    kind, payload = bob.of(of_bob)[1]
    assert kind == Kind.END
    end = decode_end(payload)
    assert (end.code, end.message) == ("forbidden", READ_ORDERS)
    await until(lambda: Kind.DELIVERY in [kind for kind, _ in ann.of(of_ann)])
    assert len(bob.of(of_bob)) == 2


async def test_who_may_not_manage_a_group_does_not_change_it_by_joining(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker
) -> None:
    policy.deny("bob", "manage", "group", "billing")
    await join(ann, "billing", "orders")
    wish = {"lease_ms": 70_000}
    request_id = say_consume(bob, "billing", "orders", wish=wish, if_differs="apply")
    text = "'bob' has no permission to manage group 'billing'"
    assert await refusal(bob, request_id) == text
    assert broker.consuming.find("billing").record.lease_ms != 70_000
    await join(ann, "billing", "orders", wish=wish, if_differs="apply")
    assert broker.consuming.find("billing").record.lease_ms == 70_000


# --- the schedule ----------------------------------------------------------------------------


def schedule_of(broker: Broker, speaker: Speaker) -> Schedule:
    assert isinstance(broker.clock, ManualClock)
    return Schedule(broker, broker.clock, speaker)


async def test_who_may_not_write_a_topic_does_not_schedule_to_it(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker
) -> None:
    policy.deny("bob", "write", "topic", "orders")
    options: list[dict[str, Any]] = [
        {"due_at_ms": [HOUR_MS, HOUR_MS]},
        {"delays_ms": [5, 5]},
        {"delays_ms": [5, 5], "compression": "zstd"},
        {"delays_ms": [5, 5], "uniques": ["a", None]},
    ]
    for columns in options:
        topics = ["bills", "orders"]
        request_id = bob.say_publish("@schedule", [b"a", b"b"], topics=topics, **columns)
        assert await refusal(bob, request_id) == WRITE_ORDERS
    assert broker.catalogue.by_name == {}
    schedule = schedule_of(broker, ann)
    assert await schedule.add(5, topic="orders") == 0
    assert await schedule_of(broker, bob).add(5, topic="bills") == 1
    # The broker fires them by itself: nobody's permission is asked for then.
    policy.deny("ann", "write", "topic", "orders")
    await schedule.passes(5)
    assert schedule.numbers("orders") == [0]
    assert schedule.numbers("bills") == [1]


async def test_who_may_not_write_a_topic_does_not_move_or_replace_what_waits_for_it(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker
) -> None:
    policy.deny("bob", "write", "topic", "orders")
    of_ann, of_bob = schedule_of(broker, ann), schedule_of(broker, bob)
    await of_ann.add(50, topic="orders", uniques=["invoice"])
    at_ms = of_bob.clock.now_ms() + HOUR_MS
    for name in ({"id": 0}, {"unique": "invoice"}):
        assert await refused(Operator(bob), "schedule.move", **name, at_ms=at_ms) == WRITE_ORDERS
    request_id = of_bob.say([5], "bills", uniques=["invoice"], replaces=[-1])
    assert await refusal(bob, request_id) == WRITE_ORDERS
    assert (await of_ann.move(0, 60))["state"] == "moved"
    await of_ann.passes(59)
    assert of_ann.numbers("orders") == []
    await of_ann.passes(1)
    assert of_ann.numbers("orders") == [1]
    assert of_ann.numbers("bills") == []


# --- requests, copies, the broker itself -----------------------------------------------------


async def test_who_may_not_is_refused_by_each_request_and_who_may_is_answered(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker
) -> None:
    policy.deny("bob", "manage", "topic", "orders")
    policy.deny("bob", "read", "topic", "orders")
    policy.deny("bob", "read", "topic", "*")
    operator = Operator(bob)
    text = "'bob' has no permission to manage topic 'orders'"
    assert await refused(operator, "topic.create", topic="orders") == text
    assert "orders" not in broker.catalogue.by_name
    assert (await Operator(ann).ask("topic.create", topic="orders"))["topic"] == "orders"
    assert await refused(operator, "topic.describe", topic="orders") == READ_ORDERS
    assert await refused(operator, "status") == "'bob' has no permission to read all topics"
    assert (await operator.ask("topic.create", topic="bills"))["topic"] == "bills"


async def test_a_copy_is_published_with_the_permissions_of_who_asked_for_it(
    broker: Broker, policy: Denying, ann: Speaker, bob: Speaker
) -> None:
    policy.deny("bob", "write", "topic", "orders")
    await bob.publish("staged", [b"a"])
    await ann.publish("orders", [b"b"])
    copy = {"source": "staged", "offset": 0, "batches": 1, "target": "orders"}
    copy |= {"producer_id": 9, "sequence": 1}
    assert await refused(Operator(bob), "topic.copy", **copy) == WRITE_ORDERS
    assert message_count(broker, "orders") == 1
    assert (await Operator(ann).ask("topic.copy", **copy))["batches"] == 1
    assert message_count(broker, "orders") == 2


async def test_the_broker_itself_is_never_refused(broker: Broker, ann: Speaker) -> None:
    await ann.publish("orders")
    inside = broker.scheduling.inside
    assert not broker.policy.allows(inside.principal, "read", "topic", "orders")
    reply = await broker.operations.call(inside, DescribeTopic(topic="orders"))
    assert reply.next_offset == 1


async def test_a_client_without_a_token_is_no_broker() -> None:
    """Where no tokens are configured everybody is anonymous: the policy decides about them."""
    broker = await open_broker(policy=Denying())
    speaker = await Speaker.to(broker)
    text = "an anonymous client has no permission to write topic 'orders'"
    assert await refusal(speaker, speaker.say_publish("orders")) == text
    with pytest.raises(OnwardError, match="an anonymous client has no permission to read all"):
        await Operator(speaker).ask("status")
    await broker.stop()
