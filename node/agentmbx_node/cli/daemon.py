"""`agentmbx up` and `down`: the daemon of this machine."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import click

from agentmbx_node.cli import text
from agentmbx_node.cli.asking import json_option
from agentmbx_node.control import client
from agentmbx_node.errors import Failure
from agentmbx_node.home import LOG_NAME, home_folder, lock_holder, make_private_folder

START_S: Final = 20.0
STOP_S: Final = 15.0
LOG_BYTES_MAX: Final = 8 * 1024 * 1024
_CODES: Final = {1: "failed", 2: "usage", 3: "refused", 4: "unreachable"}
_POLL_S: Final = 0.05


@click.command(short_help="Start this machine's daemon.")
@click.option("--detach", is_flag=True, help="Return when it is ready; it goes on by itself.")
@click.option("--name", help="This machine's name. [env: MBX_NAME; default: the host's]")
@click.option(
    "--listen", metavar="HOST:PORT|off", help="Where peers reach it. [default: port 7420]"
)
@click.option(
    "--advertise",
    metavar="ADDRESS",
    multiple=True,
    help="Tell peers this address instead of those found; may be repeated.",
)
@json_option
def up(
    detach: bool,  # noqa: FBT001
    name: str | None,
    listen: str | None,
    advertise: tuple[str, ...],
    as_json: bool,  # noqa: FBT001
) -> None:
    """Start the daemon that keeps this machine's mail going.

    Its data is in MBX_HOME, else in your data folder; there is one daemon for each folder.

    \b
    Examples:
      agentmbx up --detach
      agentmbx up --name desktop --listen 0.0.0.0:7420
      agentmbx up --listen off        (mail comes by a relay only)
    """  # noqa: D301 - \b keeps click from joining the lines
    home = home_folder()
    if not detach:
        from agentmbx_node.daemon import UpOptions, run  # noqa: PLC0415 - help needs no web server

        run(home, UpOptions(name=name, listen=listen, advertise=advertise))
        return
    words = ["--name", name] if name else []
    words += ["--listen", listen] if listen else []
    for address in advertise:
        words += ["--advertise", address]
    status = _start(home, words)
    text.show(status, as_json, lambda answer: f"{answer['name']} is up.")


@click.command(short_help="Stop this machine's daemon.")
@json_option
def down(as_json: bool) -> None:  # noqa: FBT001
    """Stop the daemon; what waits in the outbox goes on when it is up again."""
    home = home_folder()
    process = lock_holder(home)
    answer = client.call(home, {"do": "stop"}, STOP_S)
    ends_s = time.monotonic() + STOP_S
    # Whoever supervises it may have started the next one already.
    while process is not None and lock_holder(home) == process:
        if time.monotonic() > ends_s:
            raise Failure("failed", "The daemon does not stop.", f"See {home / LOG_NAME}.", 1)
        time.sleep(_POLL_S)
    text.show(answer, as_json, lambda _: "Stopped. What waits stays in the outbox.")


def _start(home: Path, words: list[str]) -> dict[str, object]:
    make_private_folder(home)
    log_path = home / LOG_NAME
    _set_long_log_aside(log_path)
    command = [sys.executable, "-c", "from agentmbx_node.cli import main; main()", "up", *words]
    with log_path.open("ab") as log:
        log_path.chmod(0o600)
        began_at = log.tell()
        child = subprocess.Popen(  # noqa: S603 - this program itself
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=os.environ | {"MBX_HOME": str(home)},
        )
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s:
        if child.poll() is not None:
            raise _did_not_start(log_path, began_at, child.returncode)
        try:
            status = client.call(home, {"do": "status"}, 2.0)
        except Failure:
            time.sleep(_POLL_S)
        else:
            if lock_holder(home) == child.pid:
                return status
            time.sleep(_POLL_S)
    child.terminate()
    raise Failure("failed", "The daemon did not get ready in time.", f"See {log_path}.", 1)


def _did_not_start(log_path: Path, began_at: int, code: int) -> Failure:
    with log_path.open("rb") as log:
        log.seek(began_at)
        said = log.read().decode("utf-8", "replace").strip().splitlines()
    # What `up` itself prints for a failure: the text, then a step further in.
    told = [line.removeprefix("agentmbx: ") for line in said if line.startswith("agentmbx: ")]
    if told:
        steps = [line.strip() for line in said[said.index(f"agentmbx: {told[-1]}") + 1 :]]
    else:
        steps = []
        told = [f"The daemon ended while it started: {said[-1] if said else f'exit code {code}'}"]
    step = steps[0] if steps else f"See {log_path}."
    exit_code = code if code in _CODES else 1
    return Failure(_CODES[exit_code], told[-1], step, exit_code)


def _set_long_log_aside(path: Path) -> None:
    try:
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_name(f"{path.name}.1"))
    except FileNotFoundError:
        return
