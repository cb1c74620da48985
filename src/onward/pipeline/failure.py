"""One clear sentence out of what Spark says when something fails.

An error that we raise in a worker, in a reader's planning or in a stream comes back as pages of
Python and Java. Somewhere in them is the line that Python writes last in a traceback:

    onward.errors.UnknownTopic: topic 'orders' does not exist

`plain` finds it and gives the error back as it was raised. It also knows the few failures of Spark
itself that a user can do something about. All else is None: the caller shows what there is.
"""

import re
from collections.abc import Iterator

from onward.errors import InvalidRequest, NotInstalled, OnwardError, Unavailable, all_errors

_OURS = re.compile(r"^.*?\bonward\.errors\.(\w+): (.+?)\s*$", re.MULTILINE)
_BARE = re.compile(r"^\s*onward\.errors\.(\w+)\s*$", re.MULTILINE)
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_NO_PYTHON = re.compile(r'Cannot run program "([^"]+)"')
_CONDITION = re.compile(r"^\[[A-Z0-9_.]+\] ")
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+")
_UNKNOWN_FORMAT = re.compile(r"Failed to find the data source: (\S+?)\. ")
_BY_NAME = {kind.__name__: kind for kind in all_errors()}
# How Spark names what is wrong with a query; its first line is the sentence.
_WRONG_QUERIES = {"AnalysisException", "ParseException"}
DEPTH_MAX = 20


def plain(error: BaseException) -> OnwardError | None:
    r"""Return the error of ours that is at the bottom of another one; None when there is none.

    >>> plain(RuntimeError("...\nonward.errors.UnknownTopic: topic 'orders' does not exist"))
    UnknownTopic("topic 'orders' does not exist")
    """
    for one in _chain(error):
        found = one if isinstance(one, OnwardError) else _in_text(one)
        if found is not None:
            return found
    return None


def is_interrupt(error: BaseException) -> bool:
    """Tell whether an error is ctrl-C, or what came of it while a job was left.

    >>> is_interrupt(KeyboardInterrupt()), is_interrupt(ValueError("no"))
    (True, False)
    """
    return any(isinstance(one, KeyboardInterrupt) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    current: BaseException | None = error
    for _ in range(DEPTH_MAX):
        if current is None:
            return
        yield current
        current = current.__cause__ or current.__context__


def _in_text(error: BaseException) -> OnwardError | None:
    text = str(error)
    return _our_own(text) or _wrong_query(error, text) or _of_spark(text)


def _our_own(text: str) -> OnwardError | None:
    # The last one: what stands before it is what it was raised from.
    found = [*_OURS.finditer(text)] or [*_BARE.finditer(text)]
    if not found:
        return None
    kind = _BY_NAME.get(found[-1][1], OnwardError)
    return kind(found[-1][2] if found[-1].re is _OURS else "")


def _wrong_query(error: BaseException, text: str) -> OnwardError | None:
    is_query = {kind.__name__ for kind in type(error).__mro__} & _WRONG_QUERIES
    # A failure of Python code while a query is planned comes under the same name.
    if not is_query or "Traceback" in text or not text.strip():
        return None
    line = _SQLSTATE.sub("", text.strip().splitlines()[0])
    sentence = _CONDITION.sub("", line).rstrip(".; ")
    return InvalidRequest(uncapitalized(sentence))


def uncapitalized(sentence: str) -> str:
    """Return a sentence as our errors begin, in lower case; a word in capitals stays one.

    >>> uncapitalized("The table is not there"), uncapitalized("JDBC says no")
    ('the table is not there', 'JDBC says no')
    """
    return sentence if sentence[1:2].isupper() else sentence[:1].lower() + sentence[1:]


def _of_spark(text: str) -> OnwardError | None:
    """Return the sentence for a failure of Spark's own that a user can do something about."""
    if missing := _MISSING.search(text):
        return NotInstalled(
            f"a spark worker has no module '{missing[1]}': "
            "run pip install 'onward[spark]' in the python of every worker"
        )
    if no_python := _NO_PYTHON.search(text):
        return NotInstalled(
            f"a spark worker has no python at {no_python[1]}: "
            "set PYSPARK_PYTHON to a path that every worker has"
        )
    if unknown := _UNKNOWN_FORMAT.search(text):
        return InvalidRequest(f"spark knows no format '{unknown[1]}'")
    if "PYTHON_VERSION_MISMATCH" in text:
        return NotInstalled("the python of the spark workers is not of the driver's version")
    if "java.lang.OutOfMemoryError" in text:
        return Unavailable("spark ran out of memory: give it more, for example memory 4g")
    if "Answer from Java side is empty" in text or "Error while sending or receiving" in text:
        return Unavailable("spark's java ended: what it says is on stderr, above")
    return None
