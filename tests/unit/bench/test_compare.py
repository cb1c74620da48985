"""The comparison of two trees: its interval, its direction, and what it calls worse."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

TREE = Path(__file__).parents[3]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", TREE / "benchmarks" / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare", module)
    spec.loader.exec_module(module)
    return module


def make_tree(folder: Path, *, figure: float, ratio_is: str) -> Path:
    """Make a tree whose benchmark prints a figure at once."""
    package = folder / "src" / "onward"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    record = json.dumps({"onward": figure, "details": {"ratio_is": ratio_is}})
    (package / "cli.py").write_text(f"def main():\n    print({record!r})\n")
    return folder


@pytest.mark.parametrize(
    ("ratio_is", "ratio"), [("onward / best peer", 2.0), ("best peer / onward", 0.5)]
)
def test_a_ratio_above_one_means_better_in_both_directions(
    compare: ModuleType, tmp_path: Path, ratio_is: str, ratio: float
) -> None:
    base = make_tree(tmp_path / "base", figure=100, ratio_is=ratio_is)
    tree = make_tree(tmp_path / "tree", figure=200, ratio_is=ratio_is)
    assert compare.compare(base, tree, ["read"], rounds=2).ratios == [ratio, ratio]


def test_the_interval_leaves_out_one_of_ten_pairs_on_each_side(compare: ModuleType) -> None:
    assert compare.Comparison(ratios=range(1, 11)).interval == (2, 9)
    assert compare.Comparison(ratios=range(1, 6)).interval == (1, 5)
    assert compare.Comparison(ratios=range(1, 41)).interval == (14, 27)


def test_only_an_interval_that_is_wholly_beyond_five_percent_is_worse(compare: ModuleType) -> None:
    assert compare.Comparison(ratios=[0.9] * 10).is_worse
    assert not compare.Comparison(ratios=[0.9] * 8 + [0.96] * 2).is_worse
    assert not compare.Comparison(ratios=[1.2] * 10).is_worse
