"""Tables of a catalog: `CREATE TABLE orders USING onward OPTIONS (topic 'orders')`.

    CREATE   Spark asks for the schema, with the table's properties: options as `option.NAME`, and
             beside them what the catalog adds (provider, owner, comment, location ...)
    SELECT   Spark gives the schema that the catalog kept, and none of the table's options

So the options travel as the comment of the first column, which the catalog keeps with the schema.
Options of a query (`SELECT * FROM orders WITH (...)`) win over them. A token is not kept: tables
are seen by many, so it comes from the query or from ONWARD_TOKEN.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_CATALOG = "provider"
"""The property that only a catalog adds."""
_PREFIX = "option."
_MARK = "onward table "
_SECRET = "token"


def is_table(options: Mapping[str, str]) -> bool:
    """Return True if options come from a catalog that creates a table.

    >>> is_table({"provider": "onward", "option.topic": "orders"}), is_table({"topic": "orders"})
    (True, False)
    """
    return _CATALOG in options


def own_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that somebody wrote, without the properties that a catalog adds.

    >>> own_options({"provider": "onward", "owner": "ann", "option.topic": "orders"})
    {'topic': 'orders'}
    """
    if not is_table(options):
        return dict(options)
    return {
        name.removeprefix(_PREFIX): value
        for name, value in options.items()
        if name.startswith(_PREFIX)
    }


def comment_of(options: Mapping[str, str]) -> str | None:
    """Return the comment that carries a table's options; None when no table is created.

    >>> comment_of({"provider": "onward", "option.topic": "orders", "option.token": "x"})
    'onward table {"topic": "orders"}'
    """
    if not is_table(options):
        return None
    own = {name.lower(): value for name, value in own_options(options).items()}
    kept = {name: value for name, value in own.items() if name != _SECRET}
    return _MARK + json.dumps(kept)


def options_of(
    options: Mapping[str, str], schema: StructType, names: Collection[str] | None = None
) -> dict[str, str]:
    """Return the options of a read or a write: its own, and under them those of its table.

    Of a table's options only those that have one of the given names count, if there are any.
    """
    comment = schema.fields[0].metadata.get("comment", "") if len(schema) else ""
    kept = json.loads(comment.removeprefix(_MARK)) if comment.startswith(_MARK) else {}
    known = None if names is None else {name.lower() for name in names}
    kept = {name: value for name, value in kept.items() if known is None or name in known}
    return {**kept, **{name.lower(): value for name, value in own_options(options).items()}}
