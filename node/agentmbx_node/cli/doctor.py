"""`agentmbx doctor` and `ping`: what works, what does not, and what to do."""

import os
from pathlib import Path
from typing import Any

import click

from agentmbx_node.cli import text
from agentmbx_node.cli.asking import PATIENCE_S, ask, json_option
from agentmbx_node.control import client
from agentmbx_node.errors import Failure
from agentmbx_node.home import home_folder

Findings = list[dict[str, Any]]


@click.command(short_help="Say what works, what does not, and what to do.")
@json_option
def doctor(as_json: bool) -> int:  # noqa: FBT001
    """Look at the daemon, its listener, the relay and each peer; exit 1 if something is wrong."""
    home = home_folder()
    try:
        answer = client.call(home, {"do": "doctor"}, PATIENCE_S)
    except Failure as error:
        if error.code != "unreachable":
            raise
        daemon = {"ok": False, "part": "daemon", "text": str(error), "remedy": error.next_step}
        return _fail(error, [_folder_finding(home), daemon], as_json=as_json)
    bad = [each for each in answer["findings"] if not each["ok"]]
    if bad:
        words = f"{len(bad)} of {len(answer['findings'])} findings need you."
        return _fail(Failure("findings", words, "", 1), answer["findings"], as_json=as_json)
    text.show(answer, as_json, lambda answer: _render(answer["findings"]))
    return 0


@click.command(short_help="Try each way to a peer now.")
@click.argument("peer")
@json_option
def ping(peer: str, as_json: bool) -> None:  # noqa: FBT001
    """Try every way to PEER and time it; exit 4 if none works."""
    ask({"do": "ping", "peer": peer}, as_json=as_json, render=_render_ping)


def _fail(error: Failure, findings: Findings, *, as_json: bool) -> int:
    if not as_json:
        text.show({}, as_json, lambda _: _render(findings))
    return text.fail(error, as_json=as_json, findings=findings)


def _folder_finding(home: Path) -> dict[str, Any]:
    finding = {"ok": True, "part": "folder", "text": f"{home} is there", "remedy": ""}
    if not home.exists():
        return finding | {"text": f"{home} is made when the daemon starts"}
    bad = finding | {"ok": False, "remedy": "Set MBX_HOME to another folder."}
    if not home.is_dir():
        return bad | {"text": f"{home} is a file"}
    if home.stat().st_uid != os.geteuid() or not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        return bad | {"text": f"{home} is not this user's"}
    return finding


def _render(findings: Findings) -> str:
    lines = []
    for each in findings:
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
