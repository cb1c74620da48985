"""The options of the source, read once: what is wrong is said before anything is read.

    which messages   topic (a name or several, with commas) | topicPattern
    from where       startingOffsets (earliest, latest, group, JSON) | startingTimestamp
    to where         endingOffsets (latest, group, JSON) | endingTimestamp        (batch only)
    how              group, columns, minPartitions, maxRowsPerPartition
                     maxRowsPerTrigger, maxBytesPerTrigger                        (stream only)
    what is gone     onDataLoss (fail, skip, lake) | failOnDataLoss, lake
    bodies           bodySchema (DDL), badBodies (fail, null)
    measuring        arrow=false: rows one by one, as a source without Arrow would   (batch only)
    the broker       servers, token, timeout

The names that Kafka's connector has for the same things are understood as well: KAFKA_NAMES.
Spark's options do not care about upper and lower case; an option that does not exist is an error,
for the one that was meant would silently be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from typing import Literal

from onward.clock import SystemClock
from onward.durations import parse_instant_ms, parse_size_bytes
from onward.errors import InvalidRequest
from onward.message.names import check_topic_name
from onward.pipeline.place import Place, place_of
from onward.pipeline.schema import MESSAGE_COLUMNS

OPTION_NAMES = (
    *("servers", "token", "timeout", "topic", "topicPattern", "path", "group", "columns"),
    *("startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp"),
    *("maxRowsPerTrigger", "maxBytesPerTrigger", "minPartitions", "maxRowsPerPartition"),
    *("onDataLoss", "failOnDataLoss", "lake", "bodySchema", "badBodies", "arrow"),
)
KAFKA_NAMES = {
    "kafka.bootstrap.servers": "servers",
    "subscribe": "topic",
    "subscribePattern": "topicPattern",
    "maxOffsetsPerTrigger": "maxRowsPerTrigger",
    "maxRecordsPerPartition": "maxRowsPerPartition",
}
"""Names of options that mean one of ours, for programs that come from Kafka's connector."""
HEADERS = "includeHeaders"
"""Kafka's word for whether there is a column `headers`; here there is, unless it says no."""
EARLIEST, LATEST = -2, -1
"""In offsets of topics these numbers mean the ends of the topic, as in other systems."""

_BY_LOWER = {name.lower(): name for name in OPTION_NAMES}
_OTHERS = {name.lower(): ours for name, ours in KAFKA_NAMES.items()} | {HEADERS.lower(): HEADERS}
_OFFSET_MAX = 2**63 - 1

Loss = Literal["fail", "skip", "lake"]


@dataclass(frozen=True)
class Bound:
    """Where reading begins or ends: a word, offsets by topic, one offset for one topic, or a time.

    >>> Bound(word="earliest").time_ms is None
    True
    """

    word: Literal["", "earliest", "latest", "group"] = ""
    offsets: Mapping[str, int] = field(default_factory=dict)
    time_ms: int | None = None


@dataclass(frozen=True)
class SourceOptions:
    """What is to be read, and how."""

    place: Place
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    start: Bound | None = None
    end: Bound | None = None
    group: str | None = None
    columns: tuple[str, ...] | None = None
    rows_per_trigger: int | None = None
    bytes_per_trigger: int | None = None
    partitions_min: int | None = None
    rows_per_partition: int | None = None
    on_loss: Loss = "fail"
    lake: str | None = None
    body_schema: str | None = None
    bad_bodies: Literal["fail", "null"] = "fail"
    is_arrow: bool = True


