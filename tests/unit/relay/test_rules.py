"""The rules of the relay: as work on the store in memory, and through the relay's own calls."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from agentmbx_protocol import bodies, limits
from agentmbx_protocol.custody import HeldFact, believe_held
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.errors import (
    NoSuchQueue,
    NotAdmitted,
    QueueFull,
    Refusal,
    RelayFull,
    Retired,
    Stale,
    Superseded,
    Unavailable,
)
from agentmbx_protocol.queue_commands import Collect, Register, Retire, senders_digest
from agentmbx_relay import rules
from agentmbx_relay.quota import Quota
from agentmbx_relay.relay import Relay
from agentmbx_relay.store import Deposit, Queue, StoreBroken, StoreBusy, StoreError, StoreFull
from correspondents import Correspondent, Owner
from engines import SqliteEngine
from fakes import (
    PLENTY,
    RELAY,
    CountingKey,
    CountingSignatures,
    Image,
    MemoryStore,
    MemoryTransaction,
    committing,
    relay_on,
    settled,
)
from store_works import (
    ALICE,
    BOB,
    CAROL,
    INSTANCE,
    LENGTH,
    NOW,
    QUEUE,
    UNTIL,
    Shelf,
    add_queue,
    fact,
    hold,
    parcel,
)

MINE, OTHER = b"i" * 16, b"j" * 16
COUNTER, LAST = 100, 2**63 - 1
ROOMY = Quota(PLENTY, PLENTY, 0)
# Room for four: two are common, and each of two senders has one.
FOUR = Quota(4 * LENGTH, PLENTY, 0)
ENDS = [(StoreFull, RelayFull), (StoreBusy, Unavailable), (StoreBroken, Unavailable)]


class Desk:
    """A queue of the instance `MINE` at `COUNTER` that lists Alice and Bob, and the rules."""

    def __init__(self, quota: Quota = ROOMY) -> None:
        self.image = Image()
        self.transaction = MemoryTransaction(self.image, PLENTY)
        self.quota = quota
        queue = self.transaction.add_queue(QUEUE, 0)
        self.transaction.command(queue, COUNTER, MINE)
        self.transaction.list_senders(queue, [ALICE, BOB])

    @property
    def queue(self) -> Queue:
        return self.image.queues[QUEUE]

    def hold(
        self, *parcels: Deposit, signer: bytes = ALICE, queue: bytes = QUEUE, now_ms: int = NOW
    ) -> rules.Holding:
        return rules.hold(self.transaction, queue, signer, parcels, quota=self.quota, now_ms=now_ms)

    def register(
        self, counter: int, instance: bytes = MINE, takeover: int = 0, now_ms: int = NOW
    ) -> rules.QueueFacts:
        command = Register(
            queue=QUEUE,
            relay=RELAY.public,
            counter=counter,
            instance=instance,
            takeover=takeover,
            senders=(BOB, CAROL),
        )
        return rules.register(
            self.transaction, command, None, now_ms=now_ms, is_open=False, queues_max=9
        )

    def collect(
        self, counter: int, instance: bytes = MINE, acks: tuple[bytes, ...] = ()
    ) -> tuple[Queue, int]:
        return rules.collect(self.transaction, collect_command(counter, instance, acks))

    def retire(self, counter: int, instance: bytes = MINE) -> rules.QueueFacts:
        command = Retire(queue=QUEUE, relay=RELAY.public, counter=counter, instance=instance)
        return rules.retire(self.transaction, command, NOW)


def collect_command(counter: int, instance: bytes = MINE, acks: tuple[bytes, ...] = ()) -> Collect:
    return Collect(
        queue=QUEUE,
        relay=RELAY.public,
        counter=counter,
        instance=instance,
        senders_digest=bytes(32),
        bytes_max=0,
        wait_s=0,
        acks=acks,
    )


@contextmanager
def unchanged(desk: Desk, refusal: type[Refusal]) -> Iterator[None]:
    """The command in the block is refused with the queue as it is, and nothing is written."""
    before, written_bytes = desk.image.copy(), desk.transaction.written_bytes
    with pytest.raises(rules.CommandRefused) as raised:
        yield
    assert type(raised.value.refusal) is refusal
    assert raised.value.queue is desk.queue
    assert desk.image == before
    assert desk.transaction.written_bytes == written_bytes


class Bench:
    """A relay in one process, its store, and one owner with one correspondent."""

    relay: Relay

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.key = CountingKey()
        self.signatures = CountingSignatures(self.key)
        self.owner = Owner(RELAY.public)
        self.sender = Correspondent(self.owner)
        self.owner.senders = (self.sender.pair.public,)

    async def begin(self, *senders: bytes) -> None:
        self.owner.senders = senders or self.owner.senders
        await self.relay.register(bodies.join_frames([self.owner.register_frame()]))

    async def deposit(self, *envelopes: Envelope) -> dict[bytes, HeldFact]:
        """The facts of what the sender may believe to be held."""
        body = await self.relay.deposit(bodies.join_frames([each.frame.data for each in envelopes]))
        statement, refused = bodies.parse_deposit_answer(body, len(envelopes))
        assert refused == []
        return believe_held(statement, RELAY.public, envelopes)

    async def collect(self, *acks: bytes) -> list[bytes]:
        return await self.relay.collect(bodies.join_frames([self.owner.collect_frame(acks)]))

    async def retire(self) -> None:
        await self.relay.retire(bodies.join_frames([self.owner.retire_frame()]))

    @property
    def held(self) -> set[bytes]:
        """The digests of what is durable."""
        return set(self.store.disk.image.rows)


@asynccontextmanager
async def a_bench() -> AsyncIterator[Bench]:
    bench = Bench(MemoryStore())
    async with committing(bench.store) as commits:
        bench.relay = relay_on(bench.store, commits, key=bench.key, signatures=bench.signatures)
        await bench.begin()
        yield bench


# Rule 1


async def test_rule_1_no_held_is_signed_before_its_commit_is_durable() -> None:
    async with a_bench() as bench:
        envelope, signed_count = bench.sender.write(), bench.key.count
        bench.store.gate.clear()
        answer = asyncio.ensure_future(bench.deposit(envelope))
        await bench.store.under_way.wait()
        await settled()
        assert (answer.done(), bench.key.count, bench.held) == (
            False,
            signed_count,
            set(),
        )
        bench.store.gate.set()
        assert set(await answer) == bench.held == {envelope.digest}
        assert bench.key.count == signed_count + 1


@pytest.mark.parametrize(("error", "refusal"), ENDS)
async def test_rule_1_a_commit_that_fails_signs_no_held_and_fails_every_deposit_in_it(
    error: type[StoreError], refusal: type[Refusal]
) -> None:
    async with a_bench() as bench:
        signed_count = bench.key.count
        bench.store.gate.clear()
        first = asyncio.ensure_future(bench.deposit(bench.sender.write()))
        await bench.store.under_way.wait()
        later = [asyncio.ensure_future(bench.deposit(bench.sender.write())) for _ in range(5)]
        await settled()
        bench.store.disk.failures.extend([None, error("a fault of the test")])
        bench.store.gate.set()
        kept = set(await first)
        results = await asyncio.gather(*later, return_exceptions=True)
        assert [type(each) for each in results] == [refusal] * 5
        assert bench.held == kept
        assert bench.key.count == signed_count + 1


# Rule 2, and X1: the same envelope more than once


async def test_x1_an_envelope_three_times_in_one_request_is_one_with_one_fact() -> None:
    async with a_bench() as bench:
        same, one, two = (bench.sender.write() for _ in range(3))
        facts = await bench.deposit(same, one, same, two, same)
        assert set(facts) == {same.digest, one.digest, two.digest}
        assert await bench.collect() == [each.frame.data for each in (same, one, two)]


async def test_x1_an_envelope_in_two_parallel_requests_has_the_same_facts_in_both() -> None:
    async with a_bench() as bench:
        same, one, two = (bench.sender.write() for _ in range(3))
        first, second = await asyncio.gather(
            bench.deposit(one, same), bench.deposit(same, two, same)
        )
        assert first[same.digest] == second[same.digest]
        assert await bench.collect() == [each.frame.data for each in (one, same, two)]


async def test_rule_2_the_facts_are_the_same_after_the_envelope_was_collected_and_acked() -> None:
    async with a_bench() as bench:
        envelope = bench.sender.write()
        first = await bench.deposit(envelope)
        assert await bench.deposit(envelope) == first
        (data,) = await bench.collect()
        await bench.collect(parse_envelope(data).digest)
        assert await bench.deposit(envelope) == first
        assert await bench.collect() == []


def test_only_what_is_new_is_counted_as_new() -> None:
    desk = Desk()
    assert desk.hold(parcel(0), parcel(1), parcel(0)).new_count == 2
    holding = desk.hold(parcel(1), parcel(2), now_ms=NOW + 5)
    assert holding.outcomes == [fact(1), fact(2, NOW + 5)]
    assert (holding.new_count, holding.queue_id) == (1, desk.queue.id)


def test_rule_2_a_full_queue_still_tells_the_facts_of_what_it_knows() -> None:
    desk = Desk(FOUR)
    holding = desk.hold(*(parcel(number) for number in (0, 1, 2, 3, 1, 3, 0)))
    taken = [holding.outcomes[at] for at in (0, 1, 2, 4, 6)]
    assert taken == [fact(number) for number in (0, 1, 2, 1, 0)]
    assert [type(holding.outcomes[at]) for at in (3, 5)] == [QueueFull, QueueFull]
    assert holding.new_count == 3
    assert desk.hold(parcel(3), signer=BOB).outcomes == [fact(3)]


def test_what_is_past_its_time_is_no_known_envelope_of_a_full_queue() -> None:
    desk = Desk(FOUR)
    desk.hold(parcel(0), parcel(1), parcel(2))
    (outcome,) = desk.hold(parcel(0), now_ms=UNTIL).outcomes
    assert isinstance(outcome, QueueFull)


# Rule 8


def test_rule_8_an_unknown_queue_and_a_sender_that_is_not_listed_are_the_same() -> None:
    desk, ended = Desk(), Desk()
    ended.retire(COUNTER + 1)
    desk.hold(parcel(0), signer=ALICE)
    desk.register(COUNTER + 1)
    cases = [
        (desk, b"X" * 32, ALICE),
        (desk, QUEUE, b"X" * 32),
        (desk, QUEUE, ALICE),
        (ended, QUEUE, BOB),
    ]
    told = set()
    for each, queue, signer in cases:
        written_bytes = each.transaction.written_bytes
        with pytest.raises(NoSuchQueue) as raised:
            each.hold(parcel(0), queue=queue, signer=signer)
        told.add((raised.value.detail, raised.value.retryable, raised.value.retry_after_s))
        assert each.transaction.written_bytes == written_bytes
    assert len(told) == 1
    assert NoSuchQueue.retryable


async def test_rule_8_they_are_told_after_one_look_up_and_before_any_signature_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_bench() as bench:
        envelope = bench.sender.write()
        await bench.deposit(envelope)
        stranger = Correspondent(bench.owner)
        elsewhere = Correspondent(Owner(RELAY.public), bench.sender.pair)
        bodies_of = {
            "unknown queue": elsewhere.write().frame.data,
            "not listed": stranger.write().frame.data,
            "not listed, badly signed": stranger.write().frame.data[:-1] + b"?",
        }
        asked: list[tuple[bytes, bytes]] = []
        look_up = bench.store.sender

        def sender(queue: bytes, signer: bytes) -> object:
            asked.append((queue, signer))
            return look_up(queue, signer)

        monkeypatch.setattr(bench.store, "sender", sender)
        checked_count, told = bench.signatures.count, set()
        for name, data in bodies_of.items():
            asked.clear()
            with pytest.raises(NoSuchQueue) as raised:
                await bench.relay.deposit(bodies.join_frames([data]))
            told.add((raised.value.detail, raised.value.retry_after_s))
            assert len(asked) == 1, name
        await bench.begin(stranger.pair.public)
        with pytest.raises(NoSuchQueue):
            await bench.deposit(envelope)
        await bench.retire()
        with pytest.raises(NoSuchQueue):
            await bench.deposit(stranger.write())
        assert len(told) == 1
        assert bench.signatures.count == checked_count


# Commands


REGISTERS = [
    (MINE, COUNTER + 1, 0, None),
    (MINE, LAST, 0, None),
    (MINE, COUNTER, 0, Stale),
    (MINE, 1, 0, Stale),
    (MINE, COUNTER + 1, 7, None),
    (MINE, COUNTER, LAST, Stale),
    (OTHER, COUNTER + 1, 0, Superseded),
    (OTHER, LAST, 0, Superseded),
    (OTHER, 1, 0, Superseded),
    (OTHER, COUNTER + 1, COUNTER - 1, Superseded),
    (OTHER, COUNTER + 1, COUNTER, None),
    (OTHER, COUNTER + 1, COUNTER + 1, None),
    (OTHER, COUNTER + 1, LAST, None),
    (OTHER, COUNTER, COUNTER, Stale),
    (OTHER, 1, LAST, Stale),
]


@pytest.mark.parametrize(("instance", "counter", "takeover", "refusal"), REGISTERS)
def test_a_register_on_a_known_queue(
    instance: bytes, counter: int, takeover: int, refusal: type[Refusal] | None
) -> None:
    desk = Desk()
    if refusal is None:
        facts = desk.register(counter, instance, takeover)
        digest = senders_digest([BOB, CAROL])
        assert facts == rules.QueueFacts(desk.queue.id, QUEUE, counter, instance, digest)
        assert {key for key, sender in desk.queue.senders.items() if sender.listed} == {BOB, CAROL}
        assert (desk.queue.counter, desk.queue.instance) == (counter, instance)
        return
    with unchanged(desk, refusal):
        desk.register(counter, instance, takeover)


COMMANDS = [
    (MINE, COUNTER + 1, None),
    (MINE, LAST, None),
    (MINE, COUNTER, Stale),
    (MINE, 1, Stale),
    (OTHER, COUNTER + 1, Superseded),
    (OTHER, LAST, Superseded),
    (OTHER, 1, Superseded),
]


@pytest.mark.parametrize(("instance", "counter", "refusal"), COMMANDS)
def test_a_collect(instance: bytes, counter: int, refusal: type[Refusal] | None) -> None:
    desk = Desk()
    desk.hold(parcel(0), parcel(1))
    acks = (parcel(0).digest, parcel(9).digest, parcel(0).digest)
    if refusal is None:
        assert desk.collect(counter, instance, acks) == (desk.queue, 1)
        assert (desk.queue.counter, desk.queue.instance) == (counter, instance)
        assert desk.queue.used == LENGTH + limits.TOMBSTONE_BYTES
        return
    with unchanged(desk, refusal):
        desk.collect(counter, instance, acks)


@pytest.mark.parametrize(("instance", "counter", "refusal"), COMMANDS)
def test_a_retire(instance: bytes, counter: int, refusal: type[Refusal] | None) -> None:
    desk = Desk()
    if refusal is None:
        facts = desk.retire(counter, instance)
        nobody = senders_digest([])
        assert facts == rules.QueueFacts(desk.queue.id, QUEUE, counter, instance, nobody)
        assert desk.queue.retired_ms == NOW
        return
    with unchanged(desk, refusal):
        desk.retire(counter, instance)


@pytest.mark.parametrize("instance", [MINE, OTHER])
@pytest.mark.parametrize("counter", [1, COUNTER + 1, COUNTER + 2, LAST])
@pytest.mark.parametrize("takeover", [0, LAST])
def test_a_retired_queue_answers_retired_to_all_but_a_repeated_retire(
    instance: bytes, counter: int, takeover: int
) -> None:
    desk = Desk()
    facts = desk.retire(COUNTER + 1)
    with unchanged(desk, Retired):
        desk.register(counter, instance, takeover)
    with unchanged(desk, Retired):
        desk.collect(counter, instance, (parcel(0).digest,))
    assert desk.retire(counter, instance) == facts
    assert desk.queue.retired_ms == NOW


def test_an_unknown_queue_is_told_as_such_and_made_only_by_register() -> None:
    desk = Desk()
    del desk.image.queues[QUEUE]
    with pytest.raises(NoSuchQueue):
        desk.collect(COUNTER + 1)
    with pytest.raises(NoSuchQueue):
        desk.retire(COUNTER + 1)
    with pytest.raises(NotAdmitted):
        desk.register(COUNTER + 1)
    assert desk.image.queues == {}


def test_a_collect_without_acks_writes_nothing_and_yet_counts() -> None:
    desk = Desk()
    written_bytes = desk.transaction.written_bytes
    desk.collect(COUNTER + 5)
    assert desk.transaction.written_bytes == written_bytes
    with pytest.raises(rules.CommandRefused):
        desk.collect(COUNTER + 5)


@pytest.mark.parametrize("now_ms", [1, NOW, LAST])
@pytest.mark.parametrize("counter", [COUNTER + 1, NOW - 1, NOW + 1, LAST])
def test_rule_7_a_counter_is_never_compared_with_a_clock(counter: int, now_ms: int) -> None:
    desk = Desk()
    assert desk.register(counter, now_ms=now_ms).counter == counter


def test_what_is_signed_about_a_queue_is_as_it_is_now_and_moves_nothing_back() -> None:
    desk = Desk()
    outdated = msgspec.structs.replace(desk.queue)
    desk.register(COUNTER + 50, OTHER, LAST)
    facts = rules.settle(desk.transaction, outdated)
    assert (facts.counter, facts.instance) == (COUNTER + 50, OTHER)
    assert (desk.queue.counter, desk.queue.instance) == (COUNTER + 50, OTHER)
    del desk.image.queues[QUEUE]
    with pytest.raises(NoSuchQueue):
        rules.settle(desk.transaction, outdated)


def test_settling_makes_a_lazy_counter_durable() -> None:
    desk = Desk()
    queue, _ = desk.collect(COUNTER + 5)
    written_bytes = desk.transaction.written_bytes
    assert rules.settle(desk.transaction, queue).counter == COUNTER + 5
    assert desk.transaction.written_bytes > written_bytes


# X5: what was acked stays acked


@pytest.fixture
async def shelf(tmp_path: Path) -> AsyncIterator[Shelf]:
    engine = SqliteEngine(tmp_path)
    shelf = Shelf(engine, await engine.open())
    yield shelf
    await shelf.engine.close()


async def test_x5_acks_are_durable_with_the_answer(shelf: Shelf) -> None:
    parcels = [parcel(number) for number in range(100)]
    await shelf.do(add_queue())
    await shelf.do(hold(*parcels))
    for at in range(0, 100, 10):
        acks = tuple(each.digest for each in parcels[at : at + 10])
        command = collect_command(COUNTER + at, INSTANCE, acks)
        _, acked = await shelf.do(partial(rules.collect, command=command))
        assert acked == 10
        # The power goes as soon as the answer is out.
        await shelf.crash()
        assert await shelf.waiting() == [each.data for each in parcels[at + 10 :]]
        assert (await shelf.queue()).counter == COUNTER + at
