"""What the daemon does for each request at its control socket."""

import sqlite3
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from agentmbx_node import outbox
from agentmbx_node.clock import Now
from agentmbx_node.control.doctor import Doctor, listen_text
from agentmbx_node.control.mail_requests import MailRequests
from agentmbx_node.control.pair_requests import PairRequests
from agentmbx_node.control.relay_requests import RelayRequests
from agentmbx_node.errors import Failure
from agentmbx_node.machine import RunningMachine
from agentmbx_node.mail import listing
from agentmbx_node.outbox import Move
from agentmbx_node.pairing import fingerprint
from agentmbx_node.peers import find_peer, list_paths, paired
from agentmbx_node.store.rows import PEER, QUEUE, Peer, machine_of, name_key

LEAVE_MS: Final = 72 * 3600 * 1000

Step = Mapping[str, object]


class Requests:
    """Answers by the request's "do"; `handle` is the control server's handler."""

    def __init__(self, machine: RunningMachine, home: Path) -> None:
        self._machine = machine
        self._home = home
        self._pairing = PairRequests(machine)
        relay, mail = RelayRequests(machine), MailRequests(machine)
        doctor = Doctor(machine, home)
        self._does: Mapping[str, Callable[[dict[str, Any]], AsyncGenerator[Step, None]]] = {
            "status": self._status,
            "stop": self._stop,
            "pair": self._pairing.pair,
            "join": self._pairing.join,
            "peers": self._peers,
            "rename": self._rename,
            "unpair": self._unpair,
            "relay_set": relay.relay_set,
            "relay_unset": relay.relay_unset,
            "relay_status": relay.relay_status,
            "send": mail.send,
            "inbox": mail.inbox,
            "read": mail.read,
            "sent": mail.sent,
            "outbox": mail.outbox,
            "outbox_retry": mail.outbox_retry,
            "outbox_cancel": mail.outbox_cancel,
            "doctor": doctor.doctor,
            "ping": doctor.ping,
        }

    async def handle(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Events, then the answer; raises `Failure`."""
        does = self._does.get(str(request.get("do")))
        if does is None:
            raise Failure(
                "usage",
                "The daemon does not know this request.",
                "Is it of another version? `agentmbx down`, then `agentmbx up --detach`.",
                2,
            )
        async with aclosing(does(request)) as steps:
            async for step in steps:
                yield step

    async def answer_pair(self, body: bytes, address: str) -> bytes:
        """What a joiner at that IP is answered; raises a `Refusal`."""
        return await self._pairing.answer(body, address)

    async def _status(self, _request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        machine = self._machine

        def work(connection: sqlite3.Connection) -> dict[str, object]:
            queues = QUEUE.find(connection, "WHERE state IN ('new', 'live') ORDER BY id DESC")
            return {
                "name": machine_of(connection).name,
                "peers": [
                    {
                        "name": peer.name,
                        "paths": list_paths(peer),
                        "outbox": _counts(connection, peer),
                    }
                    for peer in paired(connection)
                ],
                "relay": {
                    "url": queues[0].url if queues else None,
                    "state": (queues[0].error or queues[0].state) if queues else "none",
                },
                "unread": listing.unread_count(connection),
            }

        document = await machine.database.read(work)
        listens = machine.listens_at
        yield document | {
            "version": metadata.version("agentmbx"),
            "home": str(self._home),
            "listen": listen_text(listens) if listens else None,
            "fingerprint": fingerprint(machine.keyring.identity.public),
        }

    async def _stop(self, _request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        self._machine.stopping.set()
        yield {}

    async def _peers(self, _request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        def work(connection: sqlite3.Connection) -> list[dict[str, object]]:
            return [
                {
                    "name": peer.name,
                    "fingerprint": fingerprint(peer.identity),
                    "state": peer.state,
                    "last_contact_ms": peer.contact_ms,
                    "paths": list_paths(peer),
                }
                for peer in PEER.find(connection, "WHERE state != 'left' ORDER BY name_key")
            ]

        yield {"peers": await self._machine.database.read(work)}

    async def _rename(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        new = str(request.get("new", ""))

        def work(connection: sqlite3.Connection) -> None:
            peer = find_peer(connection, str(request.get("old", "")))
            taken = [each.name_key for each in paired(connection) if each.id != peer.id]
            taken.append(name_key(machine_of(connection).name))
            if not new or new != new.strip() or not new.isprintable() or "@" in new:
                raise Failure("usage", "A name is visible text without @.", "", 2)
            if name_key(new) in taken:
                raise Failure("name_taken", f"The name {new!r} is in use.", "Take another.", 3)
            peer.name, peer.name_key = new, name_key(new)
            PEER.save(connection, peer)

        await self._machine.write(work)
        yield {"name": new}

    async def _unpair(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        def work(connection: sqlite3.Connection) -> Peer:
            peer, now = find_peer(connection, str(request.get("peer", ""))), self._now()
            outbox.end_all(connection, peer, Move.CANCEL, now, "you ended the pairing")
            peer.state, peer.is_due, peer.has_news = "leaving", True, True
            peer.leave_age_ms = now.age_ms + LEAVE_MS
            PEER.save(connection, peer)
            return peer

        peer = await self._machine.write(work)
        await self._machine.parts_changed()
        yield {"peer": peer.name}

    def _now(self) -> Now:
        return self._machine.clock.now()


def _counts(connection: sqlite3.Connection, peer: Peer) -> dict[str, int]:
    # Two counts that an index alone answers, also for a long backlog.
    (waiting,) = connection.execute(
        "SELECT COUNT(*) FROM letter WHERE peer = ? AND state IN ('queued', 'held')", (peer.id,)
    ).fetchone()
    (held,) = connection.execute(
        "SELECT COUNT(*) FROM letter WHERE peer = ? AND state = 'held'", (peer.id,)
    ).fetchone()
    return {"queued": waiting - held, "held": held}
