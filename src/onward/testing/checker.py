"""Says what is wrong with a history. It knows nothing of the broker, only what clients saw.

It is given the history and the drains: all messages of each topic, read at the end, when everything
works again. What it promises about the broker, if it finds nothing:

    I1    every acked message is in the drain, at the offset of its receipt, with its bytes
    I2    nothing was ever read that was not attempted
    I3    nothing is stored twice; what was refused is not stored at all
    I4    an offset is one message, for all readers at all times; offsets have no holes
    I5    messages of one producer are in the order of its calls
    I13   everybody got an answer
    G1... what groups promise: see `group_checker`
    R1... what retention leaves to them: see `retention_checker`

Topics that lose messages on purpose (see `history`) are held to what is left of these promises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from onward.message.message import Message
from onward.testing.group_checker import check_groups
from onward.testing.history import Attempt, History, Reading, id_of, kind_of
from onward.testing.retention_checker import check_retention

Drains = dict[str, list[Message]]


def check(history: History, drains: Drains) -> list[str]:
    """Return all violations, as sentences; an empty list when all is well."""
    return [
        *_everyone_was_answered(history),
        *_only_attempts_are_read(history, drains),
        *_an_offset_is_one_message(history, drains),
        *_readings_have_no_holes(history),
        *_readings_begin_where_asked(history, drains),
        *_nothing_is_stored_twice(history, drains),
        *_drains_are_in_order(history, drains),
        *_acked_messages_are_there(history, drains),
        *check_groups(history.groups, drains),
        *check_retention(history, drains),
    ]


def _everyone_was_answered(history: History) -> Iterator[str]:
    for attempt in history.attempts.values():
        if attempt.outcome == "pending":
            yield f"I13: the publish of {attempt.id} to {attempt.topic!r} was never answered"


def _only_attempts_are_read(history: History, drains: Drains) -> Iterator[str]:
    for who, message in _all_messages(history, drains):
        attempt = history.attempts.get(id_of(message))
        if attempt is None or not _is_copy(message, attempt):
            yield f"I2: {who} read {message.id} {message.body[:40]!r}, which nobody published"


def _is_copy(message: Message, attempt: Attempt) -> bool:
    said = (attempt.topic, attempt.body, attempt.key, attempt.tag, attempt.priority or 0)
    return said == (message.topic, message.body, message.key, message.tag, message.priority)


def _an_offset_is_one_message(history: History, drains: Drains) -> Iterator[str]:
    """A name that was used again begins again at offset 0; its event ids do not repeat."""
    first: dict[tuple[str, int, int], tuple[str, int, str]] = {}
    for who, message in _all_messages(history, drains):
        kind = kind_of(message.topic)
        if kind == "volatile":
            continue
        place = message.topic, message.offset, message.event_id if kind == "brief" else 0
        name = id_of(message)
        known = first.setdefault(place, (name, message.event_id, who))
        if known[:2] != (name, message.event_id):
            yield (
                f"I4: {message.id} is {known[0]} (event {known[1]}) for {known[2]} and "
                f"{name} (event {message.event_id}) for {who}"
            )


def _readings_have_no_holes(history: History) -> Iterator[str]:
    for reading in history.readings:
        if kind_of(reading.topic) != "kept":
            continue
        for before, after in pairwise(reading.messages):
            if after.offset != before.offset + 1:
                yield f"I4: {reading.reader} read {after.id} right after {before.id}"
            if after.event_id < before.event_id:
                yield f"I4: {reading.reader} saw event ids go back at {after.id}"


def _readings_begin_where_asked(history: History, drains: Drains) -> Iterator[str]:
    for reading in history.readings:
        if kind_of(reading.topic) == "kept" and reading.messages and reading.start != "latest":
            first = reading.messages[0]
            drain = drains.get(reading.topic, [])
            before = drain[first.offset - 1] if 0 < first.offset <= len(drain) else None
            if not _begins_well(reading, first, before):
                yield (
                    f"I4: {reading.reader} asked for {reading.topic!r} from {reading.start} "
                    f"{reading.value} and got {first.id}, event {first.event_id}, "
                    f"published at {first.published_at_ms}"
                )


def _begins_well(reading: Reading, first: Message, before: Message | None) -> bool:
    match reading.start:
        case "earliest":
            return first.offset == 0
        case "offset":
            return first.offset == reading.value
        case "time":
            return before is None or before.published_at_ms < reading.value
        case "event_id":
            return first.event_id > reading.value and (
                before is None or before.event_id <= reading.value
            )
    return True


def _nothing_is_stored_twice(history: History, drains: Drains) -> Iterator[str]:
    places: dict[str, set[tuple[int, int]]] = {}
    for _, message in _all_messages(history, drains):
        attempt = history.attempts.get(id_of(message))
        if attempt is not None and kind_of(message.topic) != "volatile":
            places.setdefault(attempt.id, set()).add((message.offset, message.event_id))
    for name, found in places.items():
        attempt = history.attempts[name]
        if len(found) > 1:
            yield f"I3: {name} is stored {len(found)} times in {attempt.topic!r}: {sorted(found)}"
        if attempt.outcome == "refused":
            yield f"I3: {name} was refused ({attempt.error}) and stored in {attempt.topic!r}"


def _drains_are_in_order(history: History, drains: Drains) -> Iterator[str]:
    for topic, messages in drains.items():
        last: dict[int, Attempt] = {}
        if kind_of(topic) == "kept" and messages and messages[0].offset != 0:
            yield f"I4: {topic!r} begins at offset {messages[0].offset}"
        for before, after in pairwise(messages):
            if after.offset != before.offset + 1 or after.event_id < before.event_id:
                yield f"I4: in the drain {after.id} follows {before.id}"
        for message in messages:
            attempt = history.attempts.get(id_of(message))
            if attempt is None or kind_of(topic) == "volatile":
                continue
            earlier = last.setdefault(attempt.producer, attempt)
            if earlier.number > attempt.number:
                yield f"I5: {attempt.id} ({message.id}) is stored after {earlier.id}"
            last[attempt.producer] = attempt


def _acked_messages_are_there(history: History, drains: Drains) -> Iterator[str]:
    for attempt in history.attempts.values():
        kind = kind_of(attempt.topic)
        if attempt.outcome != "acked" or kind == "volatile":
            continue
        drain = drains.get(attempt.topic, [])
        if kind != "kept" and (not drain or attempt.event_id < drain[0].event_id):
            continue  # trimmed, or of a topic that is no more
        found = _at(drain, attempt.offset)
        if found is None:
            yield f"I1: {attempt.id} was acked at {attempt.topic}/{attempt.offset} and is lost"
        elif (id_of(found), found.event_id) != (attempt.id, attempt.event_id):
            yield (
                f"I1: {attempt.id} was acked as {found.id}, event {attempt.event_id}, where "
                f"{id_of(found)}, event {found.event_id}, is now"
            )


def _at(drain: Sequence[Message], offset: int) -> Message | None:
    place = offset - drain[0].offset if drain else -1
    return drain[place] if 0 <= place < len(drain) else None


def _all_messages(history: History, drains: Drains) -> Iterator[tuple[str, Message]]:
    for reading in history.readings:
        for message in reading.messages:
            yield reading.reader, message
    for handed in history.groups.handed:
        yield handed.stint.machine, handed.message
    for group, dead in history.groups.dead.items():
        for buried in dead.values():
            if buried.message is not None:
                yield f"the list of dead letters of {group!r}", buried.message
    for messages in drains.values():
        for message in messages:
            yield "the drain", message
