"""This machine's card: made anew, with a higher sequence, whenever what it says has changed."""

import sqlite3
from collections.abc import Sequence

from agentmbx_node.cards import read_card
from agentmbx_node.clock import Now
from agentmbx_node.keyring import Keyring
from agentmbx_node.store.rows import MACHINE, QUEUE, machine_of
from agentmbx_protocol import limits
from agentmbx_protocol.card import Card, Route, make_card


def renew(
    connection: sqlite3.Connection, keyring: Keyring, now: Now, addresses: Sequence[str]
) -> bool:
    """Make the card that says what is true now; whether it differs from the last one.

    Peers are told until each has shown that it knows it.
    """
    machine = machine_of(connection)
    routes = [
        Route(row.url, row.relay_key, keyring.queue_key(row.salt).public)
        for row in QUEUE.find(connection, "WHERE state = 'live' ORDER BY id DESC")
        if not row.error or row.contact_ms
    ]
    wanted = Card(
        identity=keyring.identity.public,
        sequence=machine.card_sequence,
        name=machine.name,
        sealing=keyring.sealing.public,
        addresses=tuple(addresses[: limits.ADDRESSES_MAX]),
        routes=tuple(routes[: limits.ROUTES_MAX]),
    )
    if machine.card and read_card(machine.card) == wanted:
        return False
    machine.card_sequence = max(machine.card_sequence + 1, now.wall_ms // 1000)
    machine.card = make_card(
        keyring.identity,
        Card(
            identity=wanted.identity,
            sequence=machine.card_sequence,
            name=wanted.name,
            sealing=wanted.sealing,
            addresses=wanted.addresses,
            routes=wanted.routes,
        ),
    )
    MACHINE.save(connection, machine)
    connection.execute("UPDATE peer SET card_tries = 0 WHERE state = 'paired'")
    return True
