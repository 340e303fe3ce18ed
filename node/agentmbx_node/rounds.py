"""One round of attempts to one peer: what is offered, by which way, and what came of it.

A round is begun in a commit that marks each letter as tried before the first byte leaves; it goes
directly if the peer may be reached so, else to the peer's relay. Backoff is the peer's; it is kept
in the store and cut short by contact.
"""

import random
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from agentmbx_node import outbox, reports
from agentmbx_node.addresses import usable_addresses
from agentmbx_node.cards import read_card
from agentmbx_node.clock import Now
from agentmbx_node.keyring import Keyring
from agentmbx_node.outbox import Move
from agentmbx_node.parcels import Sealer
from agentmbx_node.store.rows import LETTER, PEER, LetterRow, Peer
from agentmbx_node.wishes import HOUR, LONG_MS, S, Told, Wish, relay_gap_ms
from agentmbx_protocol import limits
from agentmbx_protocol.card import Route
from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.errors import Refusal

LETTERS_MAX: Final = limits.DEPOSIT_ENVELOPES_MAX - 1
ROUND_BYTES_MAX: Final = 3 * 1024 * 1024
DIRECT_PAUSE_MS: Final = 300 * S
DEPOSIT_AGAIN_MS: Final = (HOUR, 6 * HOUR)
BACKOFF_MS_MAX: Final = 900 * S
REFUSED_LETTER_MS: Final = 900 * S
GIVE_UP_ROUNDS: Final = 8
SMALLEST_AT: Final = 6


class Offer(msgspec.Struct, frozen=True):
    """One envelope of a round, and the letter in it by id and digest; "" for a state letter."""

    parcel: Envelope
    letter: str = ""
    digest: bytes = b""


class Round(msgspec.Struct, frozen=True):
    """Envelopes for one peer by one way: direct to `addresses`, or a relay's `route`.

    `told` is what its state letter tells; None: it has none.
    """

    peer: int
    peer_key: bytes
    offers: Sequence[Offer]
    letters: Sequence[str]
    began_age_ms: int
    told: Told | None
    addresses: Sequence[str] = ()
    route: Route | None = None

    @property
    def parcels(self) -> list[Envelope]:
        """The envelopes, in the order in which they go."""
        return [offer.parcel for offer in self.offers]


def begin(
    connection: sqlite3.Connection, keyring: Keyring, number: int, now: Now
) -> Round | int | None:
    """The next round to the peer; or the age at which there will be one; None: nothing waits."""
    peer = PEER.get(connection, number)
    if peer is None or peer.state == "left":
        return None
    if peer.is_telling:
        # The last round never ended, so nobody knows whether the peer was told.
        peer.is_telling, peer.is_due, peer.has_news = False, True, True
    if peer.state == "leaving" and (not peer.is_due or now.age_ms >= peer.leave_age_ms):
        peer.state = "left"
        if peer.leave_age_ms <= now.age_ms + reports.NEWS_S * S:
            peer.leave_age_ms = now.age_ms + reports.KEPT_MS
        PEER.save(connection, peer)
        return None
    connection.execute(
        "UPDATE letter SET next_age_ms = ? WHERE peer = ? AND state IN ('queued', 'held')"
        " AND deadline_age_ms <= ? AND rounds = 0 AND next_age_ms > ?",
        (now.age_ms, number, now.age_ms, now.age_ms),
    )
    if now.age_ms < peer.retry_age_ms:
        return peer.retry_age_ms
    sealer = Sealer.of(connection, keyring)
    addresses = _addresses(peer, now)
    wish = Wish.of(connection, sealer.machine, peer, now, direct=bool(addresses))
    due = _due(connection, peer, now)
    if not due and not wish.now:
        return wish.next_age_ms(connection, peer, now)
    for row in due:
        if not row.was_tried:
            row.was_tried = True
            LETTER.save(connection, row)
    told = wish.begin_telling(peer, now) if wish.now else None
    if addresses:
        begun = _direct(connection, sealer, peer, due, now, told=told, addresses=addresses)
    else:
        begun = _by_relay(connection, sealer, peer, due, now, told=told)
    PEER.save(connection, peer)
    return begun


