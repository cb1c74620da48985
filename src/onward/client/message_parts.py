"""What a message carries beside its body: keys, headers, tags and the like, checked.

They are checked where they are given: messages of several callers share a batch, and what is wrong
with one of them must be said to who gave it, before it is in there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onward.errors import InvalidRequest
from onward.message.headers import encode_headers

Tags = str | Sequence[str] | None


def optional_parts(
    key: str | None, headers: Mapping[str, str | bytes] | None, tag: Tags,
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
            _check_text(name, text)
            optional[name] = text
    if headers:
        encode_headers(headers)
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
    """Refuse a column of the wrong length or with values of the wrong type.

    >>> check_column("keys", ["a"], count=2)
    Traceback (most recent call last):
    onward.errors.InvalidRequest: keys has 1 values for 2 bodies
    """
    if len(column) != count:
        raise InvalidRequest(f"{name} has {len(column)} values for {count} bodies")
    wanted = {"headers": Mapping, "priorities": int}.get(name, str)
    for kind in set(map(type, column)) - {type(None)}:
        if not issubclass(kind, wanted):
            raise InvalidRequest(f"{name} holds a {kind.__name__}")


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name.removesuffix('s')} is text, not {type(text).__name__}")
    if len(text) > 32_767:
        raise InvalidRequest(
            f"{name.removesuffix('s')} has {len(text)} characters; 32767 are the most"
        )
