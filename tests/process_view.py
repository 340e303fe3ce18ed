"""What Linux tells about a running process: its memory, its processor time, its command line."""

import contextlib
import os
from pathlib import Path


def memory_bytes(pid: int) -> int:
    """The resident memory of a process."""
    return _status_bytes(pid, "VmRSS")


def forget_peak(pid: int) -> None:
    """Begin a new peak of resident memory from now (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory_bytes(pid: int) -> int:
    """The most resident memory that it had since `forget_peak`, or since it began."""
    return _status_bytes(pid, "VmHWM")


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command_line(pid: int) -> bytes:
    """The arguments of a process, as everybody on the machine may read them."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    started: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            started += map(int, (task / "children").read_text().split())
    return started


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise LookupError(name)
