"""What all commands of the node share: asking the daemon, and printing what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import click

from agentmbx_node.cli import text
from agentmbx_node.control import client
from agentmbx_node.home import home_text

PATIENCE_S: Final = 60.0

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def wants_json(context: click.Context, *, as_json: bool) -> bool:
    """Whether the command, or the group that it stands under, was given `--json`."""
    above = context.parent.params.get("as_json") if context.parent else None
    return as_json or bool(above)


def ask(
    request: dict[str, Any], *, as_json: bool, render: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """Ask the daemon once and print its answer; raises `Failure`."""
    answer = client.call(home_text(), request, PATIENCE_S)
    text.show(answer, as_json, render)
    return answer


def stream(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The daemon's events, then its answer; raises `Failure`."""
    return client.stream(home_text(), request)
