"""Sending, reading and listing mail, as the daemon does it."""

import sqlite3
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from agentmbx_node import outbox
from agentmbx_node.clock import Now
from agentmbx_node.errors import Failure
from agentmbx_node.machine import RunningMachine
from agentmbx_node.mail import listing, message
from agentmbx_node.mail.message import Message
from agentmbx_node.peers import find_peer, paired
from agentmbx_node.store.rows import LetterRow, machine_of

WAIT_S_MAX: Final = 3600.0
REACHED: Final[Mapping[str, tuple[str, ...]]] = {
    "held": ("held", "stored", "not_confirmed", "cancelled"),
    "stored": ("stored", "not_confirmed", "cancelled"),
}

Step = Mapping[str, object]


class MailRequests:
    """What `send`, `inbox`, `read`, `sent` and `outbox` ask."""

    def __init__(self, machine: RunningMachine) -> None:
        self._machine = machine

    async def send(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """A letter in the outbox, then perhaps its states as they come."""
        recipient, _, peer_name = str(request.get("to", "")).rpartition("@")
        if not recipient or not peer_name:
            raise Failure("usage", "Mail goes to NAME@PEER.", "`agentmbx peers` lists peers.", 2)
        told = Message(
            sender=str(request.get("as") or message.OWNER),
            recipient=recipient,
            subject=str(request.get("subject", "")).strip(),
            body=str(request.get("body") or ""),
            kind=str(request.get("kind") or "message"),
        )
        content = message.encode(told)
        key = request.get("key")

        def work(connection: sqlite3.Connection) -> LetterRow:
            return outbox.submit(
                connection,
                find_peer(connection, peer_name),
                content_type=message.CONTENT_TYPE,
                content=content,
                now=self._now(),
                retry_key=str(key) if key else None,
            )

        peer = await self._machine.database.read(
            lambda connection: find_peer(connection, peer_name)
        )
        row = await self._machine.submit(peer.id or 0, work)
        wanted = REACHED.get(str(request.get("wait") or ""), ())
        ends_s = time.monotonic() + WAIT_S_MAX
        with self._machine.changes.watch() as watch:
            seen = row.state
            while True:
                (letter,) = await self._sent(row.id)
                if wanted and letter["state"] != seen:
                    seen = str(letter["state"])
                    yield {"event": "state", "state": seen, "way": letter["way"]}
                left_s = ends_s - time.monotonic()
                if not wanted or seen in wanted or left_s <= 0:
                    break
                await watch.wait(left_s)
        yield {"id": row.id, "state": letter["state"], "letter": letter}

    async def inbox(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """All mail, or that of one name."""
        owner = request.get("as")
        yield {
            "messages": await self._machine.database.read(
                lambda c: listing.inbox(c, machine_of(c).name, str(owner) if owner else None)
            )
        }

    async def read(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """One message, marked as read."""
        mail_id, now = str(request.get("id", "")), self._now()
        yield {
            "message": await self._machine.write(
                lambda c: listing.read(c, machine_of(c).name, mail_id, now)
            )
        }

    async def sent(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Letters that were sent, or one of them."""
        letter_id = request.get("id")
        yield {"letters": await self._sent(str(letter_id) if letter_id else None)}

    async def outbox(self, _request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Letters that have not ended."""
        yield {"letters": await self._sent(None, only_open=True)}

    async def outbox_retry(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Try all that waits at once."""
        letter_id = request.get("id")

        def work(connection: sqlite3.Connection) -> int:
            peers = paired(connection)
            if letter_id:
                row = listing.find_letter(connection, str(letter_id))
                peers = [peer for peer in peers if peer.id == row.peer]
            for peer in peers:
                outbox.retry(connection, peer, self._now())
            return sum(len(outbox.find_open(connection, peer)) for peer in peers)

        count = await self._machine.write(work)
        self._machine.ring_couriers()
        yield {"count": count}

    async def outbox_cancel(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """End one letter."""

        def work(connection: sqlite3.Connection) -> tuple[LetterRow, bool]:
            row = listing.find_letter(connection, str(request.get("id", "")))
            return row, outbox.cancel(connection, row, self._now())

        row, may_arrive = await self._machine.write(work)
        self._machine.ring_courier(row.peer)
        yield {"id": row.id, "state": row.state, "may_still_arrive": may_arrive}

    async def _sent(
        self, letter_id: str | None, *, only_open: bool = False
    ) -> list[listing.Document]:
        now = self._now()
        return await self._machine.database.read(
            lambda connection: listing.sent(connection, now, letter_id, only_open=only_open)
        )

    def _now(self) -> Now:
        return self._machine.clock.now()
