"""One contract for every store of the relay: commits, queues, senders, invites and the clock."""

import hashlib
import pkgutil
from collections.abc import Mapping

import pytest

import agentmbx_relay
from agentmbx_protocol import limits
from agentmbx_protocol.errors import NotAdmitted, QueueFull, Refusal
from agentmbx_protocol.queue_commands import senders_digest
from agentmbx_relay.store import (
    Invite,
    Store,
    StoreBroken,
    StoreBusy,
    StoreError,
    StoreFull,
    Transaction,
    Work,
)
from engines import ENGINES
from fakes import DAY_MS, START_MS
from store_works import (
    ALICE,
    BOB,
    CAROL,
    INSTANCE,
    LENGTH,
    NOW,
    OTHER_INSTANCE,
    OTHER_QUEUE,
    QUEUE,
    TEMPORARY,
    UNTIL,
    Shelf,
    Shown,
    ack,
    add_queue,
    command,
    fact,
    hold,
    known,
    knows,
    list_senders,
    parcel,
    refuse,
    retire,
    shown,
    sweep,
    vouch,
)

ERRORS = (StoreFull, StoreBusy, StoreBroken)


def test_every_engine_of_the_relay_is_held_to_this_contract() -> None:
    modules = {module.name for module in pkgutil.iter_modules(agentmbx_relay.__path__)}
    assert {name for name in modules if name.endswith("_store")} == set(ENGINES) - {"memory"}


async def test_it_is_a_store(empty: Shelf) -> None:
    assert isinstance(empty.store, Store)


# Commits


async def test_outcomes_come_in_the_order_of_the_works_that_were_run_one_after_the_other(
    shelf: Shelf,
) -> None:
    works: list[Work[object]] = [
        hold(parcel(0)),
        lambda t: t.used,
        hold(parcel(1)),
        lambda t: t.used,
    ]
    outcomes = await shelf.store.commit(works)
    assert outcomes[1] == LENGTH
    assert outcomes[3] == 2 * LENGTH
    assert await shelf.store.commit([]) == []


async def test_a_refusal_among_good_work_stands_in_its_place_and_harms_no_neighbour(
    shelf: Shelf,
) -> None:
    refusal = QueueFull()
    works: list[Work[object]] = [hold(parcel(0)), refuse(refusal), hold(parcel(1))]
    outcomes = await shelf.store.commit(works)
    assert outcomes == [[(fact(0), True)], refusal, [(fact(1), True)]]
    await shelf.crash()
    assert await shelf.waiting() == [parcel(0).data, parcel(1).data]


async def test_a_bug_in_one_work_is_raised_and_rolls_back_everything(furnished: Shelf) -> None:
    before = await furnished.picture()
    bug = ZeroDivisionError("a bug")

    def work(transaction: Transaction) -> None:
        transaction.retire(known(transaction, OTHER_QUEUE), NOW)
        transaction.put_invite(Invite(BOB, 1, NOW + 1))
        raise bug

    with pytest.raises(ZeroDivisionError) as raised:
        await furnished.store.commit([hold(parcel(6), sender=BOB), work, command(9)])
    assert raised.value is bug
    assert await furnished.picture() == before
    await furnished.crash()
    assert await furnished.picture() == before
    await furnished.do(hold(parcel(6), sender=BOB))


async def test_adding_a_queue_twice_is_a_bug_and_no_failure_of_the_disk(shelf: Shelf) -> None:
    before = await shelf.picture()
    with pytest.raises(Exception) as raised:  # noqa: PT011 - each engine has its own
        await shelf.store.commit([hold(parcel(0)), add_queue()])
    assert not isinstance(raised.value, StoreError | Refusal)
    assert await shelf.picture() == before


