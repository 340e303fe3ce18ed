"""What tests of a running relay begin with: a queue with its owner and senders, and a seed."""

import asyncio
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from agentmbx_node.hops.http import HopRefused, open_session
from agentmbx_protocol.keys import key_text
from correspondents import Correspondent, Owner, Wire
from relay_process import RelayProcess

QUIET_START_S = 0.5


class Scene(msgspec.Struct):
    """One queue at a relay: the calls, its owner, and those that it lists."""

    wire: Wire
    owner: Owner
    senders: list[Correspondent]

    @property
    def sender(self) -> Correspondent:
        """The first sender."""
        return self.senders[0]


def line_of(relay: RelayProcess) -> str:
    """URL#KEY of a running relay, without an invite."""
    return f"{relay.url}#{key_text(relay.relay_key)}"


async def add_queue(wire: Wire, *, senders: int = 1) -> Scene:
    """A new queue by `wire`, which must be admitted there."""
    owner = Owner(wire.hop.relay_key)
    peers = [Correspondent(owner) for _ in range(senders)]
    owner.senders = tuple(sorted(peer.pair.public for peer in peers))
    await wire.register(owner)
    return Scene(wire, owner, peers)


@asynccontextmanager
async def queue_at(
    relay: RelayProcess, *, senders: int = 1, line: str = ""
) -> AsyncIterator[Scene]:
    """A new queue at an open relay, or at a closed one by the invite in `line`."""
    async with open_session() as session:
        yield await add_queue(Wire(session, line or line_of(relay)), senders=senders)


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], *, within_s: float, what: str
) -> float:
    """Ask until `condition` holds; how long that took. Fails with `what` when it never does."""
    started = time.monotonic()
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return time.monotonic() - started
        if time.monotonic() - started > within_s:
            raise AssertionError(f"not within {within_s} s: {what}")
        await asyncio.sleep(0.02)


def seeded() -> random.Random:
    """Randomness from MBX_TEST_SEED, else from a new seed; the seed is printed."""
    seed = int(os.environ.get("MBX_TEST_SEED") or secrets.randbits(32))
    print(f"MBX_TEST_SEED={seed}")  # noqa: T201 - pytest shows it when a test fails
    return random.Random(seed)


def stretched_s(limit_s: float) -> float:
    """A limit for a quiet machine, stretched when programs start slowly here and now."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import aiohttp"], check=True)
    return limit_s * max((time.monotonic() - started) / QUIET_START_S, 1)


async def refused(call: Awaitable[object]) -> HopRefused:
    """How the relay refuses `call`, as it must."""
    with pytest.raises(HopRefused) as raised:
        await call
    return raised.value
