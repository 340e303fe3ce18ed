"""One round of attempts to one peer: what is offered, by which way, and what came of it.

A round is begun in a commit that marks each letter as tried before the first byte leaves; it goes
directly if the peer may be reached so, then what is left goes to the peer's relay. Backoff is the
peer's; it is kept in the store and cut short by contact.
"""

import random
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from agentmbx_node import outbox, reports
from agentmbx_node.addresses import usable_addresses
from agentmbx_node.clock import Now
from agentmbx_node.keyring import Keyring
from agentmbx_node.outbox import Move
from agentmbx_node.parcels import Sealer
from agentmbx_node.store.rows import LETTER, PEER, LetterRow, Machine, Peer
from agentmbx_protocol import limits
from agentmbx_protocol.card import Route, parse_card
from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.errors import NoSuchQueue, QueueFull, RateLimited, Refusal, RelayFull

S: Final = 1000
HOUR: Final = 3600 * S
LETTERS_MAX: Final = limits.DEPOSIT_ENVELOPES_MAX - 1
ROUND_BYTES_MAX: Final = 3 * 1024 * 1024
DIRECT_PAUSE_MS: Final = 300 * S
STATE_GAP_MS: Final = 60 * S
STATE_GAP_UNANSWERED_MS: Final = 900 * S
STATE_GAP_DIRECT_MS: Final = S
ASK_AFTER_MS: Final = 300 * S
ASK_EVERY_MS: Final = 900 * S
CARD_TRIES_HOURLY: Final = 6
VOID_TRIES_MAX: Final = 8
LONG_MS: Final = 12 * HOUR
DEPOSIT_AGAIN_MS: Final = (HOUR, 6 * HOUR)
BACKOFF_MS_MAX: Final = 900 * S
REFUSED_LETTER_MS: Final = 900 * S
GIVE_UP_ROUNDS: Final = 8
_OF_THE_QUEUE: Final = (NoSuchQueue, QueueFull, RelayFull, RateLimited)


class Offer(msgspec.Struct, frozen=True):
    """One envelope of a round, and the id of the letter in it; "" for a state letter."""

    parcel: Envelope
    letter: str


class Round(msgspec.Struct, frozen=True):
    """Envelopes for one peer by one way: direct to `addresses`, or a relay's `route`."""

    peer: int
    peer_key: bytes
    offers: Sequence[Offer]
    letters: Sequence[str]
    began_age_ms: int
    asks: bool
    addresses: Sequence[str] = ()
    route: Route | None = None
    answered: bool = False
    took_any: bool = False

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
    if peer.state == "leaving" and (not peer.is_due or now.age_ms >= peer.leave_age_ms):
        peer.state, peer.leave_age_ms = "left", now.age_ms + reports.KEPT_MS
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
    machine = sealer.machine
    addresses = _addresses(peer, now)
    want = _Wish.of(connection, machine, peer, now, direct=bool(addresses))
    due = _due(connection, peer, now)
    if not due and not want.now:
        return want.next_age_ms(connection, peer, now)
    for row in due:
        if not row.was_tried:
            row.was_tried = True
            LETTER.save(connection, row)
    if want.now:
        want.note(peer, now)
    if addresses:
        offers = [Offer(sealer.seal(peer, row.data), row.id) for row in due]
        if want.now:
            data = reports.make(connection, sealer.machine, peer, now, ask=want.ask)
            offers.insert(0, Offer(sealer.seal(peer, data), ""))
        begun = Round(
            peer=number,
            peer_key=peer.pair_key,
            offers=offers,
            letters=[row.id for row in due],
            began_age_ms=now.age_ms,
            asks=want.ask,
            addresses=addresses,
        )
    else:
        begun = _by_relay(connection, sealer, peer, due, now, with_state=want.now, asks=want.ask)
    PEER.save(connection, peer)
    return begun


