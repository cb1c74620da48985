"""A broker whose retention is wrong on purpose: the checker must notice it."""

from typing import Any

from onward.broker.broker import Broker


def carry_nothing(broker: Broker) -> None:
    """Drops retries and dead letters with their segments."""

    async def carry(*arguments: Any) -> None:
        pass

    broker.housekeeping._carry_over._carry = carry
