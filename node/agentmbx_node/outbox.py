"""What leaves: the life of a letter, from the commit that numbers it to its end.

A letter is `queued` until a relay says `held` or the peer `stored`; it is `held` until it is
`stored` or sealed anew. No answer of a hop ends it (rule 5): only `stored`, a state letter that
covers it, a bye, the user's cancel, or its deadline. What ended without the peer's word is
corrected when that word comes all the same.
"""

import base64
import sqlite3
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

import msgspec

from agentmbx_node.clock import Now
from agentmbx_node.errors import Failure
from agentmbx_node.store.rows import EVENT, LETTER, PEER, Event, LetterRow, Peer
from agentmbx_protocol import limits
from agentmbx_protocol.letter import Letter, decode_letter, encode_letter, letter_digest

ID_CHARACTERS: Final = 16
OPEN: Final = ("queued", "held")


class Move(Enum):
    """What can happen to a letter."""

    HELD = "held"
    STORED = "stored"
    RESEAL = "reseal"
    GIVE_UP = "give up"
    CANCEL = "cancel"


MOVES: Final[Mapping[tuple[str, Move], str]] = {
    ("queued", Move.HELD): "held",
    ("queued", Move.STORED): "stored",
    ("queued", Move.RESEAL): "queued",
    ("queued", Move.GIVE_UP): "not_confirmed",
    ("queued", Move.CANCEL): "cancelled",
    ("held", Move.HELD): "held",
    ("held", Move.STORED): "stored",
    ("held", Move.RESEAL): "queued",
    ("held", Move.GIVE_UP): "not_confirmed",
    ("held", Move.CANCEL): "cancelled",
    # The peer has it after all: a later confirmation corrects what was told before.
    ("not_confirmed", Move.STORED): "stored",
    ("cancelled", Move.STORED): "stored",
}


class IllegalMove(Exception):
    """A bug: the letter cannot make this move from where it is."""


class KeyConflict(Failure):
    """The caller's key was used for another letter."""

    def __init__(self, letter: str) -> None:
        super().__init__(
            "key_conflict",
            f"This key was used for another message, {letter}; nothing was sent.",
            "Use a new key for a new message.",
            3,
        )


def letter_id(digest: bytes) -> str:
    """The id that a person sees, the same on both machines: 16 letters and digits."""
    return base64.b32encode(digest).decode("ascii")[:ID_CHARACTERS].lower()


def submit(
    connection: sqlite3.Connection,
    peer: Peer,
    *,
    content_type: str,
    content: bytes,
    now: Now,
    retry_key: str | None = None,
) -> LetterRow:
    """A letter in the outbox with its number; durable when this commit is.

    The same `retry_key` again gives the letter that is there; raises `KeyConflict` when that is to
    another peer or has another content.
    """
    if retry_key is not None:
        for known in LETTER.find(connection, "WHERE retry_key = ?", (retry_key,)):
            letter = decode_letter(known.data)
            if (known.peer, letter.content_type, letter.content) != (
                peer.id,
                content_type,
                content,
            ):
                raise KeyConflict(known.id)
            return known
    letter = Letter(
        stream=peer.stream,
        number=peer.last_number + 1,
        sent_ms=max(now.wall_ms, 0),
        lifetime_s=limits.LETTER_LIFETIME_S_MAX,
        content_type=content_type,
        content=content,
    )
    data = encode_letter(letter)
    peer.last_number = letter.number
    PEER.save(connection, peer)
    digest = letter_digest(data)
    row = LetterRow(
        id=letter_id(digest),
        peer=peer.id or 0,
        stream=letter.stream,
        number=letter.number,
        data=data,
        digest=digest,
        state="queued",
        way="",
        why="",
        queued_ms=now.wall_ms,
        deadline_age_ms=now.age_ms + letter.lifetime_s * 1000,
        next_age_ms=now.age_ms,
        retry_key=retry_key,
    )
    LETTER.add(connection, row)
    _note(connection, row, now, "")
    return row


