"""State letters: what this machine tells a peer of both stores, and what it hears of them."""

import hashlib
import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from agentmbx_node import outbox, ranges
from agentmbx_node.clock import Now
from agentmbx_node.outbox import Move
from agentmbx_node.store.rows import LETTER, MACHINE, LetterRow, Machine, Peer
from agentmbx_protocol import limits
from agentmbx_protocol.letter import STATE, Letter, encode_letter
from agentmbx_protocol.state import (
    PeerCard,
    Range,
    RefusedLetter,
    SentStream,
    State,
    StoredDigest,
    StoredStream,
    VoidStream,
    make_state,
)

NEWS_S: Final = 72 * 3600
REPEAT_S: Final = 3600
KEPT_MS: Final = 90 * 24 * 3600 * 1000
TELL_MS: Final = 3600 * 1000
# No honest machine gets so far; a higher word of a peer would leave no room to go on from.
BELIEVED_MAX: Final = 2**62

_void_decoder = msgspec.msgpack.Decoder(tuple[VoidStream, ...])


def make(
    connection: sqlite3.Connection,
    machine: Machine,
    peer: Peer,
    now: Now,
    *,
    ask: bool,
    has_news: bool = False,
) -> bytes:
    """The bytes of a new state letter to the peer, whose row is changed but not written here.

    One with news lives as long as any letter, since the peer may sleep; a repeat is short.
    """
    peer.state_sequence += 1
    state = State(
        card_sequence=machine.card_sequence,
        card_digest=hashlib.sha256(machine.card).digest(),
        sequence=peer.state_sequence,
        streams=_stored(connection, peer),
        refused=_refused(connection, peer),
        sent=_sent(connection, peer),
        void=_void(connection, peer),
        void_seen=_void_decoder.decode(peer.void_seen) if peer.void_seen else (),
        peer_cards=(PeerCard(peer.card_sequence, hashlib.sha256(peer.card).digest()),),
        unopened=tuple(sorted(set(msgspec.msgpack.decode(peer.unopened, type=list[bytes]))))
        if peer.unopened
        else (),
        ask_seen=peer.ask_seen,
        now_ms=max(now.wall_ms, 0),
        ask=ask,
        bye=peer.state != "paired",
    )
    letter = Letter(
        stream=peer.stream,
        number=0,
        sent_ms=max(now.wall_ms, 0),
        lifetime_s=NEWS_S if has_news else REPEAT_S,
        content_type=STATE,
        content=make_state(state),
    )
    return encode_letter(letter)


def take(
    connection: sqlite3.Connection, machine: Machine, peer: Peer, state: State, now: Now
) -> None:
    """Hear a state letter of the peer's, whose row is changed but not written here.

    Of an older one than was heard before only this counts: that the peer has seen more of this
    machine than there is here.
    """
    if state.bye:
        # No word of this pairing comes after it, so its order does not matter.
        leave(connection, peer, now, Move.GIVE_UP, "the peer ended the pairing")
        return
    _find_own_age(connection, machine, peer, state)
    if state.order <= (peer.seen_card, peer.seen_sequence):
        _answer_old(peer, state, now)
        return
    peer.seen_card, peer.seen_sequence = state.order
    peer.is_unanswered, peer.void_tries = False, 0
    peer.clock_ahead_ms = state.now_ms - now.wall_ms
    _hear_of_card(peer, state)
    if state.ask:
        peer.is_due, peer.ask_seen = True, state.sequence
    _hear_of_ends(connection, peer, state, now)
    _confirm(connection, peer, state, now)
    _send_again(connection, peer, state, now)


def may_tell(peer: Peer, now: Now) -> bool:
    """Whether an hour has passed since the peer was told of what is amiss with its envelopes."""
    return not peer.unopened_age_ms or now.age_ms - peer.unopened_age_ms >= TELL_MS


def leave(connection: sqlite3.Connection, peer: Peer, now: Now, what: Move, detail: str) -> None:
    """End the pairing and its letters; the key is kept a while, only to answer with a bye."""
    outbox.end_all(connection, peer, what, now, detail)
    peer.state, peer.is_due = "left", False
    peer.leave_age_ms = now.age_ms + KEPT_MS


