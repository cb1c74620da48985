"""Errors of ours as Spark shows them: the sentence, without the way that it came.

Spark's processes write a traceback into the text of what the user sees. What is wrong with a
request is said by its sentence, so the methods that Spark calls are `@brief`: an `OnwardError`
leaves them without the frames below, and without what it was raised from. All other errors are
defects, and keep both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from types import GeneratorType
from typing import ParamSpec, TypeVar, cast

from onward.errors import OnwardError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def brief(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let errors of ours leave a method, or the generator that it returns, without a traceback.

    >>> @brief
    ... def find(topic: str) -> None:
    ...     raise OnwardError(f"topic {topic!r} does not exist")
    >>> try:
    ...     find("orders")
    ... except OnwardError as error:
    ...     print(error, error.__traceback__.tb_next.tb_next)
    topic 'orders' does not exist None
    """

    @wraps(call)
    def called(*given: _P.args, **named: _P.kwargs) -> _R:
        try:
            found = call(*given, **named)
        except OnwardError as error:
            raise error.with_traceback(None) from None
        return cast("_R", _each(found)) if isinstance(found, GeneratorType) else found

    return called


def _each(found: Generator[_R]) -> Generator[_R]:
    try:
        yield from found
    except OnwardError as error:
        raise error.with_traceback(None) from None
