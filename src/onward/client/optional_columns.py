"""The optional columns of a batch that is being filled, one message after another.

A column exists from the first message on that has a value for it: what nobody uses costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

Headers = Mapping[str, str | bytes]


class Optional:
    """The optional columns of an open batch: lists that exist once somebody used them."""

    __slots__ = (
        "delays_ms", "due_at_ms", "headers", "keys", "priorities", "replaces", "tags", "tenants",
        "topics", "trace_ids", "uniques",
    )  # fmt: skip

    def __init__(self) -> None:
        self.keys: list[str | None] | None = None
        self.headers: list[Headers | None] | None = None
        self.tags: list[str | None] | None = None
        self.trace_ids: list[str | None] | None = None
        self.priorities: list[int | None] | None = None
        self.tenants: list[str | None] | None = None
        self.due_at_ms: list[int | None] | None = None
        self.delays_ms: list[int | None] | None = None
        self.topics: list[str | None] | None = None
        self.uniques: list[str | None] | None = None
        self.replaces: list[int | None] | None = None

    def set(self, name: str, number: int, value: object) -> None:
        """Set one value of the message with this number."""
        column = getattr(self, name)
        if column is None:
            column = []
            setattr(self, name, column)
        column.extend([None] * (number - len(column)))
        column.append(value)

    def remove(self, number: int) -> None:
        """Forget the values of the message with this number."""
        for name in self.__slots__:
            column = getattr(self, name)
            if column is not None:
                del column[number : number + 1]

    def columns(self, count: int) -> dict[str, list[object]]:
        """Return the columns that are used, each as long as the batch."""
        used = {}
        for name in self.__slots__:
            column = getattr(self, name)
            if column is not None:
                column.extend([None] * (count - len(column)))
                used[name] = column
        return used