def _find_own_age(
    connection: sqlite3.Connection, machine: Machine, peer: Peer, state: State
) -> None:
    """Catch up when this store is older than the peer's view of it, or two copies live.

    A new card is made where the old one was dropped, and new letters go in a new stream, since
    the peer may have other letters under the numbers that come next (SPEC section 5.4).
    """
    known = state.peer_cards[0] if state.peer_cards else PeerCard(1, bytes(32))
    same = not machine.card or known.digest == hashlib.sha256(machine.card).digest()
    if machine.card_sequence < known.sequence < BELIEVED_MAX or (
        known.sequence == machine.card_sequence and not same
    ):
        machine.card_sequence, machine.card = known.sequence, b""
        MACHINE.save(connection, machine)
        peer.is_due = peer.has_news = True
    is_older = any(
        stored.stream == peer.stream and stored.ranges[-1].last > peer.last_number
        for stored in state.streams
    )
    if peer.state_sequence < state.ask_seen < BELIEVED_MAX:
        peer.state_sequence = state.ask_seen
        peer.is_due = peer.has_news = is_older = True
    if is_older:
        peer.stream, peer.last_number = secrets.token_bytes(limits.STREAM_BYTES), 0


def _answer_old(peer: Peer, state: State, now: Now) -> None:
    # Late, or of a machine whose store is an older copy: then `ask_seen` shows it that, since it is
    # the highest sequence that was seen, asking or not, when another one came after it.
    if state.card_sequence == peer.seen_card:
        peer.ask_seen = max(peer.ask_seen, peer.seen_sequence)
    if may_tell(peer, now):
        peer.unopened_age_ms = now.age_ms
        peer.is_due = peer.has_news = True


def _hear_of_card(peer: Peer, state: State) -> None:
    known = state.peer_cards[0].sequence if state.peer_cards else 0
    if known < peer.confirmed_card:
        peer.is_due = True
    elif known > peer.confirmed_card:
        peer.card_tries = 0
    peer.confirmed_card = known


def _hear_of_ends(connection: sqlite3.Connection, peer: Peer, state: State, now: Now) -> None:
    """Note which letters have ended at the peer, and which of this machine's it knows are void."""
    number = peer.id or 0
    for sent in state.sent:
        if not sent.confirmed:
            continue
        connection.execute(
            "DELETE FROM stored_digest WHERE peer = ? AND stream = ? AND number <= ?"
            " AND kept_until_age_ms <= ?",
            (number, sent.stream, sent.confirmed, now.age_ms),
        )
        ranges.note_ended(connection, number, sent.stream, 1, sent.confirmed)
    for void in state.void:
        for each in void.ranges:
            ranges.note_ended(connection, number, void.stream, each.first, each.last)
            # What arrived all the same is listed again, and so corrects the peer.
            connection.execute(
                "INSERT OR REPLACE INTO stored_digest"
                " (peer, stream, number, digest, kept_until_age_ms)"
                " SELECT peer, stream, number, digest, ? FROM mail"
                " WHERE peer = ? AND stream = ? AND number BETWEEN ? AND ?",
                (now.age_ms + KEPT_MS, number, void.stream, each.first, each.last),
            )
    if state.void:
        peer.is_due = peer.has_news = True
    peer.void_seen = msgspec.msgpack.encode(state.void) if state.void else b""
    for void in state.void_seen:
        for each in void.ranges:
            connection.execute(
                "UPDATE letter SET is_void = 0 WHERE peer = ? AND stream = ?"
                " AND number BETWEEN ? AND ? AND is_void = 1",
                (number, void.stream, each.first, each.last),
            )


def _confirm(connection: sqlite3.Connection, peer: Peer, state: State, now: Now) -> None:
    for stored in state.streams:
        for each in stored.digests:
            for row in LETTER.find(
                connection,
                "WHERE peer = ? AND stream = ? AND number = ? AND state != 'stored'",
                (peer.id, stored.stream, each.number),
            ):
                if state.covers(row.stream, row.number, row.digest):
                    row.way = row.way or "relay"
                    outbox.move(connection, row, Move.STORED, now, "the peer says that it has it")


