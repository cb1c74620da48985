"""What a seed chooses before its run begins: sizes, programs, topics, and which faults there are.

A seed chooses only some of the faults, so that each of them is also met without the others hiding
it. Sizes are small, so that segments, runs, checkpoints and rewrites come and go all the time; some
are smaller than a configuration file may say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from onward.settings import LogSettings, ServerSettings, Settings
from onward.testing.group_history import GroupPlan
from onward.testing.history import TopicKind

TROUBLES = (
    "power", "power in mid-operation", "kill", "stop", "sync error", "cut", "half-open",
    "partition", "clock", "full disk", "short writes", "uncached reads", "slow network",
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """The world of one run."""

    troubles: tuple[str, ...]
    settings: Settings
    publishers: int
    followers: int
    topics: tuple[str, ...]
    trouble_ms: int
    pause_ms_max: int
    executor_ms_max: int
    groups: tuple[GroupPlan, ...]

    @property
    def is_bounded(self) -> bool:
        """Tell whether the log as a whole is bounded, so that all topics lose old messages."""
        return self.settings.log.retention_bytes > 0

    @property
    def late_us(self) -> int:
        """How long something may be on its way to a member."""
        is_slow = {"slow network", "partition"} & set(self.troubles)
        return 30_000_000 if is_slow else 3_000_000

    @classmethod
    def choose(
        cls,
        random: Random,
        *,
        troubles: tuple[str, ...] | None = None,
        groups: tuple[GroupPlan, ...] | None = None,
    ) -> Scenario:
        """Choose some of everything; `troubles` and `groups` replace those that would be chosen.

        >>> Scenario.choose(Random(7), troubles=("power",)).troubles
        ('power',)
        """
        chosen = tuple(random.sample(TROUBLES, random.randint(1, 6)))
        is_bounded = random.random() < 0.2
        topics = _topics(random, "trimmed" if is_bounded else "kept")
        is_trimmed = "trimmed-9" in topics and random.random() < 0.5
        return cls(
            troubles=chosen if troubles is None else troubles,
            settings=_settings(
                random, retention_bytes=60_000 if is_bounded else 0, is_trimmed=is_trimmed
            ),
            publishers=random.randint(1, 4),
            followers=random.randint(1, 4),
            topics=topics,
            trouble_ms=random.choice((10_000, 30_000, 60_000)),
            pause_ms_max=random.choice((20, 200, 1_000)),
            executor_ms_max=random.choice((1, 5, 50, 300)),
            groups=_groups(random, topics, is_trimmed=is_trimmed)
            if groups is None
            else _with_topics(groups, topics),
        )


def _topics(random: Random, kind: TopicKind) -> tuple[str, ...]:
    """Return some topics of one kind and some of others: see `history`."""
    most = [f"{kind}-{number}" for number in range(random.randint(1, 3))]
    others = random.sample(("trimmed-9", "brief-0", "brief-1", "volatile-0"), random.randint(1, 4))
    return (*most, *others)


def _groups(random: Random, topics: tuple[str, ...], *, is_trimmed: bool) -> tuple[GroupPlan, ...]:
    """Choose some groups; with `is_trimmed` one of them for the topic that loses old messages."""
    count = random.choice((0, 1, 1, 2, 3))
    chosen = [GroupPlan.choose(random, f"g{number}", topics) for number in range(count)]
    if is_trimmed:
        chosen.append(GroupPlan.choose(random, f"g{count}", ("trimmed-9",)))
    return tuple(chosen)


def _with_topics(groups: tuple[GroupPlan, ...], topics: tuple[str, ...]) -> tuple[GroupPlan, ...]:
    return tuple(replace(plan, topics=plan.topics or topics[:1]) for plan in groups)


def _settings(random: Random, *, retention_bytes: int, is_trimmed: bool) -> Settings:
    # Retention drops whole segments: only small ones go within a run.
    segment_bytes = (8_192, 16_384) if is_trimmed else (8_192, 16_384, 65_536, 1 << 20)
    return Settings(
        server=ServerSettings(
            heartbeat_ms=random.choice((500, 5_000)),
            inflight_bytes_max=random.choice((20_000, 64 << 20)),
            connection_bytes_max=random.choice((10_000, 8 << 20)),
            stop_ms=random.choice((50, 10_000)),
        ),
        log=LogSettings(
            folder="log",
            segment_bytes_max=random.choice(segment_bytes),
            checkpoint_rows=random.choice((5, 50, 1_000)),
            checkpoint_bytes=random.choice((8_192, 65_536, 1 << 20)),
            preallocate_bytes=random.choice((0, 4_096, 65_536)),
            disk_reserve_bytes=random.choice((0, 30_000)),
            retention_ms=0,
            retention_bytes=retention_bytes,
            interval_ms=random.choice((10, 1_000)),
        ),
    )
