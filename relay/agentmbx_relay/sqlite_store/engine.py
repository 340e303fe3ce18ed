"""The relay's store on SQLite: one writer, group commits, reads beside it.

WAL with synchronous=FULL, read back at start. Queues, senders and running totals are mirrored in
memory by the writer; a failed commit reloads them. Checkpoints are explicit, so that a failed
fsync of one is seen (rule 1).
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

import aiosqlite

from agentmbx_protocol.errors import Refusal
from agentmbx_relay.sqlite_store import files
from agentmbx_relay.sqlite_store.mirror import Mirror
from agentmbx_relay.sqlite_store.transaction import SqliteTransaction
from agentmbx_relay.store import (
    Queue,
    Sender,
    StoreBroken,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnfit,
    Work,
)

T = TypeVar("T")

BUSY_TIMEOUT_S: Final = 5.0
CHECKPOINT_BYTES: Final = 16 * 1024 * 1024
RESERVE_BYTES: Final = 8 * 1024 * 1024
WAITING_ROWS_MAX: Final = 1024
VACUUM_PAGES: Final = 256
VACUUM_PAGES_MIN: Final = 4096
_RESERVE_NAME: Final = "reserve"
_BUGS: Final = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.NotSupportedError,
    sqlite3.ProgrammingError,
)

_WAITING: Final = f"""
    SELECT b.data FROM (
        SELECT seq, SUM(length + 4) OVER (ORDER BY seq) AS total, ROW_NUMBER() OVER () AS place
        FROM (SELECT seq, length FROM envelope WHERE queue = ? AND held = 1
              ORDER BY seq LIMIT {WAITING_ROWS_MAX})
    ) AS e JOIN envelope_bytes AS b ON b.seq = e.seq
    WHERE e.total <= ? OR e.place = 1 ORDER BY e.seq
