"""What Spark says when something fails, and the one sentence that is in it.

The texts are Spark 4.3's own, from errors that were really raised, with their middles left out.
"""

import pytest

from onward.errors import (
    Conflict,
    InvalidRequest,
    NotConnected,
    NotInstalled,
    OffsetOutOfRange,
    OnwardError,
    Unavailable,
    UnknownTopic,
)
from onward.pipeline.failure import plain


class AnalysisException(Exception):
    """Named as the one of pyspark, which this test does not need."""


IN_SCHEMA = """\
[PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: Traceback (most recent call last):
  File "source.py", line 16, in schema
    raise UnknownTopic("topic 'orders' does not exist")
onward.errors.UnknownTopic: topic 'orders' does not exist
 SQLSTATE: 38000"""  # noqa: E501

IN_A_READER = """\
An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "source.py", line 28, in read
    stretch = next(stretches)
onward.errors.NotConnected: cannot reach localhost:1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "source.py", line 29, in read
    raise OffsetOutOfRange("offset 3 of topic 'orders' is gone: it begins at 10") from e
onward.errors.OffsetOutOfRange: offset 3 of topic 'orders' is gone: it begins at 10"""

IN_A_STREAM = """\
[STREAM_FAILED] Query [id = ccee070d, runId = c0b0da48] terminated with exception: [PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform initialOffset: Traceback (most recent call last):
  File "stream.py", line 41, in initialOffset
    raise Conflict("group 'g' is used by spark job 7")
onward.errors.Conflict: group 'g' is used by spark job 7
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = ccee070d, runId = c0b0da48]
Current Committed Offsets: {}

Logical Plan:
WriteToMicroBatchDataSource noop-table
+- ~StreamingDataSourceV2ScanRelation[a#21L] onward
"""  # noqa: E501

IN_FOREACH_BATCH = """\
[STREAM_FAILED] Query [id = dbea7455, runId = e6770b3b] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred in the user provided function in foreach batch sink. Reason: An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "job.py", line 57, in fb
    def fb(df, i): raise NotConnected("cannot reach localhost:1")
onward.errors.NotConnected: cannot reach localhost:1
 SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
"""  # noqa: E501

NO_MODULE = """\
An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "source.py", line 30, in read
ModuleNotFoundError: No module named 'pyarrow'"""

NO_PYTHON = """\
An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 8.0 failed 1 times, most recent failure: Lost task 1.0 in stage 8.0 (TID 12) (localhost executor driver): java.io.IOException: Cannot run program "/nowhere/python": error=2, No such file or directory
	at java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)
"""  # noqa: E501

NO_FORMAT = """\
An error occurred while calling o404.load.
: org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: onward. Make sure the provider name is correct and the package is properly registered and compatible with your Spark version. SQLSTATE: 42K02
	at org.apache.spark.sql.errors.QueryExecutionErrors$
"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        (IN_SCHEMA, UnknownTopic, "topic 'orders' does not exist"),
        (IN_A_READER, OffsetOutOfRange, "offset 3 of topic 'orders' is gone: it begins at 10"),
        (IN_A_STREAM, Conflict, "group 'g' is used by spark job 7"),
        (IN_FOREACH_BATCH, NotConnected, "cannot reach localhost:1"),
        (
            NO_MODULE,
            NotInstalled,
            (
                "a spark worker has no module 'pyarrow': "
                "run pip install 'onward[spark]' in the python of every worker"
            ),
        ),
        (
            NO_PYTHON,
            NotInstalled,
            (
                "a spark worker has no python at /nowhere/python: "
                "set PYSPARK_PYTHON to a path that every worker has"
            ),
        ),
        (NO_FORMAT, InvalidRequest, "spark knows no format 'onward'"),
        (
            "An error occurred while calling o1.count.\n: java.lang.OutOfMemoryError: Java heap",
            Unavailable,
            "spark ran out of memory: give it more, for example memory 4g",
        ),
    ],
)
def test_the_sentence_is_found_in_the_pages(text: str, kind: type[OnwardError], sentence: str):
    found = plain(RuntimeError(text))
    assert type(found) is kind
    assert str(found) == sentence


def test_an_error_of_ours_below_another_is_the_same_object():
    ours = UnknownTopic("topic 'orders' does not exist")
    above = RuntimeError("a job failed")
    above.__cause__ = ours
    assert plain(above) is ours
    assert plain(ours) is ours


def test_an_error_of_a_later_version_keeps_its_sentence():
    found = plain(RuntimeError("onward.errors.NotYetKnown: the moon is full"))
    assert type(found) is OnwardError
    assert str(found) == "the moon is full"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            (
                "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `x` cannot be resolved. "
                "Did you mean one of the following? [`id`]. SQLSTATE: 42703;\n'Project ['x]"
            ),
            "a column with name `x` cannot be resolved. Did you mean one of the following? [`id`]",
        ),
        (
            (
                "\n[PARSE_SYNTAX_ERROR] Syntax error at or near 'selec'. SQLSTATE: 42601 "
                "(line 1, pos 0)\n\n== SQL ==\nselec * from nothere\n^^^\n"
            ),
            "syntax error at or near 'selec'. (line 1, pos 0)",
        ),
    ],
)
def test_a_wrong_query_is_an_invalid_request_with_the_first_line_of_spark(text: str, sentence: str):
    found = plain(AnalysisException(text))
    assert type(found) is InvalidRequest
    assert str(found) == sentence


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the disk is on fire"),
        RuntimeError(""),
        AnalysisException("[PYTHON_DATA_SOURCE_ERROR] Failed: Traceback (most recent call last):"),
    ],
)
def test_what_is_neither_ours_nor_known_stays_as_it_is(error: Exception):
    assert plain(error) is None


def test_errors_that_go_in_a_circle_are_no_endless_loop():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert plain(first) is None
