r"""Which texts a message may carry: valid Unicode, and not longer than the limit.

A Python string may hold lone surrogates ("\ud800"), which UTF-8 cannot express: they come from
file names and arguments that were decoded with `surrogateescape`. Such a text could be stored, but
not compared, listed or sent in JSON, so it is refused where it is given. Bytes that another client
stored as text are still read: this is not checked again on the way out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from onward.errors import InvalidRequest

TEXT_CHARACTERS_MAX: Final = 32_767
UNIQUE_CHARACTERS_MAX: Final = 512
"""Length of a business key, `unique`."""


def check_text(field: str, text: object, *, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    r"""Return the text, or raise `InvalidRequest` that names the field and what is wrong.

    >>> check_text("key", "order-7")
    'order-7'
    >>> check_text("key", "\ud800")
    Traceback (most recent call last):
    onward.errors.InvalidRequest: key is not valid Unicode: '\ud800' has a lone surrogate
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"{field} is text, not {type(text).__name__}")
    if len(text) > characters_max:
        raise InvalidRequest(f"{field} has {len(text)} characters; {characters_max} are the most")
    if not text.isascii():
        _check_unicode(field, text)
    return text


def check_texts(
    field: str, texts: Collection[str], *, characters_max: int = TEXT_CHARACTERS_MAX
) -> None:
    """Check many texts at once, as `check_text` does for one, without looking at each of them.

    >>> check_texts("key", ["a", "b"])
    """
    joined = "".join(texts)
    is_long = len(joined) > characters_max and max(map(len, texts)) > characters_max
    if is_long or not (joined.isascii() or is_unicode(joined)):
        for text in texts:  # one of them is wrong: the error shows which
            check_text(field, text, characters_max=characters_max)


def is_unicode(text: str) -> bool:
    r"""Return True if UTF-8 can express the text.

    >>> is_unicode("ü"), is_unicode("\udc80")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 10) : error.start + 30]
        raise InvalidRequest(
            f"{field} is not valid Unicode: {shown!a} has a lone surrogate"
        ) from None