def source_options(options: Mapping[str, str]) -> SourceOptions:
    """Return what options mean, or raise what is wrong with them.

    >>> source_options({"topic": "orders,refunds", "startingOffsets": "latest"}).topics
    ('orders', 'refunds')
    >>> source_options({"topic": "orders", "startOffset": "7"})
    Traceback (most recent call last):
    onward.errors.InvalidRequest: there is no option 'startOffset'; did you mean 'startingOffsets'?
    """
    given = _known(options)
    topics, pattern = _topics(given)
    group = given.get("group")
    return SourceOptions(
        place=place_of(given),
        topics=topics,
        pattern=pattern,
        start=_bound(given, "starting", ("earliest", "latest", "group"), topics, group),
        end=_bound(given, "ending", ("latest", "group"), topics, group),
        group=group,
        columns=_columns(given),
        rows_per_trigger=_count(given, "maxRowsPerTrigger"),
        bytes_per_trigger=_size(given, "maxBytesPerTrigger"),
        partitions_min=_count(given, "minPartitions"),
        rows_per_partition=_count(given, "maxRowsPerPartition"),
        on_loss=_loss(given),
        lake=given.get("lake"),
        body_schema=given.get("bodySchema"),
        bad_bodies="null" if _choice(given, "badBodies", ("fail", "null")) == "null" else "fail",
        is_arrow=_choice(given, "arrow", ("true", "false")) != "false",
    )


def spark_options(options: Mapping[str, object]) -> dict[str, str]:
    """Return options as Spark wants them: names in its own spelling, values as text.

    >>> spark_options({"starting_offsets": {"orders": 7}, "min_partitions": 4, "lake": None})
    {'startingOffsets': '{"orders": 7}', 'minPartitions': '4'}
    >>> spark_options({"min_parts": 4})
    Traceback (most recent call last):
    onward.errors.InvalidRequest: there is no option 'min_parts'; did you mean 'min_partitions'?
    """
    for name in options:
        # Spark would hand the name on in lower case: here it is still as it was written.
        if _camel(name).lower() not in _BY_LOWER | _OTHERS:
            raise InvalidRequest(_unknown(name, _snake))
    return {
        _camel(name): _text(value) for name, value in options.items() if value is not None
    }  # fmt: skip


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _snake(name: str) -> str:
    return re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    if isinstance(value, datetime):
        return value.astimezone().isoformat()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)


# --- one option after another ----------------------------------------------------------------


