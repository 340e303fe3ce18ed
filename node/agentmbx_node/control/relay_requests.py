"""Setting and leaving a relay, as the daemon does it."""

import sqlite3
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

import msgspec

from agentmbx_node import relays
from agentmbx_node.errors import Failure
from agentmbx_node.hops.relay import RelayLine, parse_relay_line
from agentmbx_node.machine import RunningMachine
from agentmbx_node.pairing import fingerprint
from agentmbx_node.peers import paired
from agentmbx_node.store.rows import QUEUE, machine_of

REGISTER_S: Final = 15.0
TOLD_S: Final = 5.0

Step = Mapping[str, object]


class RelayRequests:
    """`relay set`, `relay unset` and `relay status`."""

    def __init__(self, machine: RunningMachine) -> None:
        self._machine = machine

    async def relay_set(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """A queue at the relay; the answer comes when peers that can be reached know it."""
        machine = self._machine
        try:
            line = parse_relay_line(str(request.get("line", "")))
        except ValueError as error:
            raise Failure("usage", str(error), "Nothing was changed.", 2) from error
        relay_key = await relays.pin(machine.session, line)
        row = await machine.write(
            lambda connection: relays.add(connection, machine.keyring, line, relay_key)
        )
        await machine.parts_changed()
        await self._wait_registered(line, row.id or 0)
        await machine.write(lambda connection: relays.drain_others(connection, row.id or 0))
        await machine.renew_card()
        await machine.parts_changed()
        told, waiting = await self._wait_told()
        yield {
            "url": line.url,
            "relay_fingerprint": fingerprint(relay_key),
            "pinned": line.relay_key is None,
            "told": told,
            "waiting": waiting,
        }

    async def _wait_registered(self, line: RelayLine, number: int) -> None:
        machine = self._machine
        ends_s = time.monotonic() + REGISTER_S
        with machine.changes.watch() as watch:
            while True:
                row = await machine.database.read(lambda connection: QUEUE.get(connection, number))
                if row is not None and row.state == "live":
                    return
                left_s = ends_s - time.monotonic()
                if row is None or row.error or left_s <= 0:
                    break
                await watch.wait(left_s)
        await machine.write(lambda connection: relays.give_up(connection, number))
        # Whether anybody is there at all decides what the user should look at.
        await relays.pin(machine.session, msgspec.structs.replace(line, relay_key=None))
        text = row.error if row is not None and row.error else "it does not answer"
        raise Failure(
            "relay_refused",
            f"The relay made no queue: {text.rstrip('.')}. What was set before stays.",
            "`agentmbx relay probe URL#KEY.INVITE` says more.",
            3,
        )

    async def _wait_told(self) -> tuple[list[str], list[str]]:
        machine = self._machine
        ends_s = time.monotonic() + TOLD_S
        with machine.changes.watch() as watch:
            while True:
                told, waiting = await machine.database.read(_who_knows)
                left_s = ends_s - time.monotonic()
                if not waiting or left_s <= 0:
                    return told, waiting
                await watch.wait(left_s)

    async def relay_unset(self, _request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Use no relay any more; what one still holds is collected first."""

        def work(connection: sqlite3.Connection) -> None:
            if not QUEUE.find(connection, "WHERE state IN ('new', 'live')"):
                raise Failure("no_relay", "No relay is set.", "", 3)
            relays.drain_others(connection, 0)

        await self._machine.write(work)
        await self._machine.renew_card()
        await self._machine.parts_changed()
        yield {}

    async def relay_status(self, _request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Each queue at a relay."""
        keyring = self._machine.keyring
        yield {
            "relays": await self._machine.database.read(
                lambda connection: relays.list_relays(connection, keyring)
            )
        }


def _who_knows(connection: sqlite3.Connection) -> tuple[list[str], list[str]]:
    newest = machine_of(connection).card_sequence
    peers = paired(connection)
    return (
        [peer.name for peer in peers if peer.confirmed_card >= newest],
        [peer.name for peer in peers if peer.confirmed_card < newest],
    )
