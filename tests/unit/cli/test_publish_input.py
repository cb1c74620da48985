"""What `onward publish` does with input that breaks off, or receipts that nobody reads."""

import subprocess
import sys
from pathlib import Path

import onward

ONWARD = [sys.executable, "-c", "import sys; from onward.cli import main; main(sys.argv[1:])"]


def stored(folder: Path, topic: str) -> list[str]:
    with onward.connect_sync(f"file:{folder}") as mq:
        return [message.text for message in mq.read(topic)]


def test_a_wrong_line_is_named_by_its_number_and_all_before_it_are_published(tmp_path: Path):
    folder = tmp_path / "data"
    lines = "".join(f'{{"body": "{n}"}}\n' for n in range(1_500)) + 'broken\n{"body": "late"}\n'
    ended = subprocess.run(
        [*ONWARD, "publish", "orders", "--json-lines", "--address", f"file:{folder}"],
        input=lines, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "line 1501: 'broken' is not a message as JSON" in ended.stderr
    assert "1500 messages were published before" in ended.stderr
    assert stored(folder, "orders") == [str(n) for n in range(1_500)]


def test_everything_is_published_though_nobody_reads_the_receipts(tmp_path: Path):
    folder = tmp_path / "data"
    publishing = subprocess.Popen(
        [*ONWARD, "publish", "orders", "--json", "--batch", "10", "--address", f"file:{folder}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert publishing.stdin is not None
    assert publishing.stdout is not None
    publishing.stdin.write("".join(f"{n}\n" for n in range(100)))
    publishing.stdin.flush()
    assert publishing.stdout.readline()
    publishing.stdout.close()
    publishing.stdin.write("".join(f"{n}\n" for n in range(100, 500)))
    publishing.stdin.close()
    assert publishing.wait() == 0
    assert stored(folder, "orders") == [str(n) for n in range(500)]
