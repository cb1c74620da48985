"""What a message carries beside its body: keys, headers, tags and the like, checked.

They are checked where they are given: messages of several callers share a batch, and what is wrong
with one of them must be said to who gave it, before it is in there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from onward.errors import InvalidRequest
from onward.message.headers import HEADERS_MAX
from onward.message.texts import UNIQUE_CHARACTERS_MAX, check_text, check_texts, is_unicode

Tags = str | Sequence[str] | None
Headers = Mapping[str, str | bytes]

HEADER_VALUE_BYTES_MAX = 64 << 10
HEADERS_BYTES_MAX = 256 << 10
"""All names and values of one message together."""

_FIELDS = {"keys": "key", "tags": "tag", "trace_ids": "trace_id", "tenants": "tenant"}


_COLUMNS: dict[str, tuple[type, str]] = {
    "headers": (Mapping, "a dict of text to text or bytes"),
    "priorities": (int, "a number from 0 to 255"),
}
"""Columns that hold something else than text."""


def optional_parts(
    key: str | None, headers: Headers | None, tag: Tags,
    trace_id: str | None, priority: int | None, tenant: str | None,
) -> dict[str, object]:  # fmt: skip
    """Return what a message carries beside its body, checked: a batch is shared with others.

    >>> optional_parts("7", None, ["a", "b"], None, None, None)
    {'keys': '7', 'tags': 'a,b'}
    """
    tags = joined_tags(tag)
    texts = (("keys", key), ("tags", tags), ("trace_ids", trace_id), ("tenants", tenant))
    optional: dict[str, object] = {}
    for name, text in texts:
        if text is not None:
            optional[name] = check_text(_FIELDS[name], text)
    if headers:
        check_headers([headers])
        # A copy: it waits in the batch, and who gave it may use it for the next message.
        optional["headers"] = dict(headers)
    if priority is not None:
        if type(priority) is not int or not 0 <= priority <= 255:
            raise InvalidRequest(f"a priority is a number from 0 to 255, not {priority!r}")
        optional["priorities"] = priority
    return optional


def joined_tags(tag: Tags) -> str | None:
    """Return one or several tags as they travel.

    >>> joined_tags(["vip", "eu"])
    'vip,eu'
    """
    if tag is None or isinstance(tag, str):
        return tag
    try:
        return ",".join(tag)
    except TypeError:
        raise InvalidRequest(f"a tag is text, or several texts, not {tag!r}") from None


def check_column(name: str, column: Sequence[object], *, count: int) -> None:
    """Refuse a column of the wrong length, or with values that `publish` would refuse.

    >>> check_column("keys", ["a"], count=2)
    Traceback (most recent call last):
    onward.errors.InvalidRequest: keys has 1 values for 2 bodies
    """
    if len(column) != count:
        raise InvalidRequest(f"{name} has {len(column)} values for {count} bodies")
    wanted, described = _COLUMNS.get(name, (str, "text"))
    kinds = set(map(type, column)) - {type(None)}
    for kind in kinds:
        if not issubclass(kind, wanted) or kind is bool:
            place = [type(value) for value in column].index(kind)
            raise InvalidRequest(
                f"{name} holds a {kind.__name__} (at [{place}]): each of them is {described}, "
                "or None"
            )
    values: list[Any] = list(column)
    if None in values:
        values = [value for value in values if value is not None]
    if name == "headers":
        check_headers(values)
    elif name == "uniques":
        check_texts("unique", values, characters_max=UNIQUE_CHARACTERS_MAX)
    elif name != "priorities":
        check_texts(_FIELDS[name], values)


def check_headers(several: Sequence[Headers]) -> None:
    """Refuse headers that are no mapping of text to text or bytes, or over a limit.

    >>> check_headers([{"a": "b"}, {"c": b"d"}])
    """
    for one in several:
        if not isinstance(one, Mapping):
            raise InvalidRequest(
                f"headers are a dict of text to text or bytes, not a {type(one).__name__}"
            )
        if len(one) > HEADERS_MAX:
            raise InvalidRequest(f"a message has at most {HEADERS_MAX} headers, not {len(one)}")
    names = list(chain.from_iterable(several))
    values = list(chain.from_iterable([one.values() for one in several]))
    is_text = set(map(type, names)) <= {str}
    if not (is_text and all(issubclass(kind, _VALUES) for kind in set(map(type, values)))):
        raise InvalidRequest("headers have text as names, and text or bytes as values")
    check_texts("name of a header", names)
    # Far below the limits nothing is measured; UTF-8 has at most 4 bytes for a character.
    longest = 4 * max(map(len, chain(names, values)), default=0)
    most = 2 * longest * max(map(len, several), default=0)
    is_small = longest <= HEADER_VALUE_BYTES_MAX and most <= HEADERS_BYTES_MAX
    if not (is_small and _are_unicode(values)):
        for one in several:
            _check_values(one)


_VALUES = (str, bytes, bytearray, memoryview)


def _are_unicode(values: Sequence[str | bytes]) -> bool:
    texts = "".join([value for value in values if isinstance(value, str)])
    return texts.isascii() or is_unicode(texts)


def _check_values(headers: Headers) -> None:
    """Check the values of one message one by one, so that the error names the header."""
    total = sum([len(name.encode()) for name in headers])
    for name, value in headers.items():
        field = f"header {name[:40]!a}"
        if isinstance(value, str):
            value = check_text(field, value, characters_max=HEADER_VALUE_BYTES_MAX).encode()
        size = len(value)
        if size > HEADER_VALUE_BYTES_MAX:
            raise InvalidRequest(f"{field} has {size} bytes; {HEADER_VALUE_BYTES_MAX} are the most")
        total += size
    if total > HEADERS_BYTES_MAX:
        raise InvalidRequest(
            f"the headers of a message have {total} bytes; {HEADERS_BYTES_MAX} are the most"
        )
