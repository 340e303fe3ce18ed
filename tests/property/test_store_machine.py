"""A state machine of the SQLite store beside the store in memory, with faults, crashes and time.

Both run the same works and must show the same. What was told of an envelope is kept apart from
both, and rows are summed up by a connection of its own, so that they cannot be wrong together.
"""

import asyncio
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, cast

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.errors import Refusal
from agentmbx_relay.store import (
    Invite,
    Queue,
    Store,
    StoreBroken,
    StoreBusy,
    StoreError,
    StoreFull,
    Transaction,
    Work,
)
from engines import Fault, MemoryEngine, SqliteEngine
from fakes import START_MS
from store_steps import (
    FAULTS,
    INSTANCES,
    QUEUES,
    SENDERS,
    Ack,
    Add,
    Bug,
    Hold,
    List,
    Move,
    Put,
    Retire,
    SaveClock,
    Step,
    Sweep,
    Vouch,
    acks,
    close_steps,
    faults,
    holds,
    lists,
    moves,
    parcel,
    steps,
)
from store_works import ALL, Shown, shown

ERRORS: Final = {sqlite3.SQLITE_FULL: StoreFull, sqlite3.SQLITE_BUSY: StoreBusy}


class Told(msgspec.Struct):
    """What was once said of an envelope, and whether its owner has acked it."""

    fact: HeldFact
    queue: bytes
    data: bytes
    acked: bool = False


class Seen(msgspec.Struct):
    """All that a store shows of itself, and of the envelopes that were asked about."""

    queues: dict[bytes, Shown | None]
    waiting: dict[bytes, list[bytes]]
    facts: dict[bytes, HeldFact | None]
    invites: list[Invite | None]
    vouched: list[list[int]]
    used: int
    queue_count: int
    totals: dict[str, int] = {}
    listed: list[bool] = []

    def lives(self, key: bytes) -> bool:
        queue = self.queues[key]
        return queue is not None and not queue.retired_ms


Held = list[tuple[HeldFact, bool]]
# What was told of an envelope of a live queue whose time is not past, what is told of it now, and
# whether it waits.
Alive = Sequence[tuple[Told, HeldFact | None, bool]]


