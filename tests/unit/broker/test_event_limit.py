"""Log lines of one kind are limited, and what has no line is counted."""

import logging

import pytest

from onward.broker.event_limit import EVENTS_MAX, WINDOW_MS, EventLimit

LOGGER = logging.getLogger("onward.test")


def test_a_flood_becomes_a_few_lines_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    events = EventLimit(LOGGER, "sessions ended")
    for number in range(50_000):
        events.write("session ended: %d", number, now_ms=100)
    assert caplog.messages == [f"session ended: {number}" for number in range(EVENTS_MAX)]
    events.tick(now_ms=100 + WINDOW_MS - 1)
    assert len(caplog.messages) == EVENTS_MAX
    events.tick(now_ms=100 + WINDOW_MS)
    assert caplog.messages[EVENTS_MAX:] == ["sessions ended: 49980 more within 10 s, not listed"]
    events.tick(now_ms=100 + 2 * WINDOW_MS)
    assert len(caplog.messages) == EVENTS_MAX + 1


def test_events_that_are_rare_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    events = EventLimit(LOGGER, "sessions ended")
    for number in range(100):
        events.write("session ended: %d", number, now_ms=number * WINDOW_MS)
    assert len(caplog.messages) == 100
