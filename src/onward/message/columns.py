"""One column of a batch as bytes. All integers are little-endian.

    variable column (bodies, keys, headers, tags, trace ids, tenants, topics, uniques)
        lengths   u32[count]    0xFFFFFFFF = absent, contributes no bytes
        joined    the values back to back, without separators
    instants  (due_at_ms, delays_ms)   i64[count]   -2^63 = absent
    small     (priorities)  u8[count]
    numbers   (replaces, schedule_ids)   i64[count]   -2^63 = absent

Everything here works on whole columns: `map`, `join`, `accumulate` and `array` run at C speed, a
Python loop over messages does not. Decoders get untrusted bytes: a count is checked against the
real size of the column before anything is made from it, and a lie is a `ProtocolError`.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from io import BytesIO, StringIO
from typing import Final

from onward.errors import InvalidRequest, ProtocolError
from onward.message.headers import decode_headers, encode_headers

if sys.byteorder != "little":
    raise ImportError(
        "onward needs a little-endian machine: columns are used in place, not swapped"
    )

ABSENT: Final = 0xFFFF_FFFF
NO_INSTANT: Final = -(2**63)


class Column(IntEnum):
    """The kinds of columns, in the order in which they lie in a batch; others are skipped."""

    KEYS = 1
    HEADERS = 2
    TAGS = 3
    TRACE_IDS = 4
    DUE_AT_MS = 5
    PRIORITIES = 6
    TENANTS = 7
    TOPICS = 8
    UNIQUES = 9
    REPLACES = 10
    SCHEDULE_IDS = 11
    DELAYS_MS = 12
    BODIES = 255


def pack_bodies(bodies: Sequence[bytes]) -> tuple[bytes, bytes]:
    r"""Return lengths and joined bytes of values of which none is absent.

    They stay two parts, because joining them here would copy every body once more.

    >>> pack_bodies([b"ab", b"c"])
    (b'\x02\x00\x00\x00\x01\x00\x00\x00', b'abc')
    """
    return array("I", map(len, bodies)).tobytes(), b"".join(bodies)


def pack_optional(values: Sequence[bytes | None]) -> bytes:
    """Pack values of which some may be absent."""
    lengths = array("I", (ABSENT if value is None else len(value) for value in values))
    return lengths.tobytes() + b"".join(value for value in values if value is not None)


def pack_texts(texts: Sequence[str | None]) -> bytes:
    """Pack texts as utf-8; undecodable bytes that came in as surrogate escapes go out as they were.

    >>> unpack_texts(memoryview(pack_texts(["a", None, "ü"])), count=3)
    ['a', None, 'ü']
    """
    try:
        joined = "".join(texts)  # type: ignore[arg-type]  # None is what we try for
        if joined.isascii():  # one length for characters and bytes: no text is touched one by one
            return array("I", map(len, texts)).tobytes() + joined.encode()  # type: ignore[arg-type]
    except TypeError:
        pass  # some are absent
    try:
        return pack_optional([_utf8(text) for text in texts])
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"text {error.object[:40]!a} cannot be written as utf-8") from None


def pack_headers(headers: Sequence[Mapping[str, str | bytes] | None]) -> bytes:
    """Pack the headers of each message."""
    return pack_optional([None if one is None else encode_headers(one) for one in headers])


def pack_instants(instants: Sequence[int | None]) -> bytes:
    """Pack moments in milliseconds, of which some may be absent."""
    try:
        return array("q", [NO_INSTANT if at is None else at for at in instants]).tobytes()
    except OverflowError:
        raise InvalidRequest("due_at_ms has a moment that does not fit into 64 bits") from None


def pack_numbers(numbers: Sequence[int | None]) -> bytes:
    """Pack schedule ids, of which some may be absent.

    >>> unpack_numbers(memoryview(pack_numbers([7, None, -1])), count=3)
    [7, None, -1]
    """
    try:
        return array("q", [NO_INSTANT if one is None else one for one in numbers]).tobytes()
    except OverflowError:
        raise InvalidRequest("a schedule id does not fit into 64 bits") from None


def pack_priorities(priorities: Sequence[int | None]) -> bytes:
    """Pack priorities from 0 to 255; no priority is 0."""
    try:
        return bytes([priority or 0 for priority in priorities])
    except ValueError:
        raise InvalidRequest("a priority is a number from 0 to 255") from None


def lengths_of(column: memoryview, *, count: int) -> memoryview:
    """Return the lengths of a variable column in place, as u32."""
    if 4 * count > len(column):
        raise ProtocolError(f"a column of {len(column)} bytes is too short for {count} messages")
    return column[: 4 * count].cast("I")  # .tolist() before a loop: a view makes each number slowly


def unpack_bodies(column: memoryview, *, count: int) -> list[bytes]:
    """Return the values of a column in which none may be absent.

    >>> unpack_bodies(memoryview(b"".join(pack_bodies([b"ab", b"", b"c"]))), count=3)
    [b'ab', b'', b'c']
    """
    lengths = lengths_of(column, count=count).tolist()
    _check_sum(lengths, column)
    # Reading from a file in memory cuts twice as fast as slicing.
    return list(map(BytesIO(column[4 * count :]).read, lengths))


def unpack_optional(column: memoryview, *, count: int) -> list[bytes | None]:
    """Return the values of a column in which some may be absent."""
    lengths = lengths_of(column, count=count).tolist()
    if ABSENT not in lengths:
        return list(unpack_bodies(column, count=count))
    _check_sum([0 if size == ABSENT else size for size in lengths], column)
    read = BytesIO(column[4 * count :]).read
    return [None if size == ABSENT else read(size) for size in lengths]


def unpack_texts(column: memoryview, *, count: int) -> list[str | None]:
    """Return the texts of a column in which some may be absent."""
    lengths = lengths_of(column, count=count).tolist()
    joined = bytes(column[4 * count :])
    if joined.isascii() and ABSENT not in lengths:
        _check_sum(lengths, column)
        return list(map(StringIO(joined.decode("ascii"), newline="").read, lengths))
    return [
        None if value is None else value.decode("utf-8", "surrogateescape")
        for value in unpack_optional(column, count=count)
    ]


def unpack_headers(column: memoryview, *, count: int) -> list[dict[str, str | bytes] | None]:
    """Return the headers of each message."""
    packed = unpack_optional(column, count=count)
    return [None if one is None else decode_headers(one) for one in packed]


def unpack_instants(column: memoryview, *, count: int) -> list[int | None]:
    """Return the moments of a column in which some may be absent."""
    _check_width(column, count=count, width=8)
    return [None if at == NO_INSTANT else at for at in column.cast("q")]


def unpack_numbers(column: memoryview, *, count: int) -> list[int | None]:
    """Return the schedule ids of a column in which some may be absent."""
    return unpack_instants(column, count=count)


def unpack_priorities(column: memoryview, *, count: int) -> list[int]:
    """Return the priority of each message."""
    _check_width(column, count=count, width=1)
    return column.tolist()


def _check_sum(lengths: list[int], column: memoryview) -> None:
    """Refuse lengths that do not fill the joined bytes exactly."""
    total, room = sum(lengths), len(column) - 4 * len(lengths)
    if total != room:
        raise ProtocolError(f"the lengths of a column add up to {total}, but it has {room} bytes")


def _check_width(column: memoryview, *, count: int, width: int) -> None:
    if len(column) != count * width:
        raise ProtocolError(
            f"a column of {len(column)} bytes should have {width} for each of {count}"
        )


def _utf8(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")
