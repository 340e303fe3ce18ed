"""Sending, reading and listing mail, as the daemon does it."""

import sqlite3
import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, Final

from agentmbx_node import outbox
from agentmbx_node.clock import Now
from agentmbx_node.errors import Failure
from agentmbx_node.machine import RunningMachine
from agentmbx_node.mail import listing, message
from agentmbx_node.mail.message import Message
from agentmbx_node.peers import find_peer, paired
from agentmbx_node.store.rows import LETTER, LetterRow, machine_of

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
            peer = find_peer(connection, peer_name)
            return outbox.submit(
                connection,
                peer,
                content_type=message.CONTENT_TYPE,
                content=content,
                now=self._now(),
                retry_key=str(key) if key else None,
            )

        row = await self._machine.write(work)
        self._machine.ring_courier(row.peer)
        wanted = REACHED.get(str(request.get("wait") or ""))
        ends_s = time.monotonic() + WAIT_S_MAX
        while wanted is not None and row.state not in wanted:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                break
            await self._machine.changes.wait(left_s)
            seen = row.state
            row = await self._machine.database.read(partial(_current, row))
            if row.state != seen:
                yield {"event": "state", "state": row.state, "way": row.way}
        now = self._now()
        (letter,) = await self._machine.database.read(
            lambda c: listing.sent(c, now, row.id, only_open=False)
        )
        yield {"id": row.id, "state": row.state, "letter": letter}

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
        letter_id, now = request.get("id"), self._now()
        yield {
            "letters": await self._machine.database.read(
                lambda c: listing.sent(
                    c, now, str(letter_id) if letter_id else None, only_open=False
                )
            )
        }

    async def outbox(self, _request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Letters that have not ended."""
        now = self._now()
        yield {
            "letters": await self._machine.database.read(
                lambda c: listing.sent(c, now, None, only_open=True)
            )
        }

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

    def _now(self) -> Now:
        return self._machine.clock.now()


def _current(row: LetterRow, connection: sqlite3.Connection) -> LetterRow:
    return LETTER.get(connection, row.id) or row
