"""The relay's process for signatures, stopped or killed under load: every deposit is answered."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from process_view import children
from relay_process import RelayProcess
from scene import queue_at

ANSWER_S = 15.0


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_deposits_under_way_are_held_all_the_same(
    tmp_path: Path, how: signal.Signals
) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay, senders=8) as scene:
            for _ in range(3):
                batches = [[sender.write() for _ in range(20)] for sender in scene.senders]
                depositing = [asyncio.create_task(scene.wire.deposit(*batch)) for batch in batches]
                await asyncio.sleep(0.02)
                for pid in children(relay.pid):
                    os.kill(pid, how)
                async with asyncio.timeout(ANSWER_S):
                    answers = await asyncio.gather(*depositing)
                assert [len(answer.held) for answer in answers] == [20] * 8


async def test_one_that_is_killed_as_soon_as_it_is_there_stops_no_deposit(tmp_path: Path) -> None:
    killed = 0
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay, senders=8) as scene:

            async def kill() -> None:
                nonlocal killed
                while True:
                    for pid in children(relay.pid):
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
                    await asyncio.sleep(0.001)

            killing = asyncio.create_task(kill())
            loop = asyncio.get_running_loop()
            ends_s = loop.time() + 4
            while loop.time() < ends_s:
                async with asyncio.timeout(ANSWER_S):
                    letters = [sender.write() for sender in scene.senders]
                    await asyncio.gather(*(scene.wire.deposit(letter) for letter in letters))
            killing.cancel()
    assert killed
