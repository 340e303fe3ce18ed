"""A state machine of a queue's life at a closed relay, against a model that is SPEC section 10.

Two copies of one machine command three queues through the relay's own calls, with clocks of their
own that jump. The relay crashes, restarts under a wall clock that jumps, and is restored from older
copies of its store. No clock can lose mail or lock a machine out (rule 7).
"""

import asyncio
import copy
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentmbx_protocol import bodies
from agentmbx_protocol.custody import HeldFact, believe_held
from agentmbx_protocol.envelope import Envelope, make_envelope, parse_envelope
from agentmbx_protocol.errors import (
    NoSuchQueue,
    NotAdmitted,
    Refusal,
    Retired,
    Stale,
    Superseded,
)
from agentmbx_protocol.keys import SigningKey
from agentmbx_protocol.queue_commands import (
    Collect,
    Flag,
    QueueState,
    Register,
    Retire,
    make_admit,
    make_collect,
    make_queue_state,
    make_register,
    make_retire,
    parse_queue_state,
    senders_digest,
)
from agentmbx_relay.clock import RESTART_MS_MAX, RelayClock
from agentmbx_relay.group_commit import GroupCommit
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.quota import Quota
from agentmbx_relay.relay import Policy, ProvenRefusal
from agentmbx_relay.store import Invite, Queue, Store, Transaction
from engines import Engine, MemoryEngine, SqliteEngine
from fakes import DAY_MS, PLENTY, RELAY, START_MS, Ticks, relay_on

T = TypeVar("T")

INVITE: Final = SigningKey(b"I" * 32)
INVITE_USES: Final = 1
QUEUE_KEYS: Final = tuple(SigningKey(bytes([letter]) * 32) for letter in b"PQT")
SENDERS: Final = tuple(
    sorted((SigningKey(bytes([letter]) * 32) for letter in b"ab"), key=lambda key: key.public)
)
INSTANCES: Final = (b"i" * 16, b"j" * 16)
LIFETIMES_S: Final = (0, 600, 3600)
FREE_S: Final = 900
CLOCK_EVERY_MS: Final = 60_000
WALLS_MS: Final = (1, START_MS - DAY_MS, START_MS, START_MS + 400 * DAY_MS, 2**62)
JUMPS_MS: Final = (0, -(2**50), -DAY_MS, -1, 1, 50_000, 3_599_000, DAY_MS, 2**50)
STATE_PROOFS: Final = ("state", "state that is stale")
STATES: Final = {Stale: Flag.STALE, Superseded: Flag.SUPERSEDED, Retired: Flag.RETIRED}
ENVELOPES: Final[dict[tuple[int, int, int], Envelope]] = {
    (queue, sender, number): parse_envelope(
        make_envelope(
            SENDERS[sender],
            QUEUE_KEYS[queue].public,
            (60, 7200, 604_800)[number % 3],
            bytes([number]) * 1072,
        )
    )
    for queue in range(3)
    for sender in range(2)
    for number in range(4)
}


class Line(msgspec.Struct):
    """A queue as SPEC says it must be; `sure` is the least counter that a crash may leave."""

    counter: int
    instance: bytes
    senders: tuple[bytes, ...]
    ends_ms: int
    retired_ms: int = 0
    sure: int = 0

    @property
    def digest(self) -> bytes:
        return senders_digest(() if self.retired_ms else self.senders)


class Mail(msgspec.Struct):
    """An envelope that is held, or of which only the facts are left, and when it really came."""

    fact: HeldFact
    queue: int
    data: bytes
    true_ms: int
    restarts: int
    held: bool = True


class Book(msgspec.Struct):
    """All that the relay must know. Mail is in the order of acceptance."""

    lines: dict[int, Line] = {}
    mail: dict[bytes, Mail] = {}
    uses_left: int = INVITE_USES
    vouched: dict[bytes, list[int]] = {}
    saved_ms: int = START_MS

    def live(self, queue: int) -> Line | None:
        line = self.lines.get(queue)
        return line if line and not line.retired_ms else None


