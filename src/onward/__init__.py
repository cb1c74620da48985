"""Onward: a message platform on one durable log per node.

This module is the public surface: at most 20 names, each of them documented in
docs/reference/python.md. Everything else in the package may change between releases.

>>> import asyncio, onward
>>> async def main() -> bytes:
...     async with onward.connect("memory:") as mq:
...         await mq.publish("orders", {"id": 7}, key="7")
...         async for message in mq.read("orders"):
...             return message.body
>>> asyncio.run(main())
b'{"id":7}'
"""

from typing import TYPE_CHECKING

from onward.version import __version__

if TYPE_CHECKING:
    from onward.client.app import App
    from onward.client.client import Client, connect
    from onward.client.delivery import Delivery
    from onward.client.outcome import Reject, Retry
    from onward.client.receipt import BatchReceipt, Receipt
    from onward.client.sync import SyncClient, connect_sync
    from onward.errors import (
        Conflict,
        Corruption,
        InvalidRequest,
        OnwardError,
        OutcomeUnknown,
        ProtocolError,
        Unavailable,
    )
    from onward.message.message import Message
    from onward.protocol.operations.topics import TopicDescription

__all__ = [
    "App",
    "BatchReceipt",
    "Client",
    "Conflict",
    "Corruption",
    "Delivery",
    "InvalidRequest",
    "Message",
    "OnwardError",
    "OutcomeUnknown",
    "ProtocolError",
    "Receipt",
    "Reject",
    "Retry",
    "SyncClient",
    "TopicDescription",
    "Unavailable",
    "__version__",
    "connect",
    "connect_sync",
]

# Where each name lives. They are imported when they are first used: a broker needs no client, and
# `onward --help` needs neither.
_HOMES = {
    "onward.client.app": ("App",),
    "onward.client.client": ("Client", "connect"),
    "onward.client.delivery": ("Delivery",),
    "onward.client.outcome": ("Reject", "Retry"),
    "onward.client.receipt": ("BatchReceipt", "Receipt"),
    "onward.client.sync": ("SyncClient", "connect_sync"),
    "onward.errors": (
        *("Conflict", "Corruption", "InvalidRequest", "OnwardError", "OutcomeUnknown"),
        *("ProtocolError", "Unavailable"),
    ),
    "onward.message.message": ("Message",),
    "onward.protocol.operations.topics": ("TopicDescription",),
}


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            value: object = getattr(import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'onward' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
