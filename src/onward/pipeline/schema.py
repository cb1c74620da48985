"""The columns of a message in Spark: names, types, order.

Everything is nullable, because a column that a batch does not have is null in all its rows. Spark
compares the schema of the first record batch with its own, type by type, so both come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from onward.errors import InvalidRequest

if TYPE_CHECKING:
    import pyarrow as pa

MESSAGE_COLUMNS: dict[str, DataType] = {
    "topic": StringType(),
    "offset": LongType(),
    "event_id": LongType(),
    "key": StringType(),
    "body": BinaryType(),
    "headers": MapType(StringType(), BinaryType()),
    "tag": StringType(),
    "trace_id": StringType(),
    "published_at": TimestampType(),
    "due_at": TimestampType(),
    "producer": LongType(),
    "priority": IntegerType(),
    "tenant": StringType(),
    "schedule_id": LongType(),
}


def message_schema(columns: Sequence[str] | None = None) -> StructType:
    """Return the schema of messages, or of some of their columns in the order they are named.

    >>> message_schema(["offset", "key"]).simpleString()
    'struct<offset:bigint,key:string>'
    """
    names = list(MESSAGE_COLUMNS) if columns is None else list(columns)
    for name in names:
        if name not in MESSAGE_COLUMNS:
            raise InvalidRequest(unknown_column(name))
    if len(set(names)) < len(names):
        raise InvalidRequest(f"a column is named twice in {', '.join(names)}")
    return StructType([StructField(name, MESSAGE_COLUMNS[name]) for name in names])


def unknown_column(name: str, known: Sequence[str] = tuple(MESSAGE_COLUMNS)) -> str:
    """Say that there is no such column, and which one may have been meant.

    >>> unknown_column("ofset")
    "there is no column 'ofset'; did you mean 'offset'?"
    """
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
    return f"there is no column {name!r}; {hint}"


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the same schema for Arrow, exactly as Spark wants to see it.

    >>> str(arrow_schema(message_schema(["published_at"])).field(0).type)
    'timestamp[us, tz=UTC]'
    """
    return to_arrow_schema(schema, timezone="UTC")
