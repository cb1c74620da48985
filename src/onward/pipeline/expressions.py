"""What users write in SQL for a job, a predicate or a column: checked before anything is done.

Spark looks at an expression when it is put on a frame, long before a row is read. What it does
not understand raises InvalidRequest with Spark's own first sentence. `body_text` is there in every
predicate beside `body`: JSON functions want text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from pyspark.errors import AnalysisException, ParseException
from pyspark.logger import PySparkLogger
from pyspark.sql import functions as sql

from onward.errors import InvalidRequest
from onward.pipeline.failure import uncapitalized

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

T = TypeVar("T")

BODY_TEXT = "body_text"

_CLASS = re.compile(r"^\[[A-Z0-9_.]+\]\s*")
_STATE = re.compile(r"\s*SQLSTATE: \w+.*", re.DOTALL)
_SENTENCE_CHARACTERS_MAX = 500
TALKATIVE = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


def matching(frame: DataFrame, where: str | None, *, option: str = "where") -> DataFrame:
    """Return the rows for which a predicate is true; all of them without one."""
    if where is None:
        return frame
    with_text = frame.withColumn(BODY_TEXT, sql.col("body").cast("string"))
    words = _words(where, option)
    return _checked(lambda: with_text.where(words), where, option).drop(BODY_TEXT)


def column(frame: DataFrame, text: str, *, option: str) -> Column:
    """Return an expression over a frame's columns as a column."""
    expression = _checked(lambda: sql.expr(_words(text, option)), text, option)
    _checked(lambda: frame.select(expression), text, option)
    return expression


def type_of(frame: DataFrame, expression: Column) -> str:
    """Return the name of an expression's type, as Spark writes it: `string`, `array<int>`."""
    return frame.select(expression.alias("it")).schema["it"].dataType.simpleString()


def first_sentence(error: object) -> str:
    """Return what Spark says is wrong, without its class, its state and its plan.

    >>> first_sentence(ValueError("[A.B] The column `x` is not there. SQLSTATE: 42703; line 1"))
    'the column `x` is not there'
    """
    text = _STATE.sub("", _CLASS.sub("", str(error).strip()))
    line = " ".join(text.split("\n\n")[0].split()).rstrip(".")[:_SENTENCE_CHARACTERS_MAX]
    return uncapitalized(line)


def hush() -> None:
    """Keep pyspark from writing pages of JSON to stderr about what is wrong with a query.

    It raises the same as an error, which says it better.
    """
    for name in TALKATIVE:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextmanager
def quietly() -> Iterator[None]:
    """Do so for a while, in a session that is not ours."""
    loggers = [PySparkLogger.getLogger(name) for name in TALKATIVE]
    levels = [one.level for one in loggers]
    hush()
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


def _words(text: str, option: str) -> str:
    if not text.strip():
        raise InvalidRequest(f"{option!r} is empty: write an expression of SQL")
    return text


def _checked(make: Callable[[], T], text: str, option: str) -> T:
    try:
        with quietly():
            return make()
    except (AnalysisException, ParseException) as error:
        raise InvalidRequest(
            f"{option} {text!r} is not understood: {first_sentence(error)}"
        ) from None
