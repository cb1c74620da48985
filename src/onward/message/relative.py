"""A time that is relative to the clock of the broker: `{"in_ms": 600000}` where a number may stand.

A client sends what it was told ("in 10 minutes", "10 minutes ago") and never adds the time of its
own clock, which may be wrong. The broker resolves it once, when it accepts the request. A broker
that does not know this form refuses the object, because it expects a number: a relative time is
never taken for another time.
"""

from typing import Annotated

import msgspec

SINCE_REVISION = 1
"""From this revision on, which WELCOME says, a broker resolves relative times."""


class Relative(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many milliseconds from now on; negative: ago.

    >>> msgspec.json.encode(Relative(-600_000))
    b'{"in_ms":-600000}'
    """

    in_ms: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


def resolve_ms(time_ms: int | Relative, *, now_ms: int) -> int:
    """Return a time in milliseconds since 1970; what is before 1970 is there.

    >>> resolve_ms(7, now_ms=600_000), resolve_ms(Relative(-1_000), now_ms=600_000)
    (7, 599000)
    """
    return max(0, now_ms + time_ms.in_ms) if isinstance(time_ms, Relative) else time_ms