def direct_done(
    connection: sqlite3.Connection, round_: Round, stored: frozenset[bytes], now: Now
) -> None:
    """The peer itself answered: what it has stored has ended; the rest waits for its state."""
    peer = _peer(connection, round_)
    peer.failures = peer.retry_age_ms = peer.direct_retry_age_ms = 0
    peer.direct_error, peer.direct_ms, peer.contact_ms = "", now.wall_ms, now.wall_ms
    for offer in round_.offers:
        is_stored = offer.parcel.digest in stored
        if not offer.letter:
            _end_telling(peer, round_, taken=is_stored)
            continue
        row = LETTER.get(connection, offer.letter)
        if row is None or row.state == "stored" or row.digest != offer.digest:
            continue
        if is_stored:
            row.way, row.why = "direct", ""
            outbox.move(connection, row, Move.STORED, now)
        elif row.state in outbox.OPEN:
            row.why = "the peer was reached, but did not take it"
            row.next_age_ms = now.age_ms + REFUSED_LETTER_MS
            row.direct_age_ms = now.age_ms
            LETTER.save(connection, row)
    # What a relay holds is offered directly too, now that the peer is there.
    connection.execute(
        "UPDATE letter SET next_age_ms = ?1 WHERE peer = ?2 AND state = 'held'"
        " AND next_age_ms > ?1 AND (direct_age_ms = 0 OR direct_age_ms < ?3)",
        (now.age_ms, peer.id, now.age_ms - DIRECT_PAUSE_MS),
    )
    PEER.save(connection, peer)
    _end_late(connection, round_, now, answered=True)


def fall_back(
    connection: sqlite3.Connection,
    keyring: Keyring,
    round_: Round,
    error: str,
    now: Now,
) -> Round | None:
    """The direct attempt failed for all that waits: the round by relay, None if there is no route.

    It is not tried again for 5 minutes, or until contact or another network.
    """
    peer = _peer(connection, round_)
    peer.direct_retry_age_ms = now.age_ms + DIRECT_PAUSE_MS
    peer.direct_error, peer.direct_ms = error, now.wall_ms
    route, told = _route(peer), round_.told
    if told is not None and (route is None or told.is_early(now, relay_gap_ms(peer))):
        told.undo(peer)
        told = None
    due = [row for row in _letters(connection, round_) if row.state in outbox.OPEN]
    begun = None
    if route is not None and (due or told):
        sealer = Sealer.of(connection, keyring)
        begun = _by_relay(connection, sealer, peer, due, now, told=told)
        begun = msgspec.structs.replace(begun, began_age_ms=round_.began_age_ms)
    PEER.save(connection, peer)
    if begun is None:
        _fail(connection, peer, round_, error, now, retry_after_s=None)
        _end_late(connection, round_, now, answered=False)
    return begun


def relay_done(
    connection: sqlite3.Connection,
    round_: Round,
    held: Mapping[bytes, HeldFact],
    refused: Mapping[bytes, Refusal],
    error: str,
    now: Now,
    *,
    answered: bool,
) -> None:
    """What came of a round by relay; `error` is why nothing of it is known, or ""."""
    peer = _peer(connection, round_)
    for offer in round_.offers:
        digest = offer.parcel.digest
        reason = refused.get(digest)
        if not offer.letter:
            _end_telling(peer, round_, taken=digest in held)
            if reason is not None and not reason.retryable:
                peer.state_age_ms = now.age_ms
        elif (row := LETTER.get(connection, offer.letter)) and row.state in outbox.OPEN:
            if digest in held and row.envelope_digest == digest:
                _hold(connection, row, now)
                continue
            row.why = reason.detail if reason else error
            # Behind all that has waited longer, so that it holds up nothing else (O1).
            row.next_age_ms = now.age_ms
            if reason is not None and not reason.retryable:
                row.next_age_ms += REFUSED_LETTER_MS
            LETTER.save(connection, row)
    if round_.route is None and round_.told is not None:
        _end_telling(peer, round_, taken=False)
    # A refusal that may pass is of the way, and all letters wait; any other is of its letter.
    of_way = [each for each in refused.values() if each.retryable]
    peer.relay_error = error or (of_way[0].detail if of_way else "")
    peer.relay_ms = now.wall_ms
    if error or of_way or not (held or refused):
        waits = [each.retry_after_s for each in of_way if each.retry_after_s]
        _fail(
            connection, peer, round_, peer.relay_error, now, retry_after_s=max(waits, default=None)
        )
    elif held:
        # Rounds grow again by and by, else the next would meet the same letter and fail (O1).
        peer.failures = max(min(peer.failures, SMALLEST_AT) - 1, 0)
        peer.retry_age_ms = 0
    PEER.save(connection, peer)
    _end_late(connection, round_, now, answered=answered)


