"""Collects that wait: what ends them, and that nothing else does."""

import asyncio
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentmbx_protocol import frame, limits
from agentmbx_protocol.bodies import join_frames
from correspondents import Correspondent
from process_view import processor_s
from raw_http import Answer, RawConnection, request
from relay_process import RelayProcess
from scene import Scene, add_queue, eventually, queue_at, refused

POLLS = 60
SOON_S = 2.0


class _Relay(RelayProcess):
    """A relay that tells by its metrics how many collects wait."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as plug:
            plug.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{plug.getsockname()[1]}"
        self._metrics_url = f"http://{address}/"
        super().__init__(folder, "--open", f"--metrics-listen={address}")

    async def waiting_count(self) -> int:
        """How many collects wait now."""
        with await RawConnection.open(self._metrics_url) as connection:
            page = (await connection.ask(request("/metrics"))).body.decode()
        match = re.search(r"^agentmbx_relay_long_polls (\d+)", page, re.MULTILINE)
        assert match is not None
        return int(match[1])


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Relay]:
    with _Relay(tmp_path_factory.mktemp("polls") / "relay") as running:
        yield running


class _Poll:
    """A collect under way on a connection of its own."""

    def __init__(
        self, relay: RelayProcess, scene: Scene, *, wait_s: int = 0, bytes_max: int = 4_000_000
    ) -> None:
        self._frame = scene.owner.collect_frame(wait_s=wait_s, bytes_max=bytes_max)
        self._relay = relay
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> tuple[Answer, float]:
        with await RawConnection.open(self._relay.url) as connection:
            started = time.monotonic()
            answer = await connection.ask(request("/v1/collect", join_frames([self._frame])))
            return answer, time.monotonic() - started


async def _waiting(relay: _Relay, scene: Scene) -> _Poll:
    """A collect that waits at the relay by now."""
    return (await _all_waiting(relay, [scene]))[0]


async def _all_waiting(relay: _Relay, scenes: Sequence[Scene]) -> list[_Poll]:
    before = await relay.waiting_count()
    polls = [_Poll(relay, scene, wait_s=50) for scene in scenes]

    async def all_wait() -> bool:
        return await relay.waiting_count() == before + len(polls)

    await eventually(all_wait, within_s=10, what="collects that wait")
    assert not any(poll.task.done() for poll in polls)
    return polls


async def test_mail_ends_a_wait_at_once(relay: _Relay) -> None:
    async with queue_at(relay) as scene:
        poll = await _waiting(relay, scene)
        letter = scene.sender.write()
        await scene.wire.deposit(letter)
        answer, _ = await asyncio.wait_for(poll.task, SOON_S)
        assert answer.body == join_frames([letter.frame.data])


async def test_a_repeated_deposit_and_mail_for_others_end_no_wait(relay: _Relay) -> None:
    async with queue_at(relay) as scene:
        other = await add_queue(scene.wire)
        letter = scene.sender.write()
        await scene.wire.deposit(letter)
        assert len(await scene.wire.drain(scene.owner)) == 1
        poll = await _waiting(relay, scene)
        await scene.wire.deposit(letter)
        await scene.wire.deposit(other.sender.write())
        await refused(scene.wire.deposit(Correspondent(scene.owner).write()))
        assert not poll.task.done()
        news = scene.sender.write()
        await scene.wire.deposit(news)
        answer, _ = await asyncio.wait_for(poll.task, SOON_S)
        assert answer.body == join_frames([news.frame.data])


async def test_a_newer_collect_ends_an_older_one_with_what_it_has(relay: _Relay) -> None:
    async with queue_at(relay) as scene:
        poll = await _waiting(relay, scene)
        for _ in range(5):
            older, poll = poll, _Poll(relay, scene, wait_s=50)
            answer, _ = await asyncio.wait_for(older.task, SOON_S)
            assert (answer.status, answer.body) == (200, b"")
        letter = scene.sender.write()
        await scene.wire.deposit(letter)
        answer, _ = await asyncio.wait_for(poll.task, SOON_S)
        assert answer.body == join_frames([letter.frame.data])


async def test_a_list_that_changes_while_an_owner_waits_ends_the_wait(relay: _Relay) -> None:
    async with queue_at(relay) as scene:
        poll = await _waiting(relay, scene)
        await scene.wire.register(scene.owner)
        answer, _ = await asyncio.wait_for(poll.task, SOON_S)
        assert answer.status == 200


async def test_a_queue_that_is_retired_while_its_owner_waits_ends_the_wait(
    relay: _Relay,
) -> None:
    async with queue_at(relay) as scene:
        poll = await _waiting(relay, scene)
        await scene.wire.hop.retire(scene.owner.retire_frame())
        answer, _ = await asyncio.wait_for(poll.task, SOON_S)
        assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("wait_s", [0, 1, 2])
async def test_a_wait_lasts_as_long_as_it_was_asked_for(relay: _Relay, wait_s: int) -> None:
    async with queue_at(relay) as scene:
        answer, took_s = await _Poll(relay, scene, wait_s=wait_s).task
        assert (answer.status, answer.body) == (200, b"")
        assert wait_s <= took_s < wait_s + SOON_S


@pytest.mark.parametrize("wait_s", [limits.COLLECT_WAIT_S_MAX + 1, 2**16 - 1])
async def test_a_wait_beyond_the_bound_is_malformed_at_once(relay: _Relay, wait_s: int) -> None:
    async with queue_at(relay) as scene:
        fields = frame.parse(scene.owner.collect_frame()).fields
        patient = fields[:-2] + wait_s.to_bytes(2, "big")
        command = frame.sign(frame.Kind.COLLECT, scene.owner.queue, patient)
        with await RawConnection.open(relay.url) as connection:
            body = request("/v1/collect", join_frames([command]))
            answer = await asyncio.wait_for(connection.ask(body), SOON_S)
        assert (answer.status, answer.problem()) == (400, "malformed")


async def test_an_owner_with_another_list_than_the_relay_has_does_not_wait(
    relay: _Relay,
) -> None:
    async with queue_at(relay) as scene:
        scene.owner.senders = ()
        answer = await asyncio.wait_for(scene.wire.collect(scene.owner, wait_s=50), SOON_S)
        assert answer.state is not None
        assert answer.state.counter == scene.owner.counter


async def test_an_answer_holds_what_fits_and_one_letter_if_none_does(relay: _Relay) -> None:
    async with queue_at(relay) as scene:
        letters = [scene.sender.write() for _ in range(5)]
        await scene.wire.deposit(*letters)
        size = letters[0].length + 4
        for bytes_max, count in ((0, 1), (1, 1), (2 * size - 1, 1), (2 * size, 2), (2**32 - 1, 5)):
            answer, _ = await _Poll(relay, scene, wait_s=0, bytes_max=bytes_max).task
            assert answer.body == join_frames(each.frame.data for each in letters[:count])


async def test_many_owners_that_wait_cost_no_processor_time_and_all_get_their_mail(
    relay: _Relay,
) -> None:
    async with queue_at(relay) as first:
        scenes = [first, *[await add_queue(first.wire) for _ in range(POLLS - 1)]]
        polls = await _all_waiting(relay, scenes)
        used_s, started = processor_s(relay.pid), time.monotonic()
        await eventually(lambda: time.monotonic() - started > 1.5, within_s=5, what="some time")
        assert processor_s(relay.pid) - used_s < 0.3
        await asyncio.gather(*(scene.wire.deposit(scene.sender.write()) for scene in scenes))
        answers = await asyncio.wait_for(asyncio.gather(*(poll.task for poll in polls)), SOON_S)
        assert all(answer.body for answer, _ in answers)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
async def test_a_stop_answers_all_that_wait_and_spreads_when_they_come_back(
    tmp_path_factory: pytest.TempPathFactory, how: signal.Signals
) -> None:
    with _Relay(tmp_path_factory.mktemp("stop") / "relay") as relay:
        async with queue_at(relay) as first:
            scenes = [first, *[await add_queue(first.wire) for _ in range(POLLS - 1)]]
            polls = await _all_waiting(relay, scenes)
            relay.signal(how)
            answers = [answer for answer, _ in await asyncio.gather(*(poll.task for poll in polls))]
            assert await asyncio.to_thread(relay.wait) == 0
        assert {(answer.status, answer.body) for answer in answers} == {(200, b"")}
        assert {answer.headers["connection"] for answer in answers} == {"close"}
        waits_s = {int(answer.headers["retry-after"]) for answer in answers}
        assert min(waits_s) >= 1
        assert len(waits_s) > 1
