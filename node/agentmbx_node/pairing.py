"""Pairing by token, at the machine that made the line to paste: who may become a peer, and once.

The database alone says that a token is spent: its `joined` row is written with the peer, in one
transaction. What is kept in memory may be lost at any moment; then a joiner begins again. Late
is counted by the machine's age, so no wall clock has a part in pairing.
"""

import hashlib
import itertools
import sqlite3
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from agentmbx_node.clock import Now
from agentmbx_node.keyring import Keyring
from agentmbx_node.store.rows import MACHINE, PEER, Peer, name_key
from agentmbx_node.store.table import Table
from agentmbx_node.tokens import EventKind, Exchange, Tokens, refusal
from agentmbx_protocol import frame, keys, limits
from agentmbx_protocol.card import parse_card
from agentmbx_protocol.errors import BadSignature, CannotOpen, Malformed, Refusal
from agentmbx_protocol.frame import Kind
from agentmbx_protocol.pairing import (
    Hello,
    make_hello,
    make_proof,
    open_proof,
    parse_hello,
)

REPEAT_MS: Final = 24 * 3600 * 1000
SALT_BYTES: Final = 16
_FINGERPRINT_CHARACTERS: Final = 20
_FINGERPRINT_GROUP: Final = 4

OnReplaced = Callable[[sqlite3.Connection, Peer], None]


class Joined(msgspec.Struct):
    """A spent token: who spent it, and what that joiner is answered when it asks again."""

    token_id: bytes
    hello: bytes
    reply: bytes
    proof: bytes
    result: bytes
    age_ms: int


JOINED: Final = Table("joined", Joined)


class Answered(msgspec.Struct, frozen=True):
    """The frame to send, and the peer that this made: None for a reply and for a repeat."""

    frame: bytes
    token_id: bytes
    peer: Peer | None = None


def settle(tokens: Tokens, answered: Answered) -> None:
    """To be called after the commit: a token that paired ends, and the screen is told."""
    if answered.peer is not None:
        tokens.end(answered.token_id)
        peer = answered.peer
        tokens.report(EventKind.PAIRED, answered.token_id, peer.identity, peer.name)


def leave_as_it_was(_connection: sqlite3.Connection, _old_peer: Peer) -> None:
    """For a caller with nothing to do about a pairing that a new one replaces."""


def answer_pair(
    connection: sqlite3.Connection,
    tokens: Tokens,
    keyring: Keyring,
    now: Now,
    own_card: bytes,
    frames: Sequence[bytes],
    *,
    loopback: bool,
    on_replaced: OnReplaced = leave_as_it_was,
) -> Answered:
    """The answer to either request of `POST /v1/pair`; raises a `Refusal`.

    It may be sent after the commit, when `settle` was called.
    """
    if len(frames) != 1:
        raise Malformed("A step of pairing is one frame.")
    parsed = frame.parse(frames[0], Kind.HELLO, Kind.PROOF)
    if parsed.kind is Kind.HELLO:
        reply = answer_hello(connection, tokens, keyring, now, frames[0])
        return Answered(reply, parsed.fields[: limits.TOKEN_ID_BYTES])
    return answer_proof(
        connection,
        tokens,
        keyring,
        now,
        own_card,
        frames[0],
        loopback=loopback,
        on_replaced=on_replaced,
    )


def answer_hello(
    connection: sqlite3.Connection, tokens: Tokens, keyring: Keyring, now: Now, data: bytes
) -> bytes:
    """The reply to a hello, the same one each time; raises a `Refusal`."""
    hello = parse_hello(data, Kind.HELLO)
    joined = JOINED.get(connection, hello.token_id)
    if joined is not None:
        if joined.hello != hashlib.sha256(data).digest():
            tokens.report(EventKind.REUSED, hello.token_id, hello.identity, hello.name)
            raise refusal()
        _check_repeatable(joined, now)
        return joined.reply
    offer = tokens.find(hello.token_id, now, hello.identity)
    if hello.identity == keyring.identity.public:
        # The joiner here finds it out by the reply's identity, and says so on its screen.
        tokens.report(EventKind.OWN, hello.token_id, hello.identity, hello.name)
    check_unused(connection, hello.pair)
    key = hello.identity + hello.nonce
    known = offer.exchanges.get(key)
    if known is not None and known.hello.data == data and is_own(known.reply, keyring):
        return known.reply.data
    salt = tokens.draw(SALT_BYTES)
    reply = make_hello(
        Kind.REPLY,
        keyring.identity,
        named_token=hello.token_id,
        nonce=tokens.draw(limits.NONCE_BYTES),
        sealing=keyring.sealing.public,
        pair=keyring.pair_key(salt).public,
        name=_own_name(connection),
    )
    offer.remember(key, Exchange(hello, parse_hello(reply, Kind.REPLY), salt))
    return reply


