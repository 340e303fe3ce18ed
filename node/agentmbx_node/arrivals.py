"""The other end of the direct hop: what a peer deposits is stored, then answered with `stored`."""

import sqlite3
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import structlog

from agentmbx_node import inbox
from agentmbx_node.clock import Clock
from agentmbx_node.inbox import Fate, Receipt
from agentmbx_node.keyring import Keyring
from agentmbx_node.store.database import Database, StoreFailed, Work
from agentmbx_node.store.rows import PEER, Peer
from agentmbx_protocol import bodies, custody, limits
from agentmbx_protocol.custody import StoredFact
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.errors import Malformed, NoSuchQueue, Refusal, RelayFull, Unavailable

T = TypeVar("T")

log = structlog.get_logger("agentmbx.node")


class Submits(Protocol):
    """A courier, which may begin a round in the commit of a work that gives it something."""

    async def submit(self, work: Work[T]) -> T:
        """What `work` returns, durable."""
        ...


class Arrivals:
    """Takes envelopes from either way; `arrived` is told whose they were and if mail came.

    `courier_of` knows whose letters go to the peer that signs with a key.
    """

    def __init__(
        self,
        database: Database,
        keyring: Keyring,
        clock: Clock,
        courier_of: Callable[[bytes], Submits | None],
        arrived: Callable[[Collection[Receipt]], None],
    ) -> None:
        self._database = database
        self._keyring = keyring
        self._clock = clock
        self._courier_of = courier_of
        self._arrived = arrived

    async def take(self, parcels: Sequence[Envelope], way: str) -> Sequence[Receipt]:
        """The fate of each, durable; raises `StoreFailed`."""
        receipts, _ = await self._take(parcels, way)
        return receipts

    async def answer_deposit(self, body: bytes) -> bytes:
        """The answer to a peer's deposit: `stored` for what is on the disk, refusals for the rest.

        One by nobody known, and one whose pairing is over, get the same answer (rule 8).
        """
        parcels = _parse(body)
        try:
            receipts, peer = await self._take(parcels, "direct")
        except StoreFailed as error:
            log.error("direct_deposit_failed", reason=str(error))
            raise (RelayFull if error.is_full else Unavailable)(retry_after_s=60) from error
        facts = [
            StoredFact(parcel.digest, parcel.length)
            for parcel, receipt in zip(parcels, receipts, strict=True)
            if receipt.fate is Fate.STORED
        ]
        refused = [
            bodies.Refused(position, _refusal(receipt))
            for position, receipt in enumerate(receipts)
            if receipt.fate is not Fate.STORED
        ]
        if not facts:
            raise refused[0].refusal
        if peer is None:
            raise NoSuchQueue
        statement = custody.make_stored(self._keyring.pair_key(peer.salt), facts)
        return bodies.make_deposit_answer(statement, refused)

    async def _take(
        self, parcels: Sequence[Envelope], way: str
    ) -> tuple[Sequence[Receipt], Peer | None]:
        """The fates, and the peer that the first envelope came from."""

        def work(connection: sqlite3.Connection) -> tuple[list[Receipt], Peer | None]:
            receipts = inbox.receive(connection, self._keyring, parcels, self._clock.now(), way)
            return receipts, PEER.get(connection, receipts[0].peer) if receipts else None

        # What came by a relay is confirmed by a state letter, which may leave with this commit.
        courier = self._courier_of(parcels[0].signer) if way == "relay" else None
        receipts, peer = await (courier.submit(work) if courier else self._database.write(work))
        self._arrived(receipts)
        return receipts, peer


def _parse(body: bytes) -> list[Envelope]:
    frames = bodies.split_frames(body, limits.DEPOSIT_ENVELOPES_MAX)
    parcels = [parse_envelope(data) for data in frames]
    if not parcels:
        raise Malformed("A deposit holds at least one envelope.")
    if any(parcel.signer != parcels[0].signer for parcel in parcels):
        raise Malformed("A deposit is by one signer.")
    return parcels


def _refusal(receipt: Receipt) -> Refusal:
    if receipt.fate is Fate.UNKNOWN:
        return NoSuchQueue("No machine here takes mail from this sender.")
    return Malformed("The envelope was not taken; the state letter says why.")
