"""The relay's upkeep, round by round: a pause ends only when the test says so."""

import asyncio
from collections.abc import AsyncIterator, Iterator, MutableMapping, Sequence
from typing import cast

import pytest
from structlog.testing import capture_logs

from agentmbx_protocol.errors import Unavailable
from agentmbx_relay import maintenance
from agentmbx_relay.clock import RelayClock, wall_ms
from agentmbx_relay.group_commit import GroupCommit
from agentmbx_relay.health import Health
from agentmbx_relay.maintenance import (
    CLOCK_EVERY_MS,
    RESTART_S_MAX,
    SWEEP_EVERY_S,
    SWEEP_PAUSE_S,
    SWEEP_ROWS,
    Maintenance,
    Worker,
)
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.store import Deposit, StoreBroken, StoreBusy, StoreFull, Transaction
from fakes import START_MS, MemoryStore, Ticks, committing
from store_works import add_queue, hold, parcel


@pytest.fixture(autouse=True)
def logged() -> Iterator[Sequence[MutableMapping[str, object]]]:
    """What is logged, each line as its fields."""
    with capture_logs() as lines:
        yield lines


class Pauses:
    """Stands where a module has `asyncio`: every pause waits for the test."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[tuple[float, asyncio.Future[None]]] = asyncio.Queue()
        self._under_way: asyncio.Future[None] | None = None

    async def sleep(self, seconds: float) -> None:
        over = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((seconds, over))
        await over

    async def next(self) -> float:
        """End the pause that is under way, if one is; how long the next one is."""
        if self._under_way is not None:
            self._under_way.set_result(None)
        async with asyncio.timeout(10):
            seconds, self._under_way = await self._asked.get()
        return seconds


class Upkeep:
    """A running maintenance in its first pause, and what it works on."""

    def __init__(self, store: MemoryStore, commits: GroupCommit, pauses: Pauses) -> None:
        self.store = store
        self.commits = commits
        self.pauses = pauses
        self.ticks = Ticks()
        self.metrics = Metrics("test")
        self.maintenance = Maintenance(
            store,
            commits,
            clock=RelayClock(START_MS, 0, now_wall_ms=0, ticks_ms=self.ticks),
            metrics=self.metrics,
            health=Health(),
        )

    @property
    def now_ms(self) -> int:
        return START_MS + self.ticks.ms

    @property
    def saved_ms(self) -> int:
        return self.store.disk.image.clock[0]

    def count(self, name: str) -> int:
        page = self.metrics.page({}).decode()
        return int(float(page.split(f"\nagentmbx_relay_{name}_total ")[1].split()[0]))


@pytest.fixture
async def upkeep(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Upkeep]:
    pauses, store = Pauses(), MemoryStore()
    monkeypatch.setattr(maintenance, "asyncio", pauses)
    async with committing(store) as commits:
        await commits.submit(add_queue())
        upkeep = Upkeep(store, commits, pauses)
        running = asyncio.create_task(upkeep.maintenance.run())
        assert await pauses.next() == SWEEP_EVERY_S
        yield upkeep
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


def many(count: int, ttl_s: int = 60) -> list[Deposit]:
    return [parcel(number, 128, ttl_s) for number in range(count)]


# Rounds


async def test_the_first_round_saves_both_clocks(upkeep: Upkeep) -> None:
    clock_ms, saved_wall_ms = upkeep.store.disk.image.clock
    assert clock_ms == START_MS
    assert 0 <= wall_ms() - saved_wall_ms < 60_000


async def test_rule_7_the_clock_is_saved_once_a_minute(upkeep: Upkeep) -> None:
    upkeep.ticks.ms = CLOCK_EVERY_MS - 1
    await upkeep.pauses.next()
    assert upkeep.saved_ms == START_MS
    upkeep.ticks.ms = CLOCK_EVERY_MS
    await upkeep.pauses.next()
    assert upkeep.saved_ms == START_MS + CLOCK_EVERY_MS
    assert CLOCK_EVERY_MS == 60_000


async def test_a_sweep_goes_in_small_steps_with_a_pause_after_each(upkeep: Upkeep) -> None:
    count = 2 * SWEEP_ROWS + 20
    await upkeep.commits.submit(hold(*many(count), now_ms=upkeep.now_ms))
    upkeep.ticks.ms += 60_000
    left = []
    while await upkeep.pauses.next() == SWEEP_PAUSE_S:
        left.append(upkeep.store.totals()["envelopes"])
        # Between two steps there is room for others.
        await upkeep.commits.submit(hold(parcel(5000 + len(left)), now_ms=upkeep.now_ms))
    assert left == [count - SWEEP_ROWS, count - 2 * SWEEP_ROWS + 1]
    assert upkeep.store.totals()["envelopes"] == 2
    assert upkeep.count("expired") == count
    assert upkeep.count("dropped") == 0


async def test_rule_3_nothing_is_swept_before_its_time(upkeep: Upkeep) -> None:
    await upkeep.commits.submit(hold(*many(3), now_ms=upkeep.now_ms))
    upkeep.ticks.ms += 60_000 - 1
    await upkeep.pauses.next()
    assert upkeep.store.totals()["envelopes"] == 3
    upkeep.ticks.ms += 1
    await upkeep.pauses.next()
    assert upkeep.store.totals()["envelopes"] == 0


async def test_what_retired_queues_held_is_counted_as_dropped(upkeep: Upkeep) -> None:
    await upkeep.commits.submit(hold(*many(3), now_ms=upkeep.now_ms))

    def retire(transaction: Transaction) -> None:
        queue = transaction.queue(b"Q" * 32)
        assert queue is not None
        transaction.retire(queue, upkeep.now_ms)

    await upkeep.commits.submit(retire)
    await upkeep.pauses.next()
    assert (upkeep.count("dropped"), upkeep.count("expired")) == (3, 0)


@pytest.mark.parametrize("error", [StoreFull, StoreBusy])
async def test_a_round_that_fails_is_tried_again(
    upkeep: Upkeep,
    error: type[StoreFull | StoreBusy],
    logged: Sequence[MutableMapping[str, object]],
) -> None:
    failure = error("a fault of the test")
    # The sweep, then the retry of the second round.
    upkeep.store.disk.failures.extend([failure, failure])
    for _ in range(2):
        assert await upkeep.pauses.next() == SWEEP_EVERY_S
        assert upkeep.maintenance.failing
        assert upkeep.commits.failing
    await upkeep.pauses.next()
    assert not upkeep.maintenance.failing
    assert not upkeep.commits.failing
    assert sum(line["event"] == "maintenance_failed" for line in logged) == 2


async def test_a_deposit_that_failed_makes_it_see_whether_the_store_takes_a_write(
    upkeep: Upkeep,
) -> None:
    upkeep.store.disk.failures.append(StoreBusy("a fault of the test"))
    with pytest.raises(Unavailable):
        await upkeep.commits.submit(hold(parcel(0)))
    assert upkeep.commits.failing
    upkeep.store.commit_counts.clear()
    await upkeep.pauses.next()
    assert not upkeep.commits.failing
    assert upkeep.store.commit_counts == [1, 1]


async def test_rule_1_a_disk_that_breaks_under_it_stops_the_relay(upkeep: Upkeep) -> None:
    upkeep.store.disk.failures.append(StoreBroken("a fault of the test"))
    await upkeep.pauses.next()
    assert upkeep.commits.broken.is_set()
    assert upkeep.maintenance.failing


async def test_a_tidying_that_fails_makes_the_round_fail(
    upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tidy() -> None:
        raise StoreFull("a fault of the test")

    with monkeypatch.context() as patch:
        patch.setattr(upkeep.store, "tidy", tidy)
        await upkeep.pauses.next()
        assert upkeep.maintenance.failing
    await upkeep.pauses.next()
    assert not upkeep.maintenance.failing


# Workers


class Loop:
    """A worker's loop whose outcomes are laid out before."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self._outcomes = list(outcomes)
        self.worker = Worker("test", self)
        self.failing_at_start: list[bool] = []

    async def __call__(self) -> None:
        self.failing_at_start.append(self.worker.failing)
        outcome = self._outcomes.pop(0)
        if outcome is not None:
            raise outcome


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses()
    monkeypatch.setattr(maintenance, "asyncio", pauses)
    return pauses