"""  # noqa: S608 - the only value in it is a constant


class _UseReserve(Exception):
    """The commit found no room, and may be done again with that of the reserve."""


class SqliteStore:
    """A `store.Store` in one SQLite file with a reserve file beside it.

    The reserve is room that acks may use when the disk is full: it is given up when a commit
    without deposits finds no room, and taken again when there is enough.
    """

    def __init__(self, path: Path, writer: sqlite3.Connection, mirror: Mirror) -> None:
        self._path = path
        self._writer = writer
        self._mirror = mirror
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._reader: aiosqlite.Connection | None = None
        self._turn = asyncio.Lock()
        self._unsynced_bytes = 0
        self._broken: StoreBroken | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: Path,
        relay_key: bytes,
        *,
        connect: Callable[..., sqlite3.Connection] | None = None,
    ) -> Self:
        """Open the store at `path`, which must belong to the relay of `relay_key`.

        Checkpoints the log into the store before anything else, so that nothing is signed about
        rows that are only in the page cache. Raises `StoreUnfit`. `connect` stands in for
        `sqlite3.connect` where faults are injected.
        """
        if free_bytes(path) < 2 * RESERVE_BYTES:
            # The checkpoint needs room too, and mail must come out of a relay on a full disk.
            path.with_name(_RESERVE_NAME).unlink(missing_ok=True)
        writer = await asyncio.to_thread(
            files.open_writer, path, relay_key, connect or sqlite3.connect
        )
        try:
            store = cls(path, writer, await asyncio.to_thread(Mirror.load, writer))
            uri = files.uri(path, "ro")
            store._reader = await aiosqlite.connect(uri, uri=True, isolation_level=None)
        except (sqlite3.Error, LookupError, TypeError, ValueError) as error:
            # Other errors than SQLite's: a damaged row that names a queue that is not there.
            writer.close()
            raise StoreUnfit(files.unfit_text(path, error)) from error
        # From now on nothing waits on the event loop for another process: see `_begin`.
        writer.execute("PRAGMA busy_timeout = 0")
        await asyncio.to_thread(store._take_reserve)
        return store

    async def commit(
        self, works: Sequence[Work[object]], expected: Sequence[bytes] = ()
    ) -> Sequence[object | Refusal]:
        """See `store.Store.commit`."""
        return await self._commit(works, expected)

    def sender(self, queue: bytes, signer: bytes) -> tuple[Queue, Sender] | None:
        """See `store.Store.sender`."""
        return self._mirror.by_sender.get(queue + signer)

    async def waiting(self, queue: Queue, bytes_max: int) -> list[bytes]:
        """See `store.Store.waiting`."""
        if self._reader is None or queue.retired:
            return []
        try:
            rows = await self._reader.execute_fetchall(_WAITING, (queue.id, bytes_max))
        except sqlite3.Error as error:
            raise _translate(error) from error
        return [row[0] for row in rows]

    async def check(self) -> None:
        """See `store.Store.check`; rewrites the one row of the relay."""
        await self._commit([], touch=True)

    def saved_clock(self) -> tuple[int, int]:
        """See `store.Store.saved_clock`."""
        return self._mirror.saved_clock

    async def tidy(self) -> None:
        """See `store.Store.tidy`."""
        async with self._turn:
            self._raise_if_broken()
            try:
                await self._in_thread(self._tidy)
            except StoreBroken as error:
                self._broken = error
                raise

    def totals(self) -> Mapping[str, int]:
        """See `store.Store.totals`."""
        mirror = self._mirror
        return {
            "queues": mirror.live_count,
            "envelopes": mirror.envelopes,
            "tombstones": mirror.tombstones,
            "bytes": mirror.used,
            "free_bytes": free_bytes(self._path),
        }

    async def close(self) -> None:
        """See `store.Store.close`."""
        if self._closed:
            return
        self._closed = True
        try:
            async with self._turn:
                await self._in_thread(self._close_writer)
        finally:
            self._thread.shutdown(wait=True)
            if self._reader is not None:
                await self._reader.close()

    def _raise_if_broken(self) -> None:
        # After a failed fsync a later one may succeed although the data is gone (rule 1).
        if self._broken is not None:
            raise self._broken

    async def _in_thread(self, step: Callable[[], T]) -> T:
        # A caller that is cancelled, even twice, must not leave a commit behind that nobody waits
        # for, and what broke in it must not be forgotten.
        future = asyncio.get_running_loop().run_in_executor(self._thread, step)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            error = future.exception()
            if isinstance(error, StoreBroken):
                self._broken = error
            raise

    async def _commit(
        self,
        works: Sequence[Work[object]],
        expected: Sequence[bytes] = (),
        *,
        touch: bool = False,
        on_reserve: bool = False,
    ) -> list[object | Refusal]:
        """Decide and write on the event loop, which takes microseconds; sync in the thread.

        Writing in the thread too was slower: each statement gives up Python's lock there and waits
        for it again beside a busy loop.
        """
        async with self._turn:
            self._raise_if_broken()
            try:
                await self._begin()
                transaction, outcomes = self._do(
                    works, expected, touch=touch, on_reserve=on_reserve
                )
                await self._in_thread(partial(self._end, transaction, touch=touch))
            except StoreBroken as error:
                self._broken = error
                raise
            except _UseReserve:
                pass
            else:
                return outcomes
        return await self._commit(works, expected, on_reserve=True)

    async def _begin(self) -> None:
        begin = partial(self._writer.execute, "BEGIN IMMEDIATE")
        try:
            begin()
        except sqlite3.OperationalError as error:
            if not isinstance(_translate(error), StoreBusy):
                raise _translate(error) from error
        else:
            return
        try:
            await self._in_thread(partial(self._begin_patiently, begin))
        except asyncio.CancelledError:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    def _begin_patiently(self, begin: Callable[[], object]) -> None:
        try:
            self._writer.execute(f"PRAGMA busy_timeout = {int(files.BUSY_TIMEOUT_S * 1000)}")
            begin()
        except sqlite3.Error as error:
            raise _translate(error) from error
        finally:
            self._writer.execute("PRAGMA busy_timeout = 0")

    def _do(
        self,
        works: Sequence[Work[object]],
        expected: Sequence[bytes],
        *,
        touch: bool,
        on_reserve: bool,
    ) -> tuple[SqliteTransaction, list[object | Refusal]]:
        outcomes: list[object | Refusal] = []
        transaction = None
        try:
            transaction = SqliteTransaction(
                self._writer, self._mirror, free_bytes(self._path), expected
            )
            for work in works:
                try:
                    outcomes.append(work(transaction))
                except Refusal as refusal:
                    outcomes.append(refusal)
            if on_reserve:
                _refuse_deposits(transaction)
            if touch:
                transaction.touch()
            transaction.finish()
        except BaseException as error:  # noqa: BLE001 - whatever it is, nothing of it may stay
            self._undo(transaction)
            raise self._failure(error, transaction, touch=touch) from None
        return transaction, outcomes

    def _end(self, transaction: SqliteTransaction, *, touch: bool) -> None:
        try:
            self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo(transaction)
            raise self._failure(error, transaction, touch=touch) from None
        if transaction.written_bytes:
            self._mirror.lazy.clear()
        self._checkpoint_if_due(transaction.written_bytes)

    def _failure(
        self, error: BaseException, transaction: SqliteTransaction | None, *, touch: bool
    ) -> BaseException:
        if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, _BUGS):
            return error
        translated = _translate(error)
        # A check asks whether there is room; it must not use up that of the acks.
        full = isinstance(translated, StoreFull) and not touch
        if full and transaction is not None and self._may_use_reserve(transaction):
            return _UseReserve()
        return translated

    def _undo(self, transaction: SqliteTransaction | None) -> None:
        if transaction is not None:
            transaction.undo_counters()
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            self._mirror.reload(self._writer)
        except sqlite3.Error as error:
            raise StoreBroken("the store cannot be read after a failed commit") from error

    def _checkpoint_if_due(self, written_bytes: int) -> None:
        self._unsynced_bytes += written_bytes
        if self._unsynced_bytes < CHECKPOINT_BYTES:
            return
        self._unsynced_bytes = 0
        try:
            self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            translated = _translate(error)
            if isinstance(translated, StoreBroken):
                raise translated from error

    def _close_writer(self) -> None:
        try:
            if self._broken is None:
                if self._mirror.lazy:
                    self._writer.execute("BEGIN IMMEDIATE")
                    transaction, _ = self._do([], (), touch=True, on_reserve=False)
                    self._end(transaction, touch=True)
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except (sqlite3.Error, StoreError, _UseReserve):
            # What is committed is in the log and comes back at the next start.
            pass
        finally:
            self._writer.close()

    def _tidy(self) -> None:
        self._take_reserve()
        try:
            pages, free_pages = (
                self._writer.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count")
            )
            if free_pages > max(VACUUM_PAGES_MIN, pages // 4):
                # Plain execute would free one page only.
                self._writer.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
        except sqlite3.Error as error:
            raise _translate(error) from error

    @property
    def _reserve(self) -> Path:
        return self._path.with_name(_RESERVE_NAME)

    def _may_use_reserve(self, transaction: SqliteTransaction) -> bool:
        if transaction.held_bytes or not self._reserve.exists():
            return False
        self._reserve.unlink()
        return True

    def _take_reserve(self) -> None:
        if self._reserve.exists() or free_bytes(self._path) < 4 * RESERVE_BYTES:
            return
        try:
            files.write_reserve(self._reserve, RESERVE_BYTES)
        except OSError:
            self._reserve.unlink(missing_ok=True)


def _refuse_deposits(transaction: SqliteTransaction) -> None:
    if transaction.held_bytes:
        raise StoreFull("the disk is full, and its reserve is for acks")


def free_bytes(path: Path) -> int:
    """What the file system of `path` has free for this user, in bytes."""
    status = os.statvfs(path.parent)
    return status.f_bavail * status.f_frsize


def _translate(error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    if primary == sqlite3.SQLITE_FULL:
        return StoreFull("the disk is full")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusy("another process keeps the store locked")
    return StoreBroken("the store failed: " + str(getattr(error, "sqlite_errorname", "unknown")))
