import json

from onward.bench.report import Report, percentiles_ms, rounded


def report(*, onward: float, peers: dict[str, float], less_is_better: bool = False) -> Report:
    return Report(
        name="x", unit="u", onward=onward, peers=peers, durability="disk",
        less_is_better=less_is_better,
    )  # fmt: skip


def test_a_ratio_above_one_always_means_that_onward_is_ahead():
    assert report(onward=20, peers={"a": 5, "b": 10}).ratio == 2
    assert report(onward=5, peers={"a": 20, "b": 10}, less_is_better=True).ratio == 2
    assert report(onward=10, peers={"a": 5}, less_is_better=True).ratio == 0.5


def test_without_a_peer_there_is_no_ratio_but_a_null():
    record = json.loads(json.dumps(report(onward=5, peers={}).record()))
    assert record["ratio"] is None
    assert record["peers"] == {}


def test_the_line_for_machines_has_what_the_figures_depend_on():
    record = report(onward=1234.5, peers={"a": 2}).record()
    assert list(record)[:6] == ["name", "unit", "onward", "peers", "ratio", "durability"]
    details = record["details"]
    assert isinstance(details, dict)
    assert {"ratio_is", "machine"} <= set(details)
    assert {"cpus", "load_average", "versions", "python"} <= set(details["machine"])


def test_percentiles_are_values_that_were_really_seen():
    seen = percentiles_ms([number * 1_000_000 for number in range(1, 101)])
    assert (seen["p50"], seen["p99"], seen["p100"]) == (50.0, 99.0, 100.0)
    assert percentiles_ms([]) == {}


def test_figures_have_as_many_digits_as_they_deserve():
    assert [rounded(figure) for figure in (1234567.8, 12.34567, 0.5)] == [1234568, 12.346, 0.5]
