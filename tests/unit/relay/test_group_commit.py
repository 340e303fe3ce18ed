"""Group commit: many works in one commit, and what becomes of each when it fails."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agentmbx_protocol.errors import QueueFull, Refusal, RelayFull, Unavailable
from agentmbx_relay.group_commit import BATCH_BYTES_MAX, BATCH_WORKS_MAX, GroupCommit
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.store import (
    StoreBroken,
    StoreBusy,
    StoreError,
    StoreFull,
    Transaction,
    Work,
)
from engines import Fault, SqliteEngine
from fakes import MemoryStore, committing, settled
from store_works import LENGTH, Shelf, ack, add_queue, fact, hold, parcel, refuse

ENDS = [(StoreFull, RelayFull), (StoreBusy, Unavailable), (StoreBroken, Unavailable)]


class Counter:
    """The committer of a store in memory, with one queue, and the answers of its callers."""

    def __init__(self, store: MemoryStore, commits: GroupCommit) -> None:
        self.store = store
        self.commits = commits

    def ask(self, work: Work[object], length: int = 0) -> asyncio.Future[object]:
        return self.commits.submit(work, length=length)

    def deposit(self, number: int) -> asyncio.Future[object]:
        return self.ask(hold(parcel(number)), LENGTH)

    async def hold_up(self) -> asyncio.Future[object]:
        """A commit that stays in its middle until the gate is opened."""
        self.store.under_way.clear()
        self.store.gate.clear()
        first = self.ask(lambda transaction: transaction.save_url("https://relay.example/"))
        await self.store.under_way.wait()
        return first

    def then_fail(self, *errors: StoreError | None) -> None:
        """Let the commit that is held up go on, and those after it fail."""
        self.store.disk.failures.extend([None, *errors])
        self.store.gate.set()

    @property
    def held(self) -> set[bytes]:
        return set(self.store.disk.image.rows)


@pytest.fixture(autouse=True)
def logged() -> Iterator[Sequence[MutableMapping[str, object]]]:
    """What is logged, each line as its fields."""
    with capture_logs() as lines:
        yield lines


@asynccontextmanager
async def a_counter() -> AsyncIterator[Counter]:
    store = MemoryStore()
    async with committing(store) as commits:
        await commits.submit(add_queue())
        store.commit_counts.clear()
        yield Counter(store, commits)


@pytest.fixture
async def counter() -> AsyncIterator[Counter]:
    async with a_counter() as counter:
        yield counter


async def results(*answers: asyncio.Future[object]) -> list[object]:
    """What each caller was answered: a value, or the class of the error."""
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
    return [type(each) if isinstance(each, BaseException) else each for each in outcomes]


def bug(_transaction: Transaction) -> object:
    raise ZeroDivisionError


# Answers


async def test_an_answer_comes_only_when_its_commit_is_durable(counter: Counter) -> None:
    counter.store.gate.clear()
    answer = counter.deposit(0)
    await counter.store.under_way.wait()
    await settled()
    assert (answer.done(), counter.held) == (False, set())
    counter.store.gate.set()
    assert await results(answer) == [[(fact(0), True)]]
    assert counter.held == {parcel(0).digest}


async def test_a_refusal_goes_to_its_own_caller_and_no_other(counter: Counter) -> None:
    refusal = QueueFull("No room.", retry_after_s=7)
    before = await counter.hold_up()
    answers = [counter.deposit(0), counter.ask(refuse(refusal)), counter.deposit(1)]
    await settled()
    counter.store.gate.set()
    assert await results(before, *answers) == [
        None,
        [(fact(0), True)],
        QueueFull,
        [(fact(1), True)],
    ]
    assert answers[1].exception() is refusal
    assert not counter.commits.failing


@pytest.mark.parametrize("count", [1, 2, 100, BATCH_WORKS_MAX])
async def test_all_that_has_queued_while_a_commit_ran_goes_into_the_next(
    counter: Counter, count: int
) -> None:
    first = await counter.hold_up()
    answers = [counter.ask(lambda t: t.queue_count) for _ in range(count)]
    await settled()
    counter.store.gate.set()
    assert await results(first, *answers) == [None] + [1] * count
    assert counter.store.commit_counts == [1, count]


async def test_a_quiet_committer_waits_for_nobody(counter: Counter) -> None:
    for number in range(3):
        await counter.deposit(number)
    assert counter.store.commit_counts == [1, 1, 1]


async def test_one_commit_is_bounded_in_works_and_in_bytes(counter: Counter) -> None:
    first = await counter.hold_up()
    answers = [counter.ask(lambda t: t.used) for _ in range(BATCH_WORKS_MAX + 3)]
    large = [counter.ask(lambda t: t.used, BATCH_BYTES_MAX // 4) for _ in range(6)]
    await settled()
    counter.store.gate.set()
    await results(first, *answers, *large)
    assert counter.store.commit_counts == [1, BATCH_WORKS_MAX, 3 + 4, 2]


async def test_work_is_done_in_the_order_of_asking(counter: Counter) -> None:
    done: list[int] = []

    def note(number: int, _transaction: Transaction) -> None:
        done.append(number)

    first = await counter.hold_up()
    answers = [counter.ask(partial(note, n)) for n in range(600)]
    await settled()
    counter.store.gate.set()
    await results(first, *answers)
    assert done == list(range(600))


async def test_x1_one_envelope_in_two_parallel_requests_is_held_once_with_one_fact(
    counter: Counter,
) -> None:
    first = await counter.hold_up()
    same = [counter.ask(hold(parcel(0), parcel(1), parcel(0)), 3 * LENGTH) for _ in range(2)]
    await settled()
    counter.store.gate.set()
    (_, one, two) = await results(first, *same)
    assert one == [(fact(0), True), (fact(1), True), (fact(0), False)]
    assert two == [(fact(0), False), (fact(1), False), (fact(0), False)]
    assert counter.store.totals()["bytes"] == 2 * LENGTH


# Commits that fail


@pytest.mark.parametrize(("error", "refusal"), ENDS)
async def test_rule_1_when_a_commit_fails_every_deposit_in_it_fails(
    counter: Counter, error: type[StoreError], refusal: type[Refusal]
) -> None:
    first = await counter.hold_up()
    answers = [counter.deposit(number) for number in range(5)]
    await settled()
    counter.then_fail(error("a fault of the test"))
    assert await results(first, *answers) == [None] + [refusal] * 5
    for answer in answers:
        refused = answer.exception()
        assert isinstance(refused, Refusal)
        assert refused.retry_after_s
        assert refused.retryable
    assert counter.held == set()
    assert counter.commits.failing
    assert counter.commits.broken.is_set() is (error is StoreBroken)


@pytest.mark.parametrize("error", [StoreFull, StoreBusy])
async def test_after_a_failed_commit_the_next_good_one_ends_the_failing(
    counter: Counter, error: type[StoreError]
) -> None:
    counter.store.disk.failures.append(error("a fault of the test"))
    assert await results(counter.deposit(0)) != [[(fact(0), True)]]
    assert counter.commits.failing
    assert await results(counter.deposit(0)) == [[(fact(0), True)]]
    assert not counter.commits.failing


async def test_retrying_says_whether_the_store_takes_a_write_again(counter: Counter) -> None:
    error = StoreBusy("a fault of the test")
    counter.store.disk.failures.extend([error, error])
    await results(counter.deposit(0))
    with pytest.raises(StoreBusy):
        await counter.commits.retry()
    assert counter.commits.failing
    await counter.commits.retry()
    assert not counter.commits.failing


async def test_rule_1_a_retry_that_finds_the_disk_broken_stops_the_relay_too(
    counter: Counter,
) -> None:
    counter.store.disk.failures.append(StoreBroken("a fault of the test"))
    with pytest.raises(StoreBroken):
        await counter.commits.retry()
    assert counter.commits.broken.is_set()


async def test_rule_1_after_the_disk_broke_nothing_that_waits_is_committed(
    counter: Counter,
) -> None:
    first = await counter.hold_up()
    answers = [counter.ask(hold(parcel(n)), BATCH_BYTES_MAX) for n in range(4)]
    await settled()
    counter.then_fail(StoreBroken("a fault of the test"))
    assert await results(first, *answers) == [None] + [Unavailable] * 4
    assert counter.store.commit_counts == [1, 1]
    assert await results(counter.deposit(9)) == [Unavailable]
    assert counter.store.commit_counts == [1, 1]
    assert counter.held == set()


async def test_rule_1_nor_is_the_rest_of_works_that_are_tried_one_by_one(counter: Counter) -> None:
    first = await counter.hold_up()
    answers = [counter.deposit(0), counter.ask(bug), counter.deposit(1), counter.deposit(2)]
    await settled()
    # The bug takes no failure from the list: its commits end before the disk is reached.
    counter.then_fail(None, StoreBroken("a fault of the test"))
    expected = [None, [(fact(0), True)], Unavailable, Unavailable, Unavailable]
    assert await results(first, *answers) == expected
    assert counter.held == {parcel(0).digest}


async def test_on_a_full_disk_deposits_are_refused_and_acks_are_done(counter: Counter) -> None:
    await counter.deposit(0)
    counter.store.disk.full = True
    first = await counter.hold_up()
    answers = [
        counter.deposit(1),
        counter.ask(ack(parcel(0))),
        counter.deposit(2),
        counter.ask(lambda t: t.save_url("https://relay.example/")),
    ]
    await settled()
    counter.store.gate.set()
    assert await results(first, *answers) == [None, RelayFull, 1, RelayFull, None]
    assert counter.held == {parcel(0).digest}
    assert counter.store.totals()["tombstones"] == 1
    counter.store.disk.full = False
    assert await results(counter.deposit(1)) == [[(fact(1), True)]]


async def test_on_a_full_disk_a_failing_ack_is_refused_as_well(counter: Counter) -> None:
    error = StoreFull("a fault of the test")
    counter.store.disk.failures.extend([error, error])
    first = asyncio.gather(counter.deposit(1), counter.ask(ack(parcel(0))), return_exceptions=True)
    assert [type(each) for each in await first] == [RelayFull, RelayFull]
    assert counter.store.commit_counts == [2, 1]


# On SQLite, with its reserve


@pytest.fixture
async def shelf(tmp_path: Path) -> AsyncIterator[Shelf]:
    engine = SqliteEngine(tmp_path)
    shelf = Shelf(engine, await engine.open())
    await shelf.do(add_queue())
    await shelf.do(hold(parcel(0)))
    yield shelf
    await shelf.engine.close()


def break_once(shelf: Shelf, statement: str) -> None:
    assert isinstance(shelf.engine, SqliteEngine)
    shelf.engine.disk.fault = Fault(statement, sqlite3.SQLITE_FULL)


def reserve_of(shelf: Shelf) -> Path:
    assert isinstance(shelf.engine, SqliteEngine)
    return shelf.engine.path.with_name("reserve")


@pytest.mark.parametrize("statement", ["COMMIT", "UPDATE envelope", "DELETE FROM envelope_bytes"])
async def test_acks_are_done_on_the_reserve_when_the_disk_is_full(
    shelf: Shelf, statement: str
) -> None:
    assert reserve_of(shelf).exists()
    break_once(shelf, statement)
    async with committing(shelf.store) as commits:
        assert await commits.submit(ack(parcel(0))) == 1
        assert not commits.failing
    assert not reserve_of(shelf).exists()
    await shelf.store.tidy()
    assert reserve_of(shelf).exists()
    await shelf.crash()
    assert await shelf.waiting() == []


@pytest.mark.parametrize("statement", ["COMMIT", "INSERT INTO envelope ", "INSERT INTO envelope_"])
async def test_a_deposit_never_gets_the_reserve_of_the_acks(shelf: Shelf, statement: str) -> None:
    break_once(shelf, statement)
    async with committing(shelf.store) as commits:
        with pytest.raises(RelayFull):
            await commits.submit(hold(parcel(1)), length=LENGTH)
    assert reserve_of(shelf).exists()
    assert await shelf.waiting() == [parcel(0).data]


async def test_nor_does_one_that_stands_behind_an_ack(shelf: Shelf) -> None:
    break_once(shelf, "UPDATE envelope")
    async with committing(shelf.store) as commits:
        answers = [
            commits.submit(ack(parcel(0))),
            commits.submit(hold(parcel(1)), length=LENGTH),
        ]
        assert await results(*answers) == [1, RelayFull]
    assert await shelf.waiting() == []


async def test_asking_whether_there_is_room_does_not_use_it_up(shelf: Shelf) -> None:
    break_once(shelf, "COMMIT")
    async with committing(shelf.store) as commits:
        with pytest.raises(StoreFull):
            await commits.retry()
    assert reserve_of(shelf).exists()


# Work that has a bug


async def test_work_that_has_a_bug_fails_alone_and_is_logged(
    counter: Counter, logged: Sequence[MutableMapping[str, object]]
) -> None:
    first = await counter.hold_up()
    answers = [
        counter.deposit(0),
        counter.ask(bug),
        counter.ask(refuse(QueueFull())),
        counter.deposit(1),
        counter.ask(bug, LENGTH),
    ]
    await settled()
    counter.store.gate.set()
    assert await results(first, *answers) == [
        None,
        [(fact(0), True)],
        Unavailable,
        QueueFull,
        [(fact(1), True)],
        Unavailable,
    ]
    assert [(line["event"], line["error"]) for line in logged] == [
        ("work_failed", "ZeroDivisionError"),
        ("work_failed", "ZeroDivisionError"),
    ]
    assert counter.held == {parcel(0).digest, parcel(1).digest}
    assert not counter.commits.broken.is_set()
    assert await results(counter.deposit(2)) == [[(fact(2), True)]]


async def test_counters_do_not_move_twice_when_works_are_tried_one_by_one(shelf: Shelf) -> None:
    def next_counter(transaction: Transaction) -> int:
        queue = transaction.queue(b"Q" * 32)
        assert queue is not None
        transaction.command(queue, queue.counter + 1, queue.instance, lazily=True)
        return queue.counter

    async with committing(shelf.store) as commits:
        answers = [commits.submit(work) for work in (next_counter, bug, next_counter)]
        assert await results(*answers) == [2, Unavailable, 3]


# Callers that go away


async def test_a_caller_cancelled_before_its_commit_takes_no_answer_from_others(
    counter: Counter,
) -> None:
    first = await counter.hold_up()
    answers = [counter.deposit(number) for number in range(3)]
    await settled()
    answers[1].cancel()
    await settled()
    counter.store.gate.set()
    expected = [None, [(fact(0), True)], asyncio.CancelledError, [(fact(2), True)]]
    assert await results(first, *answers) == expected
    assert await results(counter.deposit(3)) == [[(fact(3), True)]]


@pytest.mark.parametrize("failure", [None, StoreFull, StoreBusy, ZeroDivisionError])
async def test_a_caller_cancelled_while_its_commit_is_under_way_wedges_nothing(
    counter: Counter, failure: type[StoreError] | type[ZeroDivisionError] | None
) -> None:
    counter.store.gate.clear()
    answers = [counter.deposit(0), counter.deposit(1), counter.deposit(2)]
    if failure is not None and issubclass(failure, StoreError):
        counter.store.disk.failures.append(failure("a fault of the test"))
    elif failure is not None:
        answers.append(counter.ask(bug))
    await settled()
    answers[0].cancel()
    answers[2].cancel()
    await settled()
    counter.store.gate.set()
    gone, answered, gone_too, *_ = await results(*answers)
    assert gone is gone_too is asyncio.CancelledError
    ends: dict[object, object] = {StoreFull: RelayFull, StoreBusy: Unavailable}
    assert answered == ends.get(failure, [(fact(1), True)])
    assert await results(counter.deposit(3)) == [[(fact(3), True)]]


@pytest.mark.parametrize("moment", range(6))
async def test_a_caller_cancelled_about_when_it_is_answered_wedges_nothing(
    counter: Counter, moment: int
) -> None:
    counter.store.gate.clear()
    answers = [counter.deposit(0), counter.deposit(1)]
    await settled()
    counter.store.gate.set()
    for _ in range(moment):
        await asyncio.sleep(0)
    answers[0].cancel()
    assert (await results(*answers))[1] == [(fact(1), True)]
    assert await results(counter.deposit(2)) == [[(fact(2), True)]]


async def test_the_work_of_a_cancelled_caller_is_whole_or_not_at_all(counter: Counter) -> None:
    counter.store.gate.clear()
    answer = counter.ask(hold(parcel(0), parcel(1), parcel(2)), 3 * LENGTH)
    await counter.store.under_way.wait()
    answer.cancel()
    await settled()
    counter.store.gate.set()
    # It was under way, so it was done; what comes again has its facts.
    assert await results(counter.ask(hold(parcel(1)), LENGTH)) == [[(fact(1), False)]]
    assert len(counter.held) == 3


moments = st.integers(0, 12)


@settings(deadline=None, print_blob=True)
@given(
    callers=st.lists(st.tuples(moments, st.none() | moments), min_size=1, max_size=8),
    failures=st.lists(st.sampled_from([None, StoreFull, StoreBusy]), max_size=4),
    gates=st.lists(st.booleans(), min_size=13, max_size=13),
)
def test_at_whatever_moment_callers_go_all_others_are_answered(
    callers: Sequence[tuple[int, int | None]],
    failures: Sequence[type[StoreError] | None],
    gates: Sequence[bool],
) -> None:
    async def story() -> None:
        async with a_counter() as counter:
            counter.store.disk.failures.extend(
                each("a fault of the test") if each else None for each in failures
            )
            answers: dict[int, asyncio.Future[object]] = {}
            for moment, is_open in enumerate(gates):
                if is_open:
                    counter.store.gate.set()
                else:
                    counter.store.gate.clear()
                for number, (begins, ends) in enumerate(callers):
                    if begins == moment:
                        answers[number] = counter.deposit(number)
                    if ends == moment and number in answers:
                        answers[number].cancel()
                await asyncio.sleep(0)
            counter.store.gate.set()
            got = dict(zip(answers, await results(*answers.values()), strict=True))
            for number, (_, ends) in enumerate(callers):
                good = got[number] == [(fact(number), True)]
                assert good or got[number] in (
                    (RelayFull, Unavailable, asyncio.CancelledError)
                    if ends is not None
                    else (RelayFull, Unavailable)
                )
                # Who was told that it is held may rely on it.
                assert not good or parcel(number).digest in counter.held
                if got[number] in (RelayFull, Unavailable):
                    assert parcel(number).digest not in counter.held
            counter.store.disk.failures.clear()
            assert await results(counter.deposit(99)) == [[(fact(99), True)]]

    asyncio.run(story())


# The end


async def test_when_told_to_stop_it_answers_all_and_takes_no_more() -> None:
    store = MemoryStore()
    commits = GroupCommit(store, Metrics("test"))
    running = asyncio.create_task(commits.run())
    await commits.submit(add_queue())
    store.gate.clear()
    answers = [commits.submit(hold(parcel(n))) for n in range(3)]
    await store.under_way.wait()
    answers.append(commits.submit(hold(parcel(3))))
    await settled()
    commits.stop()
    refused = commits.submit(hold(parcel(4)))
    await settled()
    assert not running.done()
    store.gate.set()
    assert await results(*answers) == [[(fact(n), True)] for n in range(4)]
    assert await results(refused, running) == [Unavailable, None]
    assert len(store.disk.image.rows) == 4


async def test_a_committer_that_is_cancelled_in_a_commit_leaves_no_caller_waiting() -> None:
    store = MemoryStore()
    commits = GroupCommit(store, Metrics("test"))
    running = asyncio.create_task(commits.run())
    store.gate.clear()
    answers = [commits.submit(add_queue()) for _ in range(2)]
    await store.under_way.wait()
    running.cancel()
    assert await results(running, *answers) == [asyncio.CancelledError, Unavailable, Unavailable]


async def cancel_in_a_commit(shelf: Shelf) -> None:
    """Cancel a committer twice while SQLite commits, and wait until it has ended."""
    assert isinstance(shelf.engine, SqliteEngine)
    disk = shelf.engine.disk
    commits = GroupCommit(shelf.store, Metrics("test"))
    running = asyncio.create_task(commits.run())
    disk.gate.clear()
    answer = commits.submit(hold(parcel(1)))
    assert await asyncio.to_thread(disk.under_way.wait, 10)
    for _ in range(2):
        running.cancel()
        await settled()
        assert not running.done()
    disk.gate.set()
    assert await results(running, answer) == [asyncio.CancelledError, Unavailable]


async def test_a_commit_of_sqlite_is_over_when_a_cancelled_committer_has_ended(
    shelf: Shelf,
) -> None:
    await cancel_in_a_commit(shelf)
    assert await shelf.waiting() == [parcel(0).data, parcel(1).data]
    await shelf.do(hold(parcel(2)))


async def test_rule_1_a_disk_that_breaks_under_a_cancelled_committer_is_not_forgotten(
    shelf: Shelf,
) -> None:
    shelf.engine.fail_next_commit(StoreBroken)
    await cancel_in_a_commit(shelf)
    with pytest.raises(StoreBroken):
        await shelf.do(hold(parcel(2)))
