"""Which relays this machine uses: setting one, leaving one, and what each says."""

import secrets
import sqlite3
from collections.abc import Mapping

import aiohttp

from agentmbx_node.errors import Failure, OperatingError
from agentmbx_node.hops.relay import RelayLine, fetch_info
from agentmbx_node.keyring import Keyring
from agentmbx_node.pairing import fingerprint
from agentmbx_node.store.rows import QUEUE, QueueRow
from agentmbx_protocol.keys import key_from_text, key_text
from agentmbx_protocol.queue_commands import make_admit


async def pin(session: aiohttp.ClientSession, line: RelayLine) -> bytes:
    """The relay's key: that of the line, else the one that it shows now; raises `Failure`."""
    if line.relay_key is not None:
        return line.relay_key
    try:
        info = await fetch_info(session, line.url)
    except OperatingError as error:
        raise Failure(
            "unreachable",
            f"{line.url}: {error} Nothing was changed.",
            "`agentmbx relay probe URL` says more.",
            4,
        ) from error
    return key_from_text(str(info["relay_key"]))


def add(
    connection: sqlite3.Connection, keyring: Keyring, line: RelayLine, relay_key: bytes
) -> QueueRow:
    """A new queue at that relay, to be registered; or the one that is there already."""
    for row in QUEUE.find(connection, "WHERE relay_key = ? AND state = 'live'", (relay_key,)):
        if row.url == line.url and line.invite is None:
            return row
    salt = secrets.token_bytes(16)
    proof = b""
    if line.invite is not None:
        proof = make_admit(line.invite, relay_key, keyring.queue_key(salt).public)
    row = QueueRow(
        id=None,
        salt=salt,
        url=line.url,
        relay_key=relay_key,
        instance=secrets.token_bytes(16),
        state="new",
        proof=proof,
    )
    row.id = QUEUE.add(connection, row)
    return row


def give_up(connection: sqlite3.Connection, number: int) -> None:
    """Forget a queue that could not be registered."""
    connection.execute("DELETE FROM queue WHERE id = ? AND state = 'new'", (number,))


def drain_others(connection: sqlite3.Connection, number: int) -> None:
    """Let all other queues be emptied, and retired when every peer knows the new route."""
    connection.execute(
        "UPDATE queue SET state = 'draining' WHERE state = 'live' AND id != ?", (number,)
    )
    connection.execute("DELETE FROM queue WHERE state = 'new' AND id != ?", (number,))


def list_relays(connection: sqlite3.Connection, keyring: Keyring) -> list[Mapping[str, object]]:
    """Each queue that is not retired, as `relay status` shows it."""
    return [
        {
            "url": row.url,
            "state": row.state,
            "relay_fingerprint": fingerprint(row.relay_key),
            "queue": key_text(keyring.queue_key(row.salt).public)[:8],
            "last_ms": row.contact_ms,
            "error": row.error,
            "next": _next(row),
        }
        for row in QUEUE.find(connection, "WHERE state != 'retired' ORDER BY id")
    ]


def _next(row: QueueRow) -> str:
    if row.state == "draining":
        return "emptied until every peer knows the newer route, then retired"
    if row.error:
        return "tried again by itself; `agentmbx relay probe URL` says more"
    return "collects" if row.state == "live" else "is being registered"
