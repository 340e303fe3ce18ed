"""The machine's times: the wall clock, and an age that counts suspend and no clock can jump."""

import time
from collections.abc import Callable
from typing import Final

import msgspec

RESTART_MS_MAX: Final = 3600 * 1000


class Now(msgspec.Struct, frozen=True):
    """One moment: Unix time as this machine has it, and the machine's age, in milliseconds."""

    wall_ms: int
    age_ms: int


def since_boot_ms() -> int:
    """Milliseconds of a clock that only goes up and counts suspend, from any origin."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000_000


def wall_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


class Clock:
    """The age goes on from where it was saved; a restart adds what the wall clock says has passed.

    That is not less than nothing and at most an hour (rule 7).
    """

    def __init__(
        self,
        saved_age_ms: int,
        saved_wall_ms: int,
        *,
        ticks_ms: Callable[[], int] = since_boot_ms,
        wall_ms: Callable[[], int] = wall_ms,
    ) -> None:
        passed_ms = min(max(wall_ms() - saved_wall_ms, 0), RESTART_MS_MAX)
        self._ticks_ms = ticks_ms
        self._wall_ms = wall_ms
        self._offset_ms = saved_age_ms + passed_ms - ticks_ms()

    def now(self) -> Now:
        """This moment."""
        return Now(self._wall_ms(), self._ticks_ms() + self._offset_ms)
