"""Works for a store of the relay as plain values that Hypothesis draws, shrinks and shows."""

import hashlib
import sqlite3
from typing import Final, Protocol

import msgspec
from hypothesis import strategies as st

from agentmbx_protocol import limits
from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.errors import QueueFull
from agentmbx_relay.store import Deposit, Invite, Swept, Transaction
from engines import Fault
from store_works import shown

QUEUES: Final = tuple(bytes([letter]) * 32 for letter in b"PQR")
SENDERS: Final = tuple(bytes([letter]) * 32 for letter in b"abc")
INSTANCES: Final = (b"i" * 16, b"j" * 16)
TTLS_S: Final = (1, 60, 3600, 86_400, 172_800, 604_800)

FAULTS: Final = (
    Fault("COMMIT", sqlite3.SQLITE_IOERR_FSYNC, takes_effect=True),
    *(
        Fault(statement, code)
        for statement, codes in {
            "BEGIN": (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR_READ),
            "COMMIT": (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR_FSYNC),
            "INSERT INTO envelope (": (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE),
            "INSERT INTO envelope_bytes": (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE),
            "INSERT INTO": (sqlite3.SQLITE_FULL,),
            "UPDATE envelope": (sqlite3.SQLITE_FULL, sqlite3.SQLITE_CORRUPT),
            "UPDATE sender": (sqlite3.SQLITE_FULL,),
            "UPDATE": (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE),
            "DELETE": (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE),
            "WITH": (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE),
            "SELECT": (sqlite3.SQLITE_IOERR_READ,),
        }.items()
        for code in codes
    ),
)


class Step(Protocol):
    """One work of a batch."""

    def run(self, transaction: Transaction, now_ms: int, /) -> object:
        """Do it, or nothing where the rules of the relay would not let it come so far."""


class Add(msgspec.Struct, frozen=True):
    queue: bytes
    lifetime_s: int

    def run(self, transaction: Transaction, now_ms: int) -> object:
        if transaction.queue(self.queue) is not None:
            return None
        ends_ms = now_ms + self.lifetime_s * 1000 if self.lifetime_s else 0
        return shown(transaction.add_queue(self.queue, ends_ms))


class Hold(msgspec.Struct, frozen=True):
    queue: bytes
    sender: bytes
    numbers: tuple[int, ...]

    def run(self, transaction: Transaction, now_ms: int) -> list[tuple[HeldFact, bool]]:
        queue = transaction.queue(self.queue)
        sender = queue.senders.get(self.sender) if queue else None
        if queue is None or sender is None or not sender.listed:
            return []
        return [
            transaction.hold(queue, sender, parcel(self.queue, self.sender, number), now_ms)
            for number in self.numbers
        ]


class Ack(msgspec.Struct, frozen=True):
    queue: bytes
    of_queue: bytes
    sender: bytes
    numbers: tuple[int, ...]

    def run(self, transaction: Transaction, _now_ms: int) -> int:
        queue = transaction.queue(self.queue)
        digests = [parcel(self.of_queue, self.sender, number).digest for number in self.numbers]
        return transaction.ack(queue, digests) if queue and not queue.retired else 0


class List(msgspec.Struct, frozen=True):
    queue: bytes
    senders: frozenset[bytes]

    def run(self, transaction: Transaction, _now_ms: int) -> object:
        queue = transaction.queue(self.queue)
        if queue is not None and not queue.retired:
            transaction.list_senders(queue, sorted(self.senders))
        return shown(queue)


class Move(msgspec.Struct, frozen=True):
    """Moves the counter up, as a command does; only one that is not lazy changes the instance."""

    queue: bytes
    by: int
    instance: bytes
    lazily: bool

    def run(self, transaction: Transaction, _now_ms: int) -> object:
        queue = transaction.queue(self.queue)
        if queue is not None:
            instance = queue.instance if self.lazily else self.instance
            transaction.command(queue, queue.counter + self.by, instance, lazily=self.lazily)
        return shown(queue)


class Retire(msgspec.Struct, frozen=True):
    queue: bytes

    def run(self, transaction: Transaction, now_ms: int) -> object:
        queue = transaction.queue(self.queue)
        if queue is not None and not queue.retired:
            transaction.retire(queue, now_ms)
        return transaction.queue_count