async def test_a_loop_that_ends_by_an_error_begins_again_after_growing_pauses(
    pauses: Pauses, logged: Sequence[MutableMapping[str, object]]
) -> None:
    loop = Loop(*(ValueError() for _ in range(9)))
    running = asyncio.create_task(loop.worker.run())
    lengths = []
    for _ in range(9):
        lengths.append(await pauses.next())
        assert loop.worker.failing
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert lengths[-1] == RESTART_S_MAX
    assert loop.failing_at_start == [False] * 9
    assert [(line["event"], line["worker"]) for line in logged] == [("worker_failed", "test")] * 9
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_loop_that_returns_is_not_begun_again(pauses: Pauses) -> None:
    loop = Loop(ValueError(), None)
    running = asyncio.create_task(loop.worker.run())
    await pauses.next()
    cast("asyncio.Future[None]", pauses._under_way).set_result(None)
    await asyncio.wait_for(running, 10)
    assert loop.failing_at_start == [False, False]
    assert not loop.worker.failing


async def test_a_loop_that_is_cancelled_is_over() -> None:
    begun = asyncio.Event()

    async def loop() -> None:
        begun.set()
        await asyncio.Event().wait()

    worker = Worker("test", loop)
    running = asyncio.create_task(worker.run())
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not worker.failing
