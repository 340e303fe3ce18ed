"""`status` and `inbox`: run at every prompt, so without click and its friends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentmbx_node.cli import text
from agentmbx_node.control import client
from agentmbx_node.errors import Failure
from agentmbx_node.home import home_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PATIENCE_S = 10.0
HELP = {
    "status": """Usage: agentmbx status [--json]

  Show this machine, its peers and the ways to them, its relay, and what waits.

Options:
  --json  Print one JSON object.
  --help  Show this message and exit.
""",
    "inbox": """Usage: agentmbx inbox [--as NAME] [--json]

  List the mail that arrived, the newest first. Looking marks nothing read.

  Without --as and MBX_AGENT it lists the whole machine's.

Options:
  --as NAME  Only the mail of that name.
  --json     Print one JSON object.
  --help     Show this message and exit.
""",
}


def run(command: str, arguments: Sequence[str]) -> int:
    """Run `status` or `inbox`; the exit code."""
    as_json = "--json" in arguments
    if "--help" in arguments:
        sys.stdout.write(HELP[command])
        return 0
    return text.guarded(lambda: _run(command, arguments, as_json=as_json), as_json=as_json)


def _run(command: str, arguments: Sequence[str], *, as_json: bool) -> int:
    owner = _owner(command, arguments)
    request: dict[str, Any] = {"do": command}
    if owner:
        request["as"] = owner
    answer = client.call(home_text(), request, PATIENCE_S)
    text.show(answer, as_json, render_status if command == "status" else render_inbox)
    return 0


def render_status(answer: dict[str, Any]) -> str:
    """The answer to `status` for a person."""
    relay = answer["relay"]
    lines = [
        f"{answer['name']}  {answer['fingerprint']}  agentmbx {answer['version']}",
        f"listens on {answer['listen'] or 'nothing'}, data in {answer['home']}",
        f"relay {relay['url']}: {relay['state']}" if relay["url"] else "no relay is set",
        f"{answer['unread']} unread",
    ]
    rows: list[list[object]] = [["PEER", "WAYS", "QUEUED", "HELD"]]
    for peer in answer["peers"]:
        ways = ", ".join(f"{path['path']} {_works(path['ok'])}" for path in peer["paths"])
        outbox = peer["outbox"]
        rows.append([peer["name"], ways or "none known", outbox["queued"], outbox["held"]])
    shown = "\n".join(text.escape(line) for line in lines)
    return shown + ("\n\n" + text.table(rows) if len(rows) > 1 else "\nno peers yet")


def render_inbox(answer: dict[str, Any]) -> str:
    """The answer to `inbox` for a person."""
    rows: list[list[object]] = [["ID", "FROM", "TO", "SUBJECT", "ARRIVED", ""]]
    for each in answer["messages"]:
        marks = [] if each["read"] else ["unread"]
        marks += ["late"] if each["late"] else []
        arrived = text.ago(each["arrived_ms"])
        subject = each["subject"]
        rows.append([each["id"], each["from"], each["to"], subject, arrived, ", ".join(marks)])
    return text.table(rows) if len(rows) > 1 else "No mail."


def _works(ok: bool | None) -> str:  # noqa: FBT001 - it is a value to show
    return "not tried yet" if ok is None else "works" if ok else "fails"


def _owner(command: str, arguments: Sequence[str]) -> str:
    import os  # noqa: PLC0415 - it is loaded already

    owner = os.environ.get("MBX_AGENT", "") if command == "inbox" else ""
    rest = [each for each in arguments if each != "--json"]
    while rest:
        word = rest.pop(0)
        if command == "inbox" and word == "--as" and rest:
            owner = rest.pop(0)
        elif command == "inbox" and word.startswith("--as="):
            owner = word.removeprefix("--as=")
        else:
            step = f"See `agentmbx {command} --help`."
            raise Failure("usage", f"{command} does not take {word!r}.", step, 2)
    return owner
