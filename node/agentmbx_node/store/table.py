"""Rows as structs: the few statements that each table needs, made from the struct's fields."""

import sqlite3
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


class Table(Generic[T]):
    """A table whose columns are the fields of `row`, the first of them its primary key.

    `fixed` are columns that `save` leaves alone: large ones that hardly ever change.
    """

    def __init__(self, name: str, row: type[T], *, fixed: Sequence[str] = ()) -> None:
        self._row = row
        self._columns = row.__struct_fields__
        self._saved = [each for each in self._columns[1:] if each not in fixed]
        self._key = self._columns[0]
        listed = ", ".join(self._columns)
        marks = ", ".join("?" * len(self._columns))
        changes = ", ".join(f"{column} = ?" for column in self._saved)
        self._select = f"SELECT {listed} FROM {name} "  # noqa: S608 - names of this program
        self._insert = f"INSERT INTO {name} ({listed}) VALUES ({marks})"  # noqa: S608
        self._update = f"UPDATE {name} SET {changes} WHERE {self._key} = ?"  # noqa: S608

    def find(
        self, connection: sqlite3.Connection, where: str = "", values: Sequence[object] = ()
    ) -> list[T]:
        """The rows that fit the rest of a SELECT, such as `WHERE name = ?`."""
        rows = connection.execute(self._select + where, tuple(values))
        return [self._row(*columns) for columns in rows]

    def get(self, connection: sqlite3.Connection, key: object) -> T | None:
        """The row of that primary key."""
        rows = self.find(connection, f"WHERE {self._key} = ?", (key,))
        return rows[0] if rows else None

    def add(self, connection: sqlite3.Connection, row: T) -> int:
        """Insert the row; a key of None is given by SQLite. The row's number."""
        return connection.execute(self._insert, msgspec.structs.astuple(row)).lastrowid or 0

    def save(self, connection: sqlite3.Connection, row: T) -> None:
        """Write the columns of a row that is there, the fixed ones excepted."""
        values = [getattr(row, column) for column in (*self._saved, self._key)]
        connection.execute(self._update, values)
