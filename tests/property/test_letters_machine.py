"""A state machine of two machines and their letters, over a network and a relay that fail.

Requests and answers are lost, repeated and delayed; the relay is full, lies, and is restored from
a backup; machines crash between any two steps, go back to an older copy of their store, get a new
route or a new key; wall clocks say anything. Whatever happens, a letter is stored at most once,
none is called stored that is not, and when all works again every letter ends, both sides agree,
and nothing more is sent.
"""

from collections import Counter
from typing import Final

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from agentmbx_node.outbox import OPEN
from agentmbx_node.rounds import Round
from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.envelope import parse_envelope
from agentmbx_protocol.errors import Refusal
from agentmbx_protocol.letter import decode_letter
from letter_sides import (
    DAY,
    HOUR,
    Backup,
    Kept,
    Relay,
    S,
    Side,
    collect,
    give_directly,
    give_to_relay,
    pair,
    with_byte_changed,
)

LETTERS_MAX: Final = 12
PASSES_MS: Final = (S, 61 * S, 301 * S, 16 * 60 * S, HOUR, 7 * HOUR, 25 * HOUR, 71 * HOUR)
JUMPS_MS: Final = (-400 * DAY, -HOUR, HOUR, 4 * DAY, 3650 * DAY)
FATES: Final = (
    *("through", "through", "through", "request lost", "answer lost", "twice", "late"),
    *("killed before", "killed after"),
)
COLLECTS: Final = ("through", "through", "ack lost", "commit fails", "changed", "swapped")
# In health every letter ends in this time, and one that has this long left arrives.
ENDS_MS: Final = 74 * HOUR
ARRIVES_MS: Final = 5 * HOUR
STATES_MAX: Final = 60
STEPS_MAX: Final = 500

who = st.sampled_from((0, 1))
which = st.integers(0, LETTERS_MAX)


class Sent(msgspec.Struct):
    """A letter as the model has it."""

    sender: int
    id: str
    never_left: bool = False


