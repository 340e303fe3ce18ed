"""Every implementation of the relay's store, as tests open, copy, crash and break it."""

import shutil
import sqlite3
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from agentmbx_relay.sqlite_store import SqliteStore, create
from agentmbx_relay.store import Store, StoreBroken, StoreBusy, StoreError, StoreFull
from fakes import RELAY, START_MS, Image, MemoryDisk, MemoryStore


class Fault(msgspec.Struct, frozen=True):
    """What SQLite answers to the next statement that begins with `statement`.

    `takes_effect` when the statement is run all the same, as a commit is whose fsync then fails.
    """

    statement: str
    code: int
    takes_effect: bool = False


class FaultyDisk:
    """SQLite that fails on demand: `connect` goes where `sqlite3.connect` does.

    `fault` is the next one, gone when it was met; `met_count` is how many were. While `gate` is
    closed a COMMIT waits at its beginning; `under_way` is set when one does.
    """

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.met_count = 0
        self.gate = threading.Event()
        self.gate.set()
        self.under_way = threading.Event()

    def connect(self, *arguments: Any, **options: Any) -> sqlite3.Connection:  # noqa: ANN401 - they are sqlite3's
        connection = sqlite3.connect(*arguments, factory=_Connection, **options)
        connection.disk = self
        return connection

    def take(self, statement: str) -> Fault | None:
        """The fault that this statement meets."""
        if statement == "COMMIT" and not self.gate.is_set():
            self.under_way.set()
            self.gate.wait(10)
        fault = self.fault
        if fault is None or not statement.lstrip().startswith(fault.statement):
            return None
        self.fault = None
        self.met_count += 1
        return fault


class _Connection(sqlite3.Connection):
    disk: FaultyDisk

    def execute(self, statement: str, values: Any = (), /) -> sqlite3.Cursor:  # noqa: ANN401
        return self._run(super().execute, statement, values)

    def executemany(self, statement: str, values: Any, /) -> sqlite3.Cursor:  # noqa: ANN401
        return self._run(super().executemany, statement, values)

    def executescript(self, script: str, /) -> sqlite3.Cursor:
        return self._run(super().executescript, script)

    def _run(
        self, run: Callable[..., sqlite3.Cursor], statement: str, *values: object
    ) -> sqlite3.Cursor:
        fault = self.disk.take(statement)
        if fault is None:
            return run(statement, *values)
        if fault.takes_effect:
            run(statement, *values)
        error = sqlite3.OperationalError("a fault of the test")
        error.sqlite_errorcode = fault.code
        error.sqlite_errorname = "SQLITE_FAULT_OF_THE_TEST"
        raise error


class Engine(Protocol):
    """How tests get at one implementation of `Store`; each has its own data."""

    async def open(self) -> Store:
        """The store with what is durable in it; the one before must be closed or let go of."""

    def copied(self) -> "Engine":
        """Another engine on a copy of what is durable now, as after a crash or from a backup."""

    def fail_next_commit(self, error: type[StoreError]) -> None:
        """Let the next commit that writes fail in that way."""

    async def close(self) -> None:
        """Close all stores that it opened."""


class MemoryEngine:
    """`MemoryStore`s on one disk."""

    def __init__(self, _folder: Path | None = None, disk: MemoryDisk | None = None) -> None:
        self.disk = disk or MemoryDisk(Image())

    async def open(self) -> MemoryStore:
        return MemoryStore(self.disk)

    def copied(self) -> "MemoryEngine":
        return MemoryEngine(disk=MemoryDisk(self.disk.image.copy()))

    def fail_next_commit(self, error: type[StoreError]) -> None:
        self.disk.failures.append(error("a fault of the test"))

    async def close(self) -> None:
        """Nothing is open."""


class SqliteEngine:
    """`SqliteStore`s on one file, with a `FaultyDisk` below."""

    CODES: Final = {
        StoreFull: sqlite3.SQLITE_FULL,
        StoreBusy: sqlite3.SQLITE_BUSY,
        StoreBroken: sqlite3.SQLITE_IOERR_FSYNC,
    }

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        self.path = folder / "store.db"
        self.disk = FaultyDisk()
        self._root = root or folder
        self._opened: list[SqliteStore] = []
        if not self.path.exists():
            create(self.path, RELAY.public, clock_ms=START_MS, wall_ms=START_MS)

    async def open(self) -> SqliteStore:
        store = await SqliteStore.open(self.path, RELAY.public, connect=self.disk.connect)
        self._opened.append(store)
        return store

    def copied(self) -> "SqliteEngine":
        folder = self._root / f"copy-{len(list(self._root.glob('copy-*')))}"
        folder.mkdir()
        for name in ("store.db", "store.db-wal"):
            if self.path.with_name(name).exists():
                shutil.copy(self.path.with_name(name), folder / name)
        return SqliteEngine(folder, self._root)

    def fail_next_commit(self, error: type[StoreError]) -> None:
        self.disk.fault = Fault("COMMIT", self.CODES[error])

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()


# A new engine joins with one line here; a package *_store without one fails the contract suite.
ENGINES: Final[Mapping[str, Callable[[Path], Engine]]] = {
    "memory": MemoryEngine,
    "sqlite_store": SqliteEngine,
}
