"""Commands for the operator of a relay that work beside a running one."""

import json
import os
import socket
from pathlib import Path
from typing import Final

import click

from agentmbx_relay import settings as relay_settings
from agentmbx_relay.failure import Failure

LISTEN_PORT: Final = 7421


@click.command(short_help="Print a line that admits a machine.")
@click.option(
    "--data", metavar="DIR", envvar="MBX_RELAY_DATA", required=True, help="The relay's folder."
)
@click.option("--uses", metavar="N", default="1", show_default=True, help="Machines it admits.")
@click.option("--ttl", metavar="TIME", default="7d", show_default=True, help="How long it is good.")
@click.option("--public-url", metavar="URL", help="URL in the line; else the one last served.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def invite(data: str, uses: str, ttl: str, public_url: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Print the line that a machine's owner pastes to use this relay.

    It works while the relay runs and while it does not. The part after `#` is secret: whoever has
    it may make a queue. It is never sent to the relay.

    \b
    Example:
      agentmbx relay invite --data ./relay --ttl 12h
    """  # noqa: D301 - \b keeps click from joining the lines
    from agentmbx_protocol.keys import SigningKey, key_text  # noqa: PLC0415
    from agentmbx_relay import sqlite_store  # noqa: PLC0415
    from agentmbx_relay.clock import wall_ms  # noqa: PLC0415
    from agentmbx_relay.data_folder import STORE_NAME, FolderUnfit, read_key  # noqa: PLC0415
    from agentmbx_relay.store import StoreUnfit  # noqa: PLC0415

    try:
        count = int(uses) if uses.isdecimal() and 0 < int(uses) < 10**6 else 0
        ttl_s = relay_settings.parse_duration_s(ttl)
        given_url = relay_settings.parse_url(public_url or "")
    except ValueError as error:
        raise Failure("usage", f"That is not understood: {error}.", "", 2) from error
    if not count:
        raise Failure("usage", "--uses is a whole number from 1 to 999999.", "", 2)
    folder = Path(data)
    _act_as_owner(folder)
    seed = SigningKey.generate()
    try:
        relay_key = read_key(folder, [])
        served_url = sqlite_store.add_invite(
            folder / STORE_NAME,
            key=seed.public,
            uses=count,
            ttl_ms=ttl_s * 1000,
            wall_ms=wall_ms(),
        )
    except (StoreUnfit, FolderUnfit) as error:
        raise Failure("unfit_folder", str(error), "", 1) from error
    url = given_url or served_url
    guessed = not url
    if guessed:
        url = f"http://{socket.gethostname()}:{LISTEN_PORT}/"
    line = f"agentmbx relay set {url}#{key_text(relay_key.public)}.{key_text(seed.seed)}"
    if as_json:
        click.echo(json.dumps({"ok": True, "line": line, "uses": count, "ttl_s": ttl_s}))
        return
    click.echo(line)
    click.echo(f"Good for {count} machine{'s' * (count > 1)} within {ttl}.", err=True)
    if guessed:
        click.echo(
            f"The relay's public URL is not known, so {url} is a guess: start the relay with "
            "--public-url, or give it here.",
            err=True,
        )


@click.command("show", short_help="Print every setting and where it comes from.")
@click.option("--data", metavar="DIR", help="The relay's folder. [MBX_RELAY_DATA]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show_config(data: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Print the settings that `agentmbx relay serve` would run with here.

    Flags that you would give to it are not among them.
    """
    try:
        found = relay_settings.find({"data": data}, os.environ)
        relay_settings.resolve(found)
    except relay_settings.SettingsError as error:
        raise Failure("usage", str(error), "See `agentmbx relay serve --help`.", 2) from error
    if as_json:
        rows = [
            {"name": name, "value": each.text, "source": each.source}
            for name, each in found.items()
        ]
        click.echo(json.dumps({"ok": True, "settings": rows}))
        return
    for name, each in found.items():
        click.echo(f"{name:18} {each.text or '-':20} {each.source}")


def _act_as_owner(folder: Path) -> None:
    """As root, take the folder owner's part, so that no file is left that the relay cannot use."""
    if os.geteuid() != 0 or not folder.is_dir():
        return
    status = folder.stat()
    try:
        os.setegid(status.st_gid)
        os.seteuid(status.st_uid)
    except PermissionError as error:
        # Root of a container whose capabilities were dropped.
        text = f"This root may not act as user {status.st_uid}, whose folder {folder} is."
        step = f"Run it as that user: docker compose exec -u {status.st_uid} ..."
        raise Failure("unfit_folder", text, step, 1) from error
