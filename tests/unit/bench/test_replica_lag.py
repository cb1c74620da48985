"""The benchmark of replicas measures what it says: one small run of it."""

from pathlib import Path
from typing import Any

import pytest

from onward.bench import replica_lag
from onward.bench.report import Options


@pytest.mark.e2e
def test_lag_cost_and_catch_up_are_measured_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replica_lag, "WARM_UP_S", 0.2)
    options = Options(folder=tmp_path, seconds=0.5, repeat=1, log_bytes=4 << 20)
    report = replica_lag.run(options)
    details: dict[str, Any] = dict(report.details)
    assert 0 < details["p50_ms"] <= report.onward
    assert details["cost"]["with_replica"]["per_second"] > 0
    assert details["cost"]["cpu_ratio"] > 0
    assert details["catch_up"]["log_bytes"] >= 4 << 20
    assert details["catch_up"]["ratio"] > 0
    assert (report.ratio, list(tmp_path.iterdir())) == (None, [])