class Machine(msgspec.Struct):
    """One copy of the owner's machine: its clock, and what relays told it of each queue."""

    instance: bytes
    wall_ms: int = START_MS
    counters: dict[int, int] = {}
    states: dict[int, QueueState] = {}

    def next_counter(self, queue: int, back: int) -> int:
        """max(last + 1, now in ms), as SPEC section 10 has it, or one from before."""
        last = self.counters.get(queue, 0)
        return max(last + 1 - back, 1) if back else max(last + 1, self.wall_ms)

    def believe(self, queue: int, state: QueueState) -> None:
        """Only a signed state moves the counter other than by commands."""
        self.counters[queue] = max(self.counters.get(queue, 0), state.counter)
        if state.flag is Flag.OK:
            self.states[queue] = state


# Most of what happens is about one queue and one of its two machines.
queues, machines = st.sampled_from((0, 0, 0, 1, 2)), st.sampled_from((0, 0, 0, 1))
lists = st.frozensets(st.integers(0, 1))
numbers = st.lists(st.integers(0, 3), min_size=1, max_size=4)
# Most commands come in order; of the others most repeat the counter last seen.
steps_back = st.sampled_from((0, 0, 0, 0, 1, 1, 2, 2**20))
Parcel = tuple[int, int, int]
# The queue with the most mail is asked about most.
parcels = st.tuples(st.sampled_from((0, 0, 1, 2)), st.integers(0, 1), st.integers(0, 3))


