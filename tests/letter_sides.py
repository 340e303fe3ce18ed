"""Machines that send letters in tests: databases in memory, clocks one can turn, and a relay.

What couriers and collectors do with the network is done here by plain calls, one step after the
other, so that a test can lose, repeat or delay any of them.
"""

import hashlib
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from typing import Final, TypeVar

import msgspec

from agentmbx_node import inbox, outbox, own_card, rounds
from agentmbx_node.clock import RESTART_MS_MAX, Now
from agentmbx_node.inbox import Fate, Receipt
from agentmbx_node.keyring import Keyring
from agentmbx_node.rounds import Round
from agentmbx_node.store import database
from agentmbx_node.store.rows import (
    LETTER,
    MACHINE,
    MAIL,
    PEER,
    QUEUE,
    LetterRow,
    Machine,
    Mail,
    Peer,
    QueueRow,
    machine_of,
)
from agentmbx_protocol import custody
from agentmbx_protocol.custody import HeldFact, StoredFact
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.errors import NoSuchQueue, QueueFull, Refusal
from agentmbx_protocol.keys import SealingKey, SigningKey
from agentmbx_protocol.letter import decode_letter

T = TypeVar("T")

START_MS: Final = 1_700_000_000_000
S: Final = 1000
HOUR: Final = 3600 * S
DAY: Final = 24 * HOUR
RELAY: Final = SigningKey(b"R" * 32)
URL: Final = "https://relay.example/"
TEXT: Final = "agentmbx/message"


class Backup(msgspec.Struct, frozen=True):
    """A copy of a machine's database."""

    data: bytes
    now: Now
    sealing: SealingKey