async def see(store: Store, digests: Collection[bytes]) -> Seen:
    def look(transaction: Transaction) -> object:
        queues = {key: transaction.queue(key) for key in QUEUES}
        seen = Seen(
            {key: shown(queue) for key, queue in queues.items()},
            {},
            {digest: transaction.find(digest) for digest in digests},
            [transaction.invite(key) for key in SENDERS],
            [sorted(transaction.vouched(key)) for key in QUEUES],
            transaction.used,
            transaction.queue_count,
        )
        return seen, queues

    (outcome,) = await store.commit([look])
    seen, queues = cast("tuple[Seen, dict[bytes, Queue | None]]", outcome)
    for key, queue in queues.items():
        seen.waiting[key] = await store.waiting(queue, ALL) if queue else []
    seen.totals = {name: each for name, each in store.totals().items() if name != "free_bytes"}
    seen.listed = [store.sender(key, each) is not None for key in QUEUES for each in SENDERS]
    return seen


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.engine = SqliteEngine(Path(self.folder.name))
        self.twin_engine = MemoryEngine()
        self.store: Store = self.runner.run(self.engine.open())
        self.twin: Store = self.runner.run(self.twin_engine.open())
        self.now_ms = START_MS
        self.told: dict[bytes, Told] = {}

    def teardown(self) -> None:
        with closing(sqlite3.connect(self.engine.path)) as rows:
            assert rows.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        self.runner.run(self.engine.close())
        self.runner.close()
        self.folder.cleanup()

    # What happens

    @initialize()
    def begin(self) -> None:
        """A queue that lists two, and one with a lifetime; the rest comes from the rules."""
        batch: list[Step] = []
        for queue, lifetime_s in ((QUEUES[0], 0), (QUEUES[1], 7200)):
            batch += [Add(queue, lifetime_s), List(queue, frozenset(SENDERS[:2]))]
        self.commit(batch)

    @rule(batch=st.lists(holds, min_size=1, max_size=3), fault=faults, foresees=st.booleans())
    def deposit(self, batch: list[Step], fault: Fault | None, *, foresees: bool) -> None:
        self.commit(batch, fault, foresees=foresees)

    @rule(batch=st.lists(acks | moves, min_size=1, max_size=3), fault=faults)
    def collect(self, batch: list[Step], fault: Fault | None) -> None:
        self.commit(batch, fault)

    @rule(step=lists, fault=faults)
    def register(self, step: Step, fault: Fault | None) -> None:
        self.commit([step], fault)

    @rule(queue=st.sampled_from(QUEUES), fault=faults)
    def retire(self, queue: bytes, fault: Fault | None) -> None:
        self.commit([Retire(queue)], fault)

    @rule(rows_max=st.integers(1, 6), fault=faults)
    def sweep(self, rows_max: int, fault: Fault | None) -> None:
        self.commit([Sweep(rows_max)], fault)

    @rule(
        batch=close_steps() | st.lists(steps, min_size=1, max_size=6),
        fault=faults,
        foresees=st.booleans(),
    )
    def anything(self, batch: list[Step], fault: Fault | None, *, foresees: bool) -> None:
        self.commit(batch, fault, foresees=foresees)

    def commit(
        self, batch: list[Step], fault: Fault | None = None, *, foresees: bool = True
    ) -> None:
        met_count = self.engine.disk.met_count
        self.engine.disk.fault = fault
        works = [self._work(step) for step in batch]
        try:
            expected = list(asked_about(batch)) if foresees else []
            outcomes = self.runner.run(self.store.commit(works, expected))
        except StoreError as error:
            assert self.engine.disk.met_count == met_count + 1
            self._failed(batch, error, fault)
            return
        finally:
            self.engine.disk.fault = None
        if self.engine.disk.met_count > met_count:
            self._made_good(fault, batch, outcomes)
        twin_outcomes = self.runner.run(self.twin.commit(works))
        assert [plain(each) for each in outcomes] == [plain(each) for each in twin_outcomes]
        self._remember(batch, outcomes)

    @rule(before=st.lists(steps, max_size=3), after=st.lists(steps, max_size=2))
    def commit_with_a_bug(self, before: list[Step], after: list[Step]) -> None:
        works = [self._work(step) for step in (*before, Bug(), *after)]
        for store in (self.store, self.twin):
            try:
                self.runner.run(store.commit(works))
            except ZeroDivisionError:
                continue
            raise AssertionError("a bug was not raised")

    @rule(seconds=st.sampled_from((1, 1, 59, 59, 3600, 86_400, 100 * 86_400)))
    def wait(self, seconds: int) -> None:
        self.now_ms += seconds * 1000

    @rule()
    def look_after(self) -> None:
        for store in (self.store, self.twin):
            self.runner.run(store.check())
            self.runner.run(store.tidy())

    @rule()
    def reopen(self) -> None:
        for store in (self.store, self.twin):
            self.runner.run(store.close())
        self.store = self.runner.run(self.engine.open())
        self.twin = self.runner.run(self.twin_engine.open())

    @rule()
    def crash(self) -> None:
        copied = self.engine.copied()
        self.runner.run(self.engine.close())
        self.engine = copied
        self.store = self.runner.run(copied.open())
        self.twin = self.runner.run(self.twin_engine.open())

    # What holds

    @invariant()
    def all_of_it_holds(self) -> None:
        seen = self.runner.run(see(self.store, self.told))
        assert seen == self.runner.run(see(self.twin, self.told))
        alive = [
            (told, seen.facts[digest], told.data in seen.waiting[told.queue])
            for digest, told in self.told.items()
            if told.fact.until_ms > self.now_ms and seen.lives(told.queue)
        ]
        self._rule_2_what_was_told_is_told_again(alive)
        self._rule_3_nothing_held_vanishes(alive)
        self._rule_7_the_saved_clock_is_not_below_what_was_accepted(alive)
        self._totals_are_the_sums_of_the_rows(seen)

    def _rule_2_what_was_told_is_told_again(self, alive: Alive) -> None:
        assert all(fact == told.fact for told, fact, _ in alive)

    def _rule_3_nothing_held_vanishes(self, alive: Alive) -> None:
        assert all(waits is not told.acked for told, _, waits in alive)

    def _rule_7_the_saved_clock_is_not_below_what_was_accepted(self, alive: Alive) -> None:
        clock_ms, _ = self.store.saved_clock()
        assert all(clock_ms >= told.fact.accepted_ms for told, *_ in alive)

    def _totals_are_the_sums_of_the_rows(self, seen: Seen) -> None:
        charged, counts, kept, stored = self._rows()
        assert seen.used == seen.totals["bytes"] == sum(charged.values())
        assert seen.totals["envelopes"] == counts.get(1, 0) == kept == stored
        assert seen.totals["tombstones"] == counts.get(0, 0)
        for key, queue in seen.queues.items():
            by_sender = {sender: used for (of, sender), used in charged.items() if of == key}
            senders = queue.senders.items() if queue else ()
            assert {sender: used for sender, (_, used) in senders if used} == by_sender
            assert (queue.used if queue else 0) == sum(by_sender.values())

    def _rows(self) -> tuple[Mapping[tuple[bytes, bytes], int], Mapping[int, int], int, int]:
        with closing(sqlite3.connect(f"file:{self.engine.path}?mode=ro", uri=True)) as rows:
            charged = rows.execute(
                "SELECT queue.key, sender.key, SUM(CASE held WHEN 1 THEN length ELSE 128 END)"
                " FROM envelope JOIN queue ON queue.id = envelope.queue"
                " JOIN sender ON sender.id = envelope.sender GROUP BY 1, 2"
            ).fetchall()
            counts = dict(rows.execute("SELECT held, COUNT(*) FROM envelope GROUP BY held"))
            (kept,) = rows.execute(
                "SELECT COUNT(*) FROM envelope AS e JOIN envelope_bytes AS b ON b.seq = e.seq"
                " WHERE e.held = 1 AND e.length = LENGTH(b.data)"
            ).fetchone()
            (stored,) = rows.execute("SELECT COUNT(*) FROM envelope_bytes").fetchone()
        return {(queue, sender): used for queue, sender, used in charged}, counts, kept, stored

    # How it is done

    def _work(self, step: Step) -> Work[object]:
        now_ms = self.now_ms
        return lambda transaction: step.run(transaction, now_ms)

    def _made_good(
        self, fault: Fault | None, batch: Sequence[Step], outcomes: Sequence[object]
    ) -> None:
        """Only two failures are: a lock is waited for, and acks have a reserve of room."""
        assert fault is not None
        if fault.statement == "BEGIN":
            assert fault.code == sqlite3.SQLITE_BUSY
        else:
            assert fault.code == sqlite3.SQLITE_FULL
            assert not any(map(holds_new, batch, outcomes))

    def _failed(self, batch: list[Step], error: StoreError, fault: Fault | None) -> None:
        assert fault is not None
        works = [self._work(step) for step in batch]
        assert type(error) is ERRORS.get(fault.code & 0xFF, StoreBroken)
        if not isinstance(error, StoreBroken):
            return
        for again in (lambda: self.store.commit(works), self.store.check, self.store.tidy):
            try:
                self.runner.run(again())
            except StoreBroken:
                continue
            raise AssertionError("a broken store went on")
        if fault.takes_effect:
            # Nobody was told, and yet it is there when the store is opened again.
            self._remember(batch, self.runner.run(self.twin.commit(works)))
        self.crash()

    def _remember(self, batch: Sequence[Step], outcomes: Sequence[object]) -> None:
        for step, outcome in zip(batch, outcomes, strict=True):
            if isinstance(step, Hold) and outcome:
                held = cast("Held", outcome)
                for number, (fact, is_new) in zip(step.numbers, held, strict=True):
                    self._remember_held(step, number, fact, is_new=is_new)
            if isinstance(step, Ack) and outcome and step.queue == step.of_queue:
                for number in step.numbers:
                    told = self.told.get(parcel(step.queue, step.sender, number).digest)
                    if told is not None:
                        told.acked = True

    def _remember_held(self, step: Hold, number: int, fact: HeldFact, *, is_new: bool) -> None:
        each = parcel(step.queue, step.sender, number)
        told = self.told.get(each.digest)
        known = told is not None and told.fact.until_ms > self.now_ms
        assert is_new is not known
        if is_new:
            until_ms = self.now_ms + each.ttl_s * 1000
            assert fact == HeldFact(each.digest, each.length, self.now_ms, until_ms)
            self.told[each.digest] = Told(fact, step.queue, each.data)
        else:
            assert told is not None
            assert fact == told.fact


