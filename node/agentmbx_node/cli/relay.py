"""`agentmbx relay` commands of a machine that uses a relay."""

import json
from typing import TYPE_CHECKING, Any

import click

from agentmbx_node.cli import text
from agentmbx_node.cli.asking import ask, json_option
from agentmbx_node.errors import Failure

if TYPE_CHECKING:
    from agentmbx_node.hops.relay import RelayLine


@click.command(short_help="Try a relay with one letter.")
@click.argument("url", metavar="URL")
@click.argument("fragment", metavar="[#KEY.INVITE]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def probe(url: str, fragment: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Send one letter through a throw-away queue of the relay at URL, and time each step.

    A closed relay needs the whole URL#KEY.INVITE that `agentmbx relay invite` prints; quote it. The
    probe does not use the invite up.

    \b
    Examples:
      agentmbx relay probe http://127.0.0.1:7421
      agentmbx relay probe 'https://relay.example.com/#KEY.INVITE'
    """  # noqa: D301 - \b keeps click from joining the lines
    import asyncio  # noqa: PLC0415 - help needs none of these

    from agentmbx_node.hops.relay import parse_relay_line  # noqa: PLC0415
    from agentmbx_node.probe import ProbeFailed  # noqa: PLC0415

    try:
        line = parse_relay_line(url + (fragment or ""))
    except ValueError as error:
        raise Failure("usage", str(error), "See `agentmbx relay probe --help`.", 2) from error
    try:
        steps = asyncio.run(_probe(line, show=not as_json))
    except ProbeFailed as error:
        unreachable = error.step == "reach" and not error.refused
        exit_code = 3 if error.refused else 4 if unreachable else 1
        code = "refused" if error.refused else "unreachable" if unreachable else "failed"
        next_step = "Is it running? `agentmbx relay serve --data DIR` starts one."
        raise Failure(
            code, f"{error.step}: {error}", next_step if unreachable else "", exit_code
        ) from error
    if as_json:
        click.echo(json.dumps({"ok": True, "steps": steps}))
    else:
        click.echo("The relay works.")


async def _probe(line: "RelayLine", *, show: bool) -> list[dict[str, object]]:
    from agentmbx_node.hops.http import open_session  # noqa: PLC0415
    from agentmbx_node.probe import probe_relay  # noqa: PLC0415

    steps: list[dict[str, object]] = []
    async with open_session() as session:
        async for step in probe_relay(session, line):
            steps.append({"name": step.name, "ok": True, "ms": step.duration_ms})
            if show:
                click.echo(f"{step.name:10} {step.duration_ms:8.1f} ms   {step.shows}")
    return steps


@click.command("set", short_help="Collect this machine's mail from a relay.")
@click.argument("url", metavar="URL")
@click.argument("fragment", metavar="[#KEY.INVITE]", required=False)
@json_option
def set_(url: str, fragment: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Make a queue at the relay and tell the peers; an older queue is emptied, then retired.

    Paste the whole line that `agentmbx relay invite` printed. It returns when the queue is there
    and the peers that can be reached know it, or after 5 seconds.
    """
    request = {"do": "relay_set", "line": url + (fragment or "")}
    ask(request, as_json=as_json, render=_render_set)


@click.command(short_help="Use no relay any more.")
@json_option
def unset(as_json: bool) -> None:  # noqa: FBT001
    """Take the relay out of this machine's card; what it still holds is collected first."""
    ask({"do": "relay_unset"}, as_json=as_json, render=lambda _: "No relay is set any more.")


@click.command(short_help="Show the relay that this machine uses.")
@json_option
def status(as_json: bool) -> None:  # noqa: FBT001
    """Show each queue of this machine's, when its relay last answered, and what comes next."""
    ask({"do": "relay_status"}, as_json=as_json, render=_render_status)


def _render_set(answer: dict[str, Any]) -> str:
    lines = [
        f"Collects from {text.escape(answer['url'])}",
        f"its key  {answer['relay_fingerprint']}",
    ]
    if answer["pinned"]:
        lines.append("This key was met now and is pinned; compare it with the relay's operator.")
    if answer["told"]:
        lines.append(f"told     {text.escape(', '.join(answer['told']))}")
    if answer["waiting"]:
        waiting = text.escape(", ".join(answer["waiting"]))
        lines.append(f"waiting  {waiting}: told as soon as they can be reached")
    return "\n".join(lines)


def _render_status(answer: dict[str, Any]) -> str:
    rows: list[list[object]] = [["RELAY", "KEY", "QUEUE", "STATE", "LAST ANSWER", "NEXT"]]
    for each in answer["relays"]:
        state = each["error"] or each["state"]
        last = text.ago(each["last_ms"])
        key = each["relay_fingerprint"]
        rows.append([each["url"], key, each["queue"], state, last, each["next"]])
    return text.table(rows) if len(rows) > 1 else "No relay is set."
