"""A member whose loop is blocked: others get what it had, and it begins with nothing of that."""

import threading

import onward

from .conftest import MakeBroker
from .members import PATIENCE_S
from .running import BrokerProcess

KEYS = 4


class Bob(threading.Thread):
    """Another member, in a thread of its own: publishes more, and acks whatever it gets."""

    def __init__(self, broker: BrokerProcess, *, publishes: int, wanted: int) -> None:
        super().__init__()
        self._address = broker.address
        self._publishes = publishes
        self._wanted = wanted
        self.acked: set[str] = set()

    def run(self) -> None:
        with onward.connect_sync(self._address) as mq:
            # There is credit for these: they are sent to who does not listen.
            mq.publish_many("orders", ["more"] * self._publishes, keys=keys(self._publishes))
            with mq.consume("orders", group="billing") as consumer:
                while len(self.acked) < self._wanted:
                    for delivery in consumer.fetch(100, wait="30s"):
                        delivery.ack()
                        self.acked.add(delivery.id)
            mq.publish("orders", "last", key="k0")


def keys(count: int) -> list[str]:
    return [f"k{number % KEYS}" for number in range(count)]


async def test_a_member_that_was_blocked_begins_with_nothing_that_another_has_acked(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect() as mq:
        await mq.publish_many("orders", ["first"] * 10, keys=keys(10))
        begun: list[str] = []
        ann = mq.consume("orders", group="billing", mode="ordered", lease="1s", credit=20)
        async for delivery in ann:
            begun.append(delivery.text)
            if len(begun) > 1:
                break
            bob = Bob(broker, publishes=5, wanted=15)
            bob.start()
            bob.join(PATIENCE_S)  # which blocks the loop
            assert len(bob.acked) == 15
        assert begun == ["first", "last"]
