"""Onward: a message platform on one durable log per node.

This module is the public surface: at most 20 names, each of them documented in
docs/reference/python.md. Everything else in the package may change between releases.

>>> import asyncio
>>> async def main() -> bytes:
...     async with connect("memory:") as mq:
...         await mq.publish("orders", {"id": 7}, key="7")
...         async for message in mq.read("orders"):
...             return message.body
>>> asyncio.run(main())
b'{"id":7}'
"""

from onward.client.client import Client, connect
from onward.client.receipt import BatchReceipt, Receipt
from onward.client.sync import SyncClient, connect_sync
from onward.client.topics import TopicInfo
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
from onward.version import __version__



__all__ = [
    "BatchReceipt",
    "Client",
    "Conflict",
    "Corruption",
    "InvalidRequest",
    "Message",
    "OnwardError",
    "OutcomeUnknown",
    "ProtocolError",
    "Receipt",
    "SyncClient",
    "TopicInfo",
    "Unavailable",
    "__version__",
    "connect",
    "connect_sync",
]
