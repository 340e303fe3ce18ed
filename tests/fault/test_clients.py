"""Clients that vanish at any point of a request: the relay goes on, and nobody else notices."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentmbx_protocol.bodies import join_frames
from agentmbx_protocol.envelope import Envelope, parse_envelope
from correspondents import Correspondent
from process_view import memory_bytes
from raw_http import RawConnection, chunked, deposit_request, request
from relay_process import RelayProcess
from scene import Scene, add_queue, eventually, queue_at, seeded
from tracing import traced

COMMIT_MICROSECONDS = 400_000
GROWTH_BYTES_MAX = 50 * 1024 * 1024


async def _part_of_a_deposit(
    relay: RelayProcess, data: bytes, sent_bytes: int, *, reset: bool, linger_s: float = 0
) -> None:
    connection = await RawConnection.open(relay.url)
    await connection.send(data[:sent_bytes])
    await asyncio.sleep(linger_s)
    if reset:
        connection.reset()
    else:
        connection.close()


def _points(data: bytes, dice: random.Random) -> list[int]:
    """Counts of bytes after which a client may vanish: every kind of place in a request."""
    head = data.index(b"\r\n\r\n") + 4
    edges = [0, 1, head // 2, head - 2, head - 1, head, head + 1, head + 4, len(data) - 1]
    return edges + [dice.randrange(1, head) for _ in range(6)] + [
        dice.randrange(head, len(data)) for _ in range(8)
    ]  # fmt: skip


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("in_chunks", [False, True], ids=["with-a-length", "in-chunks"])
async def test_a_request_that_breaks_off_at_any_byte_stores_nothing_and_harms_nobody(
    tmp_path: Path, *, reset: bool, in_chunks: bool
) -> None:
    dice = seeded()
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            broken = scene.sender.write()
            data = _deposit_bytes(broken, in_chunks=in_chunks)
            points = _points(data, dice)
            kept = [scene.sender.write() for _ in points]
            for point, letter in zip(points, kept, strict=True):
                await _part_of_a_deposit(
                    relay, data, point, reset=reset, linger_s=dice.choice((0, 0, 0.01))
                )
                await scene.wire.deposit(letter)
            drained = await scene.wire.drain(scene.owner)
            assert drained == [letter.frame.data for letter in kept]
            assert await _is_taken_anew(scene, broken, after=kept[-1])
        assert relay.stop() == 0
        assert "Traceback" not in relay.log()


def _deposit_bytes(letter: Envelope, *, in_chunks: bool) -> bytes:
    if not in_chunks:
        return deposit_request(letter.frame.data)
    body = chunked(join_frames([letter.frame.data]), 500)
    return request("/v1/deposit", body, headers=[("Transfer-Encoding", "chunked")])


async def _is_taken_anew(scene: Scene, letter: Envelope, *, after: Envelope) -> bool:
    facts = (await scene.wire.deposit(letter, after)).held
    return facts[letter.digest].accepted_ms > facts[after.digest].accepted_ms


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
async def test_a_client_that_vanishes_before_its_answer_leaves_all_of_its_deposit_or_nothing(
    tmp_path: Path, *, reset: bool
) -> None:
    dice = seeded()
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay, senders=8) as scene:
            held: list[Envelope] = []
            vanished: list[list[Envelope]] = []
            for _ in range(25):
                batches = [[sender.write() for _ in range(3)] for sender in scene.senders]
                held += [letter for batch in batches[:4] for letter in batch]
                vanished += batches[4:]
                await asyncio.gather(
                    *(scene.wire.deposit(*batch) for batch in batches[:4]),
                    *(_vanish_after(relay, batch, dice, reset=reset) for batch in batches[4:]),
                )
            drained = {parse_envelope(data).digest for data in await scene.wire.drain(scene.owner)}
            assert {letter.digest for letter in held} <= drained
            for batch in vanished:
                assert len(drained.intersection(each.digest for each in batch)) in (0, 3)
        assert relay.stop() == 0
        assert "Traceback" not in relay.log()


async def _vanish_after(
    relay: RelayProcess, batch: Sequence[Envelope], dice: random.Random, *, reset: bool
) -> None:
    data = deposit_request(*(letter.frame.data for letter in batch))
    wait_s = dice.uniform(0, 0.006)
    await _part_of_a_deposit(relay, data, len(data), reset=reset, linger_s=wait_s)


async def test_clients_that_vanish_in_the_middle_of_a_commit_leave_it_and_the_next_ones_whole(
    tmp_path: Path,
) -> None:
    slow_commit = f"inject=fdatasync:delay_enter={COMMIT_MICROSECONDS}"
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay, senders=6) as scene:
            letters = [sender.write() for sender in scene.senders]
            with traced(relay.pid, tmp_path / "trace", "-e", slow_commit):
                first = asyncio.create_task(scene.wire.deposit(letters[0]))
                await asyncio.sleep(COMMIT_MICROSECONDS / 4e6)
                vanishing = [
                    _part_of_a_deposit(
                        relay,
                        deposit_request(letter.frame.data),
                        10**6,
                        reset=index % 2 == 0,
                        linger_s=COMMIT_MICROSECONDS * index / 2e6,
                    )
                    for index, letter in enumerate(letters[1:5])
                ]
                last = asyncio.create_task(scene.wire.deposit(letters[5]))
                await asyncio.gather(*vanishing)
                assert letters[0].digest in (await first).held
                assert letters[5].digest in (await last).held
                after = scene.sender.write()
                assert after.digest in (await scene.wire.deposit(after)).held
            drained = await scene.wire.drain(scene.owner)
            assert len(set(drained)) == len(drained)
            assert {letters[0].frame.data, letters[5].frame.data} <= set(drained)
            assert set(drained) <= {each.frame.data for each in [*letters, after]}
            assert drained[-1] == after.frame.data
        assert "Traceback" not in relay.log()


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
async def test_an_owner_that_vanishes_while_it_waits_for_mail_loses_none(
    tmp_path: Path, *, reset: bool
) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            letters = [scene.sender.write() for _ in range(20)]
            for letter in letters:
                poll = request("/v1/collect", join_frames([scene.owner.collect_frame(wait_s=50)]))
                await _part_of_a_deposit(relay, poll, len(poll), reset=reset, linger_s=0.01)
                await scene.wire.deposit(letter)
            assert await scene.wire.drain(scene.owner) == [each.frame.data for each in letters]


async def test_an_owner_that_vanishes_in_the_middle_of_its_mail_gets_all_of_it_again(
    tmp_path: Path,
) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            letters = [scene.sender.write(bytes(200_000)) for _ in range(12)]
            for letter in letters:
                await scene.wire.deposit(letter)
            before = memory_bytes(relay.pid)
            for _ in range(15):
                frame = scene.owner.collect_frame()
                with await RawConnection.open(relay.url, receive_bytes=4096) as connection:
                    await connection.send(request("/v1/collect", join_frames([frame])))
                    assert b"200 OK" in await connection.receive()
                    connection.reset()
            assert await scene.wire.drain(scene.owner) == [each.frame.data for each in letters]
            await eventually(
                lambda: memory_bytes(relay.pid) - before < GROWTH_BYTES_MAX,
                within_s=10,
                what="memory given back",
            )


async def test_vanishing_clients_of_one_queue_do_not_slow_down_the_answers_to_another(
    tmp_path: Path,
) -> None:
    dice = seeded()
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as noisy:
            quiet = await add_queue(noisy.wire)
            noise = asyncio.create_task(_make_noise(relay, noisy.sender, dice))
            slowest_s = 0.0
            loop = asyncio.get_running_loop()
            while not noise.done():
                asked_s = loop.time()
                await quiet.wire.deposit(quiet.sender.write())
                slowest_s = max(slowest_s, loop.time() - asked_s)
            await noise
            assert slowest_s < 1
            assert len(await quiet.wire.drain(quiet.owner)) == quiet.sender.number


async def _make_noise(relay: RelayProcess, sender: Correspondent, dice: random.Random) -> None:
    for _ in range(60):
        data = deposit_request(sender.write().frame.data)
        points = [dice.randrange(len(data)) for _ in range(5)]
        await asyncio.gather(
            *(_part_of_a_deposit(relay, data, point, reset=point % 2 == 0) for point in points)
        )