class Sweep(msgspec.Struct, frozen=True):
    rows_max: int

    def run(self, transaction: Transaction, now_ms: int) -> Swept:
        return transaction.sweep(now_ms, self.rows_max)


class Vouch(msgspec.Struct, frozen=True):
    key: bytes
    lifetime_s: int

    def run(self, transaction: Transaction, now_ms: int) -> object:
        transaction.vouch(self.key, now_ms + self.lifetime_s * 1000 if self.lifetime_s else 0)
        return sorted(transaction.vouched(self.key))


class Put(msgspec.Struct, frozen=True):
    key: bytes
    uses_left: int
    lifetime_s: int

    def run(self, transaction: Transaction, now_ms: int) -> object:
        transaction.put_invite(Invite(self.key, self.uses_left, now_ms + self.lifetime_s * 1000))
        return transaction.invite(self.key)


class SaveClock(msgspec.Struct, frozen=True):
    def run(self, transaction: Transaction, now_ms: int) -> object:
        transaction.save_clock(now_ms, now_ms // 2)
        return transaction.used


class Refused(msgspec.Struct, frozen=True):
    def run(self, _transaction: Transaction, _now_ms: int) -> object:
        raise QueueFull


class Bug(msgspec.Struct, frozen=True):
    def run(self, transaction: Transaction, now_ms: int) -> object:
        transaction.save_clock(now_ms, 0)
        raise ZeroDivisionError


# Most of what happens is about the first queue, and most mail is from its first sender.
queues = st.sampled_from((*QUEUES, QUEUES[0], QUEUES[0]))
senders = st.sampled_from((*SENDERS, SENDERS[0]))
lifetimes = st.sampled_from((0, 60, 7200))
everybody, nobody = frozenset(SENDERS), frozenset[bytes]()
listed = st.sampled_from((everybody, everybody, everybody - {SENDERS[0]}, nobody))
numbers = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)
faults = st.sampled_from((*FAULTS, *(None,) * 2 * len(FAULTS)))

holds: st.SearchStrategy[Step] = st.builds(Hold, queues, senders, numbers)
acks: st.SearchStrategy[Step] = st.one_of(
    st.builds(lambda queue, *more: Ack(queue, queue, *more), queues, senders, numbers),
    st.builds(Ack, queues, queues, senders, numbers),
)
lists: st.SearchStrategy[Step] = st.builds(List, queues, listed)
moves: st.SearchStrategy[Step] = st.builds(
    Move, queues, st.integers(1, 2**32), st.sampled_from(INSTANCES), st.booleans()
)
steps: st.SearchStrategy[Step] = st.one_of(
    holds,
    holds,
    acks,
    acks,
    lists,
    moves,
    moves,
    st.builds(Add, queues, lifetimes),
    st.builds(Retire, st.sampled_from(QUEUES[1:])),
    st.builds(Sweep, st.integers(1, 4)),
    st.builds(Vouch, st.sampled_from(QUEUES[:2]), lifetimes),
    st.builds(Put, st.sampled_from(SENDERS[:2]), st.integers(0, 2), st.integers(0, 7200)),
    st.just(SaveClock()),
    st.just(Refused()),
)


@st.composite
def close_steps(draw: st.DrawFn) -> list[Step]:
    """A batch about the mail of one sender in one queue, so that one step meets another."""
    queue, sender = draw(queues), draw(senders)
    return draw(
        st.lists(
            st.one_of(
                st.builds(Hold, st.just(queue), st.just(sender), numbers),
                st.builds(Ack, st.just(queue), st.just(queue), st.just(sender), numbers),
                st.builds(List, st.just(queue), listed),
                st.builds(Sweep, st.integers(1, 6)),
            ),
            min_size=2,
            max_size=6,
        )
    )


def parcel(queue: bytes, sender: bytes, number: int) -> Deposit:
    name = queue + sender + bytes([number])
    length = limits.TOMBSTONE_BYTES + 300 * number
    return Deposit(hashlib.sha256(name).digest(), length, TTLS_S[number], name.ljust(length, b"."))
