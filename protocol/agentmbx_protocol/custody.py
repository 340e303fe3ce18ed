"""Custody: signed statements that exactly these envelope bytes are held, or stored."""

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from agentmbx_protocol import frame, limits
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.errors import ProtocolError
from agentmbx_protocol.keys import SigningKey

_HELD: Final = struct.Struct(">32sIQQ")
_STORED: Final = struct.Struct(">32sI")


class NotBelieved(ProtocolError):
    """A statement about custody that proves nothing; the letter goes on as if none had come."""


class HeldFact(msgspec.Struct, frozen=True, gc=False):
    """One envelope that a relay holds, times in milliseconds by that relay's own clock."""

    digest: bytes
    length: int
    accepted_ms: int
    until_ms: int


class Held(msgspec.Struct, frozen=True):
    """A relay's statement that it has durably stored these envelopes of one queue."""

    relay: bytes
    queue: bytes
    facts: tuple[HeldFact, ...]


class StoredFact(msgspec.Struct, frozen=True, gc=False):
    """One envelope whose letter is in the receiving machine's store."""

    digest: bytes
    length: int


class Stored(msgspec.Struct, frozen=True):
    """The receiving machine's statement that it has these letters."""

    signer: bytes
    facts: tuple[StoredFact, ...]


def prepare_held(relay: bytes, queue: bytes, facts: Iterable[HeldFact]) -> frame.Unsigned:
    """A `held` by the key `relay` for 1 to 64 facts of one queue (SPEC section 4.2)."""
    tail = b"".join([_HELD.pack(f.digest, f.length, f.accepted_ms, f.until_ms) for f in facts])
    return frame.prepare(frame.Kind.HELD, relay, queue, tail)


def make_held(relay_key: SigningKey, queue: bytes, facts: Iterable[HeldFact]) -> bytes:
    """The same, signed."""
    unsigned = prepare_held(relay_key.public, queue, facts)
    return unsigned.data + relay_key.sign(unsigned.message)


def parse_held(data: bytes) -> Held:
    """The `held` that `data` is, its signature checked; raises a `Refusal`."""
    parsed = frame.parse(data, frame.Kind.HELD)
    parsed.verify()
    facts = tuple(HeldFact(*values) for values in _HELD.iter_unpack(parsed.tail))
    return Held(parsed.signer, parsed.fields, facts)


def make_stored(pair_key: SigningKey, facts: Iterable[StoredFact]) -> bytes:
    """A signed `stored` for 1 to 64 facts (SPEC section 4.3)."""
    tail = b"".join(_STORED.pack(f.digest, f.length) for f in facts)
    return frame.sign(frame.Kind.STORED, pair_key, b"", tail)


def parse_stored(data: bytes) -> Stored:
    """The `stored` that `data` is, its signature checked; raises a `Refusal`."""
    parsed = frame.parse(data, frame.Kind.STORED)
    parsed.verify()
    facts = tuple(StoredFact(*values) for values in _STORED.iter_unpack(parsed.tail))
    return Stored(parsed.signer, facts)


def believe_held(data: bytes, relay: bytes, sent: Sequence[Envelope]) -> dict[bytes, HeldFact]:
    """The facts by digest that a sender may believe of a relay's answer (rule 4).

    `relay` is the pinned relay key, `sent` the envelopes of the request, all for one queue.
    Raises `NotBelieved` unless the signature, the relay, the queue and every digest and length
    are right, and each envelope is held for at least the ttl that it asks for, to a time that a
    store can keep (below 2^63).
    """
    try:
        held = parse_held(data)
    except ProtocolError as error:
        raise NotBelieved("the relay's statement is not a valid signed frame") from error
    if held.relay != relay:
        raise NotBelieved("the statement is signed by another key than this relay's")
    asked = {parcel.digest: parcel for parcel in sent}
    believed: dict[bytes, HeldFact] = {}
    for fact in held.facts:
        parcel = asked.get(fact.digest)
        if parcel is None or parcel.queue != held.queue or parcel.length != fact.length:
            raise NotBelieved("the statement is about other bytes than were sent")
        if fact.until_ms - fact.accepted_ms < parcel.ttl_s * 1000:
            raise NotBelieved("the relay holds for less time than was asked")
        if fact.until_ms > limits.TIME_MS_MAX:
            raise NotBelieved("the relay names a time that no clock reaches")
        believed[fact.digest] = fact
    return believed


def believe_stored(data: bytes, peer: bytes, sent: Sequence[Envelope]) -> frozenset[bytes]:
    """The digests of `sent` that the peer's machine has stored (rule 4).

    `peer` is the pair key that the peer uses with this machine. Raises `NotBelieved`.
    """
    try:
        stored = parse_stored(data)
    except ProtocolError as error:
        raise NotBelieved("the peer's statement is not a valid signed frame") from error
    if stored.signer != peer:
        raise NotBelieved("the statement is signed by another key than this peer's")
    asked = {(parcel.digest, parcel.length) for parcel in sent}
    if any((fact.digest, fact.length) not in asked for fact in stored.facts):
        raise NotBelieved("the statement is about other bytes than were sent")
    return frozenset(fact.digest for fact in stored.facts)
