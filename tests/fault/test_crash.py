"""A relay that is killed at any moment: what it signed holds, and what was acked stays away."""

import asyncio
import random
import signal
import subprocess
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

import pytest

from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.http import open_session
from agentmbx_protocol.keys import SigningKey
from agentmbx_protocol.queue_commands import Flag, QueueState, senders_digest
from correspondents import Correspondent, Wire
from ledger import Ledger
from relay_process import AGENTMBX, RelayProcess
from scene import Scene, add_queue, line_of, queue_at, refused, seeded
from tracing import traced

CRASHES_S = 25.0
COMMANDS_S = 7.0
LOAD_S_MAX = 0.3
BATCH_MAX = 40
SHORT_TTL_S_MAX = 4
LONG_TTL_S = 3600
DEPOSITS_EACH_ROUND_MAX = 25
COLLECTED_MAX = 1024


class _Story:
    """One queue under load: two senders that deposit, an owner that acks some of it."""

    def __init__(self, scene: Scene, dice: random.Random) -> None:
        self.scene = scene
        self.ledger = Ledger()
        self._dice = dice

    def loads(self) -> list[Coroutine[object, object, None]]:
        """What goes on until the relay is gone."""
        return [*(self._deposit(sender) for sender in self.scene.senders), self._collect()]

    async def _deposit(self, sender: Correspondent) -> None:
        for _ in range(DEPOSITS_EACH_ROUND_MAX):
            size = self._dice.choice((1, 1, self._dice.randint(8, BATCH_MAX)))
            short = self._dice.random() < 0.2
            ttl_s = self._dice.randint(1, SHORT_TTL_S_MAX) if short else LONG_TTL_S
            letters = [sender.write(ttl_s=ttl_s) for _ in range(size)]
            self.ledger.offer(letters)
            try:
                answer = await self.scene.wire.deposit(*letters)
            except OperatingError:
                if not short:
                    self.ledger.leave_unanswered(letters)
                return
            assert set(answer.held) == {letter.digest for letter in letters}
            self.ledger.believe(answer.held.values())

    async def _collect(self) -> None:
        acks: list[bytes] = []
        while True:
            try:
                answer = await self.scene.wire.collect(self.scene.owner, acks)
            except OperatingError:
                self.ledger.ack(acks, answered=False)
                return
            self.ledger.ack(acks, answered=True)
            digests = self.ledger.check_handed_out(answer.envelopes)
            acks = [digest for digest in digests if self._dice.random() < 0.3]
            await asyncio.sleep(self._dice.random() * 0.05)

    async def verify(self, *, drain: bool) -> None:
        """Check the restarted relay: first what it hands out, then what it says of the rest."""
        late_ms = await self._relay_now_ms() + SHORT_TTL_S_MAX * 1000
        answer = await self.scene.wire.collect(self.scene.owner)
        digests = self.ledger.check_handed_out(answer.envelopes)
        if len(digests) < COLLECTED_MAX:
            self.ledger.check_all_there(digests, late_ms)
            self.ledger.check_none_is_half(digests)
        held = [self.ledger.offered[digest] for digest in self.ledger.facts]
        for sender in self.scene.senders:
            own = [each for each in held if each.signer == sender.pair.public]
            for at in range(0, len(own), 64):
                repeated = await self.scene.wire.deposit(*own[at : at + 64])
                assert len(repeated.held) == len(own[at : at + 64])
                self.ledger.believe(repeated.held.values())
        if drain:
            await self._drain()

    async def _relay_now_ms(self) -> int:
        fresh = self.scene.senders[0].write()
        self.ledger.offer([fresh])
        answer = await self.scene.wire.deposit(fresh)
        self.ledger.believe(answer.held.values())
        return answer.held[fresh.digest].accepted_ms

    async def _drain(self) -> None:
        late_ms = await self._relay_now_ms() + SHORT_TTL_S_MAX * 1000
        everything: list[bytes] = []
        acks: list[bytes] = []
        while True:
            answer = await self.scene.wire.collect(self.scene.owner, acks)
            self.ledger.ack(acks, answered=True)
            acks = self.ledger.check_handed_out(answer.envelopes)
            everything += acks
            if not acks:
                break
        self.ledger.acked.difference_update(everything)
        self.ledger.check_all_there(everything, late_ms)
        self.ledger.acked.update(everything)


async def _crash_under_load(
    relay: RelayProcess, stories: Sequence[_Story], dice: random.Random
) -> None:
    loads = asyncio.gather(*(load for story in stories for load in story.loads()))
    await asyncio.sleep(dice.uniform(0.02, LOAD_S_MAX))
    await asyncio.to_thread(relay.kill)
    await loads
    if dice.random() < 0.3:
        await asyncio.to_thread(_die_while_starting, relay, dice.uniform(0.2, 0.8))
    await asyncio.to_thread(relay.restart)