class Side:
    """One machine with at most one living peer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keyring = Keyring(*(derived(name, part) for part in ("identity", "sealing", "root")))
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        for number in range(1, database.SCHEMA_VERSION + 1):
            database._migrate(self.connection, number)
        MACHINE.add(self.connection, Machine(1, name, b"i" * 16, 0, b"", 0, 0))
        self.wall_ms = START_MS
        self.age_ms = 1_000_000
        self.address = f"10.0.0.{derived(name, 'address')[0] % 200 + 1}:7420"
        self._drawn = 0
        self.renew_card()

    @property
    def now(self) -> Now:
        return Now(self.wall_ms, self.age_ms)

    def close(self) -> None:
        self.connection.close()

    def write(self, work: Callable[[sqlite3.Connection], T], *, fails: bool = False) -> T:
        """What `work` returns, committed; with `fails` the commit does not happen."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            value = work(self.connection)
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("ROLLBACK" if fails else "COMMIT")
        return value

    # What the machine is

    def renew_card(self) -> None:
        self.write(lambda each: own_card.renew(each, self.keyring, self.now, [self.address]))

    def add_queue(self) -> bytes:
        """A new queue that replaces the others, as after `relay set`."""
        self._drawn += 1
        salt = derived(self.name, f"queue {self._drawn} {self.age_ms}")[:16]

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE queue SET state = 'draining' WHERE state = 'live'")
            QUEUE.add(connection, QueueRow(None, salt, URL, RELAY.public, b"i" * 16, "live"))

        self.write(work)
        self.renew_card()
        return self.keyring.queue_key(salt).public

    def change_sealing(self) -> None:
        """Get a new sealing key and forget the old one, as an import does."""
        self._drawn += 1
        self.keyring.sealing = SealingKey(derived(self.name, f"sealing {self._drawn}"))
        self.renew_card()

    @property
    def queues(self) -> list[bytes]:
        rows = QUEUE.find(self.connection, "ORDER BY id")
        return [self.keyring.queue_key(row.salt).public for row in rows]

    def back_up(self) -> Backup:
        with closing(sqlite3.connect(":memory:")) as copy:
            self.connection.backup(copy)
            return Backup(copy.serialize(), self.now, self.keyring.sealing)

    def restore(self, backup: Backup) -> None:
        """Go back to an older copy; the age goes on from there, as `Clock` has it."""
        self.connection.close()
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.deserialize(backup.data)
        passed_ms = min(max(self.wall_ms - backup.now.wall_ms, 0), RESTART_MS_MAX)
        self.age_ms = backup.now.age_ms + passed_ms
        self.keyring.sealing = backup.sealing

    # What is in its store

    @property
    def card(self) -> bytes:
        return machine_of(self.connection).card

    @property
    def card_sequence(self) -> int:
        return machine_of(self.connection).card_sequence

    @property
    def peer(self) -> Peer:
        """The newest one."""
        return PEER.find(self.connection, "ORDER BY id DESC LIMIT 1")[0]

    def change_peer(self, **changes: object) -> None:
        peer = self.peer
        for name, value in changes.items():
            setattr(peer, name, value)
        self.write(lambda each: PEER.save(each, peer))

    def letters(self) -> list[LetterRow]:
        return LETTER.find(self.connection, "ORDER BY queued_ms, number")

    def letter(self, letter_id: str) -> LetterRow:
        found = LETTER.get(self.connection, letter_id)
        assert found is not None
        return found

    def mail(self) -> list[Mail]:
        return MAIL.find(self.connection, "ORDER BY arrived_ms, number")

    def contents(self) -> list[bytes]:
        """Of all mail, in the order of its arrival."""
        return [decode_letter(mail.data).content for mail in self.mail()]

    # What it does

    def send(self, content: bytes, *, key: str | None = None) -> LetterRow:
        return self.write(
            lambda each: outbox.submit(
                each, self.peer, content_type=TEXT, content=content, now=self.now, retry_key=key
            )
        )

    def cancel(self, letter_id: str) -> bool:
        return self.write(lambda each: outbox.cancel(each, self.letter(letter_id), self.now))

    def unpair(self) -> None:
        """As the control socket does it."""

        def work(connection: sqlite3.Connection) -> None:
            peer = self.peer
            outbox.end_all(connection, peer, outbox.Move.CANCEL, self.now, "you ended the pairing")
            peer.state, peer.is_due, peer.has_news = "leaving", True, True
            peer.leave_age_ms = self.now.age_ms + 72 * HOUR
            PEER.save(connection, peer)

        self.write(work)

    def begin(self) -> Round | int | None:
        number = self.peer.id or 0
        return self.write(lambda each: rounds.begin(each, self.keyring, number, self.now))

    def begin_round(self) -> Round:
        begun = self.begin()
        assert isinstance(begun, Round)
        return begun

    def direct_done(self, begun: Round, stored: frozenset[bytes]) -> None:
        self.write(lambda each: rounds.direct_done(each, begun, stored, self.now))

    def fall_back(self, begun: Round) -> Round | None:
        return self.write(
            lambda each: rounds.fall_back(each, self.keyring, begun, "not reached", self.now)
        )

    def relay_done(
        self,
        begun: Round,
        held: Mapping[bytes, HeldFact] | None = None,
        refused: Mapping[bytes, Refusal] | None = None,
        error: str = "",
    ) -> None:
        self.write(
            lambda each: rounds.relay_done(
                each, begun, held or {}, refused or {}, error, self.now, answered=not error
            )
        )

    def receive(
        self, parcels: Sequence[Envelope], way: str, *, fails: bool = False
    ) -> list[Receipt]:
        return self.write(
            lambda each: inbox.receive(each, self.keyring, parcels, self.now, way), fails=fails
        )

    def take_direct(self, parcels: Sequence[Envelope]) -> bytes:
        """The `stored` for what a peer deposits; "" when nothing of it was taken."""
        receipts = self.receive([parse_envelope(each.frame.data) for each in parcels], "direct")
        facts = [
            StoredFact(parcel.digest, parcel.length)
            for parcel, receipt in zip(parcels, receipts, strict=True)
            if receipt.fate is Fate.STORED
        ]
        if not facts:
            return b""
        return custody.make_stored(self.keyring.pair_key(self.peer.salt), facts)


class Kept(msgspec.Struct, frozen=True):
    """An envelope at the relay, or its tombstone when there is no `data`."""

    fact: HeldFact
    data: bytes | None