class Letters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sides = [Side("laptop"), Side("server")]
        self.relay = Relay()
        self.is_direct = True
        self.heals_directly = True
        self.sends_more = True
        self.sent: dict[bytes, Sent] = {}
        # Requests that are still on their way: to a machine, or to the relay.
        self.late: list[tuple[Side | None, Round]] = []
        self.backups: dict[int, Backup] = {}
        self.relay_backup: dict[bytes, dict[bytes, Kept]] = {}
        self.went_back = [False, False]
        # What each side had and lost with its store.
        self.forgot: list[set[bytes]] = [set(), set()]
        self.is_over = False
        self.states = 0

    def teardown(self) -> None:
        try:
            if self.sent or self.states:
                self.heal()
                self.nothing_is_wrong()
        finally:
            for side in self.sides:
                side.close()

    # What happens at the machines

    @initialize(
        queues=st.sampled_from(((0, 1), (0, 1), (0, 1), (0,), ())),
        heals_directly=st.booleans(),
        is_direct=st.booleans(),
        sends_more=st.booleans(),
    )
    def begin(
        self, queues: tuple[int, ...], *, heals_directly: bool, is_direct: bool, sends_more: bool
    ) -> None:
        for at in queues:
            self.relay.queues[self.sides[at].add_queue()] = {}
        self.is_direct, self.sends_more = is_direct, sends_more
        self.heals_directly = heals_directly or len(queues) < len(self.sides)
        pair(*self.sides)
        self.send(0)

    @precondition(lambda self: len(self.sent) < LETTERS_MAX and not self.is_over)
    @rule(at=who)
    def send(self, at: int) -> None:
        content = b"letter %d" % len(self.sent)
        if self.sides[at].peer.state == "paired":
            self.sent[content] = Sent(at, self.sides[at].send(content).id)

    @rule(back=which)
    def cancel(self, back: int) -> None:
        content = list(self.sent)[-1 - back % len(self.sent)]
        sent = self.sent[content]
        side = self.sides[sent.sender]
        found = [row for row in side.letters() if row.id == sent.id and row.state in OPEN]
        if found:
            may_arrive = side.cancel(sent.id)
            # A copy that went back does not know what it sent before.
            sent.never_left = not may_arrive and not self.went_back[sent.sender]

    @rule(at=who, fate=st.sampled_from(FATES), fallen=st.sampled_from(FATES))
    def run_round(self, at: int, fate: str, fallen: str) -> None:
        """One round as the courier carries it."""
        side = self.sides[at]
        begun = side.begin()
        if not isinstance(begun, Round) or fate == "killed before":
            return
        self.count_states(begun)
        if begun.addresses:
            stored = self.give(begun, self.sides[1 - at], fate) if self.is_direct else None
            if fate == "killed after":
                return
            if stored is not None:
                side.direct_done(begun, stored)
                return
            next_round = side.fall_back(begun)
            if next_round is None or fallen == "killed before":
                return
            begun, fate = next_round, fallen
            self.count_states(begun)
        held, refused, error = self.deposit(begun, fate)
        if fate != "killed after":
            side.relay_done(begun, held, refused, error)

    @rule(at=who, fate=st.sampled_from(COLLECTS), count=st.sampled_from((1, 3, 64)))
    def collect(self, at: int, fate: str, count: int) -> None:
        """One collect from each queue as the collector does it."""
        side = self.sides[at]
        for queue in side.queues:
            parcels = [parse_envelope(data) for data in self.relay.waiting(queue)[:count]]
            if not parcels:
                continue
            digests = [parcel.digest for parcel in parcels]
            if fate == "changed":
                parcels[-1] = with_byte_changed(parcels[-1])
            if fate == "swapped":
                parcels.reverse()
            side.receive(parcels, "relay", fails=fate == "commit fails")
            if fate not in ("ack lost", "commit fails"):
                self.relay.ack(queue, digests)
        self.look_at_card(side)

    @rule(at=who)
    def look_at_own_card(self, at: int) -> None:
        self.look_at_card(self.sides[at])

    @rule(at=who)
    def change_route(self, at: int) -> None:
        # An older copy would not know its queue, and nobody would reach it by relay.
        self.backups.pop(at, None)
        self.relay.queues[self.sides[at].add_queue()] = {}

    @rule()
    def change_sealing(self) -> None:
        """Only at one machine: two that forget their keys at once are to be paired anew."""
        self.sides[0].change_sealing()

    @rule(at=who)
    def back_up(self, at: int) -> None:
        self.backups[at] = self.sides[at].back_up()

    @precondition(lambda self: self.backups)
    @rule(at=who)
    def go_back(self, at: int) -> None:
        if at not in self.backups:
            return
        side = self.sides[at]
        had = set(side.contents())
        sealing = side.keyring.sealing
        side.restore(self.backups[at])
        side.keyring.sealing = sealing
        side.renew_card()
        self.went_back[at] = True
        self.forgot[at] |= had - set(side.contents())
        for sent in self.sent.values():
            if sent.sender == at:
                sent.never_left = False

    @precondition(lambda self: len(self.sent) > 2 and not self.is_over)
    @rule(at=who, sure=st.integers(0, 5))
    def unpair(self, at: int, sure: int) -> None:
        if sure == 0:
            self.is_over = True
            self.sides[at].unpair()

    # What happens around them

    @rule(ms=st.sampled_from(PASSES_MS))
    def pass_time(self, ms: int) -> None:
        self.relay.pass_ms(ms)
        for side in self.sides:
            side.age_ms += ms
            side.wall_ms += ms

    @rule(at=who, ms=st.sampled_from(JUMPS_MS))
    def jump(self, at: int, ms: int) -> None:
        self.sides[at].wall_ms += ms

    @rule()
    def switch_direct(self) -> None:
        self.is_direct = not self.is_direct

    @rule()
    def back_up_relay(self) -> None:
        self.relay_backup = self.relay.back_up()

    @rule()
    def restore_relay(self) -> None:
        self.relay.restore(self.relay_backup)

    @rule(is_full=st.booleans(), lies=st.booleans())
    def change_relay(self, *, is_full: bool, lies: bool) -> None:
        self.relay.is_full, self.relay.lies = is_full, lies

    @precondition(lambda self: self.late)
    @rule(back=which)
    def arrive_late(self, back: int) -> None:
        receiver, begun = self.late.pop(back % len(self.late))
        if receiver is None:
            self.relay.deposit(begun.parcels)
        else:
            receiver.take_direct(begun.parcels)

    # What always holds

    @invariant()
    def nothing_is_wrong(self) -> None:
        for at, side in enumerate(self.sides):
            names = Counter((mail.peer, mail.stream, mail.number) for mail in side.mail())
            assert all(count == 1 for count in names.values()), "a number is stored twice"
            counts = Counter(side.contents())
            if not self.went_back[1 - at]:
                assert all(count == 1 for count in counts.values()), "a letter is there twice"
        for content, sent in self.sent.items():
            arrived = content in self.sides[1 - sent.sender].contents()
            assert not (sent.never_left and arrived), "what never left has arrived"
        for at, side in enumerate(self.sides):
            there = set(self.sides[1 - at].contents()) | self.forgot[1 - at]
            for row in side.letters():
                if row.state == "stored":
                    assert decode_letter(row.data).content in there, "stored, but not there"
            notices = side.connection.execute(
                "SELECT MAX(n) FROM (SELECT COUNT(*) n FROM letter_event"
                " WHERE state = 'not_confirmed' GROUP BY letter)"
            ).fetchone()[0]
            assert (notices or 0) <= 1, "two notices of one letter"

    def heal(self) -> None:
        """Everything works again, and time passes."""
        self.relay.is_full = self.relay.lies = False
        self.is_direct = self.heals_directly
        self.late.clear()
        due = set()
        if not self.is_over:
            for at in (0, 1) if self.sends_more else ():
                self.send(at)
            due = {content for content, sent in self.sent.items() if self.is_young(sent)}
        self.states = 0
        began_ms = self.relay.now_ms
        steps = 0
        while (wait_ms := self.settle()) is not None:
            self.pass_time(max(wait_ms, 1))
            steps += 1
            assert self.relay.now_ms - began_ms < ENDS_MS, "something is still being sent"
            assert steps < STEPS_MAX, "rounds come too often"
        assert self.states < STATES_MAX, "too many state letters"
        self.check_end(due)

    def is_young(self, sent: Sent) -> bool:
        side = self.sides[sent.sender]
        return any(
            row.state in OPEN and row.deadline_age_ms > side.age_ms + ARRIVES_MS
            for row in side.letters()
            if row.id == sent.id
        )

    def settle(self) -> int | None:
        """Carry and collect all that is due; how long until there is more."""
        for _ in range(60):
            waits: list[int | None] = []
            for at, side in enumerate(self.sides):
                begun = side.begin()
                if isinstance(begun, Round):
                    waits.append(0)
                    self.carry(at, begun)
                else:
                    waits.append(None if begun is None else begun - side.age_ms)
            for side in self.sides:
                if collect(side, self.relay):
                    waits.append(0)
                self.look_at_card(side)
            if 0 not in waits:
                return min((each for each in waits if each is not None), default=None)
        raise AssertionError("rounds without end")

    def carry(self, at: int, begun: Round) -> None:
        side, other = self.sides[at], self.sides[1 - at]
        self.count_states(begun)
        if begun.addresses:
            stored = give_directly(begun, other) if self.is_direct else None
            if stored is not None:
                side.direct_done(begun, stored)
                return
            fallen = side.fall_back(begun)
            if fallen is None:
                return
            begun = fallen
        held, refused, error = self.deposit(begun, "through")
        side.relay_done(begun, held, refused, error)

    def check_end(self, due: set[bytes]) -> None:
        for at, side in enumerate(self.sides):
            there = self.sides[1 - at].contents()
            for row in side.letters():
                content = decode_letter(row.data).content
                assert row.state not in OPEN, "a letter never ends"
                if content in due:
                    assert row.state == "stored", f"in health, but {row.state}"
                if not self.is_over:
                    assert not row.is_void, "a void number that the peer never saw"
                    assert row.state == "stored" or content not in there, f"there, but {row.state}"
        for queue in self.relay.queues:
            assert not self.relay.waiting(queue), "something is left at the relay"

    # How it travels

    def give(self, begun: Round, receiver: Side, fate: str) -> frozenset[bytes] | None:
        if fate == "request lost":
            return None
        if fate == "late":
            self.late.append((receiver, begun))
            return None
        stored = give_directly(begun, receiver)
        if fate == "twice":
            again = give_directly(begun, receiver)
            assert (
                again == stored
                or self.sides[0].peer.state != "paired"
                or receiver.peer.state != "paired"
            )
        return None if fate == "answer lost" else stored

    def deposit(
        self, begun: Round, fate: str
    ) -> tuple[dict[bytes, HeldFact], dict[bytes, Refusal], str]:
        if begun.route is None:
            return {}, {}, "no way"
        if fate == "request lost":
            return {}, {}, "lost"
        if fate == "late":
            self.late.append((None, begun))
            return {}, {}, "lost"
        held, refused = give_to_relay(begun, self.relay)
        if fate == "twice":
            assert give_to_relay(begun, self.relay)[0].keys() == held.keys()
        if fate == "answer lost":
            return {}, {}, "lost"
        return held, refused, ""

    def count_states(self, begun: Round) -> None:
        self.states += sum(not offer.letter for offer in begun.offers)

    def look_at_card(self, side: Side) -> None:
        if not side.card:
            side.renew_card()


TestLetters = Letters.TestCase
TestLetters.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
