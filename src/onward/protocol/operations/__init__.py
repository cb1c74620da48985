"""The table of operations: everything that can be asked of a broker, declared once.

    topics        create, change, delete, describe, list
    groups        create, change, delete, describe, list, count, pause, members, hold
    group_moves   reset, skip, purge, advance, replay, fork, peek, positions
    dead_letters  list, redrive, purge
    messages      publish, read, consume; the state of one message in each group
    schedule      cancel, move, show, list, calendar, recurring schedules
    pipeline      wait for topics, entries, copies
    replicas      follow, promote, step down, snapshots
    status        the node itself

`operation.py` says what a declaration holds. A new operation is a class in one of these modules, a
handler in `broker/operations/`, and a method of the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Union

import msgspec

from onward.errors import InvalidRequest, ProtocolError
from onward.protocol.frames import Kind
from onward.protocol.operations import (
    dead_letters,
    group_moves,
    groups,
    messages,
    pipeline,
    replicas,
    schedule,
    status,
    topics,
)
from onward.protocol.operations.operation import OP, Operation, Request, declared, operation_of
from onward.protocol.payloads import decode_json, describe_mismatch

__all__ = [
    "OPERATIONS",
    "Operation",
    "Request",
    "decode_reply",
    "decode_request",
    "encode_request",
    "operation_of",
]

Reply = TypeVar("Reply")

_MODULES = (
    dead_letters, group_moves, groups, messages, pipeline, replicas, schedule, status, topics
)  # fmt: skip
"""Importing a module declares its operations."""
OPERATIONS: Mapping[str, Operation] = declared()

_REQUESTS = [row.request for row in OPERATIONS.values() if row.frame == Kind.REQUEST]
_decoder: msgspec.json.Decoder[Request[Any]] = msgspec.json.Decoder(Union[tuple(_REQUESTS)])  # noqa: UP007


def decode_request(payload: bytes | bytearray) -> Request[Any]:
    """Return the request in the payload of a REQUEST frame; the table says what it may hold.

    >>> decode_request(encode_request(topics.DescribeTopic(topic="orders")))
    DescribeTopic(topic='orders')
    """
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_describe(payload, error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the payload of REQUEST is not JSON: {error}") from None
    except RecursionError:
        raise ProtocolError("the payload of REQUEST is nested too deeply") from None


def encode_request(request: Request[Any]) -> bytes:
    """Return the payload of a REQUEST frame; raise `InvalidRequest` for a field JSON cannot hold.

    >>> json = encode_request(topics.DescribeTopic(topic="orders"))
    >>> json.endswith(b',"topic":"orders"}')
    True
    """
    try:
        return msgspec.json.encode(request)
    except (UnicodeEncodeError, TypeError, OverflowError, RecursionError):
        _find_unencodable(request)
        raise


def decode_reply(payload: bytes | bytearray, request: Request[Reply]) -> Reply:
    """Return the reply to a request.

    >>> decode_reply(b'{"topic":"orders"}', topics.DeleteTopic(topic="orders")).topic
    'orders'
    """
    reply: Reply = decode_json(payload, operation_of(request).reply, "REPLY", ProtocolError)
    return reply


def _find_unencodable(request: Request[Any]) -> None:
    for field in request.__struct_fields__:
        try:
            msgspec.json.encode(getattr(request, field))
        except UnicodeEncodeError:
            raise InvalidRequest(f"{field} is not valid Unicode: it has a lone surrogate") from None
        except (TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"{field} cannot be sent: {error}") from None


def _describe(payload: bytes | bytearray, error: msgspec.ValidationError) -> str:
    """Return a sentence that says what is wrong with a request."""
    fields = decode_json(payload, dict[str, Any], "REQUEST", InvalidRequest)
    name = fields.get(OP)
    row = OPERATIONS.get(name) if isinstance(name, str) else None
    if row is None or row.frame != Kind.REQUEST:
        known = ", ".join(
            sorted(row.name for row in OPERATIONS.values() if row.frame == Kind.REQUEST)
        )
        return f"there is no such operation; there are: {known}"
    encoded_names = {field.encode_name for field in msgspec.structs.fields(row.request)}
    unknown = sorted(fields.keys() - encoded_names - {OP})
    if unknown:
        return f"operation {row.name!r} has no field {unknown[0]!r}"
    return describe_mismatch("REQUEST", error)
