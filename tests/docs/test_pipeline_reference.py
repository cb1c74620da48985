"""The reference of the pipeline names all that there is: functions, options, columns, views."""

import inspect
import re

import msgspec
import pytest

from onward import pipeline
from onward.pipeline import options, queries, sink
from onward.pipeline.runs import JobRun

from .examples import ROOT

PAGE = (ROOT / "docs" / "reference" / "pipeline.md").read_text(encoding="utf-8")


def part(heading: str) -> str:
    """Return what stands under a heading."""
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", pipeline.__all__)
def test_every_function_and_its_arguments_are_in_the_reference(name: str):
    row = re.search(rf"`{name}\(([^)]*)\)", part("`onward.pipeline`"))
    assert row, f"{name} has no signature in the reference"
    # A default may have commas in it: only names count.
    written = re.findall(r"(?:^|, )\**(\w+)", row[1])
    assert written == list(inspect.signature(getattr(pipeline, name)).parameters)


@pytest.mark.parametrize("name", [*options.OPTION_NAMES, *options.KAFKA_NAMES, options.HEADERS])
def test_every_option_of_the_source_is_in_the_reference(name: str):
    assert f"`{name}`" in part("Options of the source")


@pytest.mark.parametrize("name", [*sink.OPTION_NAMES, *sink.SINK_COLUMNS])
def test_every_option_and_column_of_the_sink_is_in_the_reference(name: str):
    assert f"`{name}`" in part("Options and columns of the sink")


@pytest.mark.parametrize("name", queries.VIEWS)
def test_every_view_is_in_the_reference(name: str):
    assert f"`{name}`" in part("Views of `sql`")


@pytest.mark.parametrize("name", [field.name for field in msgspec.structs.fields(JobRun)])
def test_every_field_of_a_run_is_in_the_reference(name: str):
    assert f"`{name}`" in part("What jobs say: `@pipeline`")
