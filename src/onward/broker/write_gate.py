"""May this node write? The one place that knows, and says why not.

leading, running    everything
disk nearly full    what frees space or takes next to none: acks, endings of topics
stopping            nothing new; what was accepted is finished
closed              nothing at all
following           nothing: another node leads
"""

from __future__ import annotations

from onward.errors import DiskFull, NotLeader, OnwardError, Stopping


class WriteGate:
    """Whether a node may write.

    >>> gate = WriteGate()
    >>> gate.disk_is_full = True
    >>> gate.is_open, gate.refusal(even_when_full=True), gate.refusal()
    (False, None, DiskFull('the disk is nearly full: nothing is stored until there is space again'))
    """

    def __init__(self) -> None:
        self._is_leading = True
        self._leader: str | None = None
        self._why = ""
        self._is_stopping = False
        self._disk_is_full = False
        self.is_closed = False
        """Not even acks are written any more."""
        self.is_open = True
        """Everything may be written. Looked at for each publish, so it is one attribute."""

    @property
    def is_leading(self) -> bool:
        """Return True if this node decides what is written."""
        return self._is_leading

    @property
    def leader(self) -> str | None:
        """Return the address of the node that takes writes, if this one does not and knows it."""
        return self._leader

    @property
    def is_stopping(self) -> bool:
        """Return True once the node takes no new work."""
        return self._is_stopping

    @is_stopping.setter
    def is_stopping(self, is_stopping: bool) -> None:
        self._is_stopping = is_stopping
        self._note()

    @property
    def disk_is_full(self) -> bool:
        """Return True while only the reserve of the disk is left."""
        return self._disk_is_full

    @disk_is_full.setter
    def disk_is_full(self, is_full: bool) -> None:
        self._disk_is_full = is_full
        self._note()

    def lead(self) -> None:
        """Let this node write."""
        self._is_leading, self._leader = True, None
        self._note()

    def follow(self, leader: str | None, *, why: str = "this node is a read-only copy") -> None:
        """Refuse every write: `leader` is the address of the node that takes them, if known."""
        self._is_leading, self._leader, self._why = False, leader, why
        self._note()

    def refusal(self, *, even_when_full: bool = False) -> OnwardError | None:
        """Return why nothing can be written now; None when it can."""
        if not self._is_leading:
            where = f": write to {self._leader}" if self._leader else ""
            return NotLeader(self._why + where, leader=self._leader)
        if self._is_stopping:
            return Stopping("the broker is stopping")
        if self._disk_is_full and not even_when_full:
            return DiskFull("the disk is nearly full: nothing is stored until there is space again")
        return None

    def check(self, *, even_when_full: bool = False) -> None:
        """Raise when nothing can be written now."""
        if (error := self.refusal(even_when_full=even_when_full)) is not None:
            raise error

    def check_leading(self) -> None:
        """Raise `NotLeader` when another node decides what is written."""
        if not self._is_leading and (error := self.refusal()) is not None:
            raise error

    def _note(self) -> None:
        self.is_open = self._is_leading and not self._is_stopping and not self._disk_is_full
