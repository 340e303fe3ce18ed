"""What this machine can do at most, on which disk, and what else keeps it busy meanwhile."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from nacl import bindings

from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.keys import SigningKey

APPEND_BYTES: Final = 4096
APPENDS: Final = 400
SPELLS: Final = 5
SPELL_S: Final = 0.1
MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs")


class Limits(msgspec.Struct, frozen=True):
    """The bounds of one core and one disk at one moment."""

    fdatasync_p50_ms: float
    fdatasyncs_per_second: float
    verifies_per_second: float
    signs_per_second: float


def measure_limits(folder: Path, parcel: Envelope, key: SigningKey) -> Limits:
    """The limits now: appends in `folder`, and checks of exactly what `parcel`'s signature is of.

    A durable append is counted by its p50, signatures by the median of short spells.
    """
    append_s = _append_s(folder)
    return Limits(
        fdatasync_p50_ms=append_s * 1000,
        fdatasyncs_per_second=1 / append_s,
        verifies_per_second=verifies_per_second(parcel),
        signs_per_second=_per_second(lambda: key.sign(parcel.frame.message)),
    )


def append_p50_ms(folder: Path) -> float:
    """The median time of a durable append of 4 KiB in `folder`."""
    return _append_s(folder) * 1000


def verifies_per_second(parcel: Envelope) -> float:
    """How often one core checks the signature of `parcel`."""
    signer, signed = parcel.signer, parcel.frame.signature + parcel.frame.message
    return _per_second(lambda: bindings.crypto_sign_open(signed, signer))


def median(measured: Sequence[Limits]) -> Limits:
    """The middle of several measurements, field by field."""
    columns = zip(*map(msgspec.structs.astuple, measured), strict=True)
    return Limits(*map(statistics.median, columns))


def disk_folder() -> Path:
    """Where temporary folders are on a disk and not in memory."""
    for place in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        if place.is_dir() and file_system(place) not in MEMORY_FILE_SYSTEMS:
            return place
    return Path(__file__).parent


def file_system(path: Path) -> str:
    """The type of the file system that `path` is on, `unknown` where the system does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return "unknown"
    longest, kind = -1, "unknown"
    for fields in (line.split() for line in lines):
        mount = Path(fields[4])
        if path.resolve().is_relative_to(mount) and len(mount.parts) >= longest:
            longest, kind = len(mount.parts), fields[fields.index("-") + 1]
    return kind


def busy_s() -> float:
    """CPU seconds of all programs on this machine since some moment; 0 if it does not say."""
    try:
        line = Path("/proc/stat").read_text("ascii").partition("\n")[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, *interrupts = map(int, line.split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def process_s(process: int) -> float:
    """CPU seconds of a process and its living children; 0 if the machine does not say."""
    folder = Path("/proc", str(process))
    try:
        fields = (folder / "stat").read_text("ascii").rpartition(")")[2].split()
        children = [path.read_text("ascii") for path in folder.glob("task/*/children")]
    except OSError:
        return 0.0
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(process_s(int(child)) for child in " ".join(children).split())


def _append_s(folder: Path) -> float:
    sync = getattr(os, "fdatasync", os.fsync)
    data = os.urandom(APPEND_BYTES)
    seconds = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(APPENDS):
            started = time.perf_counter()
            file.write(data)
            sync(file.fileno())
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _per_second(action: Callable[[], object]) -> float:
    rates = []
    for _ in range(SPELLS):
        count, started = 0, time.perf_counter()
        while (passed_s := time.perf_counter() - started) < SPELL_S:
            for _ in range(50):
                action()
            count += 50
        rates.append(count / passed_s)
    return statistics.median(rates)