class QueueMachine(RuleBasedStateMachine):
    engine_of: Callable[[Path], Engine]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.engine: Engine = type(self).engine_of(Path(self.folder.name))
        self.book = Book()
        self.machines = [Machine(instance) for instance in INSTANCES]
        self.backup: tuple[Engine, Book] | None = None
        self.wall_ms = START_MS
        self.true_ms = 0
        self.restarts = 0
        self.runner.run(self._start())
        self.runner.run(self._submit(self._invite))

    def teardown(self) -> None:
        self.runner.run(self._stop())
        self.runner.run(self.engine.close())
        self.runner.close()
        self.folder.cleanup()

    # What the owner does

    @initialize(lifetime_s=st.sampled_from((0, 0, 0, 600)))
    def begin(self, lifetime_s: int) -> None:
        """A queue of a relay that was backed up before it knew any."""
        self.blank = self.engine.copied(), copy.deepcopy(self.book)
        self._register(0, 0, proof="invite", lifetime_s=lifetime_s)

    @rule(
        queue=queues,
        machine=machines,
        senders=lists,
        takeover=st.sampled_from(("no", "seen", "seen", "too old", "any")),
        proof=st.sampled_from(("none", "invite", "voucher", *STATE_PROOFS)),
        lifetime_s=st.sampled_from(LIFETIMES_S),
        back=steps_back,
    )
    def register(
        self,
        queue: int,
        machine: int,
        senders: frozenset[int],
        takeover: str,
        proof: str,
        lifetime_s: int,
        back: int,
    ) -> None:
        self._register(
            queue,
            machine,
            senders=senders,
            takeover=takeover,
            proof=proof,
            lifetime_s=lifetime_s,
            back=back,
        )

    @rule(queue=queues, machine=machines, acks=st.lists(parcels, max_size=6), back=steps_back)
    def collect(self, queue: int, machine: int, acks: list[Parcel], back: int) -> None:
        self._collect(queue, machine, [ENVELOPES[each].digest for each in acks], back=back)

    @rule(queue=queues, machine=machines, back=steps_back)
    def retire(self, queue: int, machine: int, back: int) -> None:
        line = self.book.lines.get(queue)
        owner = self.machines[machine]
        counter = owner.next_counter(queue, back)
        command = Retire(
            queue=QUEUE_KEYS[queue].public,
            relay=RELAY.public,
            counter=counter,
            instance=owner.instance,
        )
        frame = make_retire(QUEUE_KEYS[queue], command)
        owner.counters[queue] = max(owner.counters.get(queue, 0), counter)
        expected = None if line and line.retired_ms else self._expect(queue, machine, counter)
        answer = self._call(queue, machine, self.relay.retire, [frame], expected)
        if answer is None:
            return
        assert line is not None
        if not line.retired_ms:
            line.counter, line.retired_ms = counter, self.clock.now_ms()
        self._check_state(queue, machine, answer, Flag.RETIRED)

    @rule(machine=machines, wall_ms=st.sampled_from(WALLS_MS))
    def the_clock_of_a_machine_jumps(self, machine: int, wall_ms: int) -> None:
        self.machines[machine].wall_ms = wall_ms

    @precondition(lambda self: any(machine.states for machine in self.machines))
    @rule(
        data=st.data(), proof=st.sampled_from(("state", "state that is stale")), equal=st.booleans()
    )
    def a_relay_that_forgot_all_is_shown_the_last_state(
        self, data: st.DataObject, proof: str, *, equal: bool
    ) -> None:
        self._restore(*self.blank)
        knowing = [number for number, each in enumerate(self.machines) if each.states]
        machine = data.draw(st.sampled_from(knowing))
        queue = data.draw(st.sampled_from(sorted(self.machines[machine].states)))
        counter = self.machines[machine].states[queue].counter if equal else None
        self._register(queue, machine, proof=proof, counter=counter)

    @rule(queue=queues, machine=machines)
    def rule_7_who_follows_the_signed_states_gets_through(self, queue: int, machine: int) -> None:
        owner = self.machines[machine]
        for _ in range(4):
            refusal = self._collect(queue, machine, [])
            if refusal is None or refusal is Retired:
                return
            if refusal is NoSuchQueue:
                known = owner.states.get(queue)
                self._register(queue, machine, proof="state" if known else "none")
                if not known:
                    return
            elif refusal is Superseded:
                self._register(queue, machine, takeover="seen")
        raise AssertionError("a machine is locked out")

    # What senders do

    @rule(queue=queues, sender=st.integers(0, 1), numbers=numbers)
    def deposit(self, queue: int, sender: int, numbers: list[int]) -> None:
        sent = [ENVELOPES[queue, sender, number] for number in numbers]
        body = bodies.join_frames([each.frame.data for each in sent])
        line = self.book.live(queue)
        now_ms = self.clock.now_ms()
        try:
            answer = self.runner.run(self.relay.deposit(body))
        except NoSuchQueue:
            assert line is None or SENDERS[sender].public not in line.senders
            return
        assert line is not None
        assert SENDERS[sender].public in line.senders
        statement, refused = bodies.parse_deposit_answer(answer, len(sent))
        assert refused == []
        facts = believe_held(statement, RELAY.public, sent)
        assert set(facts) == {each.digest for each in sent}
        for each in sent:
            self._held(each, queue, facts[each.digest], now_ms)

    # What happens to the relay

    @rule(seconds=st.sampled_from((1, 60, 599, 3600, 90_000, 9 * 86_400)))
    def time_passes(self, seconds: int) -> None:
        self._wait(seconds * 1000)
        self.ticks.ms += seconds * 1000
        if self.clock.now_ms() - self.book.saved_ms >= CLOCK_EVERY_MS:
            self.book.saved_ms = self.clock.now_ms()
            now_ms, wall_ms = self.book.saved_ms, self.wall_ms
            self._do(lambda transaction: transaction.save_clock(now_ms, wall_ms))
            self._all_is_durable()

    @rule()
    def sweep(self) -> None:
        now_ms, book = self.clock.now_ms(), self.book
        self._do(lambda transaction: transaction.sweep(now_ms, 1000))
        for line in book.lines.values():
            if 0 < line.ends_ms <= now_ms and not line.retired_ms:
                line.retired_ms = now_ms
        for digest, mail in list(book.mail.items()):
            if mail.fact.until_ms <= now_ms:
                self._rule_7_it_was_kept_long_enough(mail)
                del book.mail[digest]
            elif mail.held and book.live(mail.queue) is None:
                del book.mail[digest]
        needed = {mail.queue for mail in book.mail.values()}
        for queue, line in list(book.lines.items()):
            kept_ms = DAY_MS if line.ends_ms else 90 * DAY_MS
            if line.retired_ms and queue not in needed and line.retired_ms + kept_ms <= now_ms:
                del book.lines[queue]
                book.vouched.pop(QUEUE_KEYS[queue].public, None)
        for key, ends in book.vouched.items():
            book.vouched[key] = [each for each in ends if not 0 < each <= now_ms]

    @rule()
    def the_relay_crashes(self) -> None:
        self.the_relay_restarts(0, 0, crashes=True)

    @rule(down_ms=st.integers(0, 10**7), jump_ms=st.sampled_from(JUMPS_MS), crashes=st.booleans())
    def the_relay_restarts(self, down_ms: int, jump_ms: int, *, crashes: bool) -> None:
        before_ms = self.clock.now_ms()
        self._wait(down_ms)
        self.wall_ms += jump_ms
        self.restarts += 1
        self.runner.run(self._restart(crashes=crashes))
        newest_ms = max((each.fact.accepted_ms for each in self.book.mail.values()), default=0)
        assert self.clock.now_ms() >= max(self.book.saved_ms, newest_ms)
        assert self.clock.now_ms() <= before_ms + RESTART_MS_MAX
        self._see_what_a_crash_left()

    @rule()
    def a_backup_is_made(self) -> None:
        self.backup = self.engine.copied(), copy.deepcopy(self.book)

    @precondition(lambda self: self.backup is not None)
    @rule()
    def the_relay_is_restored_from_the_backup(self) -> None:
        assert self.backup is not None
        self._restore(*self.backup)

    # What holds

    @invariant()
    def what_is_held_waits_in_order(self) -> None:
        for queue, line in self.book.lines.items():
            held = [
                each.data
                for each in self.book.mail.values()
                if each.queue == queue and each.held and not line.retired_ms
            ]
            assert self.runner.run(self._waiting(queue)) == held

    @invariant()
    def rule_7_the_clock_is_not_below_what_it_was_saved_at(self) -> None:
        assert self.clock.now_ms() >= self.book.saved_ms

    # The relay, and what it must answer

    def _restore(self, engine: Engine, book: Book) -> None:
        self.runner.run(self._stop())
        self.runner.run(self.engine.close())
        self.engine, self.book = engine.copied(), copy.deepcopy(book)
        self.restarts += 1
        self.runner.run(self._start())
        self._see_what_a_crash_left()

    async def _start(self) -> None:
        self.store: Store = await self.engine.open()
        self.ticks = Ticks(self.wall_ms % 977)
        saved_ms, saved_wall_ms = self.store.saved_clock()
        self.clock = RelayClock(
            saved_ms, saved_wall_ms, now_wall_ms=self.wall_ms, ticks_ms=self.ticks
        )
        self.commits = GroupCommit(self.store, Metrics("test"))
        self.running = asyncio.create_task(self.commits.run())
        policy = Policy("test", False, 100, Quota(PLENTY, PLENTY, 0))  # noqa: FBT003
        self.relay = relay_on(self.store, self.commits, clock=self.clock, policy=policy)

    async def _stop(self) -> None:
        self.commits.stop()
        await self.running

    async def _restart(self, *, crashes: bool) -> None:
        await self._stop()
        if crashes:
            copied = self.engine.copied()
            await self.engine.close()
            self.engine = copied
        else:
            await self.store.close()
        await self._start()

    def _do(self, work: Callable[[Transaction], object]) -> None:
        self.runner.run(self._submit(work))

    def _invite(self, transaction: Transaction) -> None:
        transaction.put_invite(Invite(INVITE.public, INVITE_USES, 2**62))

    async def _queue(self, queue: int) -> Queue:
        known = await self.commits.submit(lambda t: t.queue(QUEUE_KEYS[queue].public))
        assert known is not None
        return known

    async def _submit(self, work: Callable[[Transaction], object]) -> None:
        await self.commits.submit(work)

    async def _waiting(self, queue: int) -> list[bytes]:
        return await self.store.waiting(await self._queue(queue), 4_000_000)

    def _wait(self, passed_ms: int) -> None:
        self.true_ms += passed_ms
        self.wall_ms += passed_ms
        for machine in self.machines:
            machine.wall_ms = min(machine.wall_ms + passed_ms, 2**62)

    def _call(
        self,
        queue: int,
        machine: int,
        call: Callable[[bytes], Coroutine[object, object, T]],
        frames: Sequence[bytes],
        expected: type[Refusal] | None,
    ) -> T | None:
        """The answer, or None when it is the refusal that was expected."""
        answer: T | None = None
        refusal: type[Refusal] | None = None
        proof: bytes | None = None
        try:
            answer = self.runner.run(call(bodies.join_frames(frames)))
        except ProvenRefusal as proven:
            refusal, proof = type(proven.refusal), proven.queue_state
        except Refusal as refused:
            refusal = type(refused)
        assert refusal is expected
        # Without a queue there is no state to prove the refusal.
        assert (proof is not None) is (refusal in STATES and queue in self.book.lines)
        if refusal is not None and proof is not None:
            self._check_state(queue, machine, proof, STATES[refusal])
        return answer

    def _check_state(self, queue: int, machine: int, data: bytes, flag: Flag) -> None:
        """What a signed state says is so, and still is after a crash."""
        state, line = parse_queue_state(data), self.book.lines[queue]
        assert state == QueueState(
            RELAY.public,
            QUEUE_KEYS[queue].public,
            line.counter,
            line.instance,
            line.digest,
            flag,
        )
        self._all_is_durable()
        self.machines[machine].believe(queue, state)

    def _all_is_durable(self) -> None:
        for line in self.book.lines.values():
            line.sure = line.counter

    def _expect(
        self, queue: int, machine: int, counter: int, takeover: int = 0
    ) -> type[Refusal] | None:
        line, instance = self.book.lines.get(queue), self.machines[machine].instance
        if line is None:
            return NoSuchQueue
        if line.retired_ms:
            return Retired
        if instance != line.instance and not (takeover and takeover >= line.counter):
            return Superseded
        return None if counter > line.counter else Stale

    def _register(
        self,
        queue: int,
        machine: int,
        *,
        senders: frozenset[int] = frozenset((0, 1)),
        takeover: str = "no",
        proof: str = "none",
        lifetime_s: int = 0,
        back: int = 0,
        counter: int | None = None,
    ) -> None:
        owner, key = self.machines[machine], QUEUE_KEYS[queue]
        seen = owner.counters.get(queue, 0)
        counter = counter or owner.next_counter(queue, back)
        wanted = {"no": 0, "seen": seen, "too old": max(seen - 1, 0), "any": 2**63 - 1}[takeover]
        command = Register(
            queue=key.public,
            relay=RELAY.public,
            counter=counter,
            instance=owner.instance,
            takeover=wanted,
            senders=tuple(SENDERS[number].public for number in sorted(senders)),
        )
        frames = [make_register(key, command)]
        owner.counters[queue] = max(seen, counter)
        known = owner.states.get(queue)
        if proof in ("invite", "voucher"):
            signer = INVITE if proof == "invite" else QUEUE_KEYS[0]
            frames.append(make_admit(signer, RELAY.public, key.public, lifetime_s))
        elif proof != "none" and known is not None:
            flag = Flag.OK if proof == "state" else Flag.STALE
            frames.append(make_queue_state(RELAY, msgspec.structs.replace(known, flag=flag)))
        expected = self._expect(queue, machine, counter, wanted)
        ends_ms = 0
        if expected is NoSuchQueue:
            expected, ends_ms = self._admission(counter, proof, known, lifetime_s)
        answer = self._call(queue, machine, self.relay.register, frames, expected)
        if answer is None:
            return
        line = self.book.lines.setdefault(queue, Line(0, b"", (), ends_ms))
        line.counter, line.instance, line.senders = counter, owner.instance, command.senders
        self._check_state(queue, machine, answer, Flag.OK)

    def _admission(
        self, counter: int, proof: str, known: QueueState | None, lifetime_s: int
    ) -> tuple[type[Refusal] | None, int]:
        """The refusal of a register that would make a queue, or None and when the queue ends."""
        ends_ms = self.clock.now_ms() + lifetime_s * 1000 if lifetime_s else 0
        if proof == "state" and known is not None:
            return (None if counter > known.counter else Stale), 0
        if proof == "invite" and self.book.uses_left:
            if 0 < lifetime_s <= FREE_S:
                return self._vouch(INVITE.public, ends_ms), ends_ms
            self.book.uses_left -= 1
            return None, ends_ms
        voucher = self.book.live(0)
        if proof == "voucher" and voucher and not voucher.ends_ms:
            return self._vouch(QUEUE_KEYS[0].public, ends_ms), ends_ms
        return NotAdmitted, 0

    def _vouch(self, key: bytes, ends_ms: int) -> type[Refusal] | None:
        """Count one more that this key vouches for: one that lasts, and four at a time."""
        now_ms, others = self.clock.now_ms(), self.book.vouched.setdefault(key, [])
        alike = [each for each in others if bool(each) == bool(ends_ms) and not 0 < each <= now_ms]
        if len(alike) >= (4 if ends_ms else 1):
            return NotAdmitted
        others.append(ends_ms)
        return None

    def _collect(
        self, queue: int, machine: int, acks: Sequence[bytes], *, back: int = 0
    ) -> type[Refusal] | None:
        owner, line = self.machines[machine], self.book.lines.get(queue)
        counter = owner.next_counter(queue, back)
        known = owner.states.get(queue)
        command = Collect(
            queue=QUEUE_KEYS[queue].public,
            relay=RELAY.public,
            counter=counter,
            instance=owner.instance,
            senders_digest=known.senders_digest if known else senders_digest(()),
            bytes_max=4_000_000,
            wait_s=0,
            acks=tuple(acks),
        )
        frame = make_collect(QUEUE_KEYS[queue], command)
        owner.counters[queue] = max(owner.counters.get(queue, 0), counter)
        expected = self._expect(queue, machine, counter)
        answer = self._call(queue, machine, self.relay.collect, [frame], expected)
        if answer is None or line is None:
            return expected
        line.counter = counter
        for digest in acks:
            mail = self.book.mail.get(digest)
            if mail is not None and mail.queue == queue and mail.held:
                mail.held = False
                self._all_is_durable()
        frames = list(answer)
        if command.senders_digest != line.digest:
            self._check_state(queue, machine, frames.pop(0), Flag.OK)
        held = [each.data for each in self.book.mail.values() if each.queue == queue and each.held]
        assert frames == held
        return None

    def _held(self, envelope: Envelope, queue: int, fact: HeldFact, now_ms: int) -> None:
        known = self.book.mail.get(envelope.digest)
        if known is not None and known.fact.until_ms > now_ms:
            assert fact == known.fact
            return
        until_ms = now_ms + envelope.ttl_s * 1000
        assert fact == HeldFact(envelope.digest, envelope.length, now_ms, until_ms)
        self.book.mail.pop(envelope.digest, None)
        self.book.mail[envelope.digest] = Mail(
            fact, queue, envelope.frame.data, self.true_ms, self.restarts
        )
        self._all_is_durable()

    def _rule_7_it_was_kept_long_enough(self, mail: Mail) -> None:
        """A restart adds an hour at most to the age of mail, whatever the clocks said."""
        added_ms = (self.restarts - mail.restarts) * RESTART_MS_MAX
        age_ms = self.true_ms - mail.true_ms + added_ms
        assert age_ms >= mail.fact.until_ms - mail.fact.accepted_ms

    def _see_what_a_crash_left(self) -> None:
        """A counter that was only in force may be lost, but never one that was signed."""
        for queue, line in self.book.lines.items():
            known = self.runner.run(self._queue(queue))
            assert line.sure <= known.counter <= line.counter
            line.counter = known.counter


class MemoryQueueMachine(QueueMachine):
    engine_of = MemoryEngine


class SqliteQueueMachine(QueueMachine):
    engine_of = SqliteEngine


TestQueueMachineInMemory = MemoryQueueMachine.TestCase
TestQueueMachineInMemory.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, print_blob=True
)
TestQueueMachineOnSqlite = SqliteQueueMachine.TestCase
TestQueueMachineOnSqlite.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, print_blob=True
)
