"""The relay's own clock: it counts suspend, never goes back, and no wall clock can push it far."""

import time
from collections.abc import Callable
from typing import Final

RESTART_MS_MAX: Final = 3600 * 1000


def since_boot_ms() -> int:
    """Milliseconds of a clock that only goes up and counts suspend, from any origin."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000_000


def wall_ms() -> int:
    """Unix time in milliseconds, as this machine has it."""
    return time.time_ns() // 1_000_000


class RelayClock:
    """Time in milliseconds since the Unix epoch, as this relay counts it (rule 7).

    It goes on from `saved_ms`, plus what the wall clock says has passed since `saved_wall_ms`,
    but not less than nothing and not more than an hour.
    """

    def __init__(
        self,
        saved_ms: int,
        saved_wall_ms: int,
        *,
        now_wall_ms: int,
        ticks_ms: Callable[[], int] = since_boot_ms,
    ) -> None:
        passed_ms = min(max(now_wall_ms - saved_wall_ms, 0), RESTART_MS_MAX)
        self._ticks_ms = ticks_ms
        self._offset_ms = saved_ms + passed_ms - ticks_ms()

    def now_ms(self) -> int:
        """The time now."""
        return self._ticks_ms() + self._offset_ms
