"""Onward for Spark: `.format("onward")`, to read and to write, in batches and in streams.

    spark.read.format("onward").option("topic", "orders").load()          source.py
    spark.readStream.format("onward").option("topic", "orders").load()    stream.py
    frame.write.format("onward").mode("append").save()                    sink.py
    frame.writeStream.format("onward").start()                            sink.py

Spark makes the object in several processes, more than once for a query: making one opens nothing.
Options are read when it is known whether to read or to write.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from onward.pipeline.brief import brief
from onward.pipeline.options import source_options
from onward.pipeline.schema import message_schema
from onward.pipeline.tables import comment_of, options_of, own_options

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructField, StructType


class OnwardSource(DataSource):
    """The data source `onward`. Spark makes it; the options are those of `options.py`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """Return the word for `format`."""
        return "onward"

    @brief
    def schema(self) -> StructType | str:
        """Return the columns that will be read: as text where Spark must parse a part of it."""
        options = source_options(own_options(self.options))
        messages = message_schema(options.columns)
        if (comment := comment_of(self.options)) is not None:
            messages.fields[0].metadata = {"comment": comment}
        if options.body_schema is None:
            return messages
        return ", ".join([*map(_in_ddl, messages), options.body_schema])

    @brief
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of what topics hold now."""
        from onward.pipeline.source import BatchReader

        return BatchReader(source_options(options_of(self.options, schema)), schema)

    @brief
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader of what topics hold and will hold."""
        from onward.pipeline.stream import StreamReader

        return StreamReader(source_options(options_of(self.options, schema)), schema)

    @brief
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer of one batch."""
        from onward.pipeline.sink import OPTION_NAMES, batch_writer

        return batch_writer(options_of(self.options, schema, OPTION_NAMES), schema, overwrite)

    @brief
    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return a writer of one batch after another."""
        from onward.pipeline.sink import OPTION_NAMES, stream_writer

        return stream_writer(options_of(self.options, schema, OPTION_NAMES), schema, overwrite)


def _in_ddl(column: StructField) -> str:
    """Return a column as a part of a schema in text, with its comment."""
    said = f"`{column.name}` {column.dataType.simpleString()}"
    comment = str(column.metadata.get("comment", ""))
    quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
    return f"{said} COMMENT '{quoted}'" if quoted else said
