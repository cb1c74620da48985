"""One message as a user sees it: its body, its place in a topic, and what was said about it.

A message never changes. It is made from a batch when somebody asks for messages; code that only
moves bodies uses `Batch.bodies` and never makes one. The class is not tracked by the garbage
collector (`gc=False`), because it can hold no reference to itself and millions of them are made.
"""

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of a topic.

    >>> message = Message("orders", 7, b'{"id": 1}', tag="eu,paid")
    >>> message.id, message.tags, message.json()
    ('orders/7', ('eu', 'paid'), {'id': 1})
    """

    topic: str
    offset: int
    body: bytes
    published_at_ms: int = 0
    event_id: int = 0
    key: str | None = None
    headers: dict[str, str | bytes] | None = None
    tag: str | None = None
    trace_id: str | None = None
    due_at_ms: int | None = None
    priority: int = 0
    tenant: str | None = None
    schedule_id: int | None = None
    """The number under which it waited, if it was scheduled."""

    @property
    def id(self) -> str:
        """The name of this message for people: `topic/offset`."""
        return f"{self.topic}/{self.offset}"

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of this message, one by one."""
        return tuple(self.tag.split(",")) if self.tag else ()

    @property
    def text(self) -> str:
        """The body as text; `UnicodeDecodeError` when it is not utf-8."""
        return self.body.decode()

    def json(self) -> Any:
        """The body as the JSON value that it is; `ValueError` when it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"the body of {self.id} is not JSON: {error}") from None
