"""Stand-ins for what the relay stands on: a store in memory, with a disk that fails on demand."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self

import msgspec

from agentmbx_protocol import limits
from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.errors import BadSignature, Refusal
from agentmbx_protocol.frame import Frame
from agentmbx_protocol.keys import SigningKey
from agentmbx_protocol.queue_commands import senders_digest
from agentmbx_relay.clock import RelayClock
from agentmbx_relay.group_commit import GroupCommit
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.quota import Quota
from agentmbx_relay.relay import Policy, Relay
from agentmbx_relay.signatures import Signatures
from agentmbx_relay.store import (
    Deposit,
    Invite,
    Queue,
    Sender,
    Store,
    StoreBroken,
    StoreError,
    StoreFull,
    Swept,
    Work,
)

RELAY: Final = SigningKey(b"R" * 32)
START_MS: Final = 1_700_000_000_000
DAY_MS: Final = 24 * 3600 * 1000
PLENTY: Final = 2**40
_ROW_BYTES: Final = 4096


class Row(msgspec.Struct, frozen=True):
    """An envelope that is held, or its tombstone when there is no `data`."""

    fact: HeldFact
    queue: bytes
    sender: bytes
    data: bytes | None

    @property
    def charge(self) -> int:
        return limits.TOMBSTONE_BYTES if self.data is None else self.fact.length


class Image(msgspec.Struct):
    """All that a store holds; each transaction works on a copy. Rows are in order of acceptance."""

    clock: tuple[int, int] = (START_MS, START_MS)
    queues: dict[bytes, Queue] = {}
    rows: dict[bytes, Row] = {}
    invites: dict[bytes, Invite] = {}
    vouchers: list[tuple[bytes, int]] = []
    url: str = ""
    last_id: int = 0

    def copy(self) -> Self:
        queues = {
            key: msgspec.structs.replace(
                queue,
                senders={
                    pair: msgspec.structs.replace(sender) for pair, sender in queue.senders.items()
                },
            )
            for key, queue in self.queues.items()
        }
        return msgspec.structs.replace(
            self,
            queues=queues,
            rows=dict(self.rows),
            invites=dict(self.invites),
            vouchers=list(self.vouchers),
        )

    @property
    def used(self) -> int:
        return sum(queue.used for queue in self.queues.values())

    @property
    def live_count(self) -> int:
        return sum(not queue.retired for queue in self.queues.values())


class MemoryTransaction:
    """A `store.Transaction` on dictionaries."""

    def __init__(self, image: Image, free_bytes: int) -> None:
        self._image = image
        self._free_bytes = free_bytes
        self.written_bytes = 0
        self.held_count = 0

    @property
    def used(self) -> int:
        return self._image.used

    @property
    def free_bytes(self) -> int:
        return self._free_bytes - self.written_bytes

    @property
    def queue_count(self) -> int:
        return self._image.live_count

    def queue(self, key: bytes) -> Queue | None:
        return self._image.queues.get(key)

    def add_queue(self, key: bytes, ends_ms: int) -> Queue:
        if key in self._image.queues:
            raise KeyError("the key of a new queue is new")
        queue = Queue(self._next_id(), key, 0, b"", senders_digest(()), ends_ms, 0, {})
        self._image.queues[key] = queue
        self._wrote()
        return queue

    def command(self, queue: Queue, counter: int, instance: bytes, *, lazily: bool = False) -> None:
        queue.counter, queue.instance = counter, instance
        if not lazily:
            self._wrote()

    def list_senders(self, queue: Queue, senders: Sequence[bytes]) -> None:
        for sender in queue.senders.values():
            sender.listed = sender.key in senders
        for key in senders:
            if key not in queue.senders:
                queue.senders[key] = Sender(self._next_id(), key, listed=True)
        queue.senders_digest = senders_digest(sorted(senders))
        self._forget_unused(queue)
        self._wrote()

    def retire(self, queue: Queue, now_ms: int) -> None:
        self.list_senders(queue, ())
        queue.retired_ms = now_ms

    def vouched(self, key: bytes) -> Sequence[int]:
        return [ends_ms for voucher, ends_ms in self._image.vouchers if voucher == key]

    def vouch(self, key: bytes, ends_ms: int) -> None:
        self._image.vouchers.append((key, ends_ms))
        self._wrote()

    def invite(self, key: bytes) -> Invite | None:
        return self._image.invites.get(key)

    def put_invite(self, invite: Invite) -> None:
        self._image.invites[invite.key] = invite
        if not invite.uses_left:
            del self._image.invites[invite.key]
        self._wrote()

    def find(self, digest: bytes) -> HeldFact | None:
        row = self._image.rows.get(digest)
        return row.fact if row else None

    def hold(
        self, queue: Queue, sender: Sender, deposit: Deposit, now_ms: int
    ) -> tuple[HeldFact, bool]:
        known = self.find(deposit.digest)
        if known is not None and known.until_ms > now_ms:
            return known, False
        self._remove([deposit.digest] if known else [])
        fact = HeldFact(deposit.digest, deposit.length, now_ms, now_ms + deposit.ttl_s * 1000)
        self._put(Row(fact, queue.key, sender.key, deposit.data))
        self.held_count += 1
        self._wrote(deposit.length)
        return fact, True

    def ack(self, queue: Queue, digests: Sequence[bytes]) -> int:
        count = 0
        for digest in digests:
            row = self._image.rows.get(digest)
            if row is not None and row.queue == queue.key and row.data is not None:
                self._charge(row, -1)
                self._put(Row(row.fact, row.queue, row.sender, None))
                self._wrote()
                count += 1
        return count

    def sweep(self, now_ms: int, rows_max: int) -> Swept:
        image = self._image
        for queue in image.queues.values():
            if 0 < queue.ends_ms <= now_ms and not queue.retired:
                self.retire(queue, now_ms)
        past = sorted(
            (row for row in image.rows.values() if row.fact.until_ms <= now_ms),
            key=lambda row: row.fact.until_ms,
        )[:rows_max]
        self._remove([row.fact.digest for row in past])
        orphans = [
            row.fact.digest
            for queue in image.queues.values()
            for row in image.rows.values()
            if queue.retired and row.queue == queue.key and row.data is not None
        ][: rows_max - len(past)]
        self._remove(orphans)
        for queue in list(image.queues.values()):
            kept_ms = DAY_MS if queue.ends_ms else 90 * DAY_MS
            if queue.retired and not queue.used and queue.retired_ms + kept_ms <= now_ms:
                del image.queues[queue.key]
                image.vouchers = [each for each in image.vouchers if each[0] != queue.key]
                self._wrote()
        self._drop_over(now_ms)
        expired = sum(row.data is not None for row in past)
        return Swept(
            expired,
            len(orphans),
            len(past) - expired,
            more=len(past) + len(orphans) >= rows_max,
        )

    def save_url(self, url: str) -> None:
        self._image.url = url
        self._wrote()

    def save_clock(self, clock_ms: int, wall_ms: int) -> None:
        self._image.clock = clock_ms, wall_ms
        self._wrote()

    def _wrote(self, length: int = 0) -> None:
        self.written_bytes += _ROW_BYTES + length

    def _next_id(self) -> int:
        self._image.last_id += 1
        return self._image.last_id

    def _put(self, row: Row) -> None:
        self._image.rows[row.fact.digest] = row
        self._charge(row, 1)

    def _remove(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            row = self._image.rows.pop(digest)
            self._charge(row, -1)
            self._forget_unused(self._image.queues[row.queue])
            self._wrote()

    def _charge(self, row: Row, sign: int) -> None:
        queue = self._image.queues[row.queue]
        queue.senders[row.sender].used += sign * row.charge
        queue.used += sign * row.charge

    def _forget_unused(self, queue: Queue) -> None:
        for sender in list(queue.senders.values()):
            if not sender.listed and not sender.used:
                del queue.senders[sender.key]

    def _drop_over(self, now_ms: int) -> None:
        image = self._image
        invites = {key: each for key, each in image.invites.items() if each.ends_ms > now_ms}
        vouchers = [each for each in image.vouchers if not 0 < each[1] <= now_ms]
        if len(invites) < len(image.invites) or len(vouchers) < len(image.vouchers):
            image.invites, image.vouchers = invites, vouchers
            self._wrote()


class MemoryDisk(msgspec.Struct):
    """What is durable, and what goes wrong: `failures` has one for each commit, or None.

    While `full`, a commit that holds something new fails; others go through, as on a reserve.
    """

    image: Image
    failures: deque[StoreError | None] = msgspec.field(default_factory=deque)
    full: bool = False
    free_bytes: int = PLENTY


class MemoryStore:
    """A `store.Store` on dictionaries; another on the same disk loses only what was lazy.

    `commit_counts` has the number of works of each commit that was asked for. While `gate` is
    closed a commit waits in its middle: its works have run, and nothing is durable; `under_way` is
    set when one is.
    """

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = disk or MemoryDisk(Image())
        self.gate = asyncio.Event()
        self.gate.set()
        self.under_way = asyncio.Event()
        self.commit_counts: list[int] = []
        self._image = self.disk.image.copy()
        self._broken: StoreBroken | None = None

    async def commit(
        self,
        works: Sequence[Work[object]],
        expected: Sequence[bytes] = (),  # noqa: ARG002 - there is nothing to look up beforehand
    ) -> Sequence[object | Refusal]:
        self.commit_counts.append(len(works))
        if self._broken:
            raise self._broken
        draft = self._image.copy()
        transaction = MemoryTransaction(draft, self.disk.free_bytes)
        outcomes = [_outcome(work, transaction) for work in works]
        self.under_way.set()
        await self.gate.wait()
        self.under_way.clear()
        self._meet_failure(transaction)
        self._image = draft
        if transaction.written_bytes:
            self.disk.image = draft
        return outcomes

    def sender(self, queue: bytes, signer: bytes) -> tuple[Queue, Sender] | None:
        known = self._image.queues.get(queue)
        sender = known.senders.get(signer) if known else None
        return (known, sender) if known and sender and sender.listed else None

    async def waiting(self, queue: Queue, bytes_max: int) -> list[bytes]:
        known = self._image.queues.get(queue.key)
        if known is None or known.retired:
            return []
        envelopes: list[bytes] = []
        for row in self._image.rows.values():
            if row.queue == queue.key and row.data is not None:
                bytes_max -= row.fact.length + 4
                if envelopes and (bytes_max < 0 or len(envelopes) == limits.COLLECT_ACKS_MAX):
                    break
                envelopes.append(row.data)
        return envelopes

    async def check(self) -> None:
        await self.commit([lambda transaction: transaction.save_url(self._image.url)])

    def saved_clock(self) -> tuple[int, int]:
        clock_ms, wall_ms = self._image.clock
        newest_ms = max((row.fact.accepted_ms for row in self._image.rows.values()), default=0)
        lead_ms = max(newest_ms - clock_ms, 0)
        return clock_ms + lead_ms, wall_ms + lead_ms

    async def tidy(self) -> None:
        if self._broken:
            raise self._broken

    def totals(self) -> Mapping[str, int]:
        held = sum(row.data is not None for row in self._image.rows.values())
        return {
            "queues": self._image.live_count,
            "envelopes": held,
            "tombstones": len(self._image.rows) - held,
            "bytes": self._image.used,
            "free_bytes": self.disk.free_bytes,
        }

    async def close(self) -> None:
        self.disk.image = self._image

    def _meet_failure(self, transaction: MemoryTransaction) -> None:
        failure = self.disk.failures.popleft() if self.disk.failures else None
        if failure is None and self.disk.full and transaction.held_count:
            failure = StoreFull("the disk is full")
        if isinstance(failure, StoreBroken):
            self._broken = failure
        if failure is not None:
            raise failure


def _outcome(work: Work[object], transaction: MemoryTransaction) -> object | Refusal:
    try:
        return work(transaction)
    except Refusal as refusal:
        return refusal


@asynccontextmanager
async def committing(store: Store) -> AsyncIterator[GroupCommit]:
    """A `GroupCommit` at work on the store, until the block is left."""
    commits = GroupCommit(store, Metrics("test"))
    running = asyncio.create_task(commits.run())
    try:
        yield commits
    finally:
        commits.stop()
        if isinstance(store, MemoryStore):
            store.gate.set()
        async with asyncio.timeout(10):
            await running


class Ticks:
    """A clock that goes only when it is told to."""

    def __init__(self, ms: int = 0) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


class CountingKey(SigningKey):
    """A key that counts what it signs."""

    def __init__(self, seed: bytes = RELAY.seed) -> None:
        super().__init__(seed)
        self.count = 0

    def sign(self, message: bytes) -> bytes:
        self.count += 1
        return super().sign(message)


class CountingSignatures(Signatures):
    """Checks and makes signatures without a process of its own, and counts the checks."""

    def __init__(self, key: SigningKey = RELAY) -> None:
        super().__init__(key)
        self.failing = True
        self.count = 0

    def verify(
        self, frames: Sequence[Frame], *, alone: bool
    ) -> asyncio.Future[list[BadSignature | None]]:
        self.count += len(frames)
        return super().verify(frames, alone=alone)


def relay_on(
    store: Store,
    commits: GroupCommit,
    *,
    key: SigningKey = RELAY,
    clock: RelayClock | None = None,
    policy: Policy | None = None,
    signatures: Signatures | None = None,
) -> Relay:
    """A relay on the store; open, and with plenty of room, unless the policy says else."""
    return Relay(
        key,
        store,
        commits,
        signatures or CountingSignatures(key),
        clock=clock or RelayClock(START_MS, 0, now_wall_ms=0, ticks_ms=Ticks()),
        policy=policy or Policy("test", True, 1000, Quota(PLENTY, PLENTY, 0)),  # noqa: FBT003
        metrics=Metrics("test"),
    )


async def settled() -> None:
    """Let everything go on that can."""
    for _ in range(50):
        await asyncio.sleep(0)
