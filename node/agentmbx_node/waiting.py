"""Waiting that counts suspend, and ends early when there is something to do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from agentmbx_node.clock import since_boot_ms

SLICE_S: Final = 15.0


class Alarm:
    """Something to wait for: rung by whoever has news, or by itself when its time has come."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """End the wait that is on, or the next one."""
        self._rung.set()

    async def wait(self, delay_ms: int | None) -> None:
        """Wait until rung, or for `delay_ms` of a clock that counts suspend; None: until rung.

        The event loop's timers stand still while the machine sleeps, so the time is looked at
        anew every 15 seconds (C3).
        """
        ends_ms = None if delay_ms is None else since_boot_ms() + delay_ms
        while not self._rung.is_set():
            left_s = SLICE_S if ends_ms is None else (ends_ms - since_boot_ms()) / 1000
            if left_s <= 0:
                break
            try:
                async with asyncio.timeout(min(left_s, SLICE_S)):
                    await self._rung.wait()
            except TimeoutError:
                continue
        self._rung.clear()


class Changes:
    """Tells those who look at the store that it has changed."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()

    def tell(self) -> None:
        """Let everybody look again."""
        for watch in self._watches:
            watch.tell()

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Begin before the first look, so that no change is missed between a look and a wait."""
        watch = Watch()
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)


class Watch:
    """What one watcher has been told and has not looked at yet."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """End the wait that is on, or the next one."""
        self._changed.set()

    async def wait(self, delay_s: float) -> None:
        """Return when something has changed since the last wait, or after `delay_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(delay_s, 0)):
                await self._changed.wait()
        self._changed.clear()
