"""SPEC section 10, "Admission", line by line, on the store in memory."""

import pytest

from agentmbx_protocol.errors import NotAdmitted, Refusal, RelayFull, Stale
from agentmbx_protocol.queue_commands import Admit, Flag, QueueState, Register
from agentmbx_relay import admission, rules
from agentmbx_relay.admission import COARSE_MS
from agentmbx_relay.store import Invite, Queue
from fakes import DAY_MS, PLENTY, START_MS, Image, MemoryTransaction

RELAY, OTHER_RELAY = b"R" * 32, b"S" * 32
INVITE, VOUCHER, QUEUE, OTHER = b"I" * 32, b"V" * 32, b"Q" * 32, b"O" * 32
NOW = START_MS
LASTING, PROBE_S, PAIRING_S, WEEK_S = 0, 900, 901, 604_800


class Door:
    """A relay's admission with what it remembers."""

    def __init__(self, *, is_open: bool = False, queues_max: int = 1000) -> None:
        self.transaction = MemoryTransaction(Image(), PLENTY)
        self.is_open = is_open
        self.queues_max = queues_max
        self.now_ms = NOW

    def invite(self, uses: int = 1, ends_ms: int = NOW + DAY_MS) -> None:
        self.transaction.put_invite(Invite(INVITE, uses, ends_ms))

    def queue(self, key: bytes = VOUCHER, ends_ms: int = 0) -> Queue:
        return self.transaction.add_queue(key, ends_ms)

    def ask(
        self, proof: Admit | QueueState | None = None, key: bytes = QUEUE, counter: int = 10
    ) -> Queue:
        return admission.admit(
            self.transaction,
            register(key, counter),
            proof,
            now_ms=self.now_ms,
            is_open=self.is_open,
            queues_max=self.queues_max,
        )

    def refuses(
        self,
        proof: Admit | QueueState | None = None,
        key: bytes = QUEUE,
        counter: int = 10,
        refusal: type[Refusal] = NotAdmitted,
    ) -> bool:
        """Whether it refuses, and leaves nothing behind (else the test fails)."""
        before = self.transaction.written_bytes
        with pytest.raises(refusal):
            self.ask(proof, key, counter)
        assert self.transaction.written_bytes == before
        assert self.transaction.queue(key) is None
        return True

    @property
    def uses_left(self) -> int:
        invite = self.transaction.invite(INVITE)
        return invite.uses_left if invite else 0


def register(key: bytes = QUEUE, counter: int = 10) -> Register:
    return Register(
        queue=key, relay=RELAY, counter=counter, instance=b"i" * 16, takeover=0, senders=()
    )


def admit(
    key: bytes = QUEUE, *, by: bytes = INVITE, lifetime_s: int = LASTING, relay: bytes = RELAY
) -> Admit:
    return Admit(by, relay, key, lifetime_s)


def state(
    key: bytes = QUEUE, *, counter: int = 9, flag: Flag = Flag.OK, relay: bytes = RELAY
) -> QueueState:
    return QueueState(relay, key, counter, b"i" * 16, bytes(32), flag)


def keys(count: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(1, count + 1)]


# Open and closed


def test_an_open_relay_makes_a_queue_for_every_register() -> None:
    door = Door(is_open=True)
    assert door.ask().key == QUEUE
    assert door.transaction.queue(QUEUE) is not None


def test_a_closed_relay_makes_none_without_a_second_frame() -> None:
    assert Door().refuses()


@pytest.mark.parametrize(
    "proof",
    [
        admit(OTHER),
        admit(relay=OTHER_RELAY),
        state(OTHER),
        state(flag=Flag.STALE),
        state(flag=Flag.RETIRED),
    ],
)
def test_on_an_open_relay_a_second_frame_that_proves_nothing_does_no_harm(
    proof: Admit | QueueState,
) -> None:
    assert Door().refuses(proof)
    assert Door(is_open=True).ask(proof).ends_ms == 0


def test_on_an_open_relay_anybody_may_ask_for_a_lifetime() -> None:
    door = Door(is_open=True)
    assert door.ask(admit(lifetime_s=60)).ends_ms == NOW + 60_000
    for key in keys(10):
        door.ask(admit(key, by=OTHER), key)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_relay_has_a_bound_on_queues_that_live(*, is_open: bool) -> None:
    door = Door(is_open=is_open, queues_max=2)
    door.invite(5)
    first = door.queue(VOUCHER)
    door.ask(admit())
    assert door.refuses(admit(OTHER), OTHER, refusal=RelayFull)
    door.transaction.retire(first, NOW)
    door.ask(admit(OTHER), OTHER)


# Invites


def test_an_invite_is_used_once_for_each_queue_that_it_makes() -> None:
    door = Door()
    door.invite(2)
    assert door.ask(admit()).ends_ms == 0
    assert door.uses_left == 1
    door.ask(admit(OTHER), OTHER)
    assert door.uses_left == 0
    assert door.refuses(admit(b"N" * 32), b"N" * 32)


def test_a_repeat_for_a_queue_that_exists_costs_nothing() -> None:
    door = Door()
    door.invite(2)
    for counter in (10, 11, 12):
        rules.register(
            door.transaction,
            register(counter=counter),
            admit(),
            now_ms=NOW,
            is_open=False,
            queues_max=9,
        )
    assert door.uses_left == 1


@pytest.mark.parametrize(("passed_ms", "good"), [(-1, True), (0, False), (1, False)])
def test_an_invite_that_is_over_admits_nobody(passed_ms: int, *, good: bool) -> None:
    door = Door()
    door.invite(ends_ms=NOW)
    door.now_ms = NOW + passed_ms
    if good:
        door.ask(admit())
    else:
        assert door.refuses(admit())
        assert door.refuses(admit(lifetime_s=PROBE_S))
        assert door.uses_left == 1


