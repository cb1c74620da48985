r"""What commands print: rows for people, lines of JSON for machines, progress while they wait.

Rules:
    - Text that came from a message or a broker is shown, never executed: control characters,
      terminal escape codes and characters that reorder a line are printed as `\x1b`, `\u202e`.
    - Borders and colours only on a terminal; into a pipe go plain aligned columns.
    - Results go to stdout; progress and errors go to stderr, progress only on a terminal.
    - rich is imported by the function that needs it, not with this module.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

# C0, DEL, C1, marks that change the direction of text, line separators, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
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


def print_json(record: Mapping[str, object]) -> None:
    r"""Print one record as one line of JSON, safe on a terminal too.

    >>> print_json({"topic": "orders", "offset": 7})
    {"topic": "orders", "offset": 7}
    """
    # JSON escapes C0 by itself. What it leaves alone can only stand inside a string, where an
    # escape means the same character.
    text = json.dumps(record, ensure_ascii=False)
    escaped = _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    sys.stdout.write(escaped + "\n")


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
    if is_terminal():
        _print_rich(columns, cells, right)
    else:
        _print_plain([[name.upper() for name in columns], *cells], right)


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


def _print_plain(lines: list[list[str]], right: list[bool]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        sized = zip(line, widths, right, strict=True)
        text = "  ".join(c.rjust(width) if r else c.ljust(width) for c, width, r in sized)
        sys.stdout.write(text.rstrip() + "\n")


def _print_rich(columns: Sequence[str], cells: list[list[str]], right: list[bool]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name, is_right in zip(columns, right, strict=True):
        table.add_column(Text(name), justify="right" if is_right else "left", overflow="fold")
    for line in cells:
        # Text, not str: square brackets in a cell are no markup.
        table.add_row(*map(Text, line))
    Console().print(table)
