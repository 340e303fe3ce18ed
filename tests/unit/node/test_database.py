"""The database: group commits in one thread, strict about what it opens."""

import asyncio
import sqlite3
import stat
from pathlib import Path

import pytest

from agentmbx_node.errors import Failure
from agentmbx_node.store.database import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    Database,
    StoreFailed,
    open_database,
)


def add(number: int) -> object:
    def work(connection: sqlite3.Connection) -> int:
        connection.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER NOT NULL UNIQUE) STRICT")
        connection.execute("INSERT INTO t (n) VALUES (?)", (number,))
        return number

    return work


def numbers(connection: sqlite3.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT n FROM t ORDER BY n")]


async def test_what_is_written_together_is_there_after_a_reopening(tmp_path: Path) -> None:
    database = Database(open_database(tmp_path / "node.db"))
    written = await asyncio.gather(*(database.write(add(n)) for n in range(50)))  # type: ignore[arg-type]
    await database.close()
    assert written == list(range(50))
    connection = open_database(tmp_path / "node.db")
    assert numbers(connection) == list(range(50))
    connection.close()


async def test_a_piece_that_raises_leaves_nothing_and_the_others_go_on(tmp_path: Path) -> None:
    database = Database(open_database(tmp_path / "node.db"))

    def bad(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t (n) VALUES (99)")
        raise LookupError

    outcomes = await asyncio.gather(
        database.write(add(1)),  # type: ignore[arg-type]
        database.write(bad),
        database.write(add(1)),  # type: ignore[arg-type]
        database.write(add(2)),  # type: ignore[arg-type]
        return_exceptions=True,
    )
    assert [type(each) for each in outcomes] == [int, LookupError, sqlite3.IntegrityError, int]
    assert await database.read(numbers) == [1, 2]
    await database.close()


async def test_a_failed_statement_of_the_disk_fails_the_whole_commit(tmp_path: Path) -> None:
    database = Database(open_database(tmp_path / "node.db"))

    def broken(_connection: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    outcomes = await asyncio.gather(
        database.write(add(1)),  # type: ignore[arg-type]
        database.write(broken),
        return_exceptions=True,
    )
    assert all(isinstance(each, StoreFailed) and each.is_full for each in outcomes)
    assert await database.write(add(3)) == 3  # type: ignore[arg-type]
    assert await database.read(numbers) == [3]
    await database.close()


async def test_a_caller_that_goes_away_takes_nobody_with_it(tmp_path: Path) -> None:
    database = Database(open_database(tmp_path / "node.db"))
    first = asyncio.create_task(database.write(add(1)))  # type: ignore[arg-type]
    second = asyncio.create_task(database.write(add(2)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 2
    await database.close()


def test_it_is_owner_only(tmp_path: Path) -> None:
    open_database(tmp_path / "node.db").close()
    assert stat.S_IMODE((tmp_path / "node.db").stat().st_mode) == 0o600


def test_one_of_a_newer_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "node.db"
    connection = open_database(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(Failure, match="newer"):
        open_database(path)
    with sqlite3.connect(path) as kept:
        assert kept.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION + 1,)
    kept.close()


def test_one_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.db"
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 1")
        other.execute(f"PRAGMA application_id = {APPLICATION_ID + 1}")
    other.close()
    with pytest.raises(Failure, match="another program"):
        open_database(path)


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.db"
    path.write_bytes(b"not a database, but longer than a header of one would be " * 20)
    with pytest.raises(Failure) as refused:
        open_database(path)
    assert refused.value.code == "unfit_store"


def test_every_table_is_strict_and_nothing_but_a_key_of_the_caller_may_be_null(
    tmp_path: Path,
) -> None:
    connection = open_database(tmp_path / "node.db")
    tables = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'")
    nullable = []
    for name, sql in tables.fetchall():
        if name.startswith("sqlite_"):
            continue
        assert "STRICT" in sql
        for _, column, _, not_null, _, is_key in connection.execute(f"PRAGMA table_info({name})"):
            if not not_null and not is_key:
                nullable.append((name, column))
    connection.close()
    assert nullable == [("letter", "retry_key")]
