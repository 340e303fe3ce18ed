"""Logs as JSON lines on standard error, with repeats of one event held back."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Final

import structlog
from structlog.typing import EventDict, WrappedLogger

REPEATS_MAX: Final = 5
REPEATS_WINDOW_S: Final = 60.0


class RepeatLimit:
    """Lets each event through a few times a minute; the next one tells how many were left out.

    Warnings and errors that a stranger or a full disk can cause at will must not fill the disk.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._seen: dict[str, tuple[float, int]] = {}

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        """Raise `structlog.DropEvent` for what is one too many."""
        name = str(event.get("event"))
        now_s = self._now_s()
        since_s, count = self._seen.get(name, (now_s, 0))
        if now_s - since_s >= REPEATS_WINDOW_S:
            if count > REPEATS_MAX:
                event["left_out"] = count - REPEATS_MAX
            since_s, count = now_s, 0
        self._seen[name] = (since_s, count + 1)
        if count >= REPEATS_MAX:
            raise structlog.DropEvent
        return event


class _ForwardHandler(logging.Handler):
    """Brings what libraries log into the same lines, by name and place only, never by text."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        log = structlog.get_logger("agentmbx.relay")
        place = f"{record.module}:{record.lineno}"
        log.warning("library_message", library=record.name, place=place, error=error)


def configure(level: str) -> None:
    """Set up logging for this process; `level` is debug, info, warning or error."""
    structlog.configure(
        processors=[
            RepeatLimit(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_ForwardHandler()], force=True)
