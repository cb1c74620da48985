r"""What commands print: rows for people, lines of JSON for machines, progress while they wait.

Rules:
    - Text that came from a message or a broker is shown, never executed: control characters,
      terminal escape codes and characters that reorder a line are printed as `\x1b`, `\u202e`.
    - Rows are plain aligned columns. On a terminal they are made to fit its width: long text and
      long headings end in an ellipsis. Numbers, moments and settings are always whole.
    - Results go to stdout; progress and errors go to stderr, progress only on a terminal.
    - rich is imported by the function that needs it, not with this module.
"""

import base64
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

import msgspec

# C0, DEL, C1, marks that change the direction of text, line separators, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z|-")
_GAP = "  "
# A column that is cut keeps at least so much of its text, or of its heading.
_TEXT_LEAST = 12
_LEAST = 4
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str | bytes) -> str:
    r"""Return a text on one line that does nothing to a terminal but show.

    >>> printable(b"\x1b[31mred\xff\n")
    '\\x1b[31mred\\xff\\n'
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="backslashreplace")
    return _UNSAFE.sub(_escape, text)


def counted(number: int, noun: str) -> str:
    """Return a number of things, as a person says it.

    >>> counted(1, "message"), counted(2_000, "message")
    ('1 message', '2,000 messages')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def is_terminal(stream: TextIO | None = None) -> bool:
    """Say whether a person looks at a stream (stdout by default).

    >>> import io
    >>> is_terminal(io.StringIO())
    False
    """
    stream = stream or sys.stdout
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def print_line(text: str) -> None:
    """Print one line of text from anywhere. Not flushed: who prints slowly into a pipe flushes.

    >>> print_line("10 messages")
    10 messages
    """
    sys.stdout.write(printable(text) + "\n")


def print_json(record: Mapping[str, object] | msgspec.Struct) -> None:
    r"""Print a reply, or a record that may contain replies, as one line of JSON.

    The line has the fields that a reply has on the wire, and is safe on a terminal too.

    >>> print_json({"topic": "orders", "offset": 7})
    {"topic": "orders", "offset": 7}
    """
    # JSON escapes C0 by itself. What it leaves alone can only stand inside a string, where an
    # escape means the same character.
    text = json.dumps(record, ensure_ascii=False, default=msgspec.to_builtins)
    escaped = _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    sys.stdout.write(escaped + "\n")


def body_field(body: bytes) -> dict[str, str]:
    r"""Return the field of a JSON record for a body: its text, or base64 if it is not UTF-8.

    >>> body_field(b"hello"), body_field(b"\xff")
    ({'body': 'hello'}, {'body_base64': '/w=='})
    """
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def print_rows(
    rows: Iterable[Mapping[str, object]], *, columns: Sequence[str], as_json: bool = False
) -> None:
    """Print rows: a table for people, one line of JSON each for machines.

    >>> print_rows([{"topic": "orders", "messages": 7}], columns=["topic", "messages"])
    TOPIC   MESSAGES
    orders         7
    """
    if as_json:
        for row in rows:
            print_json({name: row.get(name) for name in columns})
        return
    listed = list(rows)
    cells = [[_cell(row.get(name)) for name in columns] for row in listed]
    # Numbers stand to the right, one under the other.
    right = [_is_numeric(row.get(name) for row in listed) for name in columns]
    lines = [[name.upper() for name in columns], *cells]
    widths = _widths(lines)
    # A setting is shown whole, however long it is.
    if is_terminal() and list(columns[:2]) != ["name", "value"]:
        _fit(widths, lines, right, shutil.get_terminal_size().columns)
    _print_plain(lines, widths, right)


@contextmanager
def progress(label: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr while the block runs; yields a function that advances it.

    >>> with progress("publishing", total=10) as advance:
    ...     advance(10)
    """
    if not is_terminal(sys.stderr):
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(printable(label), total=total)
        yield lambda count: bar.advance(task, count)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    # Bytes that were not UTF-8 come as lone surrogates: show the byte they stand for.
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return _SHORT.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(value if isinstance(value, str | bytes) else str(value))


def _is_numeric(values: Iterable[object]) -> bool:
    given = [value for value in values if value is not None]
    return bool(given) and all(type(value) in (int, float) for value in given)


def _widths(lines: list[list[str]]) -> list[int]:
    from rich.cells import cell_len

    return [max(map(cell_len, column)) for column in zip(*lines, strict=True)]


def _fit(widths: list[int], lines: list[list[str]], right: list[bool], width_max: int) -> None:
    """Make columns narrower until the lines fit, those first whose text is missed least."""
    heading, *cells = lines
    inner = _widths(cells) if cells else [0] * len(heading)
    texts = {
        index
        for index, is_right in enumerate(right)
        if index and not is_right and not all(_MOMENT.fullmatch(line[index]) for line in cells)
    }
    long = {index for index in texts if inner[index] > _TEXT_LEAST}
    for index in long:
        widths[index] = min(widths[index], max(width_max, _TEXT_LEAST))
    _shrink(widths, dict.fromkeys(long, _TEXT_LEAST), width_max)
    # Headings that are wider than what stands below.
    _shrink(widths, {index: max(i, _LEAST) for index, i in enumerate(inner)}, width_max)
    _shrink(widths, dict.fromkeys(long, _LEAST), width_max)
    # The first column is the name of the thing.
    _shrink(widths, {0: _TEXT_LEAST}, width_max)
    _shrink(widths, dict.fromkeys(texts, _LEAST), width_max)


def _shrink(widths: list[int], floors: dict[int, int], width_max: int) -> None:
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width_max
    for _ in range(excess):
        wide = [index for index, floor in sorted(floors.items()) if widths[index] > floor]
        if not wide:
            return
        widths[max(wide, key=widths.__getitem__)] -= 1


def _print_plain(lines: list[list[str]], widths: list[int], right: list[bool]) -> None:
    for line in lines:
        sized = zip(line, widths, right, strict=True)
        text = _GAP.join(_sized(cell, width, is_right) for cell, width, is_right in sized)
        sys.stdout.write(text.rstrip() + "\n")


def _sized(cell: str, width: int, is_right: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(cell) > width:
        return set_cell_size(cell, width - 1) + "…"
    gap = " " * (width - cell_len(cell))
    return gap + cell if is_right else cell + gap
