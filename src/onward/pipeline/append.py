"""How jobs hand rows to the sink: as a user would, with the options of a place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.pipeline.place import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def append(
    rows: DataFrame, place: Place, *, topic: str | None = None, write_id: str | None = None
) -> None:
    """Write rows by the sink; a write that is repeated under its id stores nothing again."""
    options = {"servers": place.servers, "timeout": place.timeout}
    optional = {"token": place.token, "topic": topic, "writeId": write_id}
    options |= {name: value for name, value in optional.items() if value is not None}
    rows.write.format("onward").mode("append").options(**options).save()
