"""Invites made by other processes while a relay writes (case R6): nobody ever meets a lock."""

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from agentmbx_node.hops.http import open_session
from agentmbx_protocol.envelope import parse_envelope
from correspondents import Owner, Wire
from relay_process import AGENTMBX, RelayProcess
from scene import Scene, add_queue, queue_at, refused

MAKERS = 3
INVITES_EACH = 6
SENDERS = 8
SLOWEST_WRITE_S = 2.0
LOCK_WORDS = ("locked", "busy", "Traceback")


async def _make_invites(relay: RelayProcess) -> list[str]:
    lines = []
    for _ in range(INVITES_EACH):
        process = await asyncio.create_subprocess_exec(
            *(*AGENTMBX, "relay", "invite", "--data", str(relay.data), "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, noise = await process.communicate()
        assert process.returncode == 0, noise
        assert noise == b""
        lines.append(json.loads(said)["line"].split()[-1])
    return lines


async def _deposit_until(stop: asyncio.Event, scene: Scene, took_s: list[float]) -> list[bytes]:
    """The digests of all that was held; every deposit is answered well."""
    digests: list[bytes] = []
    loop = asyncio.get_running_loop()
    while not stop.is_set():
        letters = [scene.sender.write() for _ in range(4)]
        started = loop.time()
        answer = await scene.wire.deposit(*letters)
        took_s.append(loop.time() - started)
        assert len(answer.held) == len(letters)
        digests += answer.held
        await scene.wire.collect(scene.owner, digests[-8:-4])
    return digests


async def _copy_until(stop: asyncio.Event, store: Path) -> int:
    """Back the store up from outside, again and again, as an operator's cron job may."""
    count = 0
    while not stop.is_set():
        await asyncio.to_thread(_copy, store, store.with_name("copy"))
        count += 1
    return count


def _copy(store: Path, to: Path) -> None:
    with closing(sqlite3.connect(store)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target, pages=64)


async def test_r6_invites_from_several_processes_while_deposits_run_all_work_and_meet_no_lock(
    tmp_path: Path,
) -> None:
    with RelayProcess(tmp_path / "relay") as relay:
        async with queue_at(relay, line=relay.invite("--uses", "20")) as first:
            scenes = [first, *[await add_queue(first.wire) for _ in range(SENDERS - 1)]]
            stop = asyncio.Event()
            took_s: list[float] = []
            deposits = [
                asyncio.create_task(_deposit_until(stop, scene, took_s)) for scene in scenes
            ]
            copies = asyncio.create_task(_copy_until(stop, relay.data / "relay.db"))
            lines = await asyncio.gather(*(_make_invites(relay) for _ in range(MAKERS)))
            stop.set()
            assert await copies > 0
            for scene, deposit in zip(scenes, deposits, strict=True):
                await _assert_adds_up(scene, await deposit)
            took_s.sort()
            assert took_s[len(took_s) * 99 // 100] < SLOWEST_WRITE_S
            await _assert_each_works_once([line for made in lines for line in made])
        assert relay.stop() == 0
        assert not [word for word in LOCK_WORDS if word in relay.log()]


async def _assert_adds_up(scene: Scene, digests: Sequence[bytes]) -> None:
    waiting = {parse_envelope(data).digest for data in await scene.wire.drain(scene.owner)}
    assert waiting <= set(digests)
    assert set(digests[-4:]) <= waiting


async def _assert_each_works_once(lines: Sequence[str]) -> None:
    assert len(set(lines)) == MAKERS * INVITES_EACH
    async with open_session() as session:
        for line in lines:
            wire = Wire(session, line)
            scene = await add_queue(wire)
            await wire.deposit(scene.sender.write())
            assert len(await wire.drain(scene.owner)) == 1
            again = await refused(wire.register(Owner(wire.hop.relay_key)))
            assert again.refusal.code == "not_admitted"


async def test_invites_made_while_a_relay_starts_and_stops_all_work(tmp_path: Path) -> None:
    relay = RelayProcess(tmp_path / "relay")
    with relay:
        making = asyncio.gather(*(_make_invites(relay) for _ in range(MAKERS)))
        while not making.done():
            assert await asyncio.to_thread(relay.stop) == 0
            await asyncio.to_thread(relay.restart)
        lines = [line for made in await making for line in made]
        async with open_session() as session:
            for line in lines:
                wire = Wire(session, line.replace(line.partition("#")[0], relay.url))
                await wire.register(Owner(wire.hop.relay_key))
        assert not [word for word in LOCK_WORDS if word in relay.log()]


async def test_an_invite_made_while_the_relay_is_not_there_works_when_it_is(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay") as relay:
        assert await asyncio.to_thread(relay.stop) == 0
        line = await asyncio.to_thread(relay.invite)
        await asyncio.to_thread(relay.restart)
        await _one_use(line)


async def _one_use(line: str) -> None:
    async with open_session() as session:
        wire = Wire(session, line)
        await wire.register(Owner(wire.hop.relay_key))
