"""What a consumer can be told besides its topics and its group, wherever one is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal, TypedDict

from onward.delivery.retry import RetryPolicy
from onward.durations import Duration


class ConsumeOptions(TypedDict, total=False):
    """The options of `Client.consume`."""

    mode: Literal["shared", "exclusive", "ordered", "broadcast"] | None
    start: str | int | datetime | timedelta | None
    member: str | None
    credit: int | None
    lease: Duration | None
    lease_ms: int | None
    retry: RetryPolicy | str | None
    tags: str | Sequence[str] | None
    all_tags: str | Sequence[str] | None
    headers: Mapping[str, str] | None
    at_most_once: bool | None
    priorities: bool | None
    tenants: Mapping[str, float] | None
    key_rate: float | None
    key_concurrency: int | None
    expires_idle: Duration | None
    expires_idle_ms: int | None
    refuse: bool
    apply: bool
    position: str | os.PathLike[str] | None