def _send_again(connection: sqlite3.Connection, peer: Peer, state: State, now: Now) -> None:
    listed = {
        (stored.stream, each.number): each.digest
        for stored in state.streams
        for each in stored.digests
    }
    fresh = secrets.token_bytes(limits.STREAM_BYTES)
    for row in outbox.find_open(connection, peer):
        other = listed.get((row.stream, row.number), row.digest[:8]) != row.digest[:8]
        if other or state.refuses(row.stream, row.number, row.digest):
            stream = fresh if peer.stream == row.stream else peer.stream
            outbox.number_anew(connection, peer, row, now, stream=stream)
        elif row.envelope_digest in state.unopened and row.envelope:
            _reseal(connection, row, now, "the peer could not open it")
        elif row.state == "held" and row.ask_sequence and state.ask_seen >= row.ask_sequence:
            _reseal(connection, row, now, "the peer does not have it")


def _reseal(connection: sqlite3.Connection, row: LetterRow, now: Now, detail: str) -> None:
    row.next_age_ms = now.age_ms
    outbox.move(connection, row, Move.RESEAL, now, detail)


def _stored(connection: sqlite3.Connection, peer: Peer) -> tuple[StoredStream, ...]:
    streams = [
        row[0]
        for row in connection.execute(
            "SELECT DISTINCT stream FROM stored_digest WHERE peer = ? LIMIT ?",
            (peer.id, limits.STATE_STREAMS_MAX),
        )
    ]
    digests_left, ranges_left = limits.STATE_DIGESTS_MAX, limits.STATE_RANGES_MAX
    found = []
    for at, stream in enumerate(sorted(streams)):
        room = ranges_left - (len(streams) - at - 1)
        stretches = connection.execute(
            "SELECT first, last FROM stored_range WHERE peer = ? AND stream = ?"
            " ORDER BY first DESC LIMIT ?",
            (peer.id, stream, room),
        ).fetchall()[::-1]
        digests = connection.execute(
            "SELECT number, digest FROM stored_digest WHERE peer = ? AND stream = ?"
            " AND number >= ? ORDER BY number LIMIT ?",
            (peer.id, stream, stretches[0][0], digests_left),
        ).fetchall()
        ranges_left -= len(stretches)
        digests_left -= len(digests)
        found.append(
            StoredStream(
                stream,
                tuple(Range(*each) for each in stretches),
                tuple(StoredDigest(number, digest[:8]) for number, digest in digests),
            )
        )
    return tuple(found)


def _refused(connection: sqlite3.Connection, peer: Peer) -> tuple[RefusedLetter, ...]:
    rows = connection.execute(
        "SELECT stream, number, digest FROM refused_number WHERE peer = ?"
        " ORDER BY stream, number, digest LIMIT ?",
        (peer.id, limits.STATE_REFUSED_MAX),
    )
    return tuple(RefusedLetter(*row) for row in rows)


def _sent(connection: sqlite3.Connection, peer: Peer) -> tuple[SentStream, ...]:
    unsettled = dict(
        connection.execute(
            "SELECT stream, MIN(number) FROM letter WHERE peer = ? AND"
            " (state IN ('queued', 'held') OR is_void = 1) GROUP BY stream",
            (peer.id,),
        ).fetchall()
    )
    rows = connection.execute(
        "SELECT stream, MAX(number) FROM letter WHERE peer = ? GROUP BY stream", (peer.id,)
    ).fetchall()
    wanted = [row for row in rows if row[0] in unsettled or row[0] == peer.stream] or rows
    return tuple(
        SentStream(stream, last, unsettled.get(stream, last + 1) - 1)
        for stream, last in sorted(wanted)[-limits.STATE_STREAMS_MAX :]
    )


def _void(connection: sqlite3.Connection, peer: Peer) -> tuple[VoidStream, ...]:
    rows = connection.execute(
        "SELECT stream, number FROM letter WHERE peer = ? AND is_void = 1"
        " ORDER BY stream, number LIMIT ?",
        (peer.id, limits.STATE_RANGES_MAX),
    )
    streams: dict[bytes, list[int]] = {}
    for stream, number in rows:
        streams.setdefault(stream, []).append(number)
    return tuple(
        VoidStream(stream, tuple(_ranges_of(numbers)))
        for stream, numbers in list(streams.items())[: limits.STATE_STREAMS_MAX]
    )


def _ranges_of(numbers: Sequence[int]) -> Iterable[Range]:
    first = numbers[0]
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        if following != number + 1:
            yield Range(first, number)
            first = following or 0
