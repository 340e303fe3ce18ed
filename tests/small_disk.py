"""A small file system of its own, and what fills it; for tests of a full disk."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs at `folder`, which is made; skips the test where it cannot be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "agentmbx-test"]
    done = subprocess.run([*mount, str(folder)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Ballast:
    """A file that leaves `left_bytes` of a file system free."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "ballast"

    def leave(self, left_bytes: int) -> None:
        """Grow until no more than that is free."""
        with self._path.open("ab") as file:
            while (free := self._free()) > left_bytes:
                file.write(bytes(min(free - left_bytes, 1024 * 1024)))
                file.flush()

    def drop(self) -> None:
        """Give it all back."""
        self._path.unlink()

    def _free(self) -> int:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize
