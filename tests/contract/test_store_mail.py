"""The same contract: envelopes, their facts and charges, handing over, retiring and sweeping."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from agentmbx_protocol import limits
from agentmbx_protocol.queue_commands import senders_digest
from agentmbx_relay.store import Swept, Transaction, Work
from fakes import DAY_MS
from store_works import (
    ALICE,
    ALL,
    BOB,
    LENGTH,
    NOW,
    OTHER_QUEUE,
    QUEUE,
    TEMPORARY,
    TTL_S,
    UNTIL,
    Shelf,
    ack,
    add_queue,
    fact,
    find,
    hold,
    known,
    knows,
    list_senders,
    parcel,
    retire,
    sweep,
)

# Envelopes, facts and charges


async def test_an_envelope_is_held_from_now_for_its_ttl(shelf: Shelf) -> None:
    assert await shelf.do(hold(parcel(0, ttl_s=7))) == [(fact(0, ttl_s=7), True)]
    await shelf.crash()
    assert await shelf.do(lambda t: t.find(parcel(0).digest)) == fact(0, ttl_s=7)


async def test_rule_2_the_same_envelope_has_the_same_facts_wherever_it_comes_again(
    shelf: Shelf,
) -> None:
    outcomes = await shelf.store.commit(
        [hold(parcel(0), parcel(1), parcel(0)), hold(parcel(0), now_ms=NOW + 1)]
    )
    assert outcomes == [[(fact(0), True), (fact(1), True), (fact(0), False)], [(fact(0), False)]]
    for now_ms in (NOW + 2, UNTIL - 1):
        # A later copy that asks for more changes nothing either.
        again = await shelf.do(hold(parcel(0, ttl_s=2 * TTL_S), now_ms=now_ms))
        assert again == [(fact(0), False)]
        await shelf.crash()
    assert await shelf.used(ALICE) == 2 * LENGTH
    assert await shelf.waiting() == [parcel(0).data, parcel(1).data]


@pytest.mark.parametrize("numbers", [(), (0,), (0, 1, 2, 3, 4), (4, 4, 0), range(100)])
async def test_what_a_store_is_told_to_expect_changes_no_outcome(
    shelf: Shelf, numbers: Sequence[int]
) -> None:
    await shelf.do(hold(parcel(0), parcel(1), parcel(2, ttl_s=1)))
    await shelf.do(ack(parcel(1)))
    now_ms = NOW + 1000
    works: list[Work[object]] = [
        hold(*(parcel(number) for number in (0, 1, 2, 3, 3)), now_ms=now_ms),
        ack(parcel(3), parcel(0)),
        find(parcel(3)),
        sweep(UNTIL),
        find(parcel(0)),
        find(parcel(3)),
        hold(parcel(0), now_ms=now_ms),
    ]
    outcomes = await shelf.store.commit(works, [parcel(number).digest for number in numbers])
    new = [(fact(2, now_ms), True), (fact(3, now_ms), True), (fact(3, now_ms), False)]
    assert outcomes == [
        [(fact(0), False), (fact(1), False), *new],
        2,
        fact(3, now_ms),
        Swept(0, 0, 2, more=False),
        None,
        fact(3, now_ms),
        [(fact(0, now_ms), True)],
    ]
    await shelf.crash()
    assert await shelf.waiting() == [parcel(2).data, parcel(0).data]


async def test_rule_2_a_tombstone_keeps_the_facts_to_the_until_time(shelf: Shelf) -> None:
    await shelf.do(hold(parcel(0)))
    await shelf.do(ack(parcel(0)))
    await shelf.do(sweep(UNTIL - 1))
    await shelf.crash()
    assert await shelf.do(lambda t: t.find(parcel(0).digest)) == fact(0)
    assert await shelf.do(hold(parcel(0), now_ms=UNTIL - 1)) == [(fact(0), False)]
    assert await shelf.waiting() == []
    assert await shelf.used(ALICE) == limits.TOMBSTONE_BYTES


@pytest.mark.parametrize("acked", [False, True])
@pytest.mark.parametrize("swept", [False, True])
async def test_from_the_until_time_on_it_is_as_if_the_envelope_had_never_been(
    shelf: Shelf, *, acked: bool, swept: bool
) -> None:
    await shelf.do(hold(parcel(0), parcel(1, ttl_s=2 * TTL_S)))
    if acked:
        await shelf.do(ack(parcel(0)))
    if swept:
        await shelf.do(sweep(UNTIL))
    assert await shelf.do(hold(parcel(0), now_ms=UNTIL)) == [(fact(0, UNTIL), True)]
    await shelf.crash()
    # It is the last now, and charged once.
    assert await shelf.waiting() == [parcel(1).data, parcel(0).data]
    assert await shelf.used(ALICE) == 2 * LENGTH
    assert shelf.totals() == {"queues": 1, "envelopes": 2, "tombstones": 0, "bytes": 2 * LENGTH}


async def test_charges_and_totals_are_the_sums_of_what_is_there(shelf: Shelf) -> None:
    await shelf.do(add_queue(OTHER_QUEUE, [ALICE]))
    await shelf.do(hold(parcel(0, 2000), parcel(1, 3000)))
    await shelf.do(hold(parcel(2, 5000), sender=BOB))
    await shelf.do(hold(parcel(3, 7000), key=OTHER_QUEUE))
    await shelf.do(ack(parcel(1, 3000), parcel(2, 5000)))
    await shelf.do(hold(parcel(4, 11000, ttl_s=1), sender=BOB))
    await shelf.do(sweep(NOW + 1000))
    for _ in range(2):
        assert await shelf.used(ALICE) == 2000 + 128
        assert await shelf.used(BOB) == 128
        assert (await shelf.queue()).used == 2000 + 128 + 128
        assert await shelf.used(ALICE, OTHER_QUEUE) == 7000
        assert (await shelf.queue(OTHER_QUEUE)).used == 7000
        assert await shelf.do(lambda t: t.used) == 2000 + 128 + 128 + 7000
        expected = {"queues": 2, "envelopes": 2, "tombstones": 2, "bytes": 9256}
        assert shelf.totals() == expected
        await shelf.crash()


async def test_the_room_on_the_disk_shrinks_by_what_the_transaction_will_write(
    shelf: Shelf,
) -> None:
    def work(transaction: Transaction) -> list[int]:
        queue = known(transaction, QUEUE)
        free = [transaction.free_bytes]
        for each in (parcel(0), parcel(0), parcel(1, 100_000)):
            transaction.hold(queue, queue.senders[ALICE], each, NOW)
            free.append(transaction.free_bytes)
        return free

    at_first, one, again, two = await shelf.do(work)
    assert at_first - one >= LENGTH
    assert again == one
    assert one - two >= 100_000
    assert shelf.store.totals()["free_bytes"] > 0


async def test_an_ack_counts_once_and_only_by_the_queue_that_holds(shelf: Shelf) -> None:
    await shelf.do(add_queue(OTHER_QUEUE, [ALICE]))
    await shelf.do(hold(parcel(0), parcel(1)))
    assert await shelf.do(ack(parcel(0), key=OTHER_QUEUE)) == 0
    assert await shelf.waiting() == [parcel(0).data, parcel(1).data]
    assert await shelf.do(ack(parcel(0), parcel(0), parcel(7))) == 1
    assert await shelf.do(ack(parcel(0))) == 0
    assert await shelf.do(ack()) == 0
    assert await shelf.do(ack(*[parcel(0)] * 200, *[parcel(1)] * 200, parcel(1))) == 1
    await shelf.crash()
    assert await shelf.do(ack(parcel(0))) == 0
    assert await shelf.waiting() == []
    assert (await shelf.queue()).used == 2 * limits.TOMBSTONE_BYTES


async def test_an_unknown_digest_has_no_facts(furnished: Shelf) -> None:
    assert await furnished.do(lambda t: t.find(parcel(9).digest)) is None


SEQUENCES: Mapping[str, tuple[Sequence[Work[object]], dict[str, int]]] = {
    "again": ([hold(parcel(0)), hold(parcel(0))], {"envelopes": 1}),
    "acked": ([hold(parcel(0)), ack(parcel(0))], {"tombstones": 1}),
    "acked again": ([hold(parcel(0)), ack(parcel(0)), ack(parcel(0))], {"tombstones": 1}),
    "expired": ([hold(parcel(0)), sweep(UNTIL)], {}),
    "tombstone expired": ([hold(parcel(0)), ack(parcel(0)), sweep(UNTIL)], {}),
    "new after its time": ([hold(parcel(0)), hold(parcel(0), now_ms=UNTIL)], {"envelopes": 1}),
    "new after it was swept": (
        [hold(parcel(0)), sweep(UNTIL), hold(parcel(0), now_ms=UNTIL)],
        {"envelopes": 1},
    ),
    "new after its tombstone": (
        [hold(parcel(0)), ack(parcel(0)), hold(parcel(0), now_ms=UNTIL), ack(parcel(0))],
        {"tombstones": 1},
    ),
    "dropped": ([hold(parcel(0)), retire(), sweep(NOW)], {"queues": 0}),
    "unlisted": ([hold(parcel(0)), list_senders(), sweep(UNTIL), list_senders(ALICE)], {}),
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("together", [True, False])
async def test_works_see_what_those_before_them_did_in_one_commit_as_in_many(
    shelf: Shelf, name: str, *, together: bool
) -> None:
    works, totals = SEQUENCES[name]
    for batch in [works] if together else [[work] for work in works]:
        await shelf.store.commit(batch)
    length = {"envelopes": LENGTH, "tombstones": limits.TOMBSTONE_BYTES}
    charged = sum(length.get(kind, 0) * count for kind, count in totals.items())
    expected = {"queues": 1, "envelopes": 0, "tombstones": 0, "bytes": charged} | totals
    for _ in range(2):
        assert shelf.totals() == expected
        assert len(await shelf.waiting()) == expected["envelopes"]
        assert (await shelf.queue()).used == charged
        await shelf.crash()


# Handing over


async def test_envelopes_wait_in_the_order_of_acceptance_whoever_sent_them(shelf: Shelf) -> None:
    await shelf.do(hold(parcel(3)))
    await shelf.store.commit([hold(parcel(1), sender=BOB, now_ms=NOW + 1), hold(parcel(4))])
    await shelf.do(hold(parcel(2), parcel(0), sender=BOB, now_ms=NOW - 5))
    await shelf.do(ack(parcel(4)))
    expected = [parcel(n).data for n in (3, 1, 2, 0)]
    assert await shelf.waiting() == expected
    await shelf.crash()
    await shelf.do(hold(parcel(5), now_ms=NOW - 9))
    assert await shelf.waiting() == [*expected, parcel(5).data]


async def test_as_many_wait_as_fit_with_four_bytes_for_each_length(shelf: Shelf) -> None:
    lengths = (1300, 2000, 1500)
    parcels = [parcel(number, length) for number, length in enumerate(lengths)]
    await shelf.do(hold(*parcels))
    for count in (1, 2, 3):
        bytes_max = sum(lengths[:count]) + 4 * count
        assert await shelf.waiting(bytes_max) == [each.data for each in parcels[:count]]
        assert len(await shelf.waiting(bytes_max - 1)) == max(count - 1, 1)


@pytest.mark.parametrize("bytes_max", [0, 1, LENGTH + 3, 2**32 - 1])
async def test_at_least_one_waits_if_any_does(shelf: Shelf, bytes_max: int) -> None:
    assert await shelf.waiting(bytes_max) == []
    await shelf.do(hold(parcel(0), parcel(1)))
    assert (await shelf.waiting(bytes_max))[0] == parcel(0).data
    await shelf.do(ack(parcel(0), parcel(1)))
    assert await shelf.waiting(bytes_max) == []


async def test_what_does_not_fit_is_not_overtaken(shelf: Shelf) -> None:
    await shelf.do(hold(parcel(0), parcel(1, 9000), parcel(2)))
    assert await shelf.waiting(2 * LENGTH + 8) == [parcel(0).data]


async def test_no_more_wait_than_one_collect_can_ack(shelf: Shelf) -> None:
    # The shorter ones come last.
    parcels = [parcel(number, 2000 - number) for number in range(limits.COLLECT_ACKS_MAX + 1)]
    await shelf.do(hold(*parcels))
    assert await shelf.waiting() == [each.data for each in parcels[:-1]]
    assert await shelf.do(ack(*parcels[:-1])) == limits.COLLECT_ACKS_MAX
    assert await shelf.waiting() == [parcels[-1].data]


async def test_only_what_the_queue_itself_holds_waits(furnished: Shelf) -> None:
    assert await furnished.waiting() == [parcel(n).data for n in (0, 2, 4)]
    assert await furnished.waiting(key=OTHER_QUEUE) == [parcel(5).data]
    assert await furnished.waiting(key=TEMPORARY) == []


async def test_many_may_read_while_one_commits(shelf: Shelf) -> None:
    queue = await shelf.queue()

    async def read() -> int:
        counts = [len(await shelf.store.waiting(queue, ALL)) for _ in range(20)]
        assert counts == sorted(counts)
        return counts[-1]

    async def write() -> None:
        for number in range(20):
            await shelf.do(hold(parcel(number)))

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read()) for _ in range(5)]
        group.create_task(write())
    assert all(0 <= reader.result() <= 20 for reader in readers)
    assert len(await shelf.waiting()) == 20


# Retiring and sweeping


async def test_a_retired_queue_lists_nobody_and_hands_out_nothing(furnished: Shelf) -> None:
    before = await furnished.queue()
    await furnished.do(retire(now_ms=NOW + 50))
    # One that was looked up before is retired as well.
    assert await furnished.store.waiting(before, ALL) == []
    for _ in range(2):
        queue = await furnished.queue()
        assert queue.retired
        assert (queue.retired_ms, queue.listed_count) == (NOW + 50, 0)
        assert queue.senders_digest == senders_digest(())
        assert await furnished.waiting() == []
        assert await furnished.do(lambda t: t.queue_count) == 2
        assert furnished.totals()["queues"] == 2
        await furnished.crash()


async def test_a_sweep_removes_what_a_retired_queue_holds_and_nothing_else(
    furnished: Shelf,
) -> None:
    await furnished.do(retire())
    assert await furnished.do(sweep(NOW)) == Swept(0, 3, 0, more=False)
    assert (await furnished.queue()).used == 2 * limits.TOMBSTONE_BYTES
    assert await furnished.waiting(key=OTHER_QUEUE) == [parcel(5).data]
    await furnished.crash()
    assert furnished.totals() == {
        "queues": 2,
        "envelopes": 1,
        "tombstones": 2,
        "bytes": LENGTH + 2 * limits.TOMBSTONE_BYTES,
    }


async def test_a_retired_queue_is_known_for_90_days(furnished: Shelf) -> None:
    await furnished.do(retire())
    await furnished.do(sweep(NOW + 90 * DAY_MS - 1))
    assert (await furnished.queue()).retired
    assert await furnished.do(lambda t: t.vouched(QUEUE)) == [0]
    await furnished.do(sweep(NOW + 90 * DAY_MS))
    for _ in range(2):
        assert not await furnished.do(knows(QUEUE))
        assert await furnished.do(lambda t: t.vouched(QUEUE)) == []
        assert await furnished.do(knows(OTHER_QUEUE))
        await furnished.crash()
    await furnished.do(add_queue())
    assert (await furnished.queue()).counter == 1


async def test_rule_3_a_sweep_removes_nothing_before_its_time(furnished: Shelf) -> None:
    before = await furnished.picture()
    assert await furnished.do(sweep(UNTIL - 1)) == Swept(0, 0, 0, more=False)
    assert await furnished.picture() == before


async def test_a_sweep_removes_what_is_past_its_time(furnished: Shelf) -> None:
    await furnished.do(hold(parcel(6, ttl_s=TTL_S + 1), sender=BOB))
    assert await furnished.do(sweep(UNTIL)) == Swept(4, 0, 2, more=False)
    for _ in range(2):
        assert await furnished.waiting() == [parcel(6).data]
        assert furnished.totals() == {
            "queues": 3,
            "envelopes": 1,
            "tombstones": 0,
            "bytes": LENGTH,
        }
        assert await furnished.do(lambda t: t.find(parcel(1).digest)) is None
        await furnished.crash()


async def test_a_sweep_is_done_in_steps_that_say_whether_there_is_more(shelf: Shelf) -> None:
    await shelf.do(add_queue(OTHER_QUEUE, [ALICE]))
    await shelf.do(hold(*map(parcel, range(7))))
    await shelf.do(ack(parcel(1), parcel(2)))
    await shelf.do(hold(*(parcel(n, ttl_s=2 * TTL_S) for n in range(7, 12)), key=OTHER_QUEUE))
    await shelf.do(retire(OTHER_QUEUE))
    removed = []
    while True:
        before = shelf.totals()
        swept = await shelf.do(sweep(UNTIL, 5))
        after = shelf.totals()
        rows = swept.expired + swept.dropped + swept.tombstones
        assert rows <= 5
        assert after["envelopes"] == before["envelopes"] - swept.expired - swept.dropped
        assert after["tombstones"] == before["tombstones"] - swept.tombstones
        removed.append(rows)
        if not swept.more:
            break
    assert sum(removed) == 12
    assert len(removed) in (3, 4)
    assert shelf.totals()["bytes"] == 0


async def test_a_sweep_that_may_remove_no_row_removes_none(furnished: Shelf) -> None:
    await furnished.do(retire())
    before = await furnished.picture()
    assert await furnished.do(sweep(NOW, 0)) == Swept(0, 0, 0, more=True)
    assert await furnished.picture() == before


async def test_a_sweep_retires_a_queue_whose_lifetime_is_over(furnished: Shelf) -> None:
    ends_ms = NOW + DAY_MS
    await furnished.do(hold(parcel(6, ttl_s=7 * 24 * 3600), sender=BOB, key=TEMPORARY))
    await furnished.do(sweep(ends_ms - 1))
    assert not (await furnished.queue(TEMPORARY)).retired
    swept = await furnished.do(sweep(ends_ms))
    assert swept.dropped == 1
    for _ in range(2):
        assert (await furnished.queue(TEMPORARY)).retired_ms == ends_ms
        assert furnished.store.sender(TEMPORARY, BOB) is None
        assert await furnished.do(lambda t: t.queue_count) == 2
        await furnished.crash()
    await furnished.do(sweep(ends_ms + DAY_MS - 1))
    assert (await furnished.queue(TEMPORARY)).retired_ms == ends_ms


async def test_a_retired_queue_is_not_forgotten_before_its_last_tombstone(
    furnished: Shelf,
) -> None:
    ends_ms, week = NOW + DAY_MS, parcel(6, ttl_s=7 * 24 * 3600)
    await furnished.do(hold(week, sender=BOB, key=TEMPORARY))
    await furnished.do(ack(week, key=TEMPORARY))
    await furnished.do(sweep(ends_ms))
    await furnished.do(sweep(NOW + 7 * DAY_MS - 1))
    for _ in range(2):
        assert (await furnished.queue(TEMPORARY)).used == limits.TOMBSTONE_BYTES
        await furnished.crash()
    assert (await furnished.do(sweep(NOW + 7 * DAY_MS))).tombstones == 1
    assert not await furnished.do(knows(TEMPORARY))
