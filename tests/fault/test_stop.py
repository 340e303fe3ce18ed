"""Every way to stop a relay (case S1), and what it keeps: the same data, whole and at once."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.http import HopRefused
from agentmbx_protocol.bodies import join_frames
from agentmbx_protocol.envelope import Envelope, parse_envelope
from process_view import children
from raw_http import Answer, RawConnection, deposit_request, request
from relay_process import RelayProcess
from scene import Scene, add_queue, eventually, queue_at, seeded

STOPS_S = 8.0
POLLS = 12
UPLOADS = 10
SLOW_UPLOADS = 6
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
Outcome = tuple[list[Envelope], BaseException | None]


async def _upload_until_refused(scene: Scene, outcomes: list[Outcome]) -> None:
    for _ in range(10_000):
        batch = [scene.sender.write() for _ in range(4)]
        try:
            answer = await scene.wire.deposit(*batch)
        except (HopRefused, OperatingError) as error:
            outcomes.append((batch, error))
            return
        assert set(answer.held) == {letter.digest for letter in batch}
        outcomes.append((batch, None))


async def _poll(relay: RelayProcess, scene: Scene) -> Answer:
    with await RawConnection.open(relay.url) as connection:
        frame = scene.owner.collect_frame(wait_s=50)
        answer = await connection.ask(request("/v1/collect", join_frames([frame])))
        await connection.ended()
        return answer


async def _half_an_upload(relay: RelayProcess, scene: Scene) -> RawConnection:
    connection = await RawConnection.open(relay.url)
    data = deposit_request(scene.sender.write().frame.data)
    await connection.send(data[: len(data) // 2])
    return connection


async def _stop_under_load(
    relay: RelayProcess, uploading: Sequence[Scene], waiting: Sequence[Scene], how: signal.Signals
) -> tuple[list[Outcome], list[Answer | BaseException]]:
    """Stop it with uploads and long polls under way; what became of each of them."""
    outcomes: list[Outcome] = []
    uploads = [asyncio.create_task(_upload_until_refused(scene, outcomes)) for scene in uploading]
    polls = asyncio.gather(*(_poll(relay, scene) for scene in waiting), return_exceptions=True)
    halves = [await _half_an_upload(relay, uploading[0]) for _ in range(SLOW_UPLOADS)]
    await asyncio.sleep(0.3)
    started = time.monotonic()
    relay.signal(how)
    code = await asyncio.to_thread(relay.wait)
    assert time.monotonic() - started < STOPS_S
    assert code == (-how if how is signal.SIGKILL else 0)
    await asyncio.gather(*uploads)
    for half in halves:
        await half.ended()
        half.close()
    return outcomes, await polls


@pytest.mark.parametrize(
    "how", [*STOP_SIGNALS, signal.SIGKILL], ids=lambda number: signal.Signals(number).name
)
async def test_s1_however_it_is_stopped_what_was_answered_is_there_and_the_rest_whole_or_not(
    tmp_path: Path, how: signal.Signals
) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as first:
            uploading = [first, *[await add_queue(first.wire) for _ in range(UPLOADS - 1)]]
            waiting = [await add_queue(first.wire) for _ in range(POLLS)]
            outcomes, polls = await _stop_under_load(relay, uploading, waiting, how)
            if how is not signal.SIGKILL:
                for answer in polls:
                    assert isinstance(answer, Answer)
                    assert (answer.status, answer.body) == (200, b"")
                    assert int(answer.headers["retry-after"]) > 0
                assert "Traceback" not in relay.log()
                assert _bytes_in_the_log_of_the_store(relay) == 0
            await asyncio.to_thread(relay.restart)
            assert len(outcomes) > UPLOADS
            await _assert_same_data(uploading, outcomes)


def _bytes_in_the_log_of_the_store(relay: RelayProcess) -> int:
    path = relay.data / "relay.db-wal"
    return path.stat().st_size if path.exists() else 0


async def _assert_same_data(scenes: Sequence[Scene], outcomes: Sequence[Outcome]) -> None:
    drained = [
        parse_envelope(data) for scene in scenes for data in await scene.wire.drain(scene.owner)
    ]
    found = {envelope.digest for envelope in drained}
    assert len(found) == len(drained)
    for batch, error in outcomes:
        count = len(found.intersection(letter.digest for letter in batch))
        if error is None:
            assert count == len(batch)
        elif isinstance(error, HopRefused):
            assert error.refusal.code in ("shutting_down", "unavailable")
            assert count == 0
        else:
            assert count in (0, len(batch))
    assert found <= {letter.digest for batch, _ in outcomes for letter in batch}


@pytest.mark.parametrize("second", STOP_SIGNALS, ids=lambda number: signal.Signals(number).name)
async def test_a_second_signal_changes_nothing_of_an_orderly_stop(
    tmp_path: Path, second: signal.Signals
) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            letter = scene.sender.write()
            await scene.wire.deposit(letter)
            half = await _half_an_upload(relay, scene)
            started = time.monotonic()
            relay.signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            for _ in range(3):
                relay.signal(second)
                await asyncio.sleep(0.05)
            assert await asyncio.to_thread(relay.wait) == 0
            assert time.monotonic() - started < STOPS_S
            half.close()
            assert "Traceback" not in relay.log()
            await asyncio.to_thread(relay.restart)
            assert await scene.wire.drain(scene.owner) == [letter.frame.data]


async def test_a_request_that_is_under_way_when_it_stops_is_told_to_come_back(
    tmp_path: Path,
) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            owner = scene.owner
            frames = {
                "/v1/deposit": scene.sender.write().frame.data,
                "/v1/collect": owner.collect_frame(wait_s=50),
                "/v1/register": owner.register_frame(),
                "/v1/retire": owner.retire_frame(),
            }
            connections = {
                frame: await _reading_its_body(relay, path, frame) for path, frame in frames.items()
            }
            relay.signal(signal.SIGTERM)
            await eventually(
                lambda: "relay_stopping" in relay.log(), within_s=5, what="a word of stopping"
            )
            for frame, connection in connections.items():
                answer = await connection.ask(frame[-10:])
                assert (answer.status, answer.problem()) == (503, "shutting_down")
                assert int(answer.headers["retry-after"]) > 0
                await connection.ended()
                connection.close()
            assert await asyncio.to_thread(relay.wait) == 0
            with pytest.raises(ConnectionError):
                await RawConnection.open(relay.url)
            await asyncio.to_thread(relay.restart)
            assert await scene.wire.drain(scene.owner) == []


async def _reading_its_body(relay: RelayProcess, path: str, frame: bytes) -> RawConnection:
    """A request of which the relay has the head and waits for the last ten bytes of the body."""
    connection = await RawConnection.open(relay.url)
    data = request(path, join_frames([frame]), headers=[("Expect", "100-continue")])
    head, end, body = data.partition(b"\r\n\r\n")
    assert (await connection.ask(head + end)).status == 100
    await connection.send(body[:-10])
    return connection


async def test_the_helper_process_of_a_relay_ends_with_it_however_it_is_stopped(
    tmp_path: Path,
) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with RelayProcess(tmp_path / how.name, "--open") as relay:
            async with queue_at(relay, senders=8) as scene:
                batch = [[sender.write() for _ in range(20)] for sender in scene.senders]
                await asyncio.gather(*(scene.wire.deposit(*letters) for letters in batch))
                helpers = children(relay.pid)
                assert helpers
                relay.signal(how)
                await asyncio.to_thread(relay.wait)
                await eventually(
                    lambda pids=helpers: not any(map(_runs, pids)), within_s=5, what="its end"
                )


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_relay_that_is_stopped_at_any_moment_of_its_start_starts_again(
    tmp_path: Path,
) -> None:
    dice = seeded()
    folder = tmp_path / "relay"
    for _ in range(8):
        relay = RelayProcess(folder, "--open")
        starting = asyncio.create_task(asyncio.to_thread(_start_or_not, relay))
        await asyncio.sleep(dice.uniform(0.05, 1.2))
        relay.signal(dice.choice((signal.SIGTERM, signal.SIGINT)))
        await starting
        await asyncio.to_thread(relay.wait)
    with RelayProcess(folder, "--open") as relay:
        async with queue_at(relay) as scene:
            await scene.wire.deposit(scene.sender.write())
            assert len(await scene.wire.drain(scene.owner)) == 1


def _start_or_not(relay: RelayProcess) -> None:
    try:
        relay.start()
    except RuntimeError:
        assert not relay.running