@pytest.mark.parametrize("error", ERRORS)
async def test_a_commit_that_fails_leaves_nothing_of_any_work(
    furnished: Shelf, error: type[StoreError]
) -> None:
    before = await furnished.picture()
    furnished.engine.fail_next_commit(error)
    with pytest.raises(error):
        await furnished.store.commit(
            [
                hold(parcel(6), sender=BOB),
                ack(parcel(0)),
                add_queue(b"N" * 32),
                list_senders(CAROL),
                command(7),
                sweep(NOW + 2 * DAY_MS),
                retire(OTHER_QUEUE),
                lambda t: t.put_invite(Invite(ALICE, 0, 0)),
                lambda t: t.vouch(BOB, 0),
                lambda t: t.save_clock(NOW + DAY_MS, NOW),
            ]
        )
    if error is StoreBroken:
        await furnished.crash()
    assert await furnished.picture() == before
    assert not await furnished.do(knows(b"N" * 32))
    await furnished.crash()
    assert await furnished.picture() == before


@pytest.mark.parametrize("instance", [INSTANCE, OTHER_INSTANCE])
@pytest.mark.parametrize("error", [StoreFull, StoreBusy])
async def test_the_work_of_a_failed_commit_can_be_run_again_as_if_it_had_never_been(
    shelf: Shelf, error: type[StoreError], instance: bytes
) -> None:
    works: list[Work[object]] = [
        lambda t: (known(t, QUEUE).counter, known(t, QUEUE).instance),
        command(5, lazily=True),
        hold(parcel(0)),
        command(6, instance=instance, lazily=instance == OTHER_INSTANCE),
    ]
    shelf.engine.fail_next_commit(error)
    with pytest.raises(error):
        await shelf.store.commit(works)
    outcomes = await shelf.store.commit(works)
    assert outcomes[0] == (1, INSTANCE)
    assert outcomes[2] == [(fact(0), True)]


async def test_after_the_disk_broke_nothing_is_committed_any_more(shelf: Shelf) -> None:
    shelf.engine.fail_next_commit(StoreBroken)
    for number in range(3):
        with pytest.raises(StoreBroken):
            await shelf.do(hold(parcel(number)))
    with pytest.raises(StoreBroken):
        await shelf.store.check()
    with pytest.raises(StoreBroken):
        await shelf.store.tidy()
    await shelf.crash()
    assert await shelf.waiting() == []


async def test_check_says_whether_the_store_takes_a_write(furnished: Shelf) -> None:
    before = await furnished.picture()
    await furnished.store.check()
    for error in ERRORS:
        furnished.engine.fail_next_commit(error)
        with pytest.raises(error):
            await furnished.store.check()
    await furnished.crash()
    assert await furnished.picture() == before


# Queues and senders


async def test_a_new_queue_has_counter_zero_no_instance_and_no_senders(empty: Shelf) -> None:
    def work(transaction: Transaction) -> object:
        return shown(transaction.add_queue(QUEUE, 0)), transaction.queue_count

    expected = Shown(0, b"", senders_digest(()), 0, 0, 0, 0, {})
    assert await empty.do(work) == (expected, 1)
    await empty.crash()
    assert shown(await empty.queue()) == expected


async def test_an_unknown_queue_is_none(empty: Shelf) -> None:
    assert await empty.do(lambda t: (t.queue(QUEUE), t.queue_count, t.used)) == (None, 0, 0)


async def test_a_command_is_durable_unless_it_is_lazy(shelf: Shelf) -> None:
    await shelf.do(command(2**63 - 1, instance=OTHER_INSTANCE))
    await shelf.crash()
    queue = await shelf.queue()
    assert (queue.counter, queue.instance) == (2**63 - 1, OTHER_INSTANCE)


async def test_a_lazy_counter_is_in_force_at_once(shelf: Shelf) -> None:
    outcomes = await shelf.store.commit(
        [command(5, lazily=True), lambda t: known(t, QUEUE).counter]
    )
    assert outcomes[1] == 5
    assert (await shelf.queue()).counter == 5


async def test_a_lazy_counter_may_be_lost_in_a_crash_but_never_moves_by_itself(
    shelf: Shelf,
) -> None:
    await shelf.do(command(5, lazily=True))
    await shelf.crash()
    assert (await shelf.queue()).counter in (1, 5)


