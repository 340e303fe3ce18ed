"""Works for a store of the relay, and a shelf on which one is held to its contract."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import msgspec

from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.errors import Refusal
from agentmbx_relay.store import Deposit, Queue, Store, Swept, Transaction, Work
from engines import Engine
from fakes import START_MS

T = TypeVar("T")

QUEUE, OTHER_QUEUE, TEMPORARY, ALICE, BOB, CAROL = (
    letter * 32 for letter in b"Q,O,T,A,B,C".split(b",")
)
INSTANCE, OTHER_INSTANCE = b"i" * 16, b"j" * 16
NOW = START_MS + 1000
TTL_S = 3600
UNTIL = NOW + TTL_S * 1000
LENGTH = 1300
ALL = 4 * 1024 * 1024


class Shelf:
    """The store under test, and ways to leave it and come back."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine = engine
        self.store = store

    async def do(self, work: Work[T]) -> T:
        """What one work returns in a commit of its own; raises its refusal."""
        (outcome,) = await self.store.commit([cast("Work[object]", work)])
        if isinstance(outcome, Refusal):
            raise outcome
        return cast("T", outcome)

    async def reopen(self) -> None:
        await self.store.close()
        self.store = await self.engine.open()

    async def crash(self) -> None:
        """Go on with what a killed process leaves."""
        copied = self.engine.copied()
        await self.engine.close()
        self.engine = copied
        self.store = await copied.open()

    async def queue(self, key: bytes = QUEUE) -> Queue:
        found = await self.do(lambda transaction: transaction.queue(key))
        assert found is not None
        return found

    async def waiting(self, bytes_max: int = ALL, key: bytes = QUEUE) -> list[bytes]:
        return await self.store.waiting(await self.queue(key), bytes_max)

    async def used(self, sender: bytes, key: bytes = QUEUE) -> int:
        return (await self.queue(key)).senders[sender].used

    def totals(self) -> dict[str, int]:
        return {name: value for name, value in self.store.totals().items() if name != "free_bytes"}

    async def picture(self) -> object:
        """All that can be seen of the store from outside."""
        return (
            [await self.do(show(key)) for key in QUEUES],
            [await self.waiting(key=key) for key in QUEUES if await self.do(knows(key))],
            [await self.do(find(parcel(number))) for number in range(10)],
            await self.do(lambda t: (t.invite(ALICE), t.invite(BOB))),
            await self.do(lambda t: (sorted(t.vouched(QUEUE)), sorted(t.vouched(BOB)))),
            await self.do(lambda t: (t.used, t.queue_count)),
            self.totals(),
            self.store.saved_clock(),
        )


QUEUES = (QUEUE, OTHER_QUEUE, TEMPORARY)


class Shown(msgspec.Struct, frozen=True):
    """What a queue shows; of its senders those that are listed or charged: whether, how much."""

    counter: int
    instance: bytes
    senders_digest: bytes
    ends_ms: int
    retired_ms: int
    used: int
    listed_count: int
    senders: Mapping[bytes, tuple[bool, int]]


def shown(queue: Queue | None) -> Shown | None:
    if queue is None:
        return None
    senders = {
        sender.key: (sender.listed, sender.used)
        for sender in queue.senders.values()
        if sender.listed or sender.used
    }
    return Shown(
        queue.counter,
        queue.instance,
        queue.senders_digest,
        queue.ends_ms,
        queue.retired_ms,
        queue.used,
        queue.listed_count,
        senders,
    )


def show(key: bytes) -> Work[object]:
    return lambda transaction: shown(transaction.queue(key))


def find(deposit: Deposit) -> Work[HeldFact | None]:
    return lambda transaction: transaction.find(deposit.digest)


def vouch(key: bytes, ends_ms: int) -> Work[None]:
    return lambda transaction: transaction.vouch(key, ends_ms)


def knows(key: bytes) -> Work[bool]:
    return lambda transaction: transaction.queue(key) is not None


def parcel(number: int, length: int = LENGTH, ttl_s: int = TTL_S) -> Deposit:
    data = f"envelope {number} ".encode().ljust(length, b".")
    return Deposit(hashlib.sha256(data).digest(), length, ttl_s, data)


def fact(number: int, now_ms: int = NOW, ttl_s: int = TTL_S) -> HeldFact:
    """What is held of `parcel(number)`."""
    return HeldFact(parcel(number).digest, LENGTH, now_ms, now_ms + ttl_s * 1000)


def add_queue(
    key: bytes = QUEUE, senders: Sequence[bytes] = (ALICE, BOB), ends_ms: int = 0
) -> Work[None]:
    def work(transaction: Transaction) -> None:
        queue = transaction.add_queue(key, ends_ms)
        transaction.command(queue, 1, INSTANCE)
        transaction.list_senders(queue, senders)

    return work


def hold(
    *parcels: Deposit, sender: bytes = ALICE, key: bytes = QUEUE, now_ms: int = NOW
) -> Work[list[tuple[HeldFact, bool]]]:
    def work(transaction: Transaction) -> list[tuple[HeldFact, bool]]:
        queue = known(transaction, key)
        return [transaction.hold(queue, queue.senders[sender], each, now_ms) for each in parcels]

    return work


def ack(*parcels: Deposit, key: bytes = QUEUE) -> Work[int]:
    return lambda transaction: transaction.ack(
        known(transaction, key), [each.digest for each in parcels]
    )


def list_senders(*senders: bytes, key: bytes = QUEUE) -> Work[None]:
    return lambda transaction: transaction.list_senders(known(transaction, key), senders)


def command(counter: int, *, instance: bytes = INSTANCE, lazily: bool = False) -> Work[None]:
    return lambda transaction: transaction.command(
        known(transaction, QUEUE), counter, instance, lazily=lazily
    )


def retire(key: bytes = QUEUE, now_ms: int = NOW) -> Work[None]:
    return lambda transaction: transaction.retire(known(transaction, key), now_ms)


def sweep(now_ms: int, rows_max: int = 1000) -> Work[Swept]:
    return lambda transaction: transaction.sweep(now_ms, rows_max)


def known(transaction: Transaction, key: bytes) -> Queue:
    queue = transaction.queue(key)
    assert queue is not None
    return queue


def refuse(refusal: Refusal) -> Work[None]:
    def work(_transaction: Transaction) -> None:
        raise refusal

    return work