def direct_done(
    connection: sqlite3.Connection, round_: Round, stored: frozenset[bytes], now: Now
) -> None:
    """The peer itself answered: what it has stored has ended; the rest waits for its state."""
    peer = _peer(connection, round_)
    peer.failures = peer.retry_age_ms = peer.direct_retry_age_ms = 0
    peer.direct_error, peer.direct_ms, peer.contact_ms = "", now.wall_ms, now.wall_ms
    took_state = False
    for offer in round_.offers:
        if offer.parcel.digest not in stored:
            continue
        if not offer.letter:
            took_state = True
            continue
        row = _letter(connection, offer.letter)
        if row is not None and row.state != "stored":
            row.way, row.why = "direct", ""
            outbox.move(connection, row, Move.STORED, now)
    if took_state:
        peer.has_news = False
        peer.unopened = b""
    left = [row for row in _letters(connection, round_) if row.state in outbox.OPEN]
    for row in left:
        row.why = "the peer was reached, but did not take it"
        row.next_age_ms = now.age_ms + REFUSED_LETTER_MS
        LETTER.save(connection, row)
    # What a relay holds is offered directly too, now that the peer is there.
    connection.execute(
        "UPDATE letter SET next_age_ms = ? WHERE peer = ? AND state = 'held'"
        " AND next_age_ms > ? AND held_age_ms < ?",
        (now.age_ms, peer.id, now.age_ms, now.age_ms - DIRECT_PAUSE_MS),
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
    had_state = any(not offer.letter for offer in round_.offers)
    gap = STATE_GAP_UNANSWERED_MS if peer.is_unanswered else STATE_GAP_MS
    with_state = had_state and (not peer.state_age_ms or now.age_ms - peer.state_age_ms >= gap)
    if had_state and (not with_state or _route(peer) is None):
        peer.is_due = True
    due = [row for row in _letters(connection, round_) if row.state in outbox.OPEN]
    begun = None
    if _route(peer) is not None and (due or with_state):
        begun = _by_relay(
            connection,
            Sealer.of(connection, keyring),
            peer,
            due,
            now,
            with_state=with_state,
            asks=round_.asks and with_state,
        )
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
        if not offer.letter:
            _settle_state(peer, taken=digest in held)
        elif (row := _letter(connection, offer.letter)) and row.state in outbox.OPEN:
            if digest in held and row.envelope_digest == digest:
                _hold(connection, row, now)
            else:
                reason = refused.get(digest)
                row.why = reason.detail if reason else error
                # Behind all that has waited longer, so that it holds up nothing else (O1).
                row.next_age_ms = now.age_ms
                if reason is not None and not isinstance(reason, _OF_THE_QUEUE):
                    row.next_age_ms += REFUSED_LETTER_MS
                LETTER.save(connection, row)
    of_queue = [each for each in refused.values() if isinstance(each, _OF_THE_QUEUE)]
    if held and not of_queue:
        peer.failures = peer.retry_age_ms = 0
    peer.relay_error = error or (of_queue[0].detail if of_queue else "")
    peer.relay_ms = now.wall_ms
    peer.is_due |= round_.route is None
    if not held or of_queue:
        waits = [each.retry_after_s for each in of_queue if each.retry_after_s]
        _fail(
            connection, peer, round_, peer.relay_error, now, retry_after_s=max(waits, default=None)
        )
    PEER.save(connection, peer)
    _end_late(connection, round_, now, answered=answered)


class _Wish(msgspec.Struct):
    """Whether a state letter is wanted now, and why."""

    now: bool
    ask: bool
    card: bool
    void: bool
    gap_ms: int
    oldest_held_age_ms: int | None
    card_at_ms: int | None

    @classmethod
    def of(
        cls,
        connection: sqlite3.Connection,
        machine: Machine,
        peer: Peer,
        now: Now,
        *,
        direct: bool,
    ) -> "_Wish":
        (oldest,) = connection.execute(
            "SELECT MIN(held_age_ms) FROM letter WHERE peer = ? AND state = 'held'", (peer.id,)
        ).fetchone()
        is_old = oldest is not None and now.age_ms - oldest > ASK_AFTER_MS
        ask = is_old and (not peer.asked_age_ms or now.age_ms - peer.asked_age_ms >= ASK_EVERY_MS)
        card_at = None
        if peer.confirmed_card < machine.card_sequence and machine.card:
            wait = HOUR if peer.card_tries < CARD_TRIES_HOURLY else LONG_MS
            card_at = peer.state_age_ms + wait if peer.card_tries else now.age_ms
        card = card_at is not None and now.age_ms >= card_at
        (voids,) = connection.execute(
            "SELECT COUNT(*) FROM letter WHERE peer = ? AND is_void = 1", (peer.id,)
        ).fetchone()
        last = max(peer.state_age_ms, peer.void_age_ms)
        void = bool(voids) and peer.void_tries < VOID_TRIES_MAX and now.age_ms >= last + LONG_MS
        gap = STATE_GAP_UNANSWERED_MS if peer.is_unanswered else STATE_GAP_MS
        gap = STATE_GAP_DIRECT_MS if direct else gap
        is_early = bool(peer.state_age_ms) and now.age_ms - peer.state_age_ms < gap
        wanted = (peer.is_due or ask or card or void) and not is_early
        return cls(wanted, ask or (wanted and card), card, void, gap, oldest, card_at)

    def note(self, peer: Peer, now: Now) -> None:
        """Write down what is about to be told."""
        peer.is_due = False
        peer.state_age_ms = now.age_ms
        if self.ask:
            peer.asked_age_ms = now.age_ms
        if self.card:
            peer.card_tries += 1
        if self.void:
            peer.void_tries += 1
            peer.void_age_ms = now.age_ms
            peer.has_news = True

    def next_age_ms(self, connection: sqlite3.Connection, peer: Peer, now: Now) -> int | None:
        """When there will be something to do, if nothing comes."""
        (soonest,) = connection.execute(
            "SELECT MIN(next_age_ms) FROM letter WHERE peer = ? AND state IN ('queued', 'held')",
            (peer.id,),
        ).fetchone()
        (deadline,) = connection.execute(
            "SELECT MIN(deadline_age_ms) FROM letter WHERE peer = ?"
            " AND state IN ('queued', 'held') AND rounds = 0",
            (peer.id,),
        ).fetchone()
        times = [each for each in (soonest, deadline, self.card_at_ms) if each is not None]
        if peer.is_due:
            times.append(peer.state_age_ms + self.gap_ms)
        if self.oldest_held_age_ms is not None:
            asked = peer.asked_age_ms + ASK_EVERY_MS if peer.asked_age_ms else 0
            times.append(max(self.oldest_held_age_ms + ASK_AFTER_MS + S, asked))
        (voids,) = connection.execute(
            "SELECT COUNT(*) FROM letter WHERE peer = ? AND is_void = 1", (peer.id,)
        ).fetchone()
        if voids and peer.void_tries < VOID_TRIES_MAX:
            times.append(max(peer.state_age_ms, peer.void_age_ms) + LONG_MS)
        return max(min(times), now.age_ms + 1) if times else None


def _by_relay(
    connection: sqlite3.Connection,
    sealer: Sealer,
    peer: Peer,
    due: Sequence[LetterRow],
    now: Now,
    *,
    with_state: bool,
    asks: bool,
) -> Round:
    route = _route(peer)
    offers = []
    for row in due:
        if route is None:
            break
        if not row.envelope or row.queue != route.queue:
            left_ms = max(row.deadline_age_ms - now.age_ms, 0)
            ttl_s = left_ms // 1000 + limits.LETTER_TTL_EXTRA_S
            parcel = sealer.seal(peer, row.data, queue=route.queue, ttl_s=ttl_s)
            row.envelope, row.envelope_digest = parcel.frame.data, parcel.digest
            row.queue = route.queue
        else:
            parcel = parse_envelope(row.envelope)
        offers.append(Offer(parcel, row.id))
    if with_state and route:
        data = reports.make(connection, sealer.machine, peer, now, ask=asks)
        ttl_s = (reports.NEWS_S if peer.has_news else 0) + limits.LETTER_TTL_EXTRA_S
        parcel = sealer.seal(peer, data, queue=route.queue, ttl_s=ttl_s)
        # News goes first; what asks goes last, so that the answer knows of all before it.
        offers.insert(len(offers) if asks else 0, Offer(parcel, ""))
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
        asks=asks,
        route=route,
    )