WRITES: Mapping[str, Work[object]] = {
    "hold": hold(parcel(9)),
    "ack": ack(parcel(0)),
    "add_queue": add_queue(OTHER_QUEUE),
    "command": lambda t: t.command(known(t, TEMPORARY), 3, INSTANCE),
    "list_senders": list_senders(ALICE, CAROL),
    "retire": retire(TEMPORARY),
    "vouch": lambda t: t.vouch(QUEUE, 0),
    "put_invite": lambda t: t.put_invite(Invite(ALICE, 3, NOW)),
    "sweep of a row": sweep(UNTIL),
    "sweep of an invite": sweep(NOW + 5),
    "sweep of a voucher": sweep(NOW + 6),
    "save_url": lambda t: t.save_url("https://relay.example/"),
    "save_clock": lambda t: t.save_clock(NOW, NOW),
}


@pytest.mark.parametrize("name", WRITES)
async def test_a_lazy_counter_is_durable_with_the_next_commit_that_writes(
    shelf: Shelf, name: str
) -> None:
    await shelf.do(add_queue(TEMPORARY))
    await shelf.do(hold(parcel(0)))
    await shelf.do(lambda t: t.put_invite(Invite(BOB, 1, NOW + 5)))
    await shelf.do(lambda t: t.vouch(CAROL, NOW + 6))
    if name == "sweep of a voucher":
        await shelf.do(sweep(NOW + 5))
    await shelf.do(command(5, lazily=True))
    await shelf.do(command(6, lazily=True))
    await shelf.do(WRITES[name])
    await shelf.crash()
    assert (await shelf.queue()).counter == 6


async def test_a_lazy_counter_is_durable_with_a_write_of_its_own_commit(shelf: Shelf) -> None:
    await shelf.store.commit([hold(parcel(0)), command(5, lazily=True)])
    await shelf.crash()
    assert (await shelf.queue()).counter == 5


async def test_a_lazy_counter_survives_close(shelf: Shelf) -> None:
    await shelf.do(command(5, lazily=True))
    await shelf.reopen()
    assert (await shelf.queue()).counter == 5


@pytest.mark.parametrize("error", [StoreFull, StoreBusy])
async def test_a_lazy_counter_is_not_lower_after_a_failed_commit(
    shelf: Shelf, error: type[StoreError]
) -> None:
    await shelf.do(command(5, lazily=True))
    shelf.engine.fail_next_commit(error)
    with pytest.raises(error):
        await shelf.do(hold(parcel(0)))
    assert (await shelf.queue()).counter == 5
    await shelf.do(hold(parcel(0)))
    await shelf.crash()
    assert (await shelf.queue()).counter == 5


