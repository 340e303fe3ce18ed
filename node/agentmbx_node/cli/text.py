"""How answers look in a terminal: escaped, aligned, with times that a person can read.

Standard library alone, since `status` and `inbox` run often.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

# `typing` costs as much as all of this; type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Not printable by Unicode's book, yet harmless and part of how people write: spaces of their
# scripts, and the joiners of Indic and Arabic scripts and of emoji.
_HARMLESS = "\u00a0\u3000\u200c\u200d"
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def escape(text: object) -> str:
    """`text` as one line of what can be seen; all else is written as its escape."""
    return "".join(
        each
        if each.isprintable() or each in _HARMLESS
        else each.encode("unicode_escape", "replace").decode("ascii")
        for each in str(text).encode("utf-8", "backslashreplace").decode()
    )


def escape_body(text: str) -> str:
    """The same for a text of several lines, which may hold tabs."""
    return "\n".join(
        "\t".join(escape(part) for part in line.split("\t"))
        for line in text.replace("\r\n", "\n").split("\n")
    )


def ago(then_ms: int) -> str:
    """How long ago that was, such as `3 min ago`; `never` for 0."""
    if not then_ms:
        return "never"
    seconds = int(time.time() - then_ms / 1000)
    if abs(seconds) < 2:  # noqa: PLR2004 - no time at all
        return "now"
    for size, unit in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min"), (1, "s")):
        if abs(seconds) >= size:
            count = abs(seconds) // size
            return f"{count} {unit} ago" if seconds > 0 else f"in {count} {unit}"
    return "now"


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows with their columns aligned, the first row being the titles; values are escaped."""
    texts = [[escape(each) for each in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(*texts, strict=True)]
    lines = (
        "  ".join(
            each + " " * (width - _width(each)) for each, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in texts
    )
    return "\n".join(lines)


def show(answer: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], str]) -> None:  # noqa: FBT001
    """Print the answer: one JSON object, or what `render` makes of it for a person."""
    if as_json:
        import json  # noqa: PLC0415 - seldom needed here

        _print(json.dumps(answer))
        return
    shown = render(answer)
    if shown:
        _print(shown.encode("utf-8", "backslashreplace").decode())


def hint(text: str) -> None:
    """A line for a person that belongs to no output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def fail(error: Any, *, as_json: bool, **more: object) -> int:  # noqa: ANN401 - of either room
    """Say what happened and what to do next, as text or JSON (with `more`); the exit code."""
    if as_json:
        document = {"ok": False, "code": error.code, "message": str(error), "next": error.next_step}
        show(document | more, True, str)  # noqa: FBT003 - as show has it
    else:
        step = f"  {escape(error.next_step)}\n" if error.next_step else ""
        sys.stderr.write(f"agentmbx: {escape(error)}\n{step}")
    return int(error.exit_code)


def guarded(command: Callable[[], int], *, as_json: bool) -> int:
    """The exit code of `command`; a failure of either room is shown, a bug is not caught."""
    try:
        return command()
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        return 130
    except BrokenPipeError:
        # Nobody reads any more, so what is left in the buffer must not be tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Both rooms raise failures that have these; anything else is a bug and shows itself.
        if not (hasattr(error, "code") and hasattr(error, "exit_code")):
            raise
        return fail(error, as_json=as_json)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    import unicodedata  # noqa: PLC0415 - seldom needed

    return sum(
        0
        if unicodedata.combining(each) or each in "\u200c\u200d"
        else 1 + (unicodedata.east_asian_width(each) in "WF")
        for each in text
    )
