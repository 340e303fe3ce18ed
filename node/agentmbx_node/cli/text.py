"""How answers look in a terminal: escaped, aligned, with times that a person can read.

Standard library alone, since `status` and `inbox` run often.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

# `typing` costs as much as all of this; type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def escape(text: object) -> str:
    """`text` as one line of what can be seen; all else is written as its escape."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "replace").decode("ascii")
        for each in str(text).encode("utf-8", "backslashreplace").decode()
    )


def escape_body(text: str) -> str:
    """The same for a text of several lines, which may hold tabs."""
    return "\n".join(
        "\t".join(escape(part) for part in line.split("\t")) for line in text.splitlines()
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
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = (
        "  ".join(each.ljust(width) for each, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )
    return "\n".join(lines)


def show(answer: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], str]) -> None:  # noqa: FBT001
    """Print the answer: one JSON object, or what `render` makes of it for a person."""
    if as_json:
        import json  # noqa: PLC0415 - seldom needed here

        sys.stdout.write(json.dumps(answer) + "\n")
        return
    shown = render(answer)
    if shown:
        sys.stdout.write(shown.encode("utf-8", "backslashreplace").decode() + "\n")


def hint(text: str) -> None:
    """A line for a person that belongs to no output."""
    sys.stderr.write(text + "\n")
