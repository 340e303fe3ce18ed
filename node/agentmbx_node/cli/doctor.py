"""`agentmbx doctor` and `ping`: what works, what does not, and what to do."""

from typing import Any

import click

from agentmbx_node.cli import text
from agentmbx_node.cli.asking import ask, json_option


@click.command(short_help="Say what works, what does not, and what to do.")
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:  # noqa: FBT001
    """Look at the daemon, its listener, the relay and each peer; exit 1 if something is wrong."""
    answer = ask({"do": "doctor"}, as_json=as_json, render=_render)
    if not all(each["ok"] for each in answer["findings"]):
        context.exit(1)


@click.command(short_help="Try each way to a peer now.")
@click.argument("peer")
@json_option
def ping(peer: str, as_json: bool) -> None:  # noqa: FBT001
    """Try every way to PEER and time it; exit 4 if none works."""
    ask({"do": "ping", "peer": peer}, as_json=as_json, render=_render_ping)


def _render(answer: dict[str, Any]) -> str:
    lines = []
    for each in answer["findings"]:
        mark = "ok " if each["ok"] else "NOT"
        lines.append(f"{mark}  {text.escape(each['part'])}: {text.escape(each['text'])}")
        if each["remedy"]:
            lines.append(f"     {text.escape(each['remedy'])}")
    return "\n".join(lines)


def _render_ping(answer: dict[str, Any]) -> str:
    rows: list[list[object]] = [["WAY", "TOOK", ""]]
    rows += [
        [each["path"], f"{each['ms']} ms", each["error"] or "works"] for each in answer["paths"]
    ]
    return text.table(rows)