def test_an_invite_admits_the_queue_that_its_signature_names_and_no_other() -> None:
    door = Door()
    door.invite()
    assert door.refuses(admit(OTHER))
    assert door.refuses(admit(relay=OTHER_RELAY))
    assert door.refuses(admit(by=OTHER))
    assert door.uses_left == 1


@pytest.mark.parametrize(
    ("lifetime_s", "uses_left"), [(1, 1), (PROBE_S, 1), (PAIRING_S, 0), (WEEK_S, 0)]
)
def test_a_lifetime_is_counted_from_now_and_a_short_one_does_not_use_the_invite_up(
    lifetime_s: int, uses_left: int
) -> None:
    door = Door()
    door.invite()
    assert door.ask(admit(lifetime_s=lifetime_s)).ends_ms == NOW + lifetime_s * 1000
    assert door.uses_left == uses_left


def test_short_queues_by_one_invite_are_four_at_a_time() -> None:
    door = Door()
    door.invite()
    for key in keys(4):
        door.ask(admit(key, lifetime_s=PROBE_S), key)
    assert door.refuses(admit(lifetime_s=PROBE_S))
    door.now_ms += PROBE_S * 1000 + COARSE_MS
    door.ask(admit(lifetime_s=PROBE_S))
    assert door.uses_left == 1
    # And they do not stand in the way of the lasting one.
    door.ask(admit(OTHER), OTHER)


# Queues that vouch


def test_a_queue_admits_one_lasting_successor() -> None:
    door = Door()
    door.queue()
    assert door.ask(admit(by=VOUCHER)).ends_ms == 0
    assert door.refuses(admit(OTHER, by=VOUCHER), OTHER)
    # The successor may have one of its own.
    door.ask(admit(OTHER, by=QUEUE), OTHER)


@pytest.mark.parametrize("lifetime_s", [1, PROBE_S, PAIRING_S, WEEK_S])
def test_a_queue_admits_four_with_a_lifetime_at_a_time(lifetime_s: int) -> None:
    door = Door()
    door.queue()
    for key in keys(4):
        assert door.ask(admit(key, by=VOUCHER, lifetime_s=lifetime_s), key).ends_ms
    assert door.refuses(admit(by=VOUCHER, lifetime_s=lifetime_s))
    door.now_ms += lifetime_s * 1000 - 1
    assert door.refuses(admit(by=VOUCHER, lifetime_s=lifetime_s))
    door.now_ms += 1 + COARSE_MS
    door.ask(admit(by=VOUCHER, lifetime_s=lifetime_s))
    # A lasting successor is counted apart.
    door.ask(admit(OTHER, by=VOUCHER), OTHER)


@pytest.mark.parametrize("now_ms", [NOW, NOW - NOW % COARSE_MS])
def test_what_is_kept_of_a_vouching_shares_no_value_with_the_queue_it_made(now_ms: int) -> None:
    door = Door()
    door.queue()
    door.now_ms = now_ms
    made = door.ask(admit(by=VOUCHER, lifetime_s=PROBE_S))
    (kept_ms,) = door.transaction.vouched(VOUCHER)
    assert made.ends_ms < kept_ms <= made.ends_ms + COARSE_MS


@pytest.mark.parametrize("lifetime_s", [LASTING, PROBE_S])
def test_a_retired_queue_vouches_for_none(lifetime_s: int) -> None:
    door = Door()
    door.transaction.retire(door.queue(), NOW)
    assert door.refuses(admit(by=VOUCHER, lifetime_s=lifetime_s))


@pytest.mark.parametrize("lifetime_s", [LASTING, PROBE_S])
def test_a_queue_with_a_lifetime_vouches_for_none_so_that_it_cannot_outlive_itself(
    lifetime_s: int,
) -> None:
    door = Door()
    door.queue(ends_ms=NOW + DAY_MS)
    assert door.refuses(admit(by=VOUCHER, lifetime_s=lifetime_s))


def test_a_queue_cannot_vouch_for_itself() -> None:
    assert Door().refuses(admit(by=QUEUE))


# A relay that was restored from a backup older than the queue


def test_a_queue_comes_back_by_its_last_signed_state() -> None:
    queue = Door().ask(state(counter=9), counter=10)
    assert (queue.key, queue.ends_ms) == (QUEUE, 0)


@pytest.mark.parametrize("counter", [1, 8, 9])
def test_the_counter_must_be_above_the_one_in_the_state(counter: int) -> None:
    assert Door().refuses(state(counter=9), counter=counter, refusal=Stale)


@pytest.mark.parametrize("flag", set(Flag) - {Flag.OK})
def test_a_state_that_says_anything_but_ok_admits_nobody(flag: Flag) -> None:
    assert Door().refuses(state(flag=flag))


def test_a_state_of_another_queue_or_another_relay_admits_nobody() -> None:
    assert Door().refuses(state(OTHER))
    assert Door().refuses(state(relay=OTHER_RELAY))


def test_coming_back_uses_nothing_up() -> None:
    door = Door()
    door.invite()
    door.ask(state())
    assert door.uses_left == 1


def test_which_queue_was_vouched_for_is_kept_nowhere() -> None:
    door = Door()
    door.invite()
    door.queue()
    door.ask(admit())
    door.ask(admit(OTHER, by=VOUCHER), OTHER)
    assert door.transaction.vouched(VOUCHER) == [0]
    assert door.transaction.vouched(INVITE) == []