def answer_proof(
    connection: sqlite3.Connection,
    tokens: Tokens,
    keyring: Keyring,
    now: Now,
    own_card: bytes,
    data: bytes,
    *,
    loopback: bool,
    on_replaced: OnReplaced = leave_as_it_was,
) -> Answered:
    """The result for a proof, with the peer that it made; raises a `Refusal`.

    The same joiner with the same proof gets the same result for 24 hours, while it is a peer.
    """
    proof = frame.parse(data, Kind.PROOF)
    named = proof.fields[: limits.TOKEN_ID_BYTES]
    joined = JOINED.get(connection, named)
    if joined is not None:
        return Answered(_repeat(connection, tokens, keyring, now, joined, proof), named)
    offer = tokens.find(named, now, proof.signer)
    nonce = proof.fields[limits.TOKEN_ID_BYTES :][: limits.NONCE_BYTES]
    exchange = offer.exchanges.get(proof.signer + nonce)
    try:
        if exchange is None:
            raise refusal()
        card = read_card(data, Kind.PROOF, offer.token, exchange.hello, exchange.reply, keyring)
        check_unused(connection, exchange.hello.pair)
    except Refusal as error:
        tokens.count_bad_proof(offer, proof.signer)
        raise refusal() from error
    if proof.signer == keyring.identity.public:
        raise Malformed("A machine does not pair with itself.")
    hello, reply = exchange.hello, exchange.reply
    peer = add_peer(
        connection,
        now,
        card,
        hello.pair,
        exchange.salt,
        tokens.draw(limits.STREAM_BYTES),
        loopback=loopback,
        on_replaced=on_replaced,
    )
    result = make_proof(Kind.RESULT, keyring.identity, offer.token, hello, reply, own_card=own_card)
    digest = hashlib.sha256(hello.data).digest()
    connection.execute("DELETE FROM joined WHERE age_ms <= ?", (now.age_ms - REPEAT_MS,))
    JOINED.add(connection, Joined(named, digest, reply.data, _name_of(proof), result, now.age_ms))
    tokens.forget(proof.signer, but=offer)
    return Answered(result, named, peer)


def _repeat(
    connection: sqlite3.Connection,
    tokens: Tokens,
    keyring: Keyring,
    now: Now,
    joined: Joined,
    proof: frame.Frame,
) -> bytes:
    try:
        proof.verify()
    except BadSignature:
        raise refusal() from None
    if joined.proof != _name_of(proof):
        tokens.report(EventKind.REUSED, joined.token_id, proof.signer)
        raise refusal()
    _check_repeatable(joined, now)
    own = parse_hello(joined.reply, Kind.REPLY).pair
    peers = PEER.find(connection, "WHERE state = 'paired' AND identity = ?", (proof.signer,))
    # A pairing that was replaced or ended since must not come back at the joiner alone.
    if all(keyring.pair_key(peer.salt).public != own for peer in peers):
        raise refusal()
    return joined.result


def _check_repeatable(joined: Joined, now: Now) -> None:
    if now.age_ms - joined.age_ms >= REPEAT_MS:
        raise refusal()


def _name_of(proof: frame.Frame) -> bytes:
    # Without the sealed card and so without the signature, which are new bytes at each making: a
    # joiner that was led astray after its proof comes back with the same proof in other bytes.
    return hashlib.sha256(proof.signer + proof.fields).digest()


def is_own(hello: Hello, keyring: Keyring) -> bool:
    """Whether the hello or reply was made with the keys that this machine has now."""
    own = keyring.identity.public, keyring.sealing.public
    return (hello.identity, hello.sealing) == own


def read_card(
    data: bytes, kind: Kind, token: bytes, hello: Hello, reply: Hello, keyring: Keyring
) -> bytes:
    """The card frame in a proof or result that fits; raises a `Refusal` for any other."""
    try:
        open_proof(data, kind, token, hello, reply, sealing_key=keyring.sealing)
        return keyring.sealing.open(frame.parse(data, kind).tail)
    except CannotOpen as error:
        raise refusal() from error


def check_unused(connection: sqlite3.Connection, pair_key: bytes) -> None:
    """Raise a `Refusal` for the pair key of a peer that is or was: nobody may pass for it."""
    if PEER.find(connection, "WHERE pair_key = ?", (pair_key,)):
        raise refusal()


def add_peer(
    connection: sqlite3.Connection,
    now: Now,
    card_frame: bytes,
    pair_key: bytes,
    salt: bytes,
    stream: bytes,
    *,
    loopback: bool,
    on_replaced: OnReplaced,
) -> Peer:
    """Store the peer of a checked card.

    A pairing with the same identity is over then: its row becomes `left`, and the new one has its
    local name. `on_replaced` is told of the old row.
    """
    card = parse_card(card_frame)
    name = card.name
    for old in PEER.find(connection, "WHERE state = 'paired' AND identity = ?", (card.identity,)):
        name, old.state = old.name, "left"
        PEER.save(connection, old)
        on_replaced(connection, old)
    name = _free_name(connection, name)
    peer = Peer(
        id=None,
        salt=salt,
        name=name,
        name_key=name_key(name),
        state="paired",
        identity=card.identity,
        sealing=card.sealing,
        pair_key=pair_key,
        card=card_frame,
        card_sequence=card.sequence,
        loopback=loopback,
        paired_ms=now.wall_ms,
        stream=stream,
        contact_ms=now.wall_ms,
    )
    peer.id = PEER.add(connection, peer)
    return peer


def fingerprint(identity: bytes) -> str:
    """The part of an identity that two persons compare, the same on both screens."""
    text = keys.key_text(identity)[:_FINGERPRINT_CHARACTERS]
    at = range(0, _FINGERPRINT_CHARACTERS, _FINGERPRINT_GROUP)
    return "-".join(text[start : start + _FINGERPRINT_GROUP] for start in at)


def _own_name(connection: sqlite3.Connection) -> str:
    machine = MACHINE.get(connection, 1)
    if machine is None:
        raise LookupError("the database has no machine")
    return machine.name


def _free_name(connection: sqlite3.Connection, wanted: str) -> str:
    rows = connection.execute("SELECT name_key FROM peer WHERE state = 'paired'")
    taken = {name_key(_own_name(connection)), *(key for (key,) in rows)}
    name = wanted
    for number in itertools.count(2):
        if name_key(name) not in taken:
            break
        suffix = f"-{number}"
        room = limits.NAME_BYTES_MAX - len(suffix)
        name = wanted.encode()[:room].decode(errors="ignore").rstrip() + suffix
    return name
