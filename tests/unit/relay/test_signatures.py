"""Signatures from the other process: whatever becomes of it, each caller has its own answer.

The tests run on uvloop, as the relay does: its pipes fail in other ways than those of asyncio.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from agentmbx_protocol.keys import SigningKey
from agentmbx_relay import signature_worker, signatures
from agentmbx_relay.signatures import Signatures
from process_view import children, command_line

KEY = SigningKey(bytes(32))
CALLERS = 32
PATIENCE_S = 15.0


@asynccontextmanager
async def running() -> AsyncIterator[Signatures]:
    made = Signatures(KEY)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def sign_all(made: Signatures, first: int = 0) -> None:
    """Many callers at once; fails unless each has the signature of its own message in time."""
    messages = [b"message %04d" % number for number in range(first, first + CALLERS)]
    async with asyncio.timeout(PATIENCE_S):
        signed = await asyncio.gather(*(made.sign(each, alone=False) for each in messages))
    assert signed == [KEY.sign(each) for each in messages]


async def worker_pid() -> int:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for pid in children(os.getpid()):
                with contextlib.suppress(OSError):
                    if signature_worker.__name__.encode() in command_line(pid):
                        return pid
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_one_that_ends_at_its_start_leaves_nobody_waiting(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr(signatures, "RESTART_S", 0.01)

    async def story() -> None:
        async with running() as made:
            for round_ in range(20):
                await sign_all(made, round_ * CALLERS)

    uvloop.run(story())


def test_one_that_is_killed_again_and_again_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signatures, "RESTART_S", 0.01)

    async def story() -> None:
        async with running() as made:
            for round_ in range(6):
                asking = asyncio.create_task(sign_all(made, round_ * CALLERS))
                os.kill(await worker_pid(), signal.SIGKILL)
                await asking

    uvloop.run(story())


def test_one_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "LOOK_S", 0.05)
    monkeypatch.setattr(signatures, "STUCK_S", 0.3)

    async def story() -> None:
        async with running() as made:
            await sign_all(made)
            pid = await worker_pid()
            os.kill(pid, signal.SIGSTOP)
            await sign_all(made, CALLERS)
            async with asyncio.timeout(PATIENCE_S):
                while pid in children(os.getpid()):  # noqa: ASYNC110 - nobody tells it
                    await asyncio.sleep(0.01)

    uvloop.run(story())


def test_one_that_rests_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "LOOK_S", 0.02)
    monkeypatch.setattr(signatures, "STUCK_S", 0.3)

    async def story() -> None:
        async with running() as made:
            # It may take longer to start than to be given up.
            while made.failing or made._process is None:
                await sign_all(made)
                await asyncio.sleep(0.02)
            pid = await worker_pid()
            await asyncio.sleep(1)
            assert not made.failing
            await sign_all(made, CALLERS)
            assert await worker_pid() == pid

    uvloop.run(story())


async def test_what_still_comes_of_one_that_was_given_up_reaches_nobody() -> None:
    answers: list[bytes] = []
    job = signatures._Job(signature_worker.SIGN, [b"asked of the first"], answers.append)
    first, second = signatures._Process(), signatures._Process()
    first.ask([job])
    assert first.give_up() == [job]
    second.ask([job])
    first.pipe_data_received(1, b"x" * (signature_worker.SIGNATURE_BYTES + 5))
    assert answers == []
    second.pipe_data_received(1, b"y" * signature_worker.SIGNATURE_BYTES)
    assert answers == [b"y" * signature_worker.SIGNATURE_BYTES]