def _direct(
    connection: sqlite3.Connection,
    sealer: Sealer,
    peer: Peer,
    due: Sequence[LetterRow],
    now: Now,
    *,
    told: Told | None,
    addresses: Sequence[str],
) -> Round:
    offers = [Offer(sealer.seal(peer, row.data), row.id, row.digest) for row in due]
    if told is not None:
        data = reports.make(
            connection, sealer.machine, peer, now, ask=told.asks, has_news=told.has_news
        )
        offers.insert(0, Offer(sealer.seal(peer, data, sealing=told.other_sealing)))
    return Round(
        peer=peer.id or 0,
        peer_key=peer.pair_key,
        offers=offers,
        letters=[row.id for row in due],
        began_age_ms=now.age_ms,
        told=told,
        addresses=addresses,
    )


def _by_relay(
    connection: sqlite3.Connection,
    sealer: Sealer,
    peer: Peer,
    due: Sequence[LetterRow],
    now: Now,
    *,
    told: Told | None,
) -> Round:
    route = _route(peer)
    offers = []
    for row in due:
        if route is None:
            break
        if row.state == "held" and row.queue != route.queue:
            outbox.move(connection, row, Move.RESEAL, now, "the peer has another route now")
        if not row.envelope or row.queue != route.queue:
            left_ms = max(row.deadline_age_ms - now.age_ms, 0)
            ttl_s = left_ms // 1000 + limits.LETTER_TTL_EXTRA_S
            parcel = sealer.seal(peer, row.data, queue=route.queue, ttl_s=ttl_s)
            row.envelope, row.envelope_digest = parcel.frame.data, parcel.digest
            row.queue = route.queue
        else:
            parcel = parse_envelope(row.envelope)
        offers.append(Offer(parcel, row.id, row.digest))
    asks = told is not None and told.asks
    if told is not None and route is not None:
        data = reports.make(connection, sealer.machine, peer, now, ask=asks, has_news=told.has_news)
        ttl_s = (reports.NEWS_S if told.has_news else 0) + limits.LETTER_TTL_EXTRA_S
        parcel = sealer.seal(peer, data, queue=route.queue, ttl_s=ttl_s, sealing=told.other_sealing)
        # News goes first; what asks goes last, so that the answer knows of all before it.
        offers.insert(len(offers) if asks else 0, Offer(parcel))
        peer.state_age_ms, peer.is_unanswered = now.age_ms, asks
        if asks:
            connection.execute(
                "UPDATE letter SET ask_sequence = ? WHERE peer = ? AND state = 'held'",
                (peer.state_sequence, peer.id),
            )
    for row in due:
        if asks and row.envelope:
            row.ask_sequence = peer.state_sequence
        LETTER.save(connection, row)
    return Round(
        peer=peer.id or 0,
        peer_key=peer.pair_key,
        offers=offers,
        letters=[row.id for row in due],
        began_age_ms=now.age_ms,
        told=told,
        route=route,
    )