def move(
    connection: sqlite3.Connection, row: LetterRow, what: Move, now: Now, detail: str = ""
) -> None:
    """Move the letter and write it; raises `IllegalMove`."""
    target = MOVES.get((row.state, what))
    if target is None:
        raise IllegalMove(f"{what.value} from {row.state}")
    was, row.state = row.state, target
    if what is Move.STORED:
        row.is_void = False
    if what in (Move.GIVE_UP, Move.CANCEL):
        row.is_void = True
    if row.state != "held":
        row.envelope = row.envelope_digest = row.queue = b""
        row.deposits = row.held_age_ms = row.ask_sequence = 0
    LETTER.save(connection, row)
    if row.state != was or detail:
        _note(connection, row, now, detail)


def find_open(connection: sqlite3.Connection, peer: Peer) -> Sequence[LetterRow]:
    """The letters to the peer that have not ended, in the order of their numbers."""
    return LETTER.find(
        connection,
        "WHERE peer = ? AND state IN ('queued', 'held') ORDER BY queued_ms, number",
        (peer.id,),
    )


def cancel(connection: sqlite3.Connection, row: LetterRow, now: Now) -> bool:
    """End the letter by the user's wish; whether it may still arrive."""
    if row.state not in OPEN:
        raise Failure(
            "ended", f"The letter {row.id} has ended already: {row.state}.", "See `sent`.", 3
        )
    may_arrive = bool(row.was_tried)
    detail = "it may still arrive" if may_arrive else "it never left this machine"
    move(connection, row, Move.CANCEL, now, detail)
    tell_peer(connection, row.peer)
    return may_arrive


def retry(connection: sqlite3.Connection, peer: Peer, now: Now) -> None:
    """Let all that waits for the peer be tried at once, by every way."""
    peer.failures = peer.retry_age_ms = peer.direct_retry_age_ms = 0
    PEER.save(connection, peer)
    connection.execute(
        "UPDATE letter SET next_age_ms = ? WHERE peer = ? AND state IN ('queued', 'held')",
        (now.age_ms, peer.id),
    )


def bring_forward(connection: sqlite3.Connection, peer: Peer, queue: bytes, now: Now) -> None:
    """The peer has a new card: try at once what waits, and what is held for another queue."""
    connection.execute(
        "UPDATE letter SET next_age_ms = ?1 WHERE peer = ?2 AND next_age_ms > ?1"
        " AND (state = 'queued' OR state = 'held' AND queue != ?3)",
        (now.age_ms, peer.id, queue),
    )


def end_all(connection: sqlite3.Connection, peer: Peer, what: Move, now: Now, detail: str) -> None:
    """End every open letter to a peer whose pairing is over."""
    for row in find_open(connection, peer):
        move(connection, row, what, now, detail)


def number_anew(
    connection: sqlite3.Connection, peer: Peer, row: LetterRow, now: Now, *, stream: bytes
) -> None:
    """Give the letter the next number of `stream`, since the peer refused the one it had.

    The peer's row is changed but not written here.
    """
    if peer.stream != stream:
        peer.stream, peer.last_number = stream, 0
    peer.last_number += 1
    letter = msgspec.structs.replace(
        decode_letter(row.data), stream=peer.stream, number=peer.last_number
    )
    row.data = encode_letter(letter)
    row.digest = letter_digest(row.data)
    row.stream, row.number = letter.stream, letter.number
    row.next_age_ms = now.age_ms
    connection.execute("UPDATE letter SET data = ? WHERE id = ?", (row.data, row.id))
    move(connection, row, Move.RESEAL, now, "its number was taken, so it goes with a new one")


def tell_peer(connection: sqlite3.Connection, number: int) -> None:
    """Let the peer hear soon which numbers ended without it."""
    connection.execute(
        "UPDATE peer SET is_due = 1, has_news = 1, void_tries = 0 WHERE id = ?", (number,)
    )


def _note(connection: sqlite3.Connection, row: LetterRow, now: Now, detail: str) -> None:
    EVENT.add(connection, Event(row.id, now.wall_ms, row.state, row.way, detail))
