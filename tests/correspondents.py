"""The two ends of a queue for tests, the demo and the benches: who sends, and who collects."""

import secrets
from collections.abc import Sequence

import aiohttp

from agentmbx_node.hops.relay import Collected, Deposited, RelayHop, parse_relay_line
from agentmbx_protocol.envelope import Envelope, make_envelope, parse_envelope
from agentmbx_protocol.keys import SealingKey, SigningKey
from agentmbx_protocol.letter import Letter, Opened, encode_letter, open_letter, seal_letter
from agentmbx_protocol.queue_commands import (
    Collect,
    QueueState,
    Register,
    Retire,
    make_admit,
    make_collect,
    make_register,
    make_retire,
    senders_digest,
)

TTL_S = 3600


class Owner:
    """A machine that owns a queue: its keys, its counter and the senders that it lists."""

    def __init__(self, relay_key: bytes, senders: Sequence[bytes] = ()) -> None:
        self.relay_key = relay_key
        self.queue, self.pair = SigningKey.generate(), SigningKey.generate()
        self.sealing = SealingKey.generate()
        self.instance = secrets.token_bytes(16)
        self.counter = 0
        self.senders = tuple(sorted(senders))

    def next_counter(self) -> int:
        """One more than the last."""
        self.counter += 1
        return self.counter

    def register_frame(self, *, takeover: int = 0, counter: int | None = None) -> bytes:
        """A `register` frame for the senders listed now."""
        command = Register(
            queue=self.queue.public,
            relay=self.relay_key,
            counter=counter or self.next_counter(),
            instance=self.instance,
            takeover=takeover,
            senders=self.senders,
        )
        return make_register(self.queue, command)

    def collect_frame(
        self,
        acks: Sequence[bytes] = (),
        *,
        wait_s: int = 0,
        bytes_max: int = 4_000_000,
        counter: int | None = None,
    ) -> bytes:
        """A `collect` frame."""
        command = Collect(
            queue=self.queue.public,
            relay=self.relay_key,
            counter=counter or self.next_counter(),
            instance=self.instance,
            senders_digest=senders_digest(self.senders),
            bytes_max=bytes_max,
            wait_s=wait_s,
            acks=tuple(acks),
        )
        return make_collect(self.queue, command)

    def retire_frame(self) -> bytes:
        """A `retire` frame."""
        command = Retire(
            queue=self.queue.public,
            relay=self.relay_key,
            counter=self.next_counter(),
            instance=self.instance,
        )
        return make_retire(self.queue, command)

    def admit_frame(self, invite: SigningKey, lifetime_s: int = 0) -> bytes:
        """An `admit` of this queue by an invite's key or by another queue's key."""
        return make_admit(invite, self.relay_key, self.queue.public, lifetime_s)

    def open(self, data: bytes) -> Opened:
        """What is in an envelope that was collected; its signature is checked."""
        parcel = parse_envelope(data)
        parcel.frame.verify()
        return open_letter(parcel, self.sealing, receiver=self.pair.public)


class Correspondent:
    """A peer that writes to one owner."""

    def __init__(self, owner: Owner, pair: SigningKey | None = None) -> None:
        self.owner = owner
        self.pair = pair or SigningKey.generate()
        self.stream = secrets.token_bytes(16)
        self.number = 0

    def write(self, content: bytes = b"hello", ttl_s: int = TTL_S) -> Envelope:
        """A new letter in an envelope for the owner's queue."""
        self.number += 1
        letter = Letter(
            stream=self.stream,
            number=self.number,
            sent_ms=1_700_000_000_000 + self.number,
            lifetime_s=259_200,
            content_type="message",
            content=content,
        )
        sealed = seal_letter(
            encode_letter(letter),
            sender=self.pair.public,
            receiver=self.owner.pair.public,
            sealing_public=self.owner.sealing.public,
        )
        return parse_envelope(make_envelope(self.pair, self.owner.queue.public, ttl_s, sealed))


class Wire:
    """The calls of an owner and its correspondents at one relay."""

    def __init__(self, session: aiohttp.ClientSession, line: str) -> None:
        parsed = parse_relay_line(line)
        if parsed.relay_key is None:
            raise ValueError("the line holds the relay's key")
        self.invite = parsed.invite
        self.hop = RelayHop(session, parsed.url, parsed.relay_key)

    async def register(self, owner: Owner, lifetime_s: int = 0) -> QueueState:
        """Make the owner's queue by the line's invite, or replace its list."""
        proof = owner.admit_frame(self.invite, lifetime_s) if self.invite else None
        return await self.hop.register(owner.register_frame(), proof)

    async def deposit(self, *envelopes: Envelope) -> Deposited:
        """Offer envelopes; what is held is believed only as rule 4 says."""
        return await self.hop.deposit(envelopes)

    async def collect(
        self, owner: Owner, acks: Sequence[bytes] = (), *, wait_s: int = 0
    ) -> Collected:
        """Ack and collect."""
        return await self.hop.collect(owner.collect_frame(acks, wait_s=wait_s), wait_s)

    async def drain(self, owner: Owner) -> list[bytes]:
        """All that waits for the owner, acked; in the order of acceptance."""
        envelopes: list[bytes] = []
        acks: list[bytes] = []
        while True:
            collected = await self.collect(owner, acks)
            if not collected.envelopes:
                return envelopes
            envelopes += collected.envelopes
            acks = [parse_envelope(data).digest for data in collected.envelopes]
