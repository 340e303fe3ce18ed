"""The store's file: made once, opened strictly, never begun anew."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import Final

from agentmbx_relay.store import Invite, StoreUnfit

APPLICATION_ID: Final = 0x4D425852
SCHEMA_VERSION: Final = 1
BUSY_TIMEOUT_S: Final = 5.0

Connect = Callable[..., sqlite3.Connection]


def create(path: Path, relay_key: bytes, *, clock_ms: int, wall_ms: int) -> None:
    """Make a new store for the relay of `relay_key` at `path`, which must not exist.

    Walks all migrations from the first. The file is owner-only from its first byte. Raises
    `OSError` or `StoreUnfit`.
    """
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            for version in range(1, SCHEMA_VERSION + 1):
                sql = _migration(version)
                connection.executescript(
                    f"BEGIN IMMEDIATE; {sql}; PRAGMA user_version = {version}; COMMIT;"
                )
            connection.execute(
                "INSERT INTO relay (id, key, clock_ms, wall_ms, url) VALUES (1, ?, ?, ?, '')",
                (relay_key, clock_ms, wall_ms),
            )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise StoreUnfit(unfit_text(path, error)) from error


def open_writer(path: Path, relay_key: bytes, connect: Connect) -> sqlite3.Connection:
    """The writer's connection to an existing store of this relay, its log checkpointed.

    Raises `StoreUnfit`: the file is missing, empty, damaged, another relay's, of a newer program,
    or on a file system that does not keep what SQLite promises.
    """
    connection = None
    try:
        _look_first(path, relay_key)
        connection = connect(
            uri(path, "rw"),
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=BUSY_TIMEOUT_S,
        )
        _set_pragmas(connection, path)
        busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except (sqlite3.Error, StoreUnfit) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, StoreUnfit):
            raise
        raise StoreUnfit(unfit_text(path, error)) from error
    if busy:
        connection.close()
        raise StoreUnfit(f"Another program is using {path}; stop it and start the relay again.")
    return connection


@contextmanager
def short_visit(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of another process beside a running relay, inside one short transaction.

    Raises `StoreUnfit`.
    """
    try:
        there = path.exists()
    except PermissionError as error:
        raise StoreUnfit(
            f"{path} cannot be used: permission denied. Run this as the user who runs the relay."
        ) from error
    if not there:
        raise StoreUnfit(
            f"There is no relay in {path.parent}. Start it once with "
            f"`agentmbx relay serve --data {path.parent}`."
        )
    try:
        _look_first(path, None)
        with closing(
            sqlite3.connect(
                uri(path, "rw"),
                uri=True,
                isolation_level=None,
                timeout=2 * BUSY_TIMEOUT_S,
            )
        ) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreUnfit(unfit_text(path, error)) from error


def add_invite(path: Path, *, key: bytes, uses: int, ttl_ms: int, wall_ms: int) -> str:
    """Add an invite beside a running relay; the public URL that the relay last served, or "".

    The invite ends `ttl_ms` from now by the relay's clock, reckoned from when it was last saved.
    """
    with short_visit(path) as connection:
        clock_ms, saved_wall_ms, url = connection.execute(
            "SELECT clock_ms, wall_ms, url FROM relay"
        ).fetchone()
        ends_ms = clock_ms + max(wall_ms - saved_wall_ms, 0) + ttl_ms
        invite = Invite(key, uses, ends_ms)
        connection.execute(
            "INSERT INTO invite (key, uses_left, ends_ms) VALUES (?, ?, ?)",
            (invite.key, invite.uses_left, invite.ends_ms),
        )
    return str(url)


def uri(path: Path, mode: str) -> str:
    """The URI by which SQLite opens `path` and never makes it: mode rw or ro."""
    return f"{path.absolute().as_uri()}?mode={mode}"


def write_reserve(path: Path, length: int) -> None:
    """Take `length` bytes of the disk with a file of zeros; raises `OSError` when it is full."""
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(handle, 0, length)
    finally:
        os.close(handle)


def unfit_text(path: Path, error: Exception) -> str:
    """What to tell a person about a store that does not open, or whose rows make no sense."""
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    hint = {
        "SQLITE_BUSY": "Another program is using it; stop that first.",
        "SQLITE_CANTOPEN": "Check that this user may read and write the file and its folder.",
        "SQLITE_READONLY": "Check that this user may write the file and its folder.",
        "SQLITE_FULL": "The disk is full; make room and start again.",
    }.get(
        str(name).split("_CANT")[0] if "READONLY" in str(name) else str(name),
        "Nothing was changed. Keep a copy of the folder and restore the last backup.",
    )
    return f"The store {path} cannot be used ({name}). {hint}"


def _look_first(path: Path, relay_key: bytes | None) -> None:
    # A connection that may write would, when it is closed, write the log of a store into it, be it
    # another relay's or a newer program's.
    with closing(
        sqlite3.connect(uri(path, "ro"), uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)
    ) as connection:
        try:
            _check_identity(connection, path, relay_key)
        except UnicodeDecodeError as error:
            # SQLite quotes a damaged schema in its message.
            raise StoreUnfit(unfit_text(path, error)) from error


def _check_identity(connection: sqlite3.Connection, path: Path, relay_key: bytes | None) -> None:
    application, version = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version")
    )
    if application != APPLICATION_ID or version < 1:
        raise StoreUnfit(
            f"{path} is empty or not a relay's store. Nothing was changed. Keep a copy of the "
            "folder and restore the last backup."
        )
    if version > SCHEMA_VERSION:
        raise StoreUnfit(
            f"{path} was written by a newer agentmbx (schema {version}, this program knows "
            f"{SCHEMA_VERSION}). Nothing was changed. Install that version again."
        )
    row = connection.execute("SELECT key FROM relay").fetchone()
    if row is None or (relay_key is not None and row[0] != relay_key):
        raise StoreUnfit(
            f"{path} belongs to another relay key than the one beside it. Put the key and the "
            "store of one backup together."
        )


def _set_pragmas(connection: sqlite3.Connection, path: Path) -> None:
    for name, value, kept in (
        ("journal_mode", "WAL", "wal"),
        ("synchronous", "FULL", 2),
        ("fullfsync", 1, 1),
        ("checkpoint_fullfsync", 1, 1),
        ("wal_autocheckpoint", 0, 0),
        ("trusted_schema", 0, 0),
        ("cell_size_check", 1, 1),
        ("cache_size", -16000, -16000),
    ):
        connection.execute(f"PRAGMA {name} = {value}")
        (now,) = connection.execute(f"PRAGMA {name}").fetchone()
        if now != kept:
            raise StoreUnfit(
                f"{path} is on a file system where SQLite cannot keep its promises "
                f"({name} is {now}, not {kept}). Use a local disk."
            )


def _migration(version: int) -> str:
    folder = resources.files("agentmbx_relay") / "schema"
    return (folder / f"{version:04}.sql").read_text("utf-8")
