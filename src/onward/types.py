"""The types of what public calls return, for annotations: `def settle(one: types.SyncDelivery)`.

`onward` itself has the names that programs call and catch; these are only named. Each of them is
described in docs/reference/python.md. They are made by clients, Apps and kits, not by programs,
except `RetryPolicy`.

>>> from onward import types
>>> def remind_later(receipt: types.ScheduledReceipt) -> int:
...     return receipt.due_at_ms
"""

from typing import TYPE_CHECKING

from onward.client.consumer import Consumer
from onward.client.delivery_batch import DeliveryBatch
from onward.client.explanation import (
    Explanation,
    GroupLife,
    LifeEvent,
    ScheduledOrigin,
)
from onward.client.groups import DeadLetterDescription
from onward.client.reader import ReadBatch, Reader
from onward.client.receipt import BatchReceipt, Receipt
from onward.client.scheduled import ScheduledBatchReceipt, ScheduledReceipt
from onward.client.sync_consumer import SyncConsumer
from onward.client.sync_delivery import SyncDelivery, SyncDeliveryBatch
from onward.client.sync_reader import SyncReader
from onward.client.sync_schedule import SyncScheduledBatchReceipt, SyncScheduledReceipt
from onward.client.work import Call as CallNext
from onward.delivery.filter import Filter
from onward.delivery.record import StartAt
from onward.delivery.retry import RetryPolicy
from onward.message.batch import Batch
from onward.message.relative import Relative
from onward.protocol.operations.groups import (
    GroupCounts,
    GroupDescription,
    MemberDescription,
    PositionDescription,
    ShareDescription,
)
from onward.protocol.operations.messages import Publisher
from onward.protocol.operations.pipeline import CopiedBatches, TopicEnd, TopicEntry
from onward.protocol.operations.replicas import (
    Promoted,
    ReplicaDescription,
    ReplicationStatus,
    SteppedDown,
)
from onward.protocol.operations.schedule import (
    CalendarBar,
    CalendarDescription,
    CancelResult,
    MoveResult,
    RecurringDescription,
    ScheduledDescription,
)
from onward.protocol.operations.topics import TopicDescription
from onward.protocol.payloads import Lineage

if TYPE_CHECKING:
    from onward.testing.kit import GroupOutcome, Kit, Outcome
    from onward.testing.kit_sync import SyncKit

__all__ = [
    "Batch",
    "BatchReceipt",
    "CalendarBar",
    "CalendarDescription",
    "CallNext",
    "CancelResult",
    "Consumer",
    "CopiedBatches",
    "DeadLetterDescription",
    "DeliveryBatch",
    "Explanation",
    "Filter",
    "GroupCounts",
    "GroupDescription",
    "GroupLife",
    "GroupOutcome",
    "Kit",
    "LifeEvent",
    "Lineage",
    "MemberDescription",
    "MoveResult",
    "Outcome",
    "PositionDescription",
    "Promoted",
    "Publisher",
    "ReadBatch",
    "Reader",
    "Receipt",
    "RecurringDescription",
    "Relative",
    "ReplicaDescription",
    "ReplicationStatus",
    "RetryPolicy",
    "ScheduledBatchReceipt",
    "ScheduledDescription",
    "ScheduledOrigin",
    "ScheduledReceipt",
    "ShareDescription",
    "StartAt",
    "SteppedDown",
    "SyncConsumer",
    "SyncDelivery",
    "SyncDeliveryBatch",
    "SyncKit",
    "SyncReader",
    "SyncScheduledBatchReceipt",
    "SyncScheduledReceipt",
    "TopicDescription",
    "TopicEnd",
    "TopicEntry",
]

_OF_TESTS = frozenset(("GroupOutcome", "Kit", "Outcome", "SyncKit"))


def __getattr__(name: str) -> object:
    """Import a type of the test kit, and the broker with it, at its first use."""
    if name in _OF_TESTS:
        from onward.testing import kit

        return getattr(kit, name)
    raise AttributeError(f"module 'onward.types' has no attribute {name!r}")
