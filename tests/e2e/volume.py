"""Small file systems of our own: to fill them up, and to cut their power."""

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

GOING_DOWN = 0x8004587D
NO_LOG_FLUSH = struct.pack("I", 2)


class Volume:
    """An ext4 in a file, mounted through a loop device."""

    def __init__(self, folder: Path, *, megabytes: int) -> None:
        self.image = folder / "volume.img"
        self.mount_point = folder / "volume"
        self.mount_point.mkdir()
        with self.image.open("wb") as file:
            file.truncate(megabytes << 20)
        _run("mkfs.ext4", "-q", "-m0", "-O", "^resize_inode", str(self.image))
        self.mount()

    def mount(self) -> None:
        _run("mount", "-o", "loop", str(self.image), str(self.mount_point))

    def unmount(self) -> None:
        _run("umount", str(self.mount_point))

    def cut_power(self) -> None:
        """From now on nothing reaches the disk: what is not there is lost."""
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, GOING_DOWN, NO_LOG_FLUSH)
        finally:
            os.close(descriptor)

    def restore_power(self) -> None:
        """Mount again what the power cut left."""
        self.unmount()
        self.mount()

    def end(self) -> None:
        subprocess.run(["umount", str(self.mount_point)], capture_output=True, check=False)


def make_volume(folder: Path, *, megabytes: int) -> Volume:
    """Make a volume, or skip the test where that is impossible."""
    if os.geteuid() != 0:
        pytest.skip("mounting a volume needs root")
    if shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:" + os.environ["PATH"]) is None:
        pytest.skip("mkfs.ext4 is not installed")
    try:
        return Volume(folder, megabytes=megabytes)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no volume can be mounted here: {error.stderr.decode().strip()}")


def _run(*command: str) -> None:
    path = "/usr/sbin:/sbin:" + os.environ["PATH"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PATH": path})
