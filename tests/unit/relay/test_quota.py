"""How room is shared, tried on the store in memory, which the contract suite vouches for."""

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmbx_protocol import limits
from agentmbx_protocol.errors import QueueFull, RelayFull
from agentmbx_relay.quota import FULL_RETRY_S, Quota
from agentmbx_relay.store import Deposit, Queue
from fakes import PLENTY, START_MS, Image, MemoryTransaction

BOUND = 120_000
HALF = BOUND // 2
KEYS = tuple(bytes([letter]) * 32 for letter in range(65, 75))
NUMBERS = itertools.count()


class Room:
    """One queue of `BOUND` bytes and the senders that it lists."""

    def __init__(
        self, senders: int, *, quota: Quota | None = None, free_bytes: int = PLENTY
    ) -> None:
        self.quota = quota or Quota(BOUND, PLENTY, 0)
        self.transaction = MemoryTransaction(Image(), free_bytes)
        self.queue = self.transaction.add_queue(b"Q" * 32, 0)
        self.held: dict[int, list[bytes]] = {number: [] for number in range(len(KEYS))}
        self.list(*range(senders))

    def list(self, *senders: int) -> None:
        self.transaction.list_senders(self.queue, [KEYS[number] for number in senders])

    def deposit(self, sender: int, length: int) -> None:
        """Hold an envelope of that length, or raise what the quota says."""
        number = next(NUMBERS)
        one = self.queue.senders[KEYS[sender]]
        self.quota.check(self.transaction, self.queue, one, length)
        digest = hashlib.sha256(str(number).encode()).digest()
        self.transaction.hold(self.queue, one, Deposit(digest, length, 60, b""), START_MS)
        self.held[sender].append(digest)

    def takes(self, sender: int, length: int) -> bool:
        one = self.queue.senders[KEYS[sender]]
        try:
            self.quota.check(self.transaction, self.queue, one, length)
        except QueueFull:
            return False
        return True

    def flood(self, sender: int, length: int = 1_000) -> int:
        """How many bytes a sender gets in that sends as fast as it can."""
        taken = 0
        while self.takes(sender, length):
            self.deposit(sender, length)
            taken += length
        return taken

    def ack(self, sender: int) -> None:
        self.transaction.ack(self.queue, self.held[sender])
        self.held[sender] = []

    def used(self, sender: int) -> int:
        return self.queue.senders[KEYS[sender]].used

    @property
    def share(self) -> int:
        return HALF // max(self.queue.listed_count, 1)


