"""Logs: repeats are held back and counted, and libraries cannot bring in text of their own."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from agentmbx_relay import logs


@pytest.fixture(autouse=True)
def _no_logging_stays() -> Iterator[None]:
    """Leave no stream of a test's behind for the loggers of others."""
    handlers = logging.root.handlers
    yield
    structlog.reset_defaults()
    logging.root.handlers = handlers


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def passes(limit: logs.RepeatLimit, event: str) -> structlog.typing.EventDict | None:
    try:
        return limit(None, "info", {"event": event})
    except structlog.DropEvent:
        return None


def test_an_event_passes_a_few_times_a_minute_and_no_more() -> None:
    limit = logs.RepeatLimit(Clock())
    passed = [passes(limit, "bad") is not None for _ in range(100)]
    assert passed.count(True) == logs.REPEATS_MAX
    assert all(passed[: logs.REPEATS_MAX])


def test_the_next_minute_begins_with_how_many_were_left_out() -> None:
    clock = Clock()
    limit = logs.RepeatLimit(clock)
    for _ in range(100):
        passes(limit, "bad")
    clock.now_s += logs.REPEATS_WINDOW_S
    event = passes(limit, "bad")
    assert event is not None
    assert event["left_out"] == 100 - logs.REPEATS_MAX


def test_one_event_does_not_hold_back_another() -> None:
    limit = logs.RepeatLimit(Clock())
    for _ in range(100):
        passes(limit, "bad")
    assert passes(limit, "other") is not None


def test_a_line_is_one_json_object_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    structlog.get_logger("t").info("a_thing_happened", count=3)
    out, err = capsys.readouterr()
    assert out == ""
    line = json.loads(err)
    assert (line["event"], line["count"], line["level"]) == ("a_thing_happened", 3, "info")


def test_what_is_below_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("error")
    structlog.get_logger("t").warning("not_shown")
    assert capsys.readouterr().err == ""


def test_a_library_says_only_where_it_spoke(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    try:
        int("canary-in-error")
    except ValueError:
        logging.getLogger("some.library").exception("canary-in-text %s", "canary-in-argument")
    line = capsys.readouterr().err
    assert "canary" not in line
    assert json.loads(line)["library"] == "some.library"
    assert json.loads(line)["error"] == "ValueError"
