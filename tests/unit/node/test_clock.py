"""The machine's age: it counts suspend, survives restarts, and no wall clock jumps it (rule 7)."""

import pytest

from agentmbx_node.clock import RESTART_MS_MAX, Clock

HOUR = 3600 * 1000
DAY = 24 * HOUR


class Hands:
    def __init__(self, wall_ms: int) -> None:
        self.ticks_ms = 5_000
        self.wall_ms = wall_ms

    def clock(self, age_ms: int, saved_wall_ms: int) -> Clock:
        return Clock(
            age_ms, saved_wall_ms, ticks_ms=lambda: self.ticks_ms, wall_ms=lambda: self.wall_ms
        )


def test_the_age_goes_with_the_ticks_and_not_with_the_wall() -> None:
    hands = Hands(wall_ms=DAY)
    clock = hands.clock(1000, DAY)
    hands.ticks_ms += 8 * HOUR
    hands.wall_ms += 400 * DAY
    assert clock.now().age_ms == 1000 + 8 * HOUR
    assert clock.now().wall_ms == 401 * DAY


@pytest.mark.parametrize(
    ("passed_ms", "counted_ms"),
    [
        (0, 0),
        (60_000, 60_000),
        (RESTART_MS_MAX, RESTART_MS_MAX),
        (DAY, RESTART_MS_MAX),
        (400 * DAY, RESTART_MS_MAX),
        (-DAY, 0),
    ],
)
def test_rule_7_a_restart_adds_not_less_than_nothing_and_at_most_an_hour(
    passed_ms: int, counted_ms: int
) -> None:
    hands = Hands(wall_ms=500 * DAY + passed_ms)
    assert hands.clock(7000, 500 * DAY).now().age_ms == 7000 + counted_ms
