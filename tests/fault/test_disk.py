"""Disks that are full or that fail (cases D1 and D4): nothing is signed that is not durable."""

import asyncio
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.http import HopRefused
from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.envelope import Envelope, parse_envelope
from raw_http import RawConnection, deposit_request, request
from relay_process import AGENTMBX, RelayProcess
from scene import Scene, eventually, queue_at
from small_disk import Ballast, mounted
from tracing import strace_path, traced

SMALL_DISK_BYTES = 64 * 1024 * 1024
RECOVERS_S = 40.0
STOPS_S = 10.0
FLOOD = 150
STOPPED = "The disk failed under the store, so the relay stopped"
SYNCED = re.compile(r"(fdatasync\(\d+<.*-wal>\)|<\.\.\. fdatasync resumed>\)) += 0$")
READ = re.compile(r" (recvfrom|recvmsg|read|readv)\((\d+)<socket")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB of its own."""
    with mounted(tmp_path / "disk", SMALL_DISK_BYTES) as folder:
        yield folder


async def _hold(scene: Scene, count: int) -> dict[Envelope, HeldFact]:
    envelopes = [scene.sender.write() for _ in range(count)]
    answer = await scene.wire.deposit(*envelopes)
    return {envelope: answer.held[envelope.digest] for envelope in envelopes}


async def _facts_again(scene: Scene, envelopes: Sequence[Envelope]) -> list[HeldFact]:
    answer = await scene.wire.deposit(*envelopes)
    return [answer.held[envelope.digest] for envelope in envelopes]


async def _ready_status(relay: RelayProcess) -> int:
    with await RawConnection.open(relay.url) as connection:
        return (await connection.ask(request("/readyz"))).status


async def _takes_deposits(scene: Scene) -> bool:
    try:
        await scene.wire.deposit(scene.sender.write())
    except HopRefused:
        return False
    return True


async def _assert_refused_as_full(relay: RelayProcess, scene: Scene, count: int) -> None:
    with await RawConnection.open(relay.url) as connection:
        for _ in range(count):
            answer = await connection.ask(deposit_request(scene.sender.write().frame.data))
            assert (answer.status, answer.problem()) == (507, "relay_full")
            assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("reserve", "left_bytes"),
    [("16MiB", 12 * 1024 * 1024), ("16MiB", 0), ("0", 0)],
    ids=["below-the-reserve", "no-byte-left", "no-byte-left-and-no-reserve-asked-for"],
)
async def test_a_full_disk_refuses_deposits_serves_owners_and_recovers_alone(
    small_disk: Path, reserve: str, left_bytes: int
) -> None:
    ballast = Ballast(small_disk)
    relay = RelayProcess(small_disk / "relay", "--open", "--disk-reserve", reserve)
    relay.log_path = small_disk.with_name("relay.log")
    with relay:
        async with queue_at(relay) as scene:
            held = await _hold(scene, 32)
            kept, acked = list(held)[:16], list(held)[16:]
            ballast.leave(left_bytes)
            logged = len(relay.log())
            await _assert_refused_as_full(relay, scene, FLOOD)
            assert await _ready_status(relay) == 503
            await eventually(
                lambda: "disk" in relay.log()[logged:], within_s=20, what="a word in the log"
            )
            assert len(relay.log()[logged:].splitlines()) <= 12
            with pytest.raises(HopRefused) as refused:
                await scene.wire.deposit(*(scene.sender.write() for _ in range(8)))
            assert refused.value.refusal.code == "relay_full"
            waiting = await scene.wire.collect(scene.owner, [each.digest for each in acked])
            assert list(waiting.envelopes) == [each.frame.data for each in kept]
            assert await _facts_again(scene, kept) == [held[each] for each in kept]
            ballast.drop()
            took_s = await eventually(
                lambda: _takes_deposits(scene), within_s=RECOVERS_S, what="deposits after freeing"
            )
            assert took_s < RECOVERS_S
            await eventually(
                lambda: _ready(relay), within_s=RECOVERS_S, what="a green readyz after freeing"
            )
            drained = await scene.wire.drain(scene.owner)
            assert drained[:16] == [each.frame.data for each in kept]
            assert not {parse_envelope(each).digest for each in drained} & {
                each.digest for each in acked
            }
            assert await _facts_again(scene, list(held)) == list(held.values())
        assert relay.stop() == 0


async def _ready(relay: RelayProcess) -> bool:
    return await _ready_status(relay) == 200


async def test_a_relay_that_is_killed_on_a_full_disk_starts_on_its_reserve_and_serves_owners(
    small_disk: Path,
) -> None:
    ballast = Ballast(small_disk)
    relay = RelayProcess(small_disk / "relay", "--open", "--disk-reserve", "16MiB")
    relay.log_path = small_disk.with_name("relay.log")
    with relay:
        async with queue_at(relay) as scene:
            held = list(await _hold(scene, 8))
            ballast.leave(0)
            relay.kill()
            await asyncio.to_thread(relay.restart)
            assert await _ready_status(relay) == 503
            waiting = await scene.wire.collect(scene.owner, [held[0].digest])
            assert list(waiting.envelopes) == [each.frame.data for each in held[1:]]
            await _assert_refused_as_full(relay, scene, 1)
            ballast.drop()
            await eventually(lambda: _takes_deposits(scene), within_s=RECOVERS_S, what="deposits")
            assert (await scene.wire.drain(scene.owner))[:7] == list(waiting.envelopes)


async def test_a_start_that_finds_no_room_at_all_says_so_and_works_when_there_is_some(
    small_disk: Path,
) -> None:
    ballast = Ballast(small_disk)
    ballast.leave(24 * 1024 * 1024)
    relay = RelayProcess(small_disk / "relay", "--open", "--disk-reserve", "8MiB")
    relay.log_path = small_disk.with_name("relay.log")
    with relay:
        async with queue_at(relay) as scene:
            held = await _hold(scene, 64)
            assert not (relay.data / "reserve").exists()
            ballast.leave(0)
            relay.kill()
            with pytest.raises(RuntimeError, match="disk is full; make room"):
                await asyncio.to_thread(relay.restart)
            assert relay.wait() == 1
            assert "Traceback" not in relay.log()
            ballast.drop()
            await asyncio.to_thread(relay.restart)
            assert await _facts_again(scene, list(held)) == list(held.values())
            assert await scene.wire.drain(scene.owner) == [each.frame.data for each in held]


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
async def test_a_failed_fsync_gives_no_held_and_stops_the_relay(tmp_path: Path, error: str) -> None:
    await _assert_stops(tmp_path, f"inject=fdatasync,fsync:error={error}")


async def test_a_failed_write_to_the_log_gives_no_held_and_stops_the_relay(tmp_path: Path) -> None:
    await _assert_stops(tmp_path, "inject=pwrite64:error=EIO")


async def _assert_stops(tmp_path: Path, injection: str) -> None:
    relay = RelayProcess(tmp_path / "relay", "--open")
    with relay:
        async with queue_at(relay) as scene:
            held = await _hold(scene, 20)
            tried = [scene.sender.write() for _ in range(4)]
            with traced(relay.pid, tmp_path / "trace", "-e", injection):
                outcomes = await asyncio.gather(
                    *(scene.wire.deposit(each) for each in tried), return_exceptions=True
                )
                for outcome in outcomes:
                    assert isinstance(outcome, HopRefused | OperatingError), outcome
                assert await asyncio.to_thread(relay.wait, STOPS_S) == 1
            assert STOPPED in relay.log()
            assert "Traceback" not in relay.log()
            await asyncio.to_thread(relay.restart)
            assert await _facts_again(scene, list(held)) == list(held.values())
            drained = await scene.wire.drain(scene.owner)
            assert drained[: len(held)] == [each.frame.data for each in held]
            assert set(drained[len(held) :]) <= {each.frame.data for each in tried}


async def test_a_full_disk_under_the_log_is_refused_and_the_relay_goes_on(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            held = await _hold(scene, 8)
            with traced(relay.pid, tmp_path / "trace", "-e", "inject=pwrite64:error=ENOSPC"):
                await _assert_refused_as_full(relay, scene, 3)
                assert await _ready_status(relay) == 503
                waiting = await scene.wire.collect(scene.owner)
                assert list(waiting.envelopes) == [each.frame.data for each in held]
            await eventually(
                lambda: _takes_deposits(scene), within_s=RECOVERS_S, what="deposits afterwards"
            )
            assert await _facts_again(scene, list(held)) == list(held.values())


@pytest.mark.parametrize("nth", [1, 2])
async def test_a_start_whose_fsync_fails_ends_before_it_is_ready(tmp_path: Path, nth: int) -> None:
    relay = RelayProcess(tmp_path / "relay", "--open").start()
    with relay:
        async with queue_at(relay) as scene:
            held = await _hold(scene, 5)
            relay.kill()
            serve = [*AGENTMBX, "relay", "serve", "--data", str(relay.data)]
            options = ["-f", "-o", "/dev/null", "-e"]
            injection = f"inject=fdatasync,fsync:error=EIO:when={nth}+"
            ended = await asyncio.to_thread(
                subprocess.run,
                [strace_path(), *options, injection, *serve, "--metrics-listen", "off"],
                capture_output=True,
                text=True,
                timeout=STOPS_S,
                check=False,
            )
            assert ended.returncode == 1
            assert "relay ready" not in ended.stdout
            assert "Traceback" not in ended.stderr
            assert re.search(r"agentmbx: \S.*(cannot be used|disk failed)", ended.stderr)
            await asyncio.to_thread(relay.restart)
            assert await _facts_again(scene, list(held)) == list(held.values())


async def test_the_log_is_synced_between_each_request_and_its_answer(tmp_path: Path) -> None:
    calls = "trace=recvfrom,recvmsg,read,readv,sendto,sendmsg,write,writev,fdatasync"
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            options = ("-y", "-s", "32", "-e", calls)
            with traced(relay.pid, tmp_path / "trace", *options) as output:
                for size in (1, 1, 8, 1, 64, 1):
                    await _hold(scene, size)
                waiting = await scene.wire.collect(scene.owner)
                acks = [parse_envelope(each).digest for each in waiting.envelopes]
                await scene.wire.collect(scene.owner, acks)
            lines = output.read_text().splitlines()
    assert _synced_before_answers(lines, "POST /v1/deposit") == [True] * 6
    assert _synced_before_answers(lines, "POST /v1/collect") == [False, True]


def _synced_before_answers(lines: Sequence[str], asked: str) -> list[bool]:
    """For each request that begins so, whether the log was synced before its answer was sent."""
    found: list[bool] = []
    for at, line in enumerate(lines):
        request_read = READ.search(line)
        if request_read is not None and f'"{asked}' in line:
            found.append(_synced_before_answer(lines[at + 1 :], request_read[2]))
    return found


def _synced_before_answer(lines: Sequence[str], socket_number: str) -> bool:
    synced = False
    for line in lines:
        if SYNCED.search(line):
            synced = True
        elif f"({socket_number}<socket" in line and "HTTP/1.1 200" in line:
            return synced
    raise AssertionError("no answer to this request")
