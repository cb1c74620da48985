import json

from onward.bench.report import Report, percentiles_ms, rounded


def report(*, onward: float, peers: dict[str, float]) -> Report:
    return Report(name="x", unit="u", onward=onward, peers=peers, durability="disk")


def test_the_ratio_is_onward_by_the_best_peer():
    assert report(onward=20, peers={"a": 5, "b": 10}).ratio == 2
    assert report(onward=5, peers={"a": 20, "b": 10}).ratio == 0.25


def test_where_less_is_better_the_ratio_is_the_best_peer_by_onward():
    less = Report(
        name="x", unit="ms", onward=2, peers={"a": 5, "b": 10}, durability="disk",
        less_is_better=True,
    )  # fmt: skip
    assert less.ratio == 2.5
    assert less.ratio_is == "best peer / onward"


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
