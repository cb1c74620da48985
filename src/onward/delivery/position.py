"""Where a member of a broadcast is in one topic: the offset below which everything is done.

An offset alone says little: a topic may end, and another may get its name, in which the same offset
is another message. So a position has the number of its topic, which is never given twice.
"""

from typing import NamedTuple


class Position(NamedTuple):
    """How far a member of a broadcast is with one topic.

    >>> Position(71, number=5).is_of(5), Position(71, number=5).is_of(6), Position(71).is_of(6)
    (True, False, True)
    """

    offset: int
    number: int = 0
    """Which topic that is; 0: stored before positions had one, so the name has to do."""

    def is_of(self, number: int) -> bool:
        """Tell whether this is a place in the topic of this number; 0: it is not known."""
        return not self.number or not number or self.number == number
