"""Peers by name, and what this machine knows of the ways to them."""

import difflib
import sqlite3

from agentmbx_node.errors import Failure
from agentmbx_node.store.rows import PEER, Peer, machine_of, name_key
from agentmbx_protocol.card import parse_card


def paired(connection: sqlite3.Connection) -> list[Peer]:
    """All peers, by name."""
    return PEER.find(connection, "WHERE state = 'paired' ORDER BY name_key")


def find_peer(connection: sqlite3.Connection, name: str) -> Peer:
    """The peer of that name; raises `Failure` with the names that are near."""
    peers = {peer.name_key: peer for peer in paired(connection)}
    found = peers.get(name_key(name))
    if found is not None:
        return found
    if name_key(name) == name_key(machine_of(connection).name):
        text = "That is this machine; mail goes to a peer."
    else:
        text = f"No peer has the name {name!r}."
    near = difflib.get_close_matches(name_key(name), peers, n=3)
    step = (
        f"Did you mean {', '.join(peers[each].name for each in near)}?"
        if near
        else "`agentmbx peers` lists them; `agentmbx pair` makes one."
    )
    raise Failure("no_such_peer", text, step, 3)


def list_paths(peer: Peer) -> list[dict[str, object]]:
    """Each way to the peer with what its last attempt came to; `ok` None: not tried yet."""
    paths: list[dict[str, object]] = []
    card = parse_card(peer.card)
    if card.addresses:
        paths.append(
            {
                "path": "direct",
                "ok": not peer.direct_error if peer.direct_ms else None,
                "last_ms": peer.direct_ms,
                "error": peer.direct_error,
            }
        )
    if card.routes:
        paths.append(
            {
                "path": f"relay {card.routes[0].url}",
                "ok": not peer.relay_error if peer.relay_ms else None,
                "last_ms": peer.relay_ms,
                "error": peer.relay_error,
            }
        )
    return paths


def forget_failures(connection: sqlite3.Connection, peer: int | None = None) -> None:
    """Let every way to the peer, or to all of them, be tried at once: the network is another."""
    connection.execute(
        "UPDATE peer SET failures = 0, retry_age_ms = 0, direct_retry_age_ms = 0"
        " WHERE id = ?1 OR ?1 IS NULL",
        (peer,),
    )
