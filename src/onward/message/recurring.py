"""The settings of a recurring schedule: the message of each run, and when the runs are.

Clients send them, the broker stores and lists them; `onward.schedule.recurring` computes the runs.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class RecurringFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields that a request, the stored record and a description have in common."""

    name: str
    topic: str
    body: bytes = b""
    key: str | None = None
    headers: dict[str, str] | None = None
    tag: str | None = None
    trace_id: str | None = None
    priority: int = 0
    tenant: str | None = None
    cron: str = ""
    zone: str = "UTC"
    every_ms: int = 0
    catch_up: Literal["one", "none"] = "one"
    """What becomes of missed runs: the latest is made up for, or none."""
    start_ms: int = 0
    """All runs are after this."""
    paused: bool = False