def _die_while_starting(relay: RelayProcess, after_s: float) -> None:
    command = [*AGENTMBX, "relay", "serve", "--data", str(relay.data), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--metrics-listen", "off"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        time.sleep(after_s)
        process.kill()


async def test_rule_1_and_2_whatever_was_held_is_there_with_the_same_facts_after_each_kill(
    tmp_path: Path,
) -> None:
    dice = seeded()
    ends_s = time.monotonic() + CRASHES_S
    crashes = 0
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with open_session() as session:
            wire = Wire(session, line_of(relay))
            stories = [_Story(await add_queue(wire, senders=2), dice) for _ in range(2)]
            while time.monotonic() < ends_s:
                await _crash_under_load(relay, stories, dice)
                crashes += 1
                for story in stories:
                    await story.verify(drain=dice.random() < 0.5)
            for story in stories:
                await story.verify(drain=True)
        assert relay.stop() == 0
    deposits = sum(story.ledger.deposit_count for story in stories)
    repeats = sum(story.ledger.same_count for story in stories)
    acks = sum(len(story.ledger.acked) for story in stories)
    print(f"{crashes=} {deposits=} {repeats=} {acks=}")  # noqa: T201 - shown when it fails
    assert crashes >= 3
    assert deposits >= 2000
    assert 0 < repeats < deposits
    assert acks >= 100


@pytest.mark.parametrize(
    ("call", "nth"),
    [("pwrite64", 1), ("pwrite64", 4), ("pwrite64", 11), ("fdatasync", 1)],
)
async def test_a_kill_at_any_write_of_a_commit_leaves_all_of_a_deposit_or_nothing(
    tmp_path: Path, call: str, nth: int
) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            first = scene.sender.write()
            facts = (await scene.wire.deposit(first)).held
            batch = [scene.sender.write() for _ in range(16)]
            kill = f"inject={call}:signal=SIGKILL:when={nth}"
            with traced(relay.pid, tmp_path / "trace", "-e", kill):
                with pytest.raises(OperatingError):
                    await scene.wire.deposit(*batch)
                assert await asyncio.to_thread(relay.wait) == -signal.SIGKILL
            await asyncio.to_thread(relay.restart)
            assert (await scene.wire.deposit(first)).held == facts
            drained = await scene.wire.drain(scene.owner)
            assert drained[0] == first.frame.data
            assert drained[1:] in ([], [letter.frame.data for letter in batch])


async def test_a_signed_queue_state_is_true_after_a_kill(tmp_path: Path) -> None:
    dice = seeded()
    ends_s = time.monotonic() + COMMANDS_S
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            lists = [tuple(sorted(_keys(dice.randint(0, 3)))) for _ in range(6)]
            while time.monotonic() < ends_s:
                state = await scene.wire.register(scene.owner)
                killer = asyncio.create_task(_kill_soon(relay, dice.uniform(0, 0.1)))
                state, tried = await _register_until_gone(scene, state, lists)
                await killer
                await asyncio.to_thread(relay.restart)
                await _assert_state_is_kept(scene, state, tried)


def _keys(count: int) -> list[bytes]:
    return [SigningKey.generate().public for _ in range(count)]


async def _kill_soon(relay: RelayProcess, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await asyncio.to_thread(relay.kill)


async def _register_until_gone(
    scene: Scene, state: QueueState, lists: Sequence[tuple[bytes, ...]]
) -> tuple[QueueState, tuple[bytes, ...]]:
    """The last state that was answered, and the list of the register that was not answered."""
    while True:
        for senders in lists:
            scene.owner.senders = senders
            try:
                state = await scene.wire.register(scene.owner)
            except OperatingError:
                return state, senders


async def _assert_state_is_kept(scene: Scene, state: QueueState, tried: tuple[bytes, ...]) -> None:
    """A command with the counter of the last signed state is stale, and its list is registered."""
    old = scene.owner.collect_frame(counter=state.counter)
    stale = await refused(scene.wire.hop.collect(old))
    assert stale.refusal.code == "stale"
    assert stale.state is not None
    assert stale.state.flag is Flag.STALE
    digests = {state.counter: state.senders_digest, scene.owner.counter: senders_digest(tried)}
    assert stale.state.senders_digest == digests[stale.state.counter]


async def test_a_queue_that_was_retired_stays_retired_after_a_kill(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            letter = scene.sender.write()
            await scene.wire.deposit(letter)
            retired = await scene.wire.hop.retire(scene.owner.retire_frame())
            await asyncio.to_thread(relay.kill)
            await asyncio.to_thread(relay.restart)
            assert await scene.wire.hop.retire(scene.owner.retire_frame()) == retired
            for call in (scene.wire.collect(scene.owner), scene.wire.register(scene.owner)):
                answer = await refused(call)
                assert (answer.refusal.code, answer.state) == ("retired", retired)
            answer = await refused(scene.wire.deposit(letter))
            assert answer.refusal.code == "no_such_queue"
