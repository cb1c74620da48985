"""Brokers that serve groups wrongly on purpose: the checker must notice each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from onward.broker.broker import Broker
from onward.broker.choosing import PlainSource
from onward.broker.crew import Crew
from onward.delivery.group import Groups
from onward.delivery.ranges import Range
from onward.protocol.deliveries import settled_frame


def confirm_too_early(broker: Broker) -> None:
    """Says that an outcome is durable when it is only on its way."""

    def answer(session: Any, request_id: int, refused: Any, **_: object) -> None:
        session.write(settled_frame(request_id, refused))

    broker.consuming.settling._answer = answer


def confirm_what_was_refused(broker: Broker) -> None:
    """Says that an outcome is durable that came after the end of its lease."""
    settling = broker.consuming.settling
    answer = settling._answer

    def answer_all(session: Any, request_id: int, refused: Any, *, has_rows: bool) -> None:
        answer(session, request_id, [], has_rows=has_rows)

    settling._answer = answer_all


def count_badly(broker: Broker) -> None:
    """Forgets to count every third retry."""
    settling = broker.consuming.settling
    row, numbers = settling._row, count(1)

    def uncounted(did: str, *arguments: Any, **named: Any) -> Any:
        if did == "retried" and next(numbers) % 3 == 0:
            named["attempt"] -= 1
        return row(did, *arguments, **named)

    settling._row = uncounted


def look_at_nothing(broker: Broker) -> None:
    """Hands out everything as it comes, whatever the group's filter and order are."""

    def plain(crew: Any, share: Any, topic: Any) -> PlainSource:
        return PlainSource(share, topic, is_exclusive=False)

    broker.consuming._source = plain


def hand_out_twice(broker: Broker) -> None:
    """Hands out every tenth message again while it is leased."""
    given: set[tuple[str, int]] = set()

    class Generous(PlainSource):
        def take(self, limit: int, **named: Any) -> list[Range]:
            ranges = super().take(limit, **named)
            for start, end in ranges:
                for offset in range(start, end):
                    if offset % 10 == 0 and (self.share.topic, offset) not in given:
                        given.add((self.share.topic, offset))
                        self.share.give_back([(offset, offset + 1)])
            return ranges

    def generous(crew: Any, share: Any, topic: Any) -> PlainSource:
        return Generous(share, topic, is_exclusive=False)

    broker.consuming._source = generous


def give_away_what_is_claimed(broker: Broker) -> None:
    """Hands out after a restart what members may re-claim, and lets them re-claim it as well."""
    for group in broker.consuming.groups.by_name.values():
        for share in group.shares.values():
            share.give_back(list(share.reserved))


def finish_for_the_dead(broker: Broker) -> None:
    """Takes what a member held when it died as done."""
    consuming = broker.consuming

    def lose_all(crew: Crew, leases: list[Any]) -> None:
        for lease in leases:
            timed = [(start, end, 0, 0) for start, end in lease.ranges]
            consuming.outcomes.ack(crew.group.record.name, lease.topic, lease.member, timed)

    assert callable(consuming.settling.lose_all)
    consuming.settling.lose_all = lose_all


def send_before_it_is_finished(broker: Broker) -> None:
    """Sends at most once before it is durable that it was sent."""
    consuming = broker.consuming

    class Hasty:
        """Outcomes that are durable at once."""

        def __getattr__(self, name: str) -> Any:
            return getattr(outcomes, name)

        def when_durable(self, done: Any) -> None:
            done(None)

    outcomes = consuming.outcomes
    finish = consuming._handing._finish_then_send

    def hasty(*arguments: Any, **named: Any) -> None:
        consuming.outcomes = Hasty()
        try:
            finish(*arguments, **named)
        finally:
            consuming.outcomes = outcomes

    consuming._handing._finish_then_send = hasty


@contextmanager
def everybody_active() -> Iterator[None]:
    """Lets no member of an exclusive group stand by."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Crew, "is_exclusive", property(lambda crew: False))
        yield


@contextmanager
def forgetful_checkpoints() -> Iterator[None]:
    """Writes checkpoints that do not say how often something failed."""
    save = Groups.save

    def save_little(groups: Groups) -> bytes:
        kept = {
            (name, topic): share.attempts
            for name, group in groups.by_name.items()
            for topic, share in group.shares.items()
        }
        for name, topic in kept:
            groups.by_name[name].shares[topic].attempts = {}
        saved = save(groups)
        for (name, topic), attempts in kept.items():
            groups.by_name[name].shares[topic].attempts = attempts
        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Groups, "save", save_little)
        yield


def count_what_was_fetched(broker: Broker) -> None:
    """Counts an attempt for everything that a member held when it died."""
    settling = broker.consuming.settling
    lose_all = settling.lose_all

    def lose_unstarted(crew: Crew, leases: list[Any]) -> None:
        for lease in leases:
            lease.start(0, 1 << 62, now_ms=0)
        lose_all(crew, leases)

    settling.lose_all = lose_unstarted


def deliver_suspects_with_others(broker: Broker) -> None:
    """Delivers a message with which a member died like any other one."""
    broker.consuming._suspects.set_apart = lambda crew, share, ranges: ranges


def blame_the_company(broker: Broker) -> None:
    """Makes dead letters of all messages that were started when a member died."""
    die = broker.consuming.settling._die
    broker.consuming.settling._die = lambda crew, lease, company: die(crew, lease, 1)


def count_past_the_policy(broker: Broker) -> None:
    """Delivers a message once more, as a further attempt, when its last attempt failed by death."""
    settling = broker.consuming.settling
    dead, row = settling._dead, settling._row

    def dead_unless_lost(crew: Crew, lease: Any, grant: Any, cause: str) -> Any:
        if "died with it" in cause:
            return row("lost", crew, lease, grant[1], attempt=grant[0], due_at_ms=0)
        return dead(crew, lease, grant, cause)

    settling._dead = dead_unless_lost
