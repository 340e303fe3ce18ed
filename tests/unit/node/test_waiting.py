"""Waiting by a clock that counts suspend (C3), and being woken by what happens."""

import asyncio
import time

import pytest

from agentmbx_node import waiting
from agentmbx_node.waiting import Alarm, Changes


async def test_a_night_asleep_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 0
    monkeypatch.setattr(waiting, "since_boot_ms", lambda: now_ms)
    monkeypatch.setattr(waiting, "SLICE_S", 0.01)
    alarm = Alarm()
    wait = asyncio.create_task(alarm.wait(8 * 3600 * 1000))
    await asyncio.sleep(0.05)
    assert not wait.done()
    now_ms = 9 * 3600 * 1000  # the lid was closed; the loop's own timers saw nothing of it
    async with asyncio.timeout(5):
        await wait


async def test_it_ends_when_rung_and_a_ring_before_the_wait_counts() -> None:
    alarm = Alarm()
    async with asyncio.timeout(5):
        wait = asyncio.create_task(alarm.wait(None))
        await asyncio.sleep(0)
        alarm.ring()
        await wait
        alarm.ring()
        await alarm.wait(None)


async def test_a_ring_ends_one_wait_only() -> None:
    alarm = Alarm()
    alarm.ring()
    await alarm.wait(None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await alarm.wait(None)


async def test_everybody_who_waits_is_told_of_a_change() -> None:
    changes = Changes()
    with changes.watch() as one, changes.watch() as other:
        waits = [asyncio.create_task(each.wait(5)) for each in (one, other)]
        await asyncio.sleep(0)
        changes.tell()
        async with asyncio.timeout(1):
            await asyncio.gather(*waits)


async def test_a_change_between_a_look_and_a_wait_is_not_missed() -> None:
    changes = Changes()
    with changes.watch() as watch:
        changes.tell()
        async with asyncio.timeout(1):
            await watch.wait(5)
        started = time.monotonic()
        await watch.wait(0.05)
        assert time.monotonic() - started >= 0.05
