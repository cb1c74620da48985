"""A member of a group as a program of its own, so that it can be killed.

    python member_program.py ADDRESS GROUP MEMBER TOPIC NOTES WAY

What it does stands in NOTES, one line each, written before it does the next thing:

    joined STATE            it is a member: active or standby
    got OFFSET ATTEMPT      a message was delivered; written before its ack is sent
    done OFFSET             its ack was confirmed

WAY is `batches`, `each` (acks one by one, many at a time), or `hold` (takes and never answers).
A line without its end was being written when the kill came: what follows it was not done.
"""

import asyncio
import os
import sys
from collections.abc import Sequence

import onward
from onward.client.consumer import Consumer
from onward.client.delivery import Delivery
from onward.errors import LeaseLost, OutcomeUnknown

BATCH_MAX = 200
TAKEN_MAX = 50
WORK_S = 0.01
"""How long messages are worked on before their ack: mostly a kill comes while some are held."""


class Notes:
    """A file that keeps what was noted, whenever the kill comes."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, lines: Sequence[str]) -> None:
        rest = memoryview("".join([f"{line}\n" for line in lines]).encode())
        while rest:
            rest = rest[os.write(self._file, rest) :]


def got(deliveries: Sequence[Delivery]) -> list[str]:
    return [f"got {one.offset} {one.attempt}" for one in deliveries]


async def work_in_batches(consumer: Consumer, notes: Notes) -> None:
    async for batch in consumer.batches():
        deliveries = list(batch.messages())
        notes.write(got(deliveries))
        await asyncio.sleep(WORK_S)
        try:
            await batch.ack()
        except (LeaseLost, OutcomeUnknown):
            continue  # the broker died: what was not acked comes again
        notes.write([f"done {one.offset}" for one in deliveries])


async def work_on_each(consumer: Consumer, notes: Notes) -> None:
    while deliveries := await consumer.take(TAKEN_MAX):
        notes.write(got(deliveries))
        await asyncio.sleep(WORK_S)
        answers = await asyncio.gather(*[one.ack() for one in deliveries], return_exceptions=True)
        for one, answer in zip(deliveries, answers, strict=True):
            if answer is None:
                notes.write([f"done {one.offset}"])
            elif not isinstance(answer, LeaseLost | OutcomeUnknown):
                raise answer


async def hold(consumer: Consumer, notes: Notes) -> None:
    held: list[Delivery] = []
    while deliveries := await consumer.take(TAKEN_MAX):
        notes.write(got(deliveries))
        held += deliveries


WAYS = {"batches": work_in_batches, "each": work_on_each, "hold": hold}


async def main(address: str, group: str, member: str, topic: str, path: str, way: str) -> None:
    notes = Notes(path)
    credit = BATCH_MAX if way == "batches" else TAKEN_MAX
    async with onward.connect(address, name=member, timeout="60s") as mq:
        consumer = mq.consume(topic, group=group, member=member, credit=credit)
        await consumer.join()
        notes.write([f"joined {'standby' if consumer.is_standby else 'active'}"])
        await WAYS[way](consumer, notes)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
