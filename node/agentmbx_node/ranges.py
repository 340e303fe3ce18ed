"""Numbers that were stored, kept as ranges for good."""

import sqlite3

from agentmbx_protocol import limits


def is_stored(connection: sqlite3.Connection, peer: int, stream: bytes, number: int) -> bool:
    """Whether a letter of that number was stored from the peer, ever."""
    row = connection.execute(
        "SELECT last FROM stored_range WHERE peer = ? AND stream = ? AND first <= ?"
        " ORDER BY first DESC LIMIT 1",
        (peer, stream, number),
    ).fetchone()
    return row is not None and row[0] >= number


def add(connection: sqlite3.Connection, peer: int, stream: bytes, number: int) -> None:
    """Record a number that is not stored yet, joined to the ranges beside it."""
    below = connection.execute(
        "SELECT first FROM stored_range WHERE peer = ? AND stream = ? AND last = ?",
        (peer, stream, number - 1),
    ).fetchone()
    above = connection.execute(
        "SELECT first, last FROM stored_range WHERE peer = ? AND stream = ? AND first = ?",
        (peer, stream, min(number + 1, limits.COUNTER_MAX)),
    ).fetchone()
    for row in (below, above):
        if row is not None:
            connection.execute(
                "DELETE FROM stored_range WHERE peer = ? AND stream = ? AND first = ?",
                (peer, stream, row[0]),
            )
    first = below[0] if below else number
    last = above[1] if above else number
    connection.execute(
        "INSERT INTO stored_range (peer, stream, first, last) VALUES (?, ?, ?, ?)",
        (peer, stream, first, last),
    )
