"""What the relay does by itself: sweep what is past its time, save its clock, look at its disk."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from agentmbx_protocol.errors import Refusal
from agentmbx_relay.clock import RelayClock, wall_ms
from agentmbx_relay.group_commit import GroupCommit
from agentmbx_relay.health import Health
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.store import Store, StoreError, Swept, Transaction

SWEEP_ROWS: Final = 500
SWEEP_EVERY_S: Final = 10.0
SWEEP_PAUSE_S: Final = 0.05
CLOCK_EVERY_MS: Final = 60_000
RESTART_S_MAX: Final = 60.0

log = structlog.get_logger("agentmbx.relay")


class Maintenance:
    """The relay's upkeep, in steps so small that deposits do not wait long for any of them.

    `failing` is true while the last round did not succeed.
    """

    def __init__(
        self,
        store: Store,
        commits: GroupCommit,
        *,
        clock: RelayClock,
        metrics: Metrics,
        health: Health,
    ) -> None:
        self._store = store
        self._commits = commits
        self._clock = clock
        self._metrics = metrics
        self._health = health
        self._saved_ms = 0
        self.failing = False

    async def run(self) -> None:
        """Do a round now and every ten seconds, until cancelled; a failure is tried again."""
        while True:
            try:
                await self._round()
                self.failing = False
            except (Refusal, StoreError) as error:
                self.failing = True
                log.error("maintenance_failed", reason=str(error))
            failing = self._health.failing()
            if failing:
                # /readyz tells strangers no more than that; which part it is stands here.
                log.warning("not_ready", parts=failing)
            await asyncio.sleep(SWEEP_EVERY_S)

    async def _round(self) -> None:
        if self._commits.failing:
            await self._commits.retry()
        if self._clock.now_ms() - self._saved_ms >= CLOCK_EVERY_MS:
            await self._commits.submit(self._save_clock)
        swept = await self._sweep()
        while swept.more:
            await asyncio.sleep(SWEEP_PAUSE_S)
            swept = await self._sweep()
        await self._store.tidy()

    async def _sweep(self) -> Swept:
        now_ms = self._clock.now_ms()
        swept = await self._commits.submit(
            lambda transaction: transaction.sweep(now_ms, SWEEP_ROWS)
        )
        self._metrics.swept(swept.expired, swept.dropped)
        return swept

    def _save_clock(self, transaction: Transaction) -> None:
        self._saved_ms = self._clock.now_ms()
        transaction.save_clock(self._saved_ms, wall_ms())


class Worker:
    """A loop that is started again with growing pauses when it ends by an error."""

    def __init__(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self.failing = False
        self._loop = loop

    async def run(self) -> None:
        """Run the loop until it returns by itself or this is cancelled."""
        pause_s = 1.0
        while True:
            began_s = time.monotonic()
            try:
                await self._loop()
            except Exception as error:
                self.failing = True
                log.error("worker_failed", worker=self.name, exc_info=error)
            else:
                return
            if time.monotonic() - began_s > RESTART_S_MAX:
                # It has worked for long since the last time, so this is no row of failures.
                pause_s = 1.0
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_S_MAX)
            self.failing = False