def asked_about(batch: Sequence[Step]) -> Iterator[bytes]:
    for step in batch:
        if isinstance(step, Hold):
            for number in (*step.numbers, 0):
                yield parcel(step.queue, step.sender, number).digest


def holds_new(step: Step, outcome: object) -> bool:
    return isinstance(step, Hold) and any(is_new for _, is_new in cast("Held", outcome))


def plain(outcome: object) -> object:
    return type(outcome) if isinstance(outcome, Refusal) else outcome


@pytest.fixture
def machine() -> Iterator[StoreMachine]:
    machine = StoreMachine()
    yield machine
    machine.teardown()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_every_fault_of_the_machine_meets_a_statement_of_the_store(
    fault: Fault, machine: StoreMachine
) -> None:
    queue, alice, bob = QUEUES[0], *SENDERS[:2]
    machine.begin()
    machine.commit([Hold(queue, alice, (0, 1, 2)), Put(bob, 1, 60), Vouch(queue, 60)])
    machine.wait(60)
    met_count = machine.engine.disk.met_count
    disk = machine.engine.disk
    batch: list[Step] = [
        Move(queue, 1, INSTANCES[0], lazily=False),
        Ack(queue, queue, alice, (2,)),
        Hold(queue, alice, (0, 3)),
        List(queue, frozenset((alice,))),
        Add(QUEUES[2], 0),
        SaveClock(),
        Sweep(10),
    ]
    machine.commit(batch, fault, foresees=False)
    machine.all_of_it_holds()
    assert disk.met_count == met_count + 1


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, print_blob=True
)
