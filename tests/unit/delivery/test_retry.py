"""Retry policies: how often, how soon, and nonsense is told from sense."""

import math

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.delivery.retry import LADDER_S, RetryPolicy, parse_policy
from onward.durations import parse_duration_ms
from onward.errors import InvalidRequest

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def delays(policy: RetryPolicy, *, spread: float = 0) -> list[int]:
    return [policy.delay_after(attempt, spread=spread) for attempt in range(1, policy.limit)]


def test_the_default_ladder_has_sixteen_steps_and_then_the_message_is_dead():
    policy = RetryPolicy()
    assert policy.limit == 17
    assert delays(policy) == [step_s * 1_000 for step_s in LADDER_S]
    assert delays(policy, spread=1) == delays(policy)


def test_the_last_step_of_a_ladder_repeats_when_there_are_more_attempts():
    policy = RetryPolicy(steps_ms=(10, 20), attempts_max=5)
    assert delays(policy) == [10, 20, 20, 20]


def test_a_fixed_pause_is_always_the_same():
    assert delays(RetryPolicy(kind="fixed", delay_ms=7, attempts_max=4)) == [7, 7, 7]
    assert RetryPolicy(kind="fixed").limit == 16


def test_an_exponential_pause_grows_up_to_its_limit():
    policy = RetryPolicy(kind="exponential", delay_ms=1_000, delay_ms_max=5_000, attempts_max=6)
    assert delays(policy) == [1_000, 2_000, 4_000, 5_000, 5_000]
    assert delays(policy, spread=1) == [900, 1_800, 3_600, 4_500, 4_500]


def test_a_policy_of_none_delivers_once():
    assert (RetryPolicy(kind="none").limit, delays(RetryPolicy(kind="none"))) == (1, [])
    assert RetryPolicy(kind="none").delay_after(1, spread=0.5) == 0


@SETTINGS
@given(
    st.integers(0, 10**9), st.floats(1, 1_000), st.floats(0, 1), st.integers(0, 10_000),
    st.floats(0, 1),
)  # fmt: skip
def test_no_pause_is_negative_or_longer_than_its_limit(
    delay_ms: int, factor: float, jitter: float, attempt: int, spread: float
):
    policy = RetryPolicy(
        kind="exponential", delay_ms=delay_ms, factor=factor, jitter=jitter, delay_ms_max=10**9
    ).check()
    assert 0 <= policy.delay_after(attempt, spread=spread) <= 10**9


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("ladder", RetryPolicy()),
        ("ladder:3", RetryPolicy(attempts_max=3)),
        ("none", RetryPolicy(kind="none")),
        ("fixed:10s", RetryPolicy(kind="fixed", delay_ms=10_000)),
        ("fixed:500ms:5", RetryPolicy(kind="fixed", delay_ms=500, attempts_max=5)),
        (
            "exponential:1s..1h",
            RetryPolicy(kind="exponential", delay_ms=1_000, delay_ms_max=3_600_000),
        ),
        (
            "exponential:2s..10m:8",
            RetryPolicy(kind="exponential", delay_ms=2_000, delay_ms_max=600_000, attempts_max=8),
        ),
        ("10s,1m,5m", RetryPolicy(steps_ms=(10_000, 60_000, 300_000))),
        ("10s", RetryPolicy(steps_ms=(10_000,))),
        (" 1s, 2s ", RetryPolicy(steps_ms=(1_000, 2_000))),
    ],
)
def test_a_policy_reads_as_people_write_it(text: str, policy: RetryPolicy):
    assert parse_policy(text) == policy


@pytest.mark.parametrize("pause", ["500ms", "45s", "10m", "1h30m", "7d", "1d1h1m1s1ms", "0s"])
def test_a_pause_means_what_a_duration_means_everywhere_else(pause: str):
    assert parse_policy(f"fixed:{pause}").delay_ms == parse_duration_ms(pause)


@pytest.mark.parametrize(
    "text",
    [
        "", "ladder:x", "ladder:0", "none:1", "fixed", "fixed:", "fixed:soon", "fixed:10s:-1",
        "fixed:10s:0", "fixed:10s:5:6", "fixed:10s:20000", "exponential:1s", "exponential:1h..1s",
        "exponential:..", "10s,,5m", "10s;20s", "always", "fixed:30m1h", "fixed:4000d", "ladder:٣",
        ",".join(["1s"] * 1_001),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_read_is_refused_with_the_forms_that_can(text: str):
    with pytest.raises(InvalidRequest, match="is not a retry policy.*fixed:10s"):
        parse_policy(text)


@pytest.mark.parametrize(
    ("nonsense", "named"),
    [
        (RetryPolicy(steps_ms=()), "steps"),
        (RetryPolicy(steps_ms=(1,) * 1_001), "steps"),
        (RetryPolicy(steps_ms=(5, -1)), "a step"),
        (RetryPolicy(kind="fixed", delay_ms=10**15), "delay_ms"),
        (RetryPolicy(kind="exponential", factor=math.nan), "factor"),
        (RetryPolicy(kind="exponential", factor=0.5), "factor"),
        (RetryPolicy(kind="exponential", factor=math.inf), "factor"),
        (RetryPolicy(kind="exponential", jitter=math.nan), "jitter"),
        (RetryPolicy(kind="exponential", jitter=1.5), "jitter"),
        (RetryPolicy(kind="exponential", delay_ms=10, delay_ms_max=5), "delay_ms_max"),
        (RetryPolicy(attempts_max=-1), "attempts_max"),
        (RetryPolicy(attempts_max=10_001), "attempts_max"),
        (RetryPolicy(kind="none", attempts_max=2), "attempts_max"),
        (RetryPolicy(kind="sometimes"), "kind"),  # type: ignore[arg-type]
        (RetryPolicy(delay_ms="10s"), "delay_ms"),  # type: ignore[arg-type]
        (RetryPolicy(steps_ms=(object(),)), "object"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_with_nonsense_is_refused_by_name(nonsense: RetryPolicy, named: str):
    with pytest.raises(InvalidRequest, match=rf"retry policy: .*{named}"):
        nonsense.check()


def test_a_policy_is_the_same_after_a_journey_as_json():
    policy = parse_policy("exponential:1s..1h:8")
    assert msgspec.json.decode(msgspec.json.encode(policy), type=RetryPolicy) == policy
    assert msgspec.json.encode(RetryPolicy()) == b"{}"
