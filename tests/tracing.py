"""strace on a running relay: makes its system calls fail or wait, and writes down their order."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

ATTACH_S = 15.0


@cache
def strace_path() -> str:
    """Where strace is, installed by apt when this is root; else the test is skipped."""
    found = shutil.which("strace")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "-y", "-q", "strace"]
        subprocess.run(command, check=False, capture_output=True, timeout=50)
        found = shutil.which("strace")
    if found is None:
        pytest.skip("strace is not installed and apt cannot install it")
    probe = [found, "-o", "/dev/null", sys.executable, "-c", "pass"]
    if subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("this user may not trace processes here")
    return found


@contextmanager
def traced(pid: int, output: Path, *options: str) -> Iterator[Path]:
    """strace all threads of a process with these options, until the end of the block."""
    command = [strace_path(), "-f", "-p", str(pid), "-o", str(output), *options]
    notes_path = output.with_name(output.name + ".notes")
    with notes_path.open("w") as notes:
        tracer = subprocess.Popen(command, stderr=notes)
    try:
        _wait_until_attached(tracer, notes_path, pid)
        yield output
    finally:
        if tracer.poll() is None:
            tracer.send_signal(signal.SIGINT)
        tracer.wait(ATTACH_S)


def _wait_until_attached(tracer: "subprocess.Popen[bytes]", notes_path: Path, pid: int) -> None:
    deadline = time.monotonic() + ATTACH_S
    while not all(_tracer_of(task) == tracer.pid for task in Path(f"/proc/{pid}/task").iterdir()):
        if tracer.poll() is not None and "not permitted" in notes_path.read_text():
            pytest.skip("this user may not attach to processes here")
        assert tracer.poll() is None, notes_path.read_text()
        assert time.monotonic() < deadline, notes_path.read_text()
        time.sleep(0.01)


def _tracer_of(task: Path) -> int:
    for line in (task / "status").read_text().splitlines():
        if line.startswith("TracerPid:"):
            return int(line.split()[1])
    return 0
