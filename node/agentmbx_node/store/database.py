"""The database file: opened strictly, migrated forward, written by one thread in group commits."""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from importlib import resources
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec

from agentmbx_node.errors import Failure

APPLICATION_ID: Final = 0x4D42584E
SCHEMA_VERSION: Final = 1
BUSY_TIMEOUT_S: Final = 5.0
BATCH_WORKS_MAX: Final = 256
_BUGS: Final = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class StoreFailed(Failure):
    """A commit did not happen; `is_full` says that the disk has no room."""

    def __init__(self, text: str, *, is_full: bool) -> None:
        step = "Make room, then do it again." if is_full else "Check the disk."
        code = "disk_full" if is_full else "store_failed"
        super().__init__(code, f"Nothing was changed: {text}.", step, 1)
        self.is_full = is_full


class StoreBroken(StoreFailed):
    """The disk failed; what was written may be there or not, so nothing is taken any more."""

    def __init__(self, text: str) -> None:
        super().__init__(text, is_full=False)


class _Waiting(msgspec.Struct):
    work: Work[object]
    done: asyncio.Future[object]


class Database:
    """The one writer of the file.

    What `write` returns is durable. All work that has come while the last commit ran shares the
    next one; each piece runs whole or, when it raises, leaves nothing behind. `broken` is set when
    the disk has failed: only a start anew, which syncs the file first, may go on (rule 1).
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting: list[_Waiting] = []
        self._running: asyncio.Task[None] | None = None
        self.broken = asyncio.Event()

    async def write(self, work: Work[T]) -> T:
        """What `work` returns, once it is on the disk.

        Raises what `work` raises, or `StoreFailed` when the commit did not happen.
        """
        if self.broken.is_set():
            raise StoreBroken("the disk has failed")
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(work, done))
        if self._running is None:
            self._running = asyncio.create_task(self._commit_all())
        return cast("T", await done)

    async def read(self, work: Work[T]) -> T:
        """What `work` returns of the committed state; it must not write."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work, self._connection)
        except sqlite3.Error as error:
            if isinstance(error, _BUGS):
                raise
            failure = _translate(error)
            if isinstance(failure, StoreBroken):
                self.broken.set()
            raise failure from error

    async def close(self) -> None:
        """Finish what waits, then close the file."""
        while self._running is not None:
            await asyncio.wait([self._running])
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch = self._waiting[:BATCH_WORKS_MAX]
                del self._waiting[:BATCH_WORKS_MAX]
                works = [each.work for each in batch]
                try:
                    outcomes = await loop.run_in_executor(self._thread, self._commit, works)
                except Exception as error:  # noqa: BLE001 - a bug, but nobody may wait for ever
                    outcomes = [error] * len(works)
                if isinstance(outcomes[0], StoreBroken):
                    self.broken.set()
                for each, outcome in zip(batch, outcomes, strict=True):
                    if each.done.done():
                        continue
                    if isinstance(outcome, BaseException):
                        each.done.set_exception(outcome)
                    else:
                        each.done.set_result(outcome)
        finally:
            self._running = None

    def _commit(self, works: list[Work[object]]) -> list[object]:
        outcomes: list[object] = []
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for work in works:
                connection.execute("SAVEPOINT piece")
                try:
                    outcomes.append(work(connection))
                except Exception as error:
                    if isinstance(error, sqlite3.Error) and not isinstance(error, _BUGS):
                        raise
                    connection.execute("ROLLBACK TO piece")
                    outcomes.append(error)
                connection.execute("RELEASE piece")
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            return [_translate(error)] * len(works)
        return outcomes


def open_database(path: Path) -> sqlite3.Connection:
    """The connection to the database at `path`, made when it is missing, and migrated.

    A backup of the file is made before a migration. Raises `Failure` for a file that is damaged,
    foreign, or of a newer program.
    """
    is_new = not path.exists()
    if is_new:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S
    )
    try:
        version = _version(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # What a crash left in the page cache must be on the disk before anything is answered.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if 0 < version < SCHEMA_VERSION:
            _back_up(connection, path.with_name(f"{path.name}.before-{version + 1}"))
        for number in range(version + 1, SCHEMA_VERSION + 1):
            _migrate(connection, number)
    except sqlite3.Error as error:
        connection.close()
        if _is_full(error):
            raise _no_room() from error
        raise _unfit(f"SQLite says {getattr(error, 'sqlite_errorname', 'unknown')}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection) -> int:
    (identifier,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version and identifier != APPLICATION_ID:
        raise _unfit("it belongs to another program")
    if version > SCHEMA_VERSION:
        raise _unfit("it was written by a newer version of agentmbx; update this one")
    return int(version)


def _migrate(connection: sqlite3.Connection, number: int) -> None:
    sql = resources.files(__package__).joinpath(f"schema/{number:04}.sql").read_text("utf-8")
    stamp = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number}"
    connection.executescript(f"BEGIN IMMEDIATE; {sql}; {stamp}; COMMIT;")


def _back_up(connection: sqlite3.Connection, path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600))
    with closing(sqlite3.connect(path)) as copy:
        connection.backup(copy)


def _unfit(reason: str) -> Failure:
    return Failure(
        "unfit_store",
        f"The machine's database cannot be used: {reason}. Nothing was changed.",
        "Restore it from a backup, or set MBX_HOME to another folder.",
        1,
    )


def _no_room() -> Failure:
    return Failure(
        "disk_full",
        "The machine's database cannot be opened: the disk is full. Nothing was changed.",
        "Make room on it, then start again.",
        1,
    )


def _is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _translate(error: sqlite3.Error) -> StoreFailed:
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if _is_full(error):
        return StoreFailed(f"the disk is full ({name})", is_full=True)
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
        return StoreFailed(f"another process keeps the store locked ({name})", is_full=False)
    return StoreBroken(f"the disk failed ({name})")
