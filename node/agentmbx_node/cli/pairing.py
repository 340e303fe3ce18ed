"""`agentmbx pair`, `join`, `peers` and `unpair`: which machines trust each other."""

import sys
from typing import Any, Final

import click

from agentmbx_node.cli import text
from agentmbx_node.cli.asking import ask, json_option, stream, wants_json
from agentmbx_node.errors import Failure

LINE_BYTES_MAX: Final = 64 * 1024


@click.command(short_help="Make a line that pairs another machine with this one.")
@json_option
def pair(as_json: bool) -> None:  # noqa: FBT001
    """Print a line to paste on another machine, and wait until it has joined.

    The line is good for one machine and ten minutes, while this command waits. Both screens then
    show both fingerprints.
    """
    for step in stream({"do": "pair"}):
        if step.get("event") == "line":
            line = f"agentmbx join {step['line']}\n"
            out = sys.stderr if as_json else sys.stdout
            if not as_json:
                text.hint("Run this on the other machine, within ten minutes:\n")
            out.write(line)
            out.flush()
        elif "event" in step:
            text.hint(text.escape(f"{step.get('reason', 'joins')} ({step.get('fingerprint', '')})"))
        else:
            text.show(step, as_json, _render_paired)


@click.command(short_help="Pair with the machine that printed the line.")
@click.argument("line", metavar="LINE|-")
@json_option
def join(line: str, as_json: bool) -> None:  # noqa: FBT001
    """Pair with the machine where `agentmbx pair` printed LINE; - reads it from standard input.

    If it is cut off, the same line again goes on where it stopped.
    """
    pasted = _read_line() if line == "-" else line.strip()
    ask({"do": "join", "line": pasted}, as_json=as_json, render=_render_paired)


@click.group(short_help="List the paired machines.", invoke_without_command=True)
@json_option
@click.pass_context
def peers(context: click.Context, as_json: bool) -> None:  # noqa: FBT001
    """List the paired machines, the ways to them, and when each was last heard of."""
    if context.invoked_subcommand is None:
        ask({"do": "peers"}, as_json=as_json, render=_render_peers)


@peers.command(short_help="Give a peer another name on this machine.")
@click.argument("old")
@click.argument("new")
@json_option
@click.pass_context
def rename(context: click.Context, old: str, new: str, as_json: bool) -> None:  # noqa: FBT001
    """Call the peer OLD by the name NEW from now on, on this machine alone."""
    request = {"do": "rename", "old": old, "new": new}
    ask(
        request,
        as_json=wants_json(context, as_json=as_json),
        render=lambda answer: f"It is {text.escape(answer['name'])} now.",
    )


@click.command(short_help="End a pairing.")
@click.argument("peer")
@json_option
def unpair(peer: str, as_json: bool) -> None:  # noqa: FBT001
    """End the pairing with PEER at once, and tell it for up to 72 hours.

    Letters to it that have not arrived are cancelled; mail from it stays.
    """
    request = {"do": "unpair", "peer": peer}
    ask(
        request,
        as_json=as_json,
        render=lambda answer: f"No longer paired with {text.escape(answer['peer'])}.",
    )


def _read_line() -> str:
    try:
        words = sys.stdin.buffer.readline(LINE_BYTES_MAX).decode().split()
    except UnicodeDecodeError as error:
        raise Failure(
            "usage", "Standard input is no UTF-8 text.", "Nothing was done.", 2
        ) from error
    if not words:
        step = "`agentmbx pair` on the other machine prints the line."
        raise Failure("usage", "Standard input has no line to join with.", step, 2)
    # Who copies the whole command means its last word.
    return words[-1]


def _render_paired(answer: dict[str, Any]) -> str:
    peer = answer["peer"]
    return (
        f"Paired with {text.escape(peer['name'])}.\n"
        f"its fingerprint   {peer['fingerprint']}\n"
        f"this machine's    {answer['own_fingerprint']}"
    )


def _render_peers(answer: dict[str, Any]) -> str:
    rows: list[list[object]] = [["PEER", "FINGERPRINT", "STATE", "LAST HEARD OF", "WAYS"]]
    for peer in answer["peers"]:
        ways = ", ".join(
            path["path"] + (f" ({path['error']})" if path["error"] else "")
            for path in peer["paths"]
        )
        heard = text.ago(peer["last_contact_ms"])
        rows.append([peer["name"], peer["fingerprint"], peer["state"], heard, ways])
    return text.table(rows) if len(rows) > 1 else "No peers yet; `agentmbx pair` makes one."
