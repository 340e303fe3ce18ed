"""The relay: what it does with each call, between the HTTP front and the store.

It checks, lets the rules decide inside a commit, and signs only after that commit is durable.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from agentmbx_protocol import bodies, custody, frame, limits
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.errors import (
    BadSignature,
    Malformed,
    NoSuchQueue,
    NotAdmitted,
    Refusal,
    ShuttingDown,
)
from agentmbx_protocol.keys import SigningKey, key_text
from agentmbx_protocol.queue_commands import (
    Admit,
    Flag,
    QueueState,
    make_queue_state,
    parse_admit,
    parse_collect,
    parse_queue_state,
    parse_register,
    parse_retire,
)
from agentmbx_relay import rules
from agentmbx_relay.clock import RelayClock
from agentmbx_relay.group_commit import GroupCommit
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.quota import Quota
from agentmbx_relay.signatures import Signatures
from agentmbx_relay.store import Deposit, Queue, Store

_FLAGS: Final = {"stale": Flag.STALE, "superseded": Flag.SUPERSEDED, "retired": Flag.RETIRED}


class Policy(msgspec.Struct, frozen=True):
    """What the operator decided: who may make queues, how many, and the name shown."""

    name: str
    is_open: bool
    queues_max: int
    quota: Quota


class ProvenRefusal(Exception):
    """A refusal that comes with the signed `queue_state` that proves it."""

    def __init__(self, refusal: Refusal, queue_state: bytes) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal
        self.queue_state = queue_state


class Relay:
    """The five calls of SPEC section 8.2; every method raises a `Refusal` or `ProvenRefusal`."""

    def __init__(
        self,
        key: SigningKey,
        store: Store,
        commits: GroupCommit,
        signatures: Signatures,
        *,
        clock: RelayClock,
        policy: Policy,
        metrics: Metrics,
    ) -> None:
        self._key = key
        self._store = store
        self._commits = commits
        self._signatures = signatures
        self._clock = clock
        self._policy = policy
        self._metrics = metrics
        self._polls: dict[int, asyncio.Event] = {}
        self._deposits_under_way = 0
        self.draining = False

    @property
    def poll_count(self) -> int:
        """How many collects wait now."""
        return len(self._polls)

    def info(self) -> dict[str, object]:
        """What `GET /v1/info` answers."""
        return {
            "versions": [1],
            "relay_key": key_text(self._key.public),
            "name": self._policy.name,
            "admission": "open" if self._policy.is_open else "invite",
            "limits": {
                "envelope_bytes_max": limits.FRAME_BYTES_MAX,
                "deposit_envelopes_max": limits.DEPOSIT_ENVELOPES_MAX,
                "deposit_bytes_max": limits.DEPOSIT_BYTES_MAX,
                "collect_bytes_max": limits.COLLECT_BYTES_MAX,
                "collect_wait_s_max": limits.COLLECT_WAIT_S_MAX,
                "senders_max": limits.SENDERS_MAX,
                "ttl_s_max": limits.TTL_S_MAX,
                "queue_bytes_max": self._policy.quota.queue_bytes_max,
            },
        }

    async def deposit(self, body: bytes) -> bytes:
        """Hold the envelopes of a deposit's body; the answer's body, signed after the commit."""
        self._refuse_when_draining()
        self._deposits_under_way += 1
        try:
            return await self._deposit(body)
        finally:
            self._deposits_under_way -= 1

    async def _deposit(self, body: bytes) -> bytes:
        started = time.perf_counter()
        parcels = _parse_parcels(bodies.split_frames(body, limits.DEPOSIT_ENVELOPES_MAX))
        good = [parcel for parcel in parcels if isinstance(parcel, Envelope)]
        if not good:
            raise _first_refusal(parcels)
        queue_key, signer = good[0].queue, good[0].signer
        if self._store.sender(queue_key, signer) is None:
            raise NoSuchQueue
        verdicts = await self._signatures.verify(
            [parcel.frame for parcel in good], alone=self._deposits_under_way == 1
        )
        refused = {id(p): verdict for p, verdict in zip(good, verdicts, strict=True) if verdict}
        taken = {p.digest: p for p in good if id(p) not in refused}
        if not taken:
            raise BadSignature
        holding = await self._hold(queue_key, signer, taken)
        known = dict(zip(taken, holding.outcomes, strict=True))
        outcomes = [
            parcel
            if isinstance(parcel, Refusal)
            else refused.get(id(parcel)) or known[parcel.digest]
            for parcel in parcels
        ]
        if holding.new_count:
            self._wake(holding.queue_id)
        answer = await self._answer_deposit(queue_key, outcomes)
        duplicates = sum(not isinstance(each, Refusal) for each in outcomes) - holding.new_count
        self._metrics.deposited(holding.new_count, duplicates, time.perf_counter() - started)
        return answer

    async def collect(self, body: bytes) -> list[bytes]:
        """Count acks, then hand over what waits, perhaps after a long poll; the answer's frames."""
        self._refuse_when_draining()
        command = parse_collect(_only_frame(body))
        self._check_relay(command.relay)
        try:
            queue, acked = await self._commits.submit(partial(rules.collect, command=command))
        except rules.CommandRefused as refused:
            raise await self._prove(refused) from None
        self._metrics.acked(acked)
        answer = []
        if queue.senders_digest != command.senders_digest:
            answer.append(await self._state(queue, Flag.OK))
        bytes_max = min(command.bytes_max, limits.COLLECT_BYTES_MAX)
        waiting = await self._wait_for_mail(queue, bytes_max, 0 if answer else command.wait_s)
        self._metrics.collected(len(waiting))
        return answer + waiting

    async def register(self, body: bytes) -> bytes:
        """Make a queue or replace its list of senders; the signed `queue_state`."""
        self._refuse_when_draining()
        frames = bodies.split_frames(body, 2)
        if not frames:
            raise Malformed("A register request holds a register frame.")
        # A long list of keys takes milliseconds to check, and that in a thread.
        command = await asyncio.to_thread(parse_register, frames[0])
        self._check_relay(command.relay)
        proof = self._parse_proof(frames[1]) if len(frames) > 1 else None
        work = partial(
            rules.register,
            command=command,
            proof=proof,
            now_ms=self._clock.now_ms(),
            is_open=self._policy.is_open,
            queues_max=self._policy.queues_max,
        )
        try:
            facts = await self._commits.submit(work)
        except rules.CommandRefused as refused:
            raise await self._prove(refused) from None
        self._wake(facts.queue_id)
        return self._sign_state(facts, Flag.OK)

    async def retire(self, body: bytes) -> bytes:
        """End a queue for good; the signed `queue_state`."""
        self._refuse_when_draining()
        command = parse_retire(_only_frame(body))
        self._check_relay(command.relay)
        work = partial(rules.retire, command=command, now_ms=self._clock.now_ms())
        try:
            facts = await self._commits.submit(work)
        except rules.CommandRefused as refused:
            raise await self._prove(refused) from None
        self._wake(facts.queue_id)
        return self._sign_state(facts, Flag.RETIRED)

    def drain(self) -> None:
        """Refuse what is new, and let every long poll answer now."""
        self.draining = True
        for event in self._polls.values():
            event.set()

    async def _hold(
        self, queue_key: bytes, signer: bytes, taken: dict[bytes, Envelope]
    ) -> rules.Holding:
        deposits = [
            Deposit(parcel.digest, parcel.length, parcel.ttl_s, parcel.frame.data)
            for parcel in taken.values()
        ]
        now_ms = self._clock.now_ms()
        work = partial(
            rules.hold,
            queue_key=queue_key,
            signer=signer,
            deposits=deposits,
            quota=self._policy.quota,
            now_ms=now_ms,
        )
        length = sum(each.length for each in deposits)
        return await self._commits.submit(work, length=length, digests=list(taken))

    async def _answer_deposit(
        self, queue_key: bytes, outcomes: Sequence[custody.HeldFact | Refusal]
    ) -> bytes:
        held = {each.digest: each for each in outcomes if isinstance(each, custody.HeldFact)}
        refused = [
            bodies.Refused(position, each)
            for position, each in enumerate(outcomes)
            if isinstance(each, Refusal)
        ]
        if not held:
            raise refused[0].refusal
        for each in refused:
            self._metrics.refused(each.refusal)
        unsigned = custody.prepare_held(self._key.public, queue_key, held.values())
        alone = self._deposits_under_way == 1
        signature = await self._signatures.sign(unsigned.message, alone=alone)
        return bodies.make_deposit_answer(unsigned.data + signature, refused)

    async def _wait_for_mail(self, queue: Queue, bytes_max: int, wait_s: int) -> list[bytes]:
        arrived = asyncio.Event()
        older = self._polls.get(queue.id)
        if older is not None:
            older.set()
        self._polls[queue.id] = arrived
        try:
            waiting = await self._store.waiting(queue, bytes_max)
            if waiting or not wait_s or self.draining:
                return waiting
            async with asyncio.timeout(wait_s):
                await arrived.wait()
        except TimeoutError:
            return []
        finally:
            if self._polls.get(queue.id) is arrived:
                del self._polls[queue.id]
        return await self._store.waiting(queue, bytes_max)

    def _wake(self, queue_id: int) -> None:
        event = self._polls.get(queue_id)
        if event is not None:
            event.set()

    async def _state(self, queue: Queue, flag: Flag) -> bytes:
        return self._sign_state(
            await self._commits.submit(partial(rules.settle, queue=queue)), flag
        )

    def _sign_state(self, facts: rules.QueueFacts, flag: Flag) -> bytes:
        state = QueueState(
            relay=self._key.public,
            queue=facts.key,
            counter=facts.counter,
            instance=facts.instance,
            senders_digest=facts.senders_digest,
            flag=flag,
        )
        return make_queue_state(self._key, state)

    async def _prove(self, refused: rules.CommandRefused) -> ProvenRefusal:
        flag = _FLAGS[refused.refusal.code]
        return ProvenRefusal(refused.refusal, await self._state(refused.queue, flag))

    def _parse_proof(self, data: bytes) -> Admit | QueueState:
        kind = frame.parse(data, frame.Kind.ADMIT, frame.Kind.QUEUE_STATE).kind
        if kind is frame.Kind.ADMIT:
            return parse_admit(data)
        state = parse_queue_state(data)
        if state.relay != self._key.public:
            raise NotAdmitted
        return state

    def _check_relay(self, relay: bytes) -> None:
        if relay != self._key.public:
            raise Malformed("The command is for another relay's key.")

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise ShuttingDown


def _only_frame(body: bytes) -> bytes:
    frames = bodies.split_frames(body, 1)
    if not frames:
        raise Malformed("The request holds no frame.")
    return frames[0]


def _parse_parcels(frames: Sequence[bytes]) -> list[Envelope | Refusal]:
    parcels: list[Envelope | Refusal] = []
    first: Envelope | None = None
    for data in frames:
        try:
            parcel = parse_envelope(data)
        except Refusal as refusal:
            parcels.append(refusal)
            continue
        first = first or parcel
        if (parcel.queue, parcel.signer) != (first.queue, first.signer):
            parcels.append(Malformed("A deposit is for one queue, by one signer."))
        else:
            parcels.append(parcel)
    return parcels


def _first_refusal(parcels: Sequence[Envelope | Refusal]) -> Refusal:
    for parcel in parcels:
        if isinstance(parcel, Refusal):
            return parcel
    return Malformed("A deposit holds at least one envelope.")