class Relay:
    """Holds envelopes by queue; it can be full, lie, and forget."""

    def __init__(self) -> None:
        self.now_ms = START_MS
        self.queues: dict[bytes, dict[bytes, Kept]] = {}
        self.is_full = False
        self.lies = False
        self.states = 0

    def deposit(self, parcels: Sequence[Envelope]) -> tuple[bytes, dict[bytes, Refusal]]:
        """A signed `held`, "" for nothing, and what was refused."""
        facts: list[HeldFact] = []
        refused: dict[bytes, Refusal] = {}
        for parcel in parcels:
            queue = self.queues.get(parcel.queue)
            if queue is None:
                refused[parcel.digest] = NoSuchQueue()
            elif parcel.digest in queue:
                facts.append(queue[parcel.digest].fact)
            elif self.is_full:
                refused[parcel.digest] = QueueFull(retry_after_s=60)
            else:
                until_ms = self.now_ms + parcel.ttl_s * S
                fact = HeldFact(parcel.digest, parcel.length, self.now_ms, until_ms)
                facts.append(fact)
                if not self.lies:
                    queue[parcel.digest] = Kept(fact, parcel.frame.data)
        return (custody.make_held(RELAY, parcels[0].queue, facts) if facts else b""), refused

    def waiting(self, queue: bytes) -> list[bytes]:
        return [kept.data for kept in self.queues.get(queue, {}).values() if kept.data is not None]

    def ack(self, queue: bytes, digests: Collection[bytes]) -> None:
        held = self.queues[queue]
        for digest in digests:
            if digest in held:
                held[digest] = Kept(held[digest].fact, None)

    def pass_ms(self, ms: int) -> None:
        self.now_ms += ms
        for held in self.queues.values():
            for digest in [key for key, kept in held.items() if kept.fact.until_ms <= self.now_ms]:
                del held[digest]

    def back_up(self) -> dict[bytes, dict[bytes, Kept]]:
        return {queue: dict(held) for queue, held in self.queues.items()}

    def restore(self, backup: Mapping[bytes, Mapping[bytes, Kept]]) -> None:
        """Forget all since the backup; a newer queue comes back by its owner's proof, empty."""
        self.queues = {queue: dict(backup.get(queue, {})) for queue in self.queues}
        self.pass_ms(0)


def pair(one: Side, other: Side) -> None:
    """Write the two rows of a pairing."""
    number = len(PEER.find(one.connection, "")) + 1
    salts = [
        derived(f"{one.name} {other.name}", f"{side.name} {number}")[:16] for side in (one, other)
    ]
    keys = [
        side.keyring.pair_key(salt).public for side, salt in zip((one, other), salts, strict=True)
    ]
    for side, far, salt, key in ((one, other, salts[0], keys[1]), (other, one, salts[1], keys[0])):
        machine = machine_of(far.connection)
        row = Peer(
            id=None,
            salt=salt,
            name=far.name,
            name_key=far.name,
            state="paired",
            identity=far.keyring.identity.public,
            sealing=far.keyring.sealing.public,
            pair_key=key,
            card=machine.card,
            card_sequence=machine.card_sequence,
            loopback=False,
            paired_ms=side.wall_ms,
            stream=derived(side.name, f"stream {number}")[:16],
        )
        side.write(lambda each, row=row: PEER.add(each, row))  # type: ignore[misc]


def give_directly(begun: Round, receiver: Side) -> frozenset[bytes] | None:
    """What the receiver stores of a direct round, as the sender believes it; None: refused."""
    data = receiver.take_direct(begun.parcels)
    return custody.believe_stored(data, begun.peer_key, begun.parcels) if data else None


def give_to_relay(begun: Round, relay: Relay) -> tuple[dict[bytes, HeldFact], dict[bytes, Refusal]]:
    """What the relay holds and refuses of a round, as the sender believes it."""
    assert begun.route is not None
    data, refused = relay.deposit(begun.parcels)
    held = custody.believe_held(data, begun.route.relay, begun.parcels) if data else {}
    return held, refused


def collect(receiver: Side, relay: Relay) -> list[Receipt]:
    """Take and ack all that waits at the relay."""
    receipts: list[Receipt] = []
    for queue in receiver.queues:
        parcels = [parse_envelope(data) for data in relay.waiting(queue)]
        if parcels:
            receipts += receiver.receive(parcels, "relay")
            relay.ack(queue, [parcel.digest for parcel in parcels])
    return receipts


def with_byte_changed(parcel: Envelope) -> Envelope:
    """The envelope as a relay hands it out that has changed a byte of it."""
    data = bytearray(parcel.frame.data)
    data[200] ^= 1
    return parse_envelope(bytes(data))


def derived(name: str, part: str) -> bytes:
    return hashlib.sha256(f"{part} of {name}".encode()).digest()