def _addresses(peer: Peer, now: Now) -> Sequence[str]:
    # Without a relay there is nothing else to try, and the peer's backoff is pause enough.
    if now.age_ms < peer.direct_retry_age_ms and _route(peer) is not None:
        return ()
    return usable_addresses(parse_card(peer.card).addresses, paired_over_loopback=peer.loopback)


def _route(peer: Peer) -> Route | None:
    routes = parse_card(peer.card).routes
    return routes[0] if routes else None


def _due(connection: sqlite3.Connection, peer: Peer, now: Now) -> list[LetterRow]:
    # After failures in a row the rounds get smaller, so that one letter that a proxy on the way
    # will not pass does not hold up the others (O1).
    count = max(LETTERS_MAX >> min(peer.failures, 6), 1)
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


def _settle_state(peer: Peer, *, taken: bool) -> None:
    if taken:
        peer.has_news, peer.unopened = False, b""
    else:
        peer.is_due = True


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
    for row in _letters(connection, round_):
        if row.state not in outbox.OPEN or round_.began_age_ms < row.deadline_age_ms:
            continue
        row.rounds += 1
        worn_out = row.rounds >= GIVE_UP_ROUNDS and now.age_ms > row.deadline_age_ms + HOUR
        if answered or worn_out:
            outbox.move(connection, row, Move.GIVE_UP, now, "its 72 hours are over")
            connection.execute(
                "UPDATE peer SET is_due = 1, has_news = 1 WHERE id = ?", (round_.peer,)
            )
        else:
            LETTER.save(connection, row)


def _peer(connection: sqlite3.Connection, round_: Round) -> Peer:
    peer = PEER.get(connection, round_.peer)
    if peer is None:
        raise LookupError("the peer of a round is gone")
    return peer


def _letter(connection: sqlite3.Connection, number: str) -> LetterRow | None:
    return LETTER.get(connection, number)


def _letters(connection: sqlite3.Connection, round_: Round) -> list[LetterRow]:
    rows = (LETTER.get(connection, each) for each in round_.letters)
    return [row for row in rows if row is not None]
