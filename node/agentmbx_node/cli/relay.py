"""`agentmbx relay` commands of a machine that uses a relay."""

import json
from typing import TYPE_CHECKING

import click

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
