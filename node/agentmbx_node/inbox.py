"""What arrives: an envelope becomes stored mail, a state letter that is heard, or nothing.

Everything here runs inside one commit; only after it may `stored` be signed or an envelope acked.
"""

import hashlib
import sqlite3
from collections.abc import Sequence
from enum import Enum
from typing import Final

import msgspec

from agentmbx_node import outbox, ranges, reports
from agentmbx_node.clock import Now
from agentmbx_node.keyring import Keyring
from agentmbx_node.outbox import letter_id
from agentmbx_node.store.rows import MAIL, PEER, Machine, Mail, Peer, machine_of
from agentmbx_protocol.card import parse_card
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.errors import CannotOpen, ProtocolError, Refusal
from agentmbx_protocol.letter import STATE, Opened, open_letter
from agentmbx_protocol.state import parse_state

LEAVE_ANSWER_MS: Final = 3600 * 1000
UNOPENED_MAX: Final = 32
REFUSED_MAX: Final = 256


class Fate(Enum):
    """What became of an envelope."""

    STORED = "stored"  # the letter is in the store, now or since before
    DONE = "done"  # nothing more will come of these bytes; a relay may drop them
    UNKNOWN = "unknown"  # nobody known signs so, or the pairing is over


class Receipt(msgspec.Struct, frozen=True):
    """The fate of one envelope, whose it was, and whether it brought new mail."""

    fate: Fate
    peer: int = 0
    is_new: bool = False


def receive(
    connection: sqlite3.Connection,
    keyring: Keyring,
    parcels: Sequence[Envelope],
    now: Now,
    way: str,
) -> list[Receipt]:
    """Take envelopes that came by `way`, "direct" or "relay" (SPEC section 5.3)."""
    machine = machine_of(connection)
    known: dict[bytes, Peer | None] = {}
    receipts = []
    for parcel in parcels:
        if parcel.signer not in known:
            found = PEER.find(connection, "WHERE pair_key = ?", (parcel.signer,))
            known[parcel.signer] = found[0] if found else None
        peer = known[parcel.signer]
        if peer is None:
            receipts.append(Receipt(Fate.UNKNOWN))
        else:
            receipts.append(_open(connection, keyring, machine, peer, parcel, now, way))
    for peer in known.values():
        if peer is not None:
            PEER.save(connection, peer)
    return receipts


def _open(
    connection: sqlite3.Connection,
    keyring: Keyring,
    machine: Machine,
    peer: Peer,
    parcel: Envelope,
    now: Now,
    way: str,
) -> Receipt:
    try:
        parcel.frame.verify()
    except Refusal:
        # Anybody can write a key into a frame, and learns nothing of whose it is (rule 8).
        _count_unopened(peer, parcel.digest, now)
        return Receipt(Fate.UNKNOWN, peer.id or 0)
    try:
        own = keyring.pair_key(peer.salt).public
        opened = open_letter(parcel, keyring.sealing, receiver=own)
    except CannotOpen:
        _count_unopened(peer, parcel.digest, now)
        return Receipt(Fate.DONE, peer.id or 0)
    _hear_from(peer, now, way)
    _learn_card(connection, peer, opened.card, now)
    if peer.state != "paired":
        return _answer_with_bye(peer, opened, now)
    return _take(connection, machine, peer, opened, now, way)


def _take(
    connection: sqlite3.Connection,
    machine: Machine,
    peer: Peer,
    opened: Opened,
    now: Now,
    way: str,
) -> Receipt:
    letter, number = opened.letter, peer.id or 0
    if letter.content_type == STATE:
        try:
            state = parse_state(letter.content)
        except ProtocolError:
            # Perhaps of a newer program; its letters are taken all the same.
            return Receipt(Fate.STORED, number)
        reports.take(connection, machine, peer, state, now)
        return Receipt(Fate.STORED, number)
    if way == "relay":
        # Who sends directly has the answer to the request itself.
        peer.is_due = peer.has_news = True
    if ranges.is_stored(connection, number, letter.stream, letter.number):
        if _known_digest(connection, number, letter.stream, letter.number) == opened.digest:
            _list_digest(connection, number, opened, now)
            return Receipt(Fate.STORED, number)
        _refuse_number(connection, peer, opened, now)
        return Receipt(Fate.DONE, number)
    ranges.add(connection, number, letter.stream, letter.number)
    _list_digest(connection, number, opened, now)
    there_ms = now.wall_ms + peer.clock_ahead_ms
    mail_id = letter_id(opened.digest)
    if MAIL.get(connection, mail_id) is not None:
        # Another peer, or one paired anew, sends bytes that are here already.
        mail_id = letter_id(hashlib.sha256(opened.digest + number.to_bytes(8, "big")).digest())
    mail = Mail(
        id=mail_id,
        peer=number,
        stream=letter.stream,
        number=letter.number,
        digest=opened.digest,
        data=opened.letter_bytes,
        arrived_ms=now.wall_ms,
        way=way,
        is_late=there_ms > letter.sent_ms + letter.lifetime_s * 1000,
    )
    MAIL.add(connection, mail)
    return Receipt(Fate.STORED, number, is_new=True)


