"""Typed columns from bodies that are JSON.

    typed(frame, "id BIGINT, name STRING")       on a DataFrame, with Spark's from_json
    BodyColumns                                  in the source, for the option bodySchema

The source has no JVM beside it, so Arrow's JSON reader does the work, many bodies at once. Each
body is wrapped into an object of its own line: a body can then neither vanish nor become two rows
unnoticed. Where something is wrong, halves are tried until the bad bodies are found. A body is bad
when it is no JSON object, or a field is of another type; fields that are missing are null, those
that nobody asked for are left out.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from onward.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BAD = "bad_body"
_SHOWN_BYTES = 60


def typed(
    frame: DataFrame, schema: str, *, bad: Literal["null", "fail", "keep"] = "null"
) -> DataFrame:
    """Return a frame of messages with the fields of their JSON bodies in place of `body`.

    Where a body is bad, all its fields are null; with `bad="fail"` the query fails instead, with
    `bad="keep"` a column `bad_body` has the body as it was.
    """
    from pyspark.sql import functions as fn

    if bad not in ("null", "fail", "keep"):
        raise InvalidRequest(f"bad is null, fail or keep, not {bad!r}")
    if "body" not in frame.columns:
        raise InvalidRequest("the frame has no column 'body'")
    text = fn.col("body").cast("string")
    parsed = fn.from_json(text, f"{schema}, {BAD} STRING", {"columnNameOfCorruptRecord": BAD})
    rows = frame.withColumn("_fields", parsed)
    broken = fn.col(f"_fields.{BAD}")
    if bad == "fail":
        said = _complaint(frame, text)
        good = fn.when(broken.isNotNull(), fn.raise_error(said)).otherwise(fn.col("_fields"))
    else:
        # Spark reads as much of a bad body as it can: half a message is worse than none.
        good = fn.when(broken.isNull(), fn.col("_fields"))
    others = [fn.col(f"`{name}`") for name in frame.columns if name != "body"]
    rows = rows.withColumns({"_good": good.dropFields(BAD), "_broken": broken})
    kept = [fn.col("_broken").alias(BAD)] if bad == "keep" else []
    return rows.select(*others, "_good.*", *kept)


def _complaint(frame: DataFrame, text: Column) -> Column:
    """Return what Spark is to say of a bad body: a line by which `plain` knows it as ours."""
    from pyspark.sql import functions as fn

    head, place = "a body", [fn.lit("")]
    if "offset" in frame.columns:
        head, place = "body of message ", [fn.col("offset").cast("string")]
        if "topic" in frame.columns:
            place = [fn.col("topic"), fn.lit("/"), *place]
    shown = fn.translate(fn.substring(text, 1, _SHOWN_BYTES), "\r\n", "  ")
    ours = f"{InvalidRequest.__module__}.{InvalidRequest.__name__}: {head}"
    return fn.concat(
        fn.lit(ours), *[fn.coalesce(one, fn.lit("?")) for one in place],
        fn.lit(" is not JSON of the schema: '"), shown, fn.lit("'\n"),
    )  # fmt: skip


class BodyColumns:
    """The columns at the end of a schema, read from bodies."""

    def __init__(self, schema: pa.Schema, *, width: int, bad: Literal["fail", "null"]) -> None:
        at = len(schema) - width
        self._schema = schema
        self._messages = [schema.field(number) for number in range(at)]
        self._type = pa.struct([schema.field(number) for number in range(at, len(schema))])
        self._parse_type = pa.struct([_parsed_as(one) for one in self._type.fields])
        self._bad = bad
        has_body = "body" in schema.names[:at]
        self.read_schema = pa.schema(
            self._messages if has_body else [*self._messages, pa.field("body", pa.binary())]
        )

    def parse(self, rows: pa.RecordBatch, *, topic: str, first_offset: int) -> pa.RecordBatch:
        """Return the rows with the columns of their bodies."""
        bodies = rows.column("body").to_pylist()
        places: list[int] = []
        fields = self._structs(bodies, 0, places)
        if places and self._bad == "fail":
            raise InvalidRequest(
                f"body of message {topic}/{first_offset + places[0]} is not JSON of the schema: "
                f"{bodies[places[0]][:_SHOWN_BYTES]!r}; set badBodies=null to read it as nulls"
            )
        parsed = pa.concat_arrays(fields or [pa.array([], self._type)]).flatten()
        kept = [rows.column(field.name) for field in self._messages]
        return pa.RecordBatch.from_arrays([*kept, *parsed], schema=self._schema)

    def _structs(self, bodies: Sequence[bytes], at: int, bad: list[int]) -> list[pa.Array]:
        """Return the fields of all bodies in order; note the places of those that are bad."""
        if not bodies:
            return []
        try:
            return [_read(bodies, self._parse_type, self._type)]
        except pa.ArrowNotImplementedError as error:
            raise InvalidRequest(f"option 'bodySchema': {error}") from None
        except pa.ArrowInvalid:
            if len(bodies) == 1:
                bad.append(at)
                return [pa.nulls(1, self._type)]
        half = len(bodies) // 2
        front = self._structs(bodies[:half], at, bad)
        if bad and self._bad == "fail":
            return front
        return front + self._structs(bodies[half:], at + half, bad)


def _read(bodies: Sequence[bytes], parse_type: pa.StructType, type_: pa.StructType) -> pa.Array:
    joined = b'{"b":' + b'}\n{"b":'.join(bodies) + b"}\n"
    table = pj.read_json(
        io.BytesIO(joined),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(joined) + 1),
        parse_options=pj.ParseOptions(
            explicit_schema=pa.schema([pa.field("b", parse_type)]),
            newlines_in_values=True,
            unexpected_field_behavior="ignore",
        ),
    )
    if table.num_rows != len(bodies):
        raise pa.ArrowInvalid("a body is more than one value")
    found = table.column("b").combine_chunks()
    if isinstance(found, pa.ChunkedArray):
        found = pa.concat_arrays(found.chunks)
    return found if parse_type == type_ else pc.cast(found, type_)


def _parsed_as(field: pa.Field) -> pa.Field:
    """Return how Arrow's JSON reader is to read a field: it knows no dates, only their text."""
    return pa.field(field.name, pa.string()) if pa.types.is_date(field.type) else field
