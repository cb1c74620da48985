"""Which messages a group wants: by tag and by header.

    tags_any   at least one of these is among the message's tags
    tags_all   all of these are
    headers    each of these headers is there and equal

All three must hold; what is empty asks nothing. `FilterWish` is some of them, as somebody asks for
them: the rest of a group's filter stays as it is.

A message's tags are one text, joined with commas; a header's value is text or bytes, and bytes are
compared as UTF-8. Columns come in, one answer for each message goes out: a group without a filter
never looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from onward.delivery.retry import check_types
from onward.errors import InvalidRequest

TAGS_MAX: Final = 100
HEADERS_MAX: Final = 20
TEXT_CHARACTERS_MAX: Final = 256

Headers = Mapping[str, str | bytes]


class Filter(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a group asks of a message.

    >>> Filter(tags_any=("eu", "us")).matches(["eu,paid", "asia", None], None, count=3)
    [True, False, False]
    """

    tags_any: tuple[str, ...] = ()
    tags_all: tuple[str, ...] = ()
    headers: dict[str, str] = {}

    @property
    def needs_tags(self) -> bool:
        """Tell whether the tags must be read."""
        return bool(self.tags_any or self.tags_all)

    @property
    def needs_headers(self) -> bool:
        """Tell whether the headers must be read."""
        return bool(self.headers)

    def __bool__(self) -> bool:
        return self.needs_tags or self.needs_headers

    def check(self) -> Filter:
        """Return the filter when it makes sense, else raise `InvalidRequest` with what does not.

        >>> Filter(tags_any=("a,b",)).check()
        Traceback (most recent call last):
        onward.errors.InvalidRequest: filter: tag 'a,b' has a comma: give two tags
        """
        check_types(self, "filter")
        tags = (*self.tags_any, *self.tags_all)
        if len(tags) > TAGS_MAX:
            raise InvalidRequest(f"filter: at most {TAGS_MAX} tags, not {len(tags)}")
        if len(self.headers) > HEADERS_MAX:
            raise InvalidRequest(f"filter: at most {HEADERS_MAX} headers, not {len(self.headers)}")
        for text in (*tags, *self.headers, *self.headers.values()):
            if len(text) > TEXT_CHARACTERS_MAX:
                raise InvalidRequest(
                    f"filter: a text has at most {TEXT_CHARACTERS_MAX} characters, not {len(text)}"
                )
        for tag in tags:
            if not tag:
                raise InvalidRequest("filter: a tag has at least one character")
            if "," in tag:
                raise InvalidRequest(f"filter: tag {tag!r} has a comma: give two tags")
        return self

    def matches(
        self,
        tags: Sequence[str | None] | None,
        headers: Sequence[Headers | None] | None,
        *,
        count: int,
    ) -> list[bool]:
        """Tell for each of `count` messages whether the group wants it.

        A column that is None says that no message has tags (or headers).
        """
        wanted = self._by_tags(tags, count)
        if not self.headers:
            return wanted
        if headers is None:
            return [False] * count
        expected = [(name, text, text.encode()) for name, text in self.headers.items()]
        return [
            yes and one is not None and all(one.get(name) in pair for name, *pair in expected)
            for yes, one in zip(wanted, headers, strict=True)
        ]

    def _by_tags(self, tags: Sequence[str | None] | None, count: int) -> list[bool]:
        if not self.needs_tags:
            return [True] * count
        if tags is None:
            return [False] * count
        # A topic has few different tags: each is looked at once.
        known = {tag: self._wants_tag(tag) for tag in set(tags)}
        return [known[tag] for tag in tags]

    def _wants_tag(self, tag: str | None) -> bool:
        tags = frozenset(tag.split(",")) if tag else frozenset()
        return (not self.tags_any or not tags.isdisjoint(self.tags_any)) and tags.issuperset(
            self.tags_all
        )


class FilterWish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of a filter that somebody asks for; None: whatever it is, empty: none of them.

    >>> FilterWish(tags_any=("eu",)).onto(Filter(headers={"kind": "paid"}))
    Filter(tags_any=('eu',), tags_all=(), headers={'kind': 'paid'})
    """

    tags_any: tuple[str, ...] | None = None
    tags_all: tuple[str, ...] | None = None
    headers: dict[str, str] | None = None

    def onto(self, chosen: Filter) -> Filter:
        """Return the filter with these parts in place of its own."""
        return Filter(
            tags_any=chosen.tags_any if self.tags_any is None else self.tags_any,
            tags_all=chosen.tags_all if self.tags_all is None else self.tags_all,
            headers=chosen.headers if self.headers is None else self.headers,
        )
