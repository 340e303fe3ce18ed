"""What a store of the relay promises; `sqlite_store` is one, the contract suite holds for all.

A store runs *work* in transactions. Work is a plain function of a `Transaction`; the rules of the
relay (`rules`, `admission`, `quota`) are such functions, so they decide inside the transaction
that writes what they decided, whatever the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.errors import Refusal

T = TypeVar("T")


class StoreError(Exception):
    """A commit did not happen: nothing of its work is in the store."""


class StoreFull(StoreError):
    """There is no room on the disk; trying again helps when there is."""


class StoreBusy(StoreError):
    """Another process kept the store locked for longer than the store waits."""


class StoreBroken(StoreError):
    """The disk failed, maybe after a part was written; the process must stop (rule 1)."""


class StoreUnfit(Exception):
    """The store cannot be opened; the text says what is wrong, what was kept and what to do."""


class Sender(msgspec.Struct, gc=False):
    """A pair key that a queue's owner lists, or once listed.

    `used` is what its envelopes and tombstones in this queue are charged, in bytes.
    """

    id: int
    key: bytes
    listed: bool
    used: int = 0


class Queue(msgspec.Struct):
    """A queue as the store holds it; only work may change it, through its transaction.

    `ends_ms` is when its lifetime is over by the relay's clock, 0 for a lasting one; `retired_ms`
    when it was retired, 0 while it lives. `used` is the sum of its senders' `used`.
    """

    id: int
    key: bytes
    counter: int
    instance: bytes
    senders_digest: bytes
    ends_ms: int
    retired_ms: int
    senders: dict[bytes, Sender]
    used: int = 0

    @property
    def retired(self) -> bool:
        """Whether it was ended, by its owner or by its lifetime."""
        return self.retired_ms != 0

    @property
    def listed_count(self) -> int:
        """How many senders its owner lists now."""
        return sum(sender.listed for sender in self.senders.values())


class Invite(msgspec.Struct, frozen=True):
    """What lets a stranger make queues: `uses_left` of them, until `ends_ms` (relay's clock)."""

    key: bytes
    uses_left: int
    ends_ms: int


class Deposit(msgspec.Struct, frozen=True, gc=False):
    """One envelope to be held, its signature checked."""

    digest: bytes
    length: int
    ttl_s: int
    data: bytes


class Transaction(Protocol):
    """The verbs of work; all of them take effect together, or none does."""

    @property
    def used(self) -> int:
        """What all queues together are charged, in bytes, with this transaction so far."""

    @property
    def free_bytes(self) -> int:
        """What the disk has free, less what this transaction is about to write."""

    @property
    def queue_count(self) -> int:
        """How many queues there are that are not retired."""

    def queue(self, key: bytes) -> Queue | None:
        """The queue of that key, retired ones too."""

    def add_queue(self, key: bytes, ends_ms: int) -> Queue:
        """A new queue with counter 0, no instance and no senders; the key must be new."""

    def command(self, queue: Queue, counter: int, instance: bytes, *, lazily: bool = False) -> None:
        """Record a command's counter and instance.

        With `lazily` alone nothing is written now: the counter is in force at once, durable with
        the next commit that writes anything, and may be lost in a crash before that.
        """

    def list_senders(self, queue: Queue, senders: Sequence[bytes]) -> None:
        """Replace the whole list; what an unlisted sender deposited stays and stays charged.

        A sender that is neither listed nor charged is forgotten, here and in `sweep`.
        """

    def retire(self, queue: Queue, now_ms: int) -> None:
        """End the queue: nobody is listed, nothing is handed out; `sweep` removes its rows."""

    def vouched(self, key: bytes) -> Sequence[int]:
        """The `ends_ms` of each queue that this queue's or invite's key vouched for, 0: lasting."""

    def vouch(self, key: bytes, ends_ms: int) -> None:
        """Record that this key vouched for a queue (which one is not kept)."""

    def invite(self, key: bytes) -> Invite | None:
        """The invite of that public key."""

    def put_invite(self, invite: Invite) -> None:
        """Add the invite or replace the one of its key; one without uses left is removed."""

    def find(self, digest: bytes) -> HeldFact | None:
        """The facts of an envelope that is held or has a tombstone."""

    def hold(
        self, queue: Queue, sender: Sender, deposit: Deposit, now_ms: int
    ) -> tuple[HeldFact, bool]:
        """Hold an envelope and charge its length; its facts, and whether it is new.

        The same one again changes nothing: the facts of an envelope or tombstone that is there
        are given as they were, unless its until time is past by `now_ms`; then it is as if it had
        never been.
        """

    def ack(self, queue: Queue, digests: Sequence[bytes]) -> int:
        """Turn those that this queue holds into tombstones; how many there were."""

    def sweep(self, now_ms: int, rows_max: int) -> "Swept":
        """Remove at most `rows_max` rows that are past their time, or of retired queues.

        Retires the queues whose lifetime is over. What a retired queue holds is dropped; its
        tombstones stay to their time. The queue itself, with what it vouched for, is forgotten
        when it has no rows and was retired 90 days ago, or one day ago if it had a lifetime.
        Invites and vouchers that are over are removed too.
        """

    def save_url(self, url: str) -> None:
        """Record the public URL, for the invites that are printed beside a running relay."""

    def save_clock(self, clock_ms: int, wall_ms: int) -> None:
        """Record the relay's clock and the wall clock at that moment."""


class Swept(msgspec.Struct, frozen=True):
    """What one sweep removed; `more` when there may be more to remove now."""

    expired: int
    dropped: int
    tombstones: int
    more: bool


Work = Callable[[Transaction], T]


@runtime_checkable
class Store(Protocol):
    """A durable store with one writer.

    Any number of tasks may read; `commit` is called by one task at a time.
    """

    async def commit(
        self, works: Sequence[Work[object]], expected: Sequence[bytes] = ()
    ) -> Sequence[object | Refusal]:
        """Run `works` in order in one transaction and make it durable before returning.

        `expected` are digests that the works will ask about; a store may look them all up at once.

        Each outcome is what its work returned, or the `Refusal` that it raised; work raises only
        before its first verb that writes. Raises `StoreFull`, `StoreBusy` or `StoreBroken`: then
        nothing of any work is in the store, and after `StoreBroken` it takes nothing any more
        (what was under way may be there when it is opened anew). Another exception of work is a
        bug: nothing is written, and it is raised.
        """

    def sender(self, queue: bytes, signer: bytes) -> tuple[Queue, Sender] | None:
        """The live queue and the sender it lists: one look-up, no matter which part is unknown."""

    async def waiting(self, queue: Queue, bytes_max: int) -> list[bytes]:
        """The envelopes that the queue holds, in the order of acceptance.

        As many as fit into `bytes_max` bytes with 4 bytes each for their length, at least one if
        any waits, and no more than one collect can ack. What is past its until time may be among
        them until it is swept.
        """

    async def check(self) -> None:
        """Raise a `StoreError` unless the store can write and sync now."""

    def saved_clock(self) -> tuple[int, int]:
        """The relay's clock and the wall clock when it was last saved, in milliseconds.

        The clock is not below the accepted time of anything that is held or has a tombstone;
        where it was saved before that, both are later by the same time.
        """

    async def tidy(self) -> None:
        """Give back what is free and take back the disk reserve, in a small step."""

    def totals(self) -> Mapping[str, int]:
        """Running totals for the metrics: queues, envelopes, tombstones, bytes, free_bytes."""

    async def close(self) -> None:
        """Write what is lazy, and let go of the files; safe to call twice."""