def test_a_sender_that_is_alone_may_use_the_whole_queue_to_the_byte() -> None:
    room = Room(1)
    room.deposit(0, BOUND - 5_000)
    assert not room.takes(0, 5_001)
    room.deposit(0, 5_000)
    assert room.queue.used == BOUND
    with pytest.raises(QueueFull) as refused:
        room.deposit(0, limits.TOMBSTONE_BYTES)
    assert refused.value.retry_after_s == FULL_RETRY_S


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10])
def test_half_is_common_and_half_is_divided(count: int) -> None:
    room = Room(count)
    assert room.flood(0) == HALF + HALF // count
    assert [room.flood(number) for number in range(1, count)] == [HALF // count] * (count - 1)
    assert room.queue.used == BOUND


def test_the_common_half_goes_to_those_who_come_first() -> None:
    room = Room(3)
    room.deposit(0, 20_000 + 35_000)
    room.deposit(1, 20_000 + 25_000)
    assert not room.takes(0, limits.TOMBSTONE_BYTES)
    assert not room.takes(1, limits.TOMBSTONE_BYTES)
    assert room.takes(2, 20_000)
    assert not room.takes(2, 20_001)


def test_q1_a_flood_from_one_sender_stops_nobody_else_and_reading_makes_room_again() -> None:
    room = Room(4)
    flooded = room.flood(0, 1_300)
    assert flooded <= HALF + room.share
    for _ in range(10):
        room.deposit(1, 1_300)
    room.flood(2, 1_300)
    room.deposit(3, 10_000)
    room.ack(0)
    assert room.used(0) == flooded // 1_300 * limits.TOMBSTONE_BYTES
    assert room.flood(0, 1_300) > 0


def test_a_full_queue_does_not_fill_another() -> None:
    room = Room(1)
    room.flood(0)
    other = room.transaction.add_queue(b"P" * 32, 0)
    room.transaction.list_senders(other, [KEYS[0]])
    room.quota.check(room.transaction, other, other.senders[KEYS[0]], BOUND)


def test_even_a_tiny_envelope_is_counted_as_its_tombstone_will_be() -> None:
    room = Room(1)
    room.deposit(0, BOUND - limits.TOMBSTONE_BYTES + 1)
    assert not room.takes(0, 1)


def test_tombstones_count_against_the_share() -> None:
    room = Room(2)
    room.flood(0, limits.TOMBSTONE_BYTES)
    room.ack(0)
    assert not room.takes(0, limits.TOMBSTONE_BYTES)
    assert room.takes(1, room.share)


def test_what_an_unlisted_sender_left_is_taken_from_the_common_half() -> None:
    room = Room(2)
    room.deposit(0, 50_000)
    room.list(1)
    assert room.takes(1, room.share + HALF - 50_000)
    assert not room.takes(1, room.share + HALF - 50_000 + 1)


def test_the_relay_has_a_bound_over_all_queues() -> None:
    room = Room(2, quota=Quota(BOUND, 10_000, 0))
    room.deposit(0, 9_000)
    room.quota.check(room.transaction, room.queue, room.queue.senders[KEYS[1]], 1_000)
    with pytest.raises(RelayFull) as refused:
        room.deposit(1, 1_001)
    assert refused.value.retry_after_s == FULL_RETRY_S


def test_the_reserve_of_the_disk_stays_free() -> None:
    room = Room(1, quota=Quota(BOUND, PLENTY, 50_000), free_bytes=100_000)
    free = room.transaction.free_bytes
    assert room.takes(0, free - 50_000)
    with pytest.raises(RelayFull):
        room.deposit(0, free - 50_000 + 1)
    room.deposit(0, 20_000)
    # What this transaction is about to write is not free any more.
    with pytest.raises(RelayFull):
        room.deposit(0, free - 50_000 - 20_000)


def test_a_bound_that_cannot_be_halved_loses_nothing() -> None:
    room = Room(1, quota=Quota(BOUND + 1, PLENTY, 0))
    room.deposit(0, BOUND + 1)
    assert not room.takes(0, 1)


senders = st.integers(0, len(KEYS) - 1)
lengths = st.integers(limits.TOMBSTONE_BYTES, 30_000)
deposits = st.lists(st.tuples(senders, lengths, st.booleans()), max_size=60)


def crowd(room: Room, acts: list[tuple[int, int, bool]]) -> None:
    """Let senders do what they like: each act is a deposit, perhaps after the owner has acked."""
    for sender, length, acked in acts:
        one = room.queue.senders.get(KEYS[sender])
        if acked:
            room.ack(sender)
        if one is not None and one.listed and room.takes(sender, length):
            room.deposit(sender, length)


@given(count=st.integers(1, len(KEYS)), acts=deposits, floods=st.lists(senders, max_size=5))
def test_rule_3_no_set_of_senders_can_push_another_out_of_its_share(
    count: int, acts: list[tuple[int, int, bool]], floods: list[int]
) -> None:
    room = Room(count)
    crowd(room, acts)
    for sender in floods:
        if sender < count:
            room.flood(sender, 977)
    assert room.queue.used <= BOUND
    for sender in range(count):
        left = room.share - room.used(sender)
        if left >= limits.TOMBSTONE_BYTES:
            room.deposit(sender, left)
            assert room.used(sender) == room.share
    assert room.queue.used <= BOUND


@given(
    before=st.frozensets(senders, min_size=1),
    after=st.frozensets(senders, min_size=1),
    acts=deposits,
    later=deposits,
)
def test_rule_3_after_a_change_of_the_list_each_sender_still_has_its_whole_share(
    before: frozenset[int],
    after: frozenset[int],
    acts: list[tuple[int, int, bool]],
    later: list[tuple[int, int, bool]],
) -> None:
    room = Room(0)
    room.list(*before)
    crowd(room, acts)
    for sender in before:
        room.flood(sender, 1_511)
    room.list(*after)
    crowd(room, later)
    for sender in after:
        left = room.share - room.used(sender)
        if left >= limits.TOMBSTONE_BYTES:
            room.deposit(sender, left)
    assert room.queue.used <= BOUND * 3 // 2


@given(
    st.lists(
        st.one_of(
            st.tuples(senders, lengths, st.booleans()),
            st.frozensets(senders, max_size=len(KEYS)),
        ),
        max_size=80,
    )
)
def test_rule_3_no_queue_grows_beyond_one_and_a_half_of_its_bound(
    acts: list[tuple[int, int, bool] | frozenset[int]],
) -> None:
    room = Room(2)
    for act in acts:
        if isinstance(act, frozenset):
            room.list(*act)
            for sender in act:
                room.flood(sender, 9_001)
        else:
            crowd(room, [act])
        assert room.queue.used <= BOUND * 3 // 2


@given(acts=deposits, sender=senders, length=lengths)
def test_asking_for_room_takes_none(
    acts: list[tuple[int, int, bool]], sender: int, length: int
) -> None:
    room = Room(len(KEYS))
    crowd(room, acts)
    before = usage(room.queue)
    room.takes(sender, length)
    assert usage(room.queue) == before


def usage(queue: Queue) -> object:
    return queue.used, {key: sender.used for key, sender in queue.senders.items()}