async def test_a_lazy_counter_is_not_lower_after_a_bug(shelf: Shelf) -> None:
    await shelf.do(command(5, lazily=True))
    with pytest.raises(ZeroDivisionError):
        await shelf.store.commit([command(6, lazily=True), hold(parcel(0)), lambda _: 1 // 0])
    assert (await shelf.queue()).counter == 5


async def test_the_list_is_replaced_as_a_whole(shelf: Shelf) -> None:
    await shelf.do(list_senders(BOB, CAROL))
    for _ in range(2):
        queue = await shelf.queue()
        assert shelf.store.sender(QUEUE, ALICE) is None
        for key in (BOB, CAROL):
            found = shelf.store.sender(QUEUE, key)
            assert found is not None
            assert (found[0].key, found[1].key, found[1].listed) == (QUEUE, key, True)
        assert queue.senders_digest == senders_digest([BOB, CAROL])
        assert queue.listed_count == 2
        await shelf.crash()


async def test_the_digest_of_the_list_does_not_depend_on_its_order_of_listing(
    shelf: Shelf,
) -> None:
    await shelf.do(list_senders(CAROL))
    await shelf.do(list_senders(ALICE, BOB, CAROL))
    assert (await shelf.queue()).senders_digest == senders_digest([ALICE, BOB, CAROL])
    await shelf.crash()
    assert (await shelf.queue()).senders_digest == senders_digest([ALICE, BOB, CAROL])


async def test_a_sender_is_found_only_in_a_live_queue_that_lists_it(shelf: Shelf) -> None:
    await shelf.do(add_queue(OTHER_QUEUE, [CAROL]))
    assert shelf.store.sender(QUEUE, ALICE) is not None
    assert shelf.store.sender(QUEUE, CAROL) is None
    assert shelf.store.sender(OTHER_QUEUE, ALICE) is None
    assert shelf.store.sender(b"X" * 32, ALICE) is None
    await shelf.do(retire())
    assert shelf.store.sender(QUEUE, ALICE) is None
    assert shelf.store.sender(OTHER_QUEUE, CAROL) is not None


async def test_what_an_unlisted_sender_deposited_stays_and_stays_charged(shelf: Shelf) -> None:
    await shelf.do(hold(parcel(0), parcel(1)))
    await shelf.do(ack(parcel(1)))
    charged = LENGTH + limits.TOMBSTONE_BYTES
    await shelf.do(list_senders(BOB))
    for _ in range(2):
        queue = await shelf.queue()
        assert queue.senders[ALICE].listed is False
        assert queue.senders[ALICE].used == queue.used == charged
        assert await shelf.waiting() == [parcel(0).data]
        await shelf.crash()
    await shelf.do(list_senders(ALICE))
    assert await shelf.used(ALICE) == charged
    assert (await shelf.do(hold(parcel(0))))[0][1] is False


async def test_an_unlisted_sender_is_charged_until_its_last_row_is_gone(shelf: Shelf) -> None:
    await shelf.do(hold(parcel(0)))
    await shelf.do(list_senders())
    await shelf.do(ack(parcel(0)))
    assert (await shelf.queue()).used == limits.TOMBSTONE_BYTES
    await shelf.do(sweep(UNTIL))
    assert (await shelf.queue()).used == 0
    await shelf.do(list_senders(ALICE))
    assert (await shelf.do(hold(parcel(0))))[0][1] is True
    assert await shelf.used(ALICE) == LENGTH


async def test_listing_256_senders_and_then_others_leaves_no_trace_of_the_first(
    shelf: Shelf,
) -> None:
    many = sorted(hashlib.sha256(bytes([n])).digest() for n in range(256))
    await shelf.do(list_senders(*many))
    assert (await shelf.queue()).listed_count == 256
    await shelf.do(hold(parcel(0), sender=many[7]))
    await shelf.do(list_senders(ALICE))
    assert all(shelf.store.sender(QUEUE, key) is None for key in many)
    for _ in range(2):
        queue = await shelf.queue()
        assert set(queue.senders) == {ALICE, many[7]}
        assert queue.listed_count == 1
        assert queue.senders_digest == senders_digest([ALICE])
        await shelf.crash()
    await shelf.do(sweep(UNTIL))
    for _ in range(2):
        assert set((await shelf.queue()).senders) == {ALICE}
        await shelf.crash()


# Invites, vouchers, clock


async def test_an_invite_is_kept_replaced_and_removed_with_its_last_use(empty: Shelf) -> None:
    invite = Invite(ALICE, 2, NOW)
    await empty.do(lambda t: t.put_invite(invite))
    await empty.crash()
    assert await empty.do(lambda t: (t.invite(ALICE), t.invite(BOB))) == (invite, None)
    spent = Invite(ALICE, 1, NOW)
    await empty.do(lambda t: t.put_invite(spent))
    assert await empty.do(lambda t: t.invite(ALICE)) == spent
    await empty.do(lambda t: t.put_invite(Invite(ALICE, 0, NOW)))
    await empty.crash()
    assert await empty.do(lambda t: t.invite(ALICE)) is None


async def test_a_sweep_removes_invites_that_are_over(empty: Shelf) -> None:
    await empty.do(lambda t: t.put_invite(Invite(ALICE, 1, NOW)))
    await empty.do(lambda t: t.put_invite(Invite(BOB, 1, NOW + 1)))
    await empty.do(sweep(NOW - 1))
    assert await empty.do(lambda t: t.invite(ALICE)) is not None
    await empty.do(sweep(NOW))
    await empty.crash()
    assert await empty.do(lambda t: t.invite(ALICE)) is None
    assert await empty.do(lambda t: t.invite(BOB)) is not None


async def test_vouchers_are_kept_by_key_until_they_are_over(empty: Shelf) -> None:
    for key, ends_ms in ((ALICE, 0), (ALICE, NOW), (ALICE, NOW + 1), (ALICE, NOW + 1), (BOB, NOW)):
        await empty.do(vouch(key, ends_ms))
    await empty.crash()
    assert sorted(await empty.do(lambda t: t.vouched(ALICE))) == [0, NOW, NOW + 1, NOW + 1]
    assert list(await empty.do(lambda t: t.vouched(BOB))) == [NOW]
    assert list(await empty.do(lambda t: t.vouched(CAROL))) == []
    await empty.do(sweep(NOW))
    assert sorted(await empty.do(lambda t: t.vouched(ALICE))) == [0, NOW + 1, NOW + 1]
    assert list(await empty.do(lambda t: t.vouched(BOB))) == []


async def test_a_refused_work_that_only_looked_leaves_the_invite(empty: Shelf) -> None:
    await empty.do(lambda t: t.put_invite(Invite(ALICE, 1, NOW)))

    def work(transaction: Transaction) -> None:
        assert transaction.invite(ALICE)
        raise NotAdmitted

    with pytest.raises(NotAdmitted):
        await empty.do(work)
    assert await empty.do(lambda t: t.invite(ALICE)) == Invite(ALICE, 1, NOW)


async def test_the_clock_is_given_back_as_it_was_saved(empty: Shelf) -> None:
    await empty.do(lambda t: t.save_clock(NOW, START_MS - 5))
    assert empty.store.saved_clock() == (NOW, START_MS - 5)
    await empty.crash()
    assert empty.store.saved_clock() == (NOW, START_MS - 5)


async def test_the_saved_clock_is_not_below_anything_accepted_and_takes_the_wall_clock_along(
    shelf: Shelf,
) -> None:
    await shelf.do(lambda t: t.save_clock(NOW, START_MS - 5))
    await shelf.do(hold(parcel(0), now_ms=NOW + 4000))
    await shelf.do(hold(parcel(1), now_ms=NOW + 3000))
    await shelf.do(ack(parcel(0), parcel(1)))
    for _ in range(2):
        assert shelf.store.saved_clock() == (NOW + 4000, START_MS - 5 + 4000)
        await shelf.crash()
    await shelf.do(lambda t: t.save_clock(NOW + 5000, START_MS + 1))
    assert shelf.store.saved_clock() == (NOW + 5000, START_MS + 1)


# Opening and closing


async def test_a_store_that_was_reopened_gives_the_same_picture(furnished: Shelf) -> None:
    before = await furnished.picture()
    await furnished.reopen()
    assert await furnished.picture() == before
    await furnished.crash()
    assert await furnished.picture() == before
    await furnished.do(retire())
    after = await furnished.picture()
    assert after != before
    await furnished.reopen()
    assert await furnished.picture() == after


async def test_tidying_changes_nothing_that_can_be_seen(furnished: Shelf) -> None:
    before = await furnished.picture()
    for _ in range(3):
        await furnished.store.tidy()
    assert await furnished.picture() == before


async def test_closing_twice_is_safe(furnished: Shelf) -> None:
    before = await furnished.picture()
    await furnished.store.close()
    await furnished.store.close()
    furnished.store = await furnished.engine.open()
    assert await furnished.picture() == before
