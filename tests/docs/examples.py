"""The examples in a page: cut out, run, and compared with what the page says that they print.

    ```python     run from top to bottom, tests in it too; `mq` is a client on `memory:`. A comment
                  after `print(...)` is what it prints: at least once, if it is in a loop.
    ```text       right after a block of Python: all that the block printed.
    ```console    lines with `$ ` are run by bash; what follows is all that they print.
    ```sh         run by bash as it is, without `make` and without what runs for ever.
    ```toml       read as a settings file.

`...` in an output stands for anything. `localhost:7700` is the broker of the test.
"""

import ast
import asyncio
import doctest
import inspect
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onward

ROOT = Path(__file__).resolve().parents[2]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
COMMAND_S_MAX = 180

_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^\s*print\(.*\)  # (.+)$")
_LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    """Of its first line, in the page."""
    output: str | None
    """What a `text` block right after it says that it prints."""


def blocks(path: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    page = path.read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(page))
    listed = []
    for number, match in enumerate(found):
        following = found[number + 1] if number + 1 < len(found) else None
        output = None
        if following is not None and following[1] == "text":
            is_next = not page[match.end() : following.start()].strip()
            output = following[2] if is_next else None
        line = page.count("\n", 0, match.start(2)) + 1
        listed.append(Block(match[1], match[2], line, output))
    return listed


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def assert_output(wanted: str, got: str, *, where: str) -> None:
    assert doctest.OutputChecker().check_output(wanted, got, _LOOSE), (
        f"{where} says\n{wanted}\nbut it printed\n{got}"
    )


# --- Python ------------------------------------------------------------------------------------


def run_python(path: Path, *, address: str) -> int:
    """Run all Python of a page; return how many blocks there were."""
    chosen = [block for block in blocks(path) if block.language == "python"]
    printed = Printed()
    names = {"__name__": "page", "onward": onward, "asyncio": asyncio, "print": printed}
    # Dataclasses and pickles look for the module that a class says it is from.
    sys.modules["page"] = types.ModuleType("page")
    with asyncio.Runner() as runner:
        mq = onward.connect("memory:")
        runner.run(mq.open())
        names["mq"] = mq
        for block in chosen:
            printed.lines.clear()
            before = set(names)
            _run_block(runner, block, names, path, address)
            _run_tests(runner, names, set(names) - before)
            _compare(block, printed, path)
        runner.run(mq.close())
    return len(chosen)


class Printed:
    """Stands in for `print`, and remembers which line of the page printed what."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def __call__(self, *values: object) -> None:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        self.lines.append((frame.f_back.f_lineno, " ".join(map(str, values))))


def _run_block(
    runner: asyncio.Runner, block: Block, names: dict[str, object], path: Path, address: str
) -> None:
    # Empty lines first, so that a traceback names the line of the page.
    text = "\n" * (block.line - 1) + block.text.replace("localhost:7700", address)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(text, str(path), "exec", flags=flags, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(_awaited(code, names))
    else:
        exec(code, names)


def _run_tests(runner: asyncio.Runner, names: dict[str, object], new: set[str]) -> None:
    for name in sorted(new):
        test = names[name]
        if name.startswith("test_") and inspect.isfunction(test):
            given = [Path.cwd()] if "tmp_path" in inspect.signature(test).parameters else []
            result = test(*given)
            if inspect.iscoroutine(result):
                runner.run(result)


async def _awaited(code: types.CodeType, names: dict[str, object]) -> None:
    async with asyncio.timeout(COMMAND_S_MAX):
        await eval(code, names)


def _compare(block: Block, printed: Printed, path: Path) -> None:
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if wanted := _COMMENT.match(line):
            got = [text for at, text in printed.lines if at == number]
            checker = doctest.OutputChecker()
            assert any(checker.check_output(wanted[1], text, _LOOSE) for text in got), (
                f"{name_of(path)}:{number} says {wanted[1]!r}, but it printed {got}"
            )
    if block.output is not None:
        got_all = "".join(f"{text}\n" for _, text in printed.lines)
        assert_output(block.output, got_all, where=f"{name_of(path)}:{block.line}")


# --- the shell ---------------------------------------------------------------------------------


class Shell:
    """bash in a folder where `onward` is what it is after an installation."""

    def __init__(self, folder: Path, *, address: str) -> None:
        self._folder = folder
        places = [folder / "bin", folder / ".venv" / "bin"]
        for place in places:
            place.mkdir(parents=True)
            script = place / "onward"
            script.write_text(
                f"#!{sys.executable}\nfrom onward.cli import main\nmain()\n", encoding="utf-8"
            )
            script.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if "ONWARD" not in name}
        self._environ = kept | {
            "PATH": f"{places[0]}:{os.environ['PATH']}",
            "ONWARD_ADDRESS": address,
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
        }

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script; what it prints on stderr is in its output."""
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", script], cwd=self._folder, env=self._environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=COMMAND_S_MAX, check=False,
        )  # fmt: skip

    def first_line(self, command: str) -> str:
        """Run what would wait for ever, until it has printed a line; then end it."""
        with subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self._folder, env=self._environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as running:  # fmt: skip
            limit = threading.Timer(COMMAND_S_MAX, running.kill)
            limit.start()
            assert running.stdout is not None
            line = running.stdout.readline()
            limit.cancel()
            running.kill()
        return line


def run_console(path: Path, shell: Shell, addresses: Mapping[str, str] | None = None) -> int:
    """Run the commands of all console blocks of a page; return how many there were.

    `addresses` says where the brokers of the test are that the page names.
    """
    count = 0
    for block in blocks(path):
        if block.language == "console":
            text = block.text
            for named, address in (addresses or {}).items():
                text = text.replace(named, address)
            for command, wanted in _commands(text):
                result = shell.run(command)
                assert_output(wanted, result.stdout, where=f"{name_of(path)}: {command}")
                count += 1
    return count


def _commands(text: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        while command.endswith("\\"):
            more, _, output = output.partition("\n")
            command = f"{command[:-1]} {more}"
        yield command, output


def run_sh(path: Path, shell: Shell) -> int:
    """Run the sh blocks of a page; return how many commands there were."""
    count = 0
    for block in blocks(path):
        lines = block.text.splitlines() if block.language == "sh" else []
        for line in lines:
            command = re.sub(r"\s+# .*", "", line)
            if not command or re.match(r"make |\S*onward serve", command):
                continue
            count += 1
            if "--follow" in command:
                said = shell.first_line(command)
                assert said, f"{name_of(path)}: {command}"
                assert not said.startswith("error:"), said
                continue
            result = shell.run(command)
            said = f"{name_of(path)}: {command}\n{result.stdout}"
            assert result.returncode == 0, said
            assert result.stdout, said
    return count


# --- settings ----------------------------------------------------------------------------------


def settings_files(path: Path) -> list[str]:
    return [block.text for block in blocks(path) if block.language == "toml"]
