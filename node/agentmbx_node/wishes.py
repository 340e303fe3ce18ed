"""When a state letter is wanted, and what becomes of the wish when one was sent or was not."""

import sqlite3
from typing import Final

import msgspec

from agentmbx_node.clock import Now
from agentmbx_node.store.rows import Machine, Peer

S: Final = 1000
HOUR: Final = 3600 * S
LONG_MS: Final = 12 * HOUR
STATE_GAP_MS: Final = 60 * S
STATE_GAP_UNANSWERED_MS: Final = 900 * S
STATE_GAP_DIRECT_MS: Final = S
ASK_AFTER_MS: Final = 300 * S
ASK_EVERY_MS: Final = 900 * S
CARD_TRIES_HOURLY: Final = 6
VOID_TRIES_MAX: Final = 8

_digests = msgspec.msgpack.Decoder(list[bytes])


class Told(msgspec.Struct, frozen=True):
    """What the state letter of a round tells, and how the peer's row was before it.

    While it is under way the row says `is_telling`, so that a crash forgets nothing.
    """

    asks: bool
    has_news: bool
    unopened: bytes
    other_sealing: bytes
    state_age_ms: int
    asked_age_ms: int
    is_unanswered: bool
    card_tries: int
    void_tries: int
    void_age_ms: int

    def is_early(self, now: Now, gap_ms: int) -> bool:
        """Whether the one before it went out less than `gap_ms` ago."""
        return bool(self.state_age_ms) and now.age_ms - self.state_age_ms < gap_ms

    def end(self, peer: Peer) -> None:
        """It was taken; what has come meanwhile is still to be told."""
        peer.is_telling = False
        if peer.unopened and self.unopened:
            told = _digests.decode(self.unopened)
            left = [each for each in _digests.decode(peer.unopened) if each not in told]
            peer.unopened = msgspec.msgpack.encode(left) if left else b""

    def undo(self, peer: Peer) -> None:
        """It was not taken, as far as anybody knows; it is due again."""
        peer.is_telling, peer.is_due = False, True
        peer.has_news = peer.has_news or self.has_news
        peer.other_sealing = peer.other_sealing or self.other_sealing
        peer.state_age_ms, peer.asked_age_ms = self.state_age_ms, self.asked_age_ms
        peer.is_unanswered = self.is_unanswered and peer.is_unanswered
        peer.card_tries = min(peer.card_tries, self.card_tries)
        peer.void_tries = min(peer.void_tries, self.void_tries)
        peer.void_age_ms = self.void_age_ms


class Wish(msgspec.Struct):
    """Whether a state letter is wanted now, and why."""

    now: bool
    ask: bool
    card: bool
    void: bool
    earliest_age_ms: int
    oldest_held_age_ms: int | None
    card_age_ms: int | None
    void_age_ms: int | None

    @classmethod
    def of(
        cls,
        connection: sqlite3.Connection,
        machine: Machine,
        peer: Peer,
        now: Now,
        *,
        direct: bool,
    ) -> "Wish":
        """What there is to tell the peer, or to ask, by that way.

        One whose pairing is over is told nothing but that. Without a card of its own, which is
        then about to be made, a machine says nothing.
        """
        is_paired = peer.state == "paired"
        (oldest,) = connection.execute(
            "SELECT MIN(held_age_ms) FROM letter WHERE peer = ? AND state = 'held'", (peer.id,)
        ).fetchone()
        is_old = oldest is not None and now.age_ms - oldest > ASK_AFTER_MS
        ask = is_old and (not peer.asked_age_ms or now.age_ms - peer.asked_age_ms >= ASK_EVERY_MS)
        card_at = None
        if is_paired and peer.confirmed_card < machine.card_sequence:
            wait = HOUR if peer.card_tries < CARD_TRIES_HOURLY else LONG_MS
            card_at = peer.state_age_ms + wait if peer.card_tries else now.age_ms
        void_at = None
        if is_paired and peer.void_tries < VOID_TRIES_MAX and _has_voids(connection, peer):
            void_at = max(peer.state_age_ms, peer.void_age_ms) + LONG_MS
        card = card_at is not None and now.age_ms >= card_at
        void = void_at is not None and now.age_ms >= void_at
        gap_ms = STATE_GAP_DIRECT_MS if direct else relay_gap_ms(peer)
        earliest = peer.state_age_ms + gap_ms if peer.state_age_ms else 0
        wanted = bool(machine.card) and now.age_ms >= earliest
        wanted = wanted and (peer.is_due or ask or card or void)
        return cls(wanted, ask or card, card, void, earliest, oldest, card_at, void_at)

    def begin_telling(self, peer: Peer, now: Now) -> Told:
        """Write down in the peer's row that a state letter is about to go."""
        told = Told(
            asks=self.ask,
            has_news=peer.has_news or self.void,
            unopened=peer.unopened,
            other_sealing=peer.other_sealing,
            state_age_ms=peer.state_age_ms,
            asked_age_ms=peer.asked_age_ms,
            is_unanswered=peer.is_unanswered,
            card_tries=peer.card_tries,
            void_tries=peer.void_tries,
            void_age_ms=peer.void_age_ms,
        )
        peer.is_telling, peer.is_due, peer.has_news = True, False, False
        peer.state_age_ms, peer.other_sealing = now.age_ms, b""
        if self.ask:
            peer.asked_age_ms = now.age_ms
        if self.card:
            peer.card_tries += 1
        if self.void:
            peer.void_tries += 1
            peer.void_age_ms = now.age_ms
        return told

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
        tell = [each for each in (self.card_age_ms, self.void_age_ms) if each is not None]
        if peer.is_due:
            tell.append(0)
        if self.oldest_held_age_ms is not None:
            asked = peer.asked_age_ms + ASK_EVERY_MS if peer.asked_age_ms else 0
            tell.append(max(self.oldest_held_age_ms + ASK_AFTER_MS + 1, asked))
        times = [each for each in (soonest, deadline) if each is not None]
        times += [max(each, self.earliest_age_ms) for each in tell]
        return max(min(times), now.age_ms + 1) if times else None


def relay_gap_ms(peer: Peer) -> int:
    """The least time between two state letters by relay."""
    return STATE_GAP_UNANSWERED_MS if peer.is_unanswered else STATE_GAP_MS


def _has_voids(connection: sqlite3.Connection, peer: Peer) -> bool:
    found = connection.execute(
        "SELECT 1 FROM letter WHERE peer = ? AND is_void = 1 LIMIT 1", (peer.id,)
    ).fetchone()
    return found is not None
