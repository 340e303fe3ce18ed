"""Peers that are slow on purpose or only sit there (case R3), and too many of them (case R4)."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

import relay_process
from agentmbx_protocol import limits
from agentmbx_protocol.bodies import join_frames
from process_view import memory_bytes, processor_s
from raw_http import RawConnection, deposit_request, request
from relay_process import AGENTMBX, RelayProcess
from scene import Scene, eventually, queue_at

PEERS = 120
HEAD_S, BODY_S, WRITE_S, IDLE_S = 2, 3, 3, 4
TIMEOUTS = (
    *("--head-timeout", f"{HEAD_S}s", "--body-timeout", f"{BODY_S}s"),
    *("--write-timeout", f"{WRITE_S}s", "--idle-timeout", f"{IDLE_S}s"),
)
SCAN_S = 1
SLACK_S = 2.5
DESCRIPTORS = 128
HELD_OPEN = 400
WATCHED_S = 3.0
STALLED = 256
GROWTH_BYTES_MAX = 640 * 1024 * 1024


@asynccontextmanager
async def honest_traffic(scene: Scene) -> AsyncIterator[None]:
    """While the block runs one sender deposits and one owner collects; p99 is under 1 s."""
    took_s: list[float] = []
    stop = asyncio.Event()

    async def go_on() -> None:
        acks: list[bytes] = []
        while not stop.is_set():
            letter = scene.sender.write()
            started = time.monotonic()
            await scene.wire.deposit(letter)
            deposited = time.monotonic()
            await scene.wire.collect(scene.owner, acks)
            took_s.extend((deposited - started, time.monotonic() - deposited))
            acks = [letter.digest]
            await asyncio.sleep(0.01)

    traffic = asyncio.create_task(go_on())
    try:
        yield
    finally:
        stop.set()
    await traffic
    took_s.sort()
    assert len(took_s) >= 20
    assert took_s[len(took_s) * 99 // 100] < 1


async def _drip(relay: RelayProcess, first: bytes, rest: bytes, every_s: float) -> float:
    """Send `first`, then a byte at a time; how long the relay bore it."""
    with await RawConnection.open(relay.url) as connection:
        started = time.monotonic()
        try:
            await connection.send(first)
            for at in range(len(rest)):
                if connection.broken:
                    break
                await connection.send(rest[at : at + 1])
                await asyncio.sleep(every_s)
        except ConnectionError:
            pass
        return time.monotonic() - started


async def test_peers_that_send_a_head_byte_by_byte_are_cut_off_at_a_fixed_deadline(
    tmp_path: Path,
) -> None:
    data = request("/v1/deposit", b"", headers=[("X-Slow", "s" * 2000)])
    await _assert_cut_off(tmp_path, lambda relay: _drip(relay, b"P", data[1:], 0.1), HEAD_S)


async def test_peers_that_send_a_second_head_byte_by_byte_are_cut_off_too(tmp_path: Path) -> None:
    data = request("/livez", headers=[("X-Slow", "s" * 2000)])
    first = request("/livez") + data[:1]
    await _assert_cut_off(tmp_path, lambda relay: _drip(relay, first, data[1:], 0.1), HEAD_S)


@pytest.mark.parametrize("path", ["/v1/deposit", "/v1/collect"])
async def test_peers_that_send_a_body_byte_by_byte_are_cut_off_at_a_fixed_deadline(
    tmp_path: Path, path: str
) -> None:
    data = request(path, bytes(5000))
    head = data.index(b"\r\n\r\n") + 4
    await _assert_cut_off(
        tmp_path, lambda relay: _drip(relay, data[:head], data[head:], 0.1), BODY_S
    )


async def test_peers_that_send_chunks_without_end_and_slowly_are_cut_off(tmp_path: Path) -> None:
    head = request("/v1/deposit", b"", headers=[("Transfer-Encoding", "chunked")])
    chunks = b"1\r\nx\r\n" * 1000
    await _assert_cut_off(tmp_path, lambda relay: _drip(relay, head, chunks, 0.05), BODY_S)


async def test_peers_that_never_say_a_word_are_cut_off(tmp_path: Path) -> None:
    await _assert_cut_off(tmp_path, lambda relay: _sit(relay, b""), HEAD_S)


async def test_peers_that_never_say_a_second_word_are_cut_off(tmp_path: Path) -> None:
    await _assert_cut_off(tmp_path, lambda relay: _sit(relay, request("/livez")), IDLE_S)


async def _sit(relay: RelayProcess, first: bytes) -> float:
    with await RawConnection.open(relay.url) as connection:
        started = time.monotonic()
        await connection.send(first)
        await connection.ended()
        return time.monotonic() - started


async def _assert_cut_off(
    tmp_path: Path, bear: Callable[[RelayProcess], Awaitable[float]], deadline_s: float
) -> None:
    with RelayProcess(tmp_path / "relay", "--open", *TIMEOUTS) as relay:
        async with queue_at(relay) as scene, honest_traffic(scene):
            async with asyncio.timeout(30):
                borne_s = await asyncio.gather(*(bear(relay) for _ in range(PEERS)))
            assert min(borne_s) > deadline_s - SCAN_S
            assert max(borne_s) < deadline_s + SCAN_S + SLACK_S
        assert relay.stop() == 0
        assert len(relay.log().splitlines()) < 30


async def test_owners_that_do_not_read_are_cut_off_and_their_mail_stays(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay", "--open", *TIMEOUTS) as relay:
        async with queue_at(relay) as scene, queue_at(relay) as other:
            letters = [scene.sender.write(bytes(200_000)) for _ in range(18)]
            for letter in letters:
                await scene.wire.deposit(letter)
            async with honest_traffic(other):
                started = time.monotonic()
                non_readers = [await _open_non_reader(relay, scene) for _ in range(12)]
                for connection in non_readers:
                    await eventually(
                        lambda each=connection: each.broken, within_s=20, what="an end of patience"
                    )
                borne_s = time.monotonic() - started
                for connection in non_readers:
                    connection.close()
            assert WRITE_S - SCAN_S < borne_s < WRITE_S + SCAN_S + SLACK_S
            assert await scene.wire.drain(scene.owner) == [each.frame.data for each in letters]


async def _open_non_reader(relay: RelayProcess, scene: Scene) -> RawConnection:
    connection = await RawConnection.open(relay.url, receive_bytes=4096)
    await connection.send(request("/v1/collect", join_frames([scene.owner.collect_frame()])))
    return connection


async def test_bodies_that_are_never_finished_take_bounded_memory_however_many_they_are(
    tmp_path: Path,
) -> None:
    body = bytes(limits.DEPOSIT_BYTES_MAX)
    data = request("/v1/deposit", body)
    assert STALLED * len(body) > 1.5 * GROWTH_BYTES_MAX
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            before = memory_bytes(relay.pid)
            for _ in range(2):
                stalled = [await RawConnection.open(relay.url) for _ in range(STALLED)]
                async with asyncio.timeout(30):
                    await asyncio.gather(*(_send_all_but_one(each, data) for each in stalled))
                assert memory_bytes(relay.pid) - before < GROWTH_BYTES_MAX
                async with asyncio.timeout(1):
                    await scene.wire.deposit(scene.sender.write(bytes(200_000)))
                for connection in stalled:
                    connection.reset()


async def _send_all_but_one(connection: RawConnection, data: bytes) -> None:
    with suppress(ConnectionError):
        await connection.send(data[:-1])


async def test_r4_without_free_descriptors_the_relay_stays_calm_and_takes_peers_again_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", *AGENTMBX]
    with monkeypatch.context() as patch:
        patch.setattr(relay_process, "AGENTMBX", limited)
        relay = RelayProcess(tmp_path / "relay", "--open").start()
    with relay:
        async with queue_at(relay) as scene, queue_at(relay, senders=3) as first_collected_late:
            await scene.wire.deposit(scene.sender.write())
            with await RawConnection.open(relay.url) as existing:
                await existing.ask(request("/livez"))
                logged = len(relay.log().splitlines())
                holders = await _hold_open(relay, HELD_OPEN)
                used_s, started = processor_s(relay.pid), time.monotonic()
                while time.monotonic() - started < WATCHED_S:
                    letter = scene.sender.write()
                    answer = await existing.ask(deposit_request(letter.frame.data))
                    assert answer.status == 200
                    await scene.wire.collect(scene.owner)
                    await asyncio.sleep(0.1)
                assert (processor_s(relay.pid) - used_s) / WATCHED_S < 0.3
                for owner in (scene.owner, first_collected_late.owner):
                    frame = join_frames([owner.collect_frame()])
                    assert (await existing.ask(request("/v1/collect", frame))).status == 200
                assert len(relay.log().splitlines()) - logged < 15
                for holder in holders:
                    holder.close()
                await eventually(
                    lambda: _is_served(relay), within_s=10, what="a new connection after release"
                )
                batch = [sender.write() for sender in first_collected_late.senders]
                await asyncio.gather(*map(first_collected_late.wire.deposit, batch))
        assert "Traceback" not in relay.log()


async def _hold_open(relay: RelayProcess, count: int) -> list[RawConnection]:
    """Open connections, each of them again once when the relay cuts it off."""
    holders = [await RawConnection.open(relay.url) for _ in range(count)]
    await asyncio.sleep(0.2)
    for at, holder in enumerate(holders):
        if holder.broken:
            holder.close()
            holders[at] = await RawConnection.open(relay.url)
    return holders


async def _is_served(relay: RelayProcess) -> bool:
    try:
        with await RawConnection.open(relay.url) as connection:
            return (await connection.ask(request("/readyz"))).status == 200
    except ConnectionError:
        return False