def _hear_from(peer: Peer, now: Now, way: str) -> None:
    # Contact cuts every backoff short: the peer is there (N3).
    peer.contact_ms = now.wall_ms
    peer.failures = peer.retry_age_ms = 0
    if way == "direct":
        peer.direct_retry_age_ms = 0


def _answer_with_bye(peer: Peer, opened: Opened, now: Now) -> Receipt:
    # The peer may not know yet that the pairing is over; a state letter that does not ask is not
    # answered, else two machines would say bye for ever (rule 9).
    fate, asks = Fate.UNKNOWN, True
    if opened.letter.content_type == STATE:
        try:
            asks = parse_state(opened.letter.content).ask
        except ProtocolError:
            asks = False
        fate = Fate.STORED
    if asks:
        _come_back(peer, now)
    return Receipt(fate, peer.id or 0)


def _come_back(peer: Peer, now: Now) -> None:
    """Say bye once more to who does not know yet; for 90 days, then never."""
    if peer.state == "left" and now.age_ms < peer.leave_age_ms:
        peer.state, peer.is_due, peer.has_news = "leaving", True, True
        peer.leave_age_ms = max(peer.leave_age_ms, now.age_ms + LEAVE_ANSWER_MS)


def _learn_card(connection: sqlite3.Connection, peer: Peer, data: bytes, now: Now) -> None:
    if not data or data == peer.card:
        return
    try:
        card = parse_card(data)
    except Refusal:
        return
    if card.identity != peer.identity:
        return
    if card.sequence > peer.card_sequence:
        peer.card, peer.card_sequence, peer.sealing = data, card.sequence, card.sealing
        peer.is_due = peer.has_news = True
        peer.direct_retry_age_ms = 0
        outbox.bring_forward(connection, peer, card.routes[0].queue if card.routes else b"", now)
    elif reports.may_tell(peer, now):
        # An older copy of the peer speaks: tell it, by its own key, which card is known here.
        peer.unopened_age_ms, peer.other_sealing = now.age_ms, card.sealing
        peer.is_due = peer.has_news = True


def _count_unopened(peer: Peer, digest: bytes, now: Now) -> None:
    known = msgspec.msgpack.decode(peer.unopened, type=list[bytes]) if peer.unopened else []
    peer.unopened = msgspec.msgpack.encode([*known, digest][-UNOPENED_MAX:])
    # It may lack this machine's card: it gets it again with the next state letter.
    peer.confirmed_card = 0
    peer.has_news = True
    if reports.may_tell(peer, now):
        peer.unopened_age_ms = now.age_ms
        peer.is_due = True
        _come_back(peer, now)


def _list_digest(connection: sqlite3.Connection, peer: int, opened: Opened, now: Now) -> None:
    """Let state letters name the letter, until its sender knows that it is here."""
    letter = opened.letter
    # The sender had ended it before, and is to be corrected.
    is_late = ranges.has_ended(connection, peer, letter.stream, letter.number)
    kept_until_ms = now.age_ms + reports.KEPT_MS if is_late else 0
    connection.execute(
        "INSERT OR REPLACE INTO stored_digest (peer, stream, number, digest, kept_until_age_ms)"
        " VALUES (?, ?, ?, ?, ?)",
        (peer, letter.stream, letter.number, opened.digest, kept_until_ms),
    )


def _known_digest(
    connection: sqlite3.Connection, peer: int, stream: bytes, number: int
) -> bytes | None:
    for table in ("stored_digest", "mail"):
        row = connection.execute(
            f"SELECT digest FROM {table} WHERE peer = ? AND stream = ? AND number = ?",  # noqa: S608
            (peer, stream, number),
        ).fetchone()
        if row is not None:
            return bytes(row[0])
    return None


def _refuse_number(connection: sqlite3.Connection, peer: Peer, opened: Opened, now: Now) -> None:
    letter = opened.letter
    connection.execute(
        "INSERT OR REPLACE INTO refused_number (peer, stream, number, digest, age_ms)"
        " VALUES (?, ?, ?, ?, ?)",
        (peer.id, letter.stream, letter.number, opened.digest[:8], now.age_ms),
    )
    connection.execute(
        "DELETE FROM refused_number WHERE peer = ?1 AND age_ms < (SELECT MIN(age_ms) FROM"
        " (SELECT age_ms FROM refused_number WHERE peer = ?1 ORDER BY age_ms DESC LIMIT ?2))",
        (peer.id, REFUSED_MAX),
    )
    peer.is_due = peer.has_news = True