def _addresses(peer: Peer, now: Now) -> Sequence[str]:
    # Without a relay there is nothing else to try, and the peer's backoff is pause enough.
    if now.age_ms < peer.direct_retry_age_ms and _route(peer) is not None:
        return ()
    return usable_addresses(read_card(peer.card).addresses, paired_over_loopback=peer.loopback)


def _route(peer: Peer) -> Route | None:
    routes = read_card(peer.card).routes
    return routes[0] if routes else None


def _due(connection: sqlite3.Connection, peer: Peer, now: Now) -> list[LetterRow]:
    # After failures in a row the rounds get smaller, so that one letter that a proxy on the way
    # will not pass does not hold up the others (O1).
    count = max(LETTERS_MAX >> min(peer.failures, SMALLEST_AT), 1)
    rows = LETTER.find(
        connection,
        "WHERE peer = ? AND state IN ('queued', 'held') AND next_age_ms <= ?"
        " ORDER BY next_age_ms, number LIMIT ?",
        (peer.id, now.age_ms, count),
    )
    taken: list[LetterRow] = []
    length = 0
    for row in rows:
        length += len(row.data) + 8 * 1024
        if taken and length > ROUND_BYTES_MAX:
            break
        taken.append(row)
    return taken


def _hold(connection: sqlite3.Connection, row: LetterRow, now: Now) -> None:
    again = row.deposits < len(DEPOSIT_AGAIN_MS)
    row.next_age_ms = now.age_ms + (DEPOSIT_AGAIN_MS[row.deposits] if again else LONG_MS)
    row.deposits += 1
    row.held_age_ms = row.held_age_ms or now.age_ms
    row.way, row.why = "relay", ""
    outbox.move(connection, row, Move.HELD, now)


def _end_telling(peer: Peer, round_: Round, *, taken: bool) -> None:
    if round_.told is None:
        return
    if taken:
        round_.told.end(peer)
    else:
        round_.told.undo(peer)


def _fail(
    connection: sqlite3.Connection,
    peer: Peer,
    round_: Round,
    error: str,
    now: Now,
    *,
    retry_after_s: int | None,
) -> None:
    wait_ms = min(BACKOFF_MS_MAX, S << min(peer.failures, 10))
    wait_ms = int(wait_ms * random.uniform(0.5, 1))  # noqa: S311 - spreads load, protects nothing
    peer.failures += 1
    peer.retry_age_ms = now.age_ms + max(wait_ms, min(retry_after_s or 0, 900) * S)
    PEER.save(connection, peer)
    for row in _letters(connection, round_):
        if row.state in outbox.OPEN and not row.why:
            row.why = error
            LETTER.save(connection, row)


def _end_late(connection: sqlite3.Connection, round_: Round, now: Now, *, answered: bool) -> None:
    """Give up what is past its deadline and had its full round (rule 5)."""
    late = [
        row
        for row in _letters(connection, round_)
        if row.state in outbox.OPEN and row.deadline_age_ms <= round_.began_age_ms
    ]
    if not answered:
        # Nobody was reached for any letter, so the round counts for those that did not fit it too.
        connection.execute(
            "UPDATE letter SET rounds = rounds + 1 WHERE peer = ? AND state IN ('queued', 'held')"
            " AND deadline_age_ms <= ?",
            (round_.peer, round_.began_age_ms),
        )
        late = LETTER.find(
            connection,
            "WHERE peer = ? AND state IN ('queued', 'held') AND rounds >= ?"
            " AND deadline_age_ms < ?",
            (round_.peer, GIVE_UP_ROUNDS, now.age_ms - HOUR),
        )
    for row in late:
        outbox.move(connection, row, Move.GIVE_UP, now, "its 72 hours are over")
    if late:
        outbox.tell_peer(connection, round_.peer)


def _peer(connection: sqlite3.Connection, round_: Round) -> Peer:
    peer = PEER.get(connection, round_.peer)
    if peer is None:
        raise LookupError("the peer of a round is gone")
    return peer


def _letters(connection: sqlite3.Connection, round_: Round) -> list[LetterRow]:
    rows = (LETTER.get(connection, each) for each in round_.letters)
    return [row for row in rows if row is not None]
