"""The data pipeline: Spark reads from Onward, writes to it, and keeps its history in a lake.

    log ──▶ source ──▶ DataFrame ──▶ sink ──▶ log          connector.py, for .format("onward")
     └────▶ archive ──▶ lake ──┐
     └─────────────────────────┴──▶ read, sql, stats, reconcile, trace, replay        jobs/

`session()` is where everything begins. Only this package imports pyspark, and only when it is used.

>>> from onward.pipeline import Place
>>> Place("localhost:7700").servers
'localhost:7700'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onward.pipeline.bodies import typed
    from onward.pipeline.failure import plain
    from onward.pipeline.lake_read import read
    from onward.pipeline.place import Place, place_of
    from onward.pipeline.progress import catch_up, lag
    from onward.pipeline.queries import sql
    from onward.pipeline.sessions import session
    from onward.pipeline.source import read_topic
    from onward.pipeline.stream import read_stream

__all__ = [
    "Place",
    "catch_up",
    "lag",
    "place_of",
    "plain",
    "read",
    "read_stream",
    "read_topic",
    "session",
    "sql",
    "typed",
]

_PLACES = {
    "Place": "place",
    "catch_up": "progress",
    "lag": "progress",
    "place_of": "place",
    "plain": "failure",
    "read": "lake_read",
    "read_stream": "stream",
    "read_topic": "source",
    "session": "sessions",
    "sql": "queries",
    "typed": "bodies",
}


def __getattr__(name: str) -> object:
    """Import what is used, and only that: a place needs no Spark."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Name what there is, also what nobody has used yet."""
    return sorted({*globals(), *__all__})
