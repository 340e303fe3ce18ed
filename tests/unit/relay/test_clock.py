import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmbx_relay.clock import RESTART_MS_MAX, RelayClock, since_boot_ms, wall_ms
from fakes import START_MS, Ticks

HOUR_MS = 3600 * 1000
any_time = st.integers(-(2**62), 2**62)


def test_it_goes_as_its_ticks_go() -> None:
    ticks = Ticks(5_000)
    clock = RelayClock(START_MS, 0, now_wall_ms=0, ticks_ms=ticks)
    assert clock.now_ms() == START_MS
    ticks.ms += 250
    assert clock.now_ms() == START_MS + 250


@pytest.mark.parametrize(
    ("passed_ms", "added_ms"),
    [
        (-1, 0),
        (-(2**60), 0),
        (0, 0),
        (1, 1),
        (HOUR_MS - 1, HOUR_MS - 1),
        (HOUR_MS, HOUR_MS),
        (HOUR_MS + 1, HOUR_MS),
        (2**60, HOUR_MS),
    ],
)
def test_rule_7_a_restart_adds_what_the_wall_clock_says_but_at_most_an_hour(
    passed_ms: int, added_ms: int
) -> None:
    wall = START_MS + 17
    clock = RelayClock(START_MS, wall, now_wall_ms=wall + passed_ms, ticks_ms=Ticks(99))
    assert clock.now_ms() == START_MS + added_ms


@given(
    st.lists(
        st.tuples(any_time, any_time, st.integers(0, 10**9), st.integers(0, 10**9)), max_size=20
    )
)
def test_rule_7_no_wall_clock_turns_it_back_or_pushes_it_far(
    restarts: list[tuple[int, int, int, int]],
) -> None:
    now_ms, saved_wall_ms = START_MS, START_MS
    for now_wall_ms, ticks_ms, up_ms, jump_ms in restarts:
        ticks = Ticks(ticks_ms)
        clock = RelayClock(now_ms, saved_wall_ms, now_wall_ms=now_wall_ms, ticks_ms=ticks)
        assert now_ms <= clock.now_ms() <= now_ms + RESTART_MS_MAX
        started_ms = clock.now_ms()
        ticks.ms += up_ms
        assert clock.now_ms() == started_ms + up_ms
        now_ms, saved_wall_ms = clock.now_ms(), now_wall_ms + jump_ms


def test_the_hour_is_an_hour() -> None:
    assert RESTART_MS_MAX == HOUR_MS


def test_the_wall_clock_is_unix_time() -> None:
    before = time.time_ns() // 1_000_000
    assert before <= wall_ms() <= time.time_ns() // 1_000_000


def test_ticks_count_suspend_where_the_system_can() -> None:
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    before = time.clock_gettime_ns(clock) // 1_000_000
    assert before <= since_boot_ms() <= time.clock_gettime_ns(clock) // 1_000_000


def test_ticks_fall_back_to_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    before = time.monotonic_ns() // 1_000_000
    assert before <= since_boot_ms() <= time.monotonic_ns() // 1_000_000


def test_it_takes_the_ticks_of_this_machine_by_itself() -> None:
    clock = RelayClock(START_MS, 0, now_wall_ms=0)
    first, second = clock.now_ms(), clock.now_ms()
    assert START_MS <= first <= second < START_MS + HOUR_MS