def _known(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options in their own spelling; empty ones are as good as none."""
    given: dict[str, str] = {}
    for name, value in options.items():
        known = _BY_LOWER.get(name.lower()) or _OTHERS.get(name.lower())
        if known is None:
            raise InvalidRequest(_unknown(name))
        if text := str(value).strip():
            if known in given:
                raise InvalidRequest(f"option {known!r} is given twice, by two of its names")
            given[known] = text
    return given


def _columns(given: Mapping[str, str]) -> tuple[str, ...] | None:
    named = _names(given, "columns")
    if named is None and _choice(given, HEADERS, ("true", "false")) == "false":
        return tuple(name for name in MESSAGE_COLUMNS if name != "headers")
    return named


def _unknown(name: str, spelled: Callable[[str], str] = str) -> str:
    close = get_close_matches(_camel(name).lower(), _BY_LOWER, n=1, cutoff=0.5)
    known = [spelled(one) for one in OPTION_NAMES]
    hint = f"did you mean {spelled(_BY_LOWER[close[0]])!r}?" if close else _listed(known)
    return f"there is no option {name!r}; {hint}"


def _listed(names: Sequence[str]) -> str:
    return f"there are: {', '.join(names)}"


def _topics(given: Mapping[str, str]) -> tuple[tuple[str, ...], str | None]:
    # `.load("orders")` arrives as the option `path`.
    ways = [name for name in ("topic", "path", "topicPattern") if name in given]
    if not ways:
        raise InvalidRequest("give the option 'topic' (a name or several) or 'topicPattern'")
    if len(ways) > 1:
        raise InvalidRequest(f"topics are named once, not by {' and '.join(map(repr, ways))}")
    if ways == ["topicPattern"]:
        try:
            re.compile(given["topicPattern"])
        except re.error as error:
            raise InvalidRequest(
                f"option 'topicPattern' is no regular expression: {error}"
            ) from None
        return (), given["topicPattern"]
    names = _names(given, ways[0]) or ()
    for name in names:
        check_topic_name(name, system=True)
    return tuple(dict.fromkeys(names)), None


def _names(given: Mapping[str, str], option: str) -> tuple[str, ...] | None:
    if option not in given:
        return None
    names = tuple(name.strip() for name in given[option].split(","))
    if not all(names):
        raise InvalidRequest(f"option {option!r} has an empty name in {given[option]!r}")
    return names


def _bound(
    given: Mapping[str, str], side: str, words: Sequence[str], topics: Sequence[str],
    group: str | None,
) -> Bound | None:  # fmt: skip
    by_offset, by_time = f"{side}Offsets", f"{side}Timestamp"
    if by_offset in given and by_time in given:
        raise InvalidRequest(f"give {by_offset!r} or {by_time!r}, not both")
    if by_time in given:
        now_ms = SystemClock().now_ms()
        return Bound(time_ms=parse_instant_ms(given[by_time], now_ms=now_ms))
    if by_offset not in given:
        return None
    text = given[by_offset]
    if text.lower() in words:
        if text.lower() == "group" and group is None:
            raise InvalidRequest(f"{by_offset}=group needs the option 'group'")
        return Bound(word=text.lower())  # type: ignore[arg-type]  # one of `words`
    return Bound(offsets=_offsets(by_offset, text, words, topics))


def _offsets(
    option: str, text: str, words: Sequence[str], topics: Sequence[str]
) -> dict[str, int]:  # fmt: skip
    wrong = InvalidRequest(
        f"option {option!r} is {', '.join(words)} or JSON such as "
        f'{{"orders": 12, "refunds": "latest"}}, not {text[:80]!r}'
    )
    try:
        found = json.loads(text)
    except ValueError:
        raise wrong from None
    if type(found) is int and len(topics) == 1:
        found = {topics[0]: found}
    if not isinstance(found, dict):
        raise wrong
    for topic in found:
        if topics and topic not in topics:
            raise InvalidRequest(f"option {option!r} names topic {topic!r}, which is not read")
    return {topic: _offset(option, topic, _of_partition(value)) for topic, value in found.items()}


def _of_partition(value: object) -> object:
    """Return the offset in Kafka's spelling of a topic with one partition: {"0": 12}."""
    return value["0"] if isinstance(value, dict) and value.keys() == {"0"} else value


def _offset(option: str, topic: str, value: object) -> int:
    named = {"earliest": EARLIEST, "latest": LATEST}.get(value) if isinstance(value, str) else value
    if type(named) is not int or not EARLIEST <= named <= _OFFSET_MAX:
        raise InvalidRequest(
            f"option {option!r} of topic {topic!r} is an offset, 'earliest' or 'latest', "
            f"not {value!r}"
        )
    return named


def _count(given: Mapping[str, str], option: str) -> int | None:
    if option not in given:
        return None
    text = given[option].replace("_", "")
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:19]) <= 10**18:
        raise InvalidRequest(f"option {option!r} is a number from 1 on, not {given[option][:80]!r}")
    return int(text)


def _size(given: Mapping[str, str], option: str) -> int | None:
    if option not in given:
        return None
    try:
        size = parse_size_bytes(given[option])
    except InvalidRequest as error:
        raise InvalidRequest(f"option {option!r}: {error}") from None
    if not size:
        raise InvalidRequest(f"option {option!r} is at least one byte")
    return size


def _choice(given: Mapping[str, str], option: str, choices: Sequence[str]) -> str | None:
    chosen = given.get(option, "").lower()
    if chosen and chosen not in choices:
        listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise InvalidRequest(f"option {option!r} is {listed}, not {given[option][:80]!r}")
    return chosen or None


def _loss(given: Mapping[str, str]) -> Loss:
    chosen = _choice(given, "onDataLoss", ("fail", "skip", "lake"))
    fails = _choice(given, "failOnDataLoss", ("true", "false"))
    if chosen and fails:
        raise InvalidRequest("give 'onDataLoss' or 'failOnDataLoss', not both")
    if chosen == "lake" and "lake" not in given:
        raise InvalidRequest("onDataLoss=lake needs the option 'lake', the folder of the lake")
    if chosen == "skip" or fails == "false":
        return "skip"
    # Who names a lake wants what is gone to come from it, unless they say otherwise.
    return "lake" if chosen is None and fails is None and "lake" in given else _fail_or(chosen)


def _fail_or(chosen: str | None) -> Loss:
    return "lake" if chosen == "lake" else "fail"
