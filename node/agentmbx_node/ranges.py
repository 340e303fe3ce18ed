"""Numbers of letters that were stored, or that ended at their sender, kept as ranges for good."""

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


def note_ended(
    connection: sqlite3.Connection, peer: int, stream: bytes, first: int, last: int
) -> None:
    """Record that the sender waits for none of these numbers any more."""
    connection.execute(
        "DELETE FROM ended_range WHERE peer = ?1 AND stream = ?2 AND first > ?3 AND last <= ?4",
        (peer, stream, first, last),
    )
    connection.execute(
        "INSERT INTO ended_range (peer, stream, first, last) VALUES (?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET last = max(last, excluded.last)",
        (peer, stream, first, last),
    )


def has_ended(connection: sqlite3.Connection, peer: int, stream: bytes, number: int) -> bool:
    """Whether the sender has said that it waits for that number no more."""
    found = connection.execute(
        "SELECT 1 FROM ended_range WHERE peer = ? AND stream = ? AND first <= ? AND last >= ?",
        (peer, stream, number, number),
    ).fetchone()
    return found is not None
