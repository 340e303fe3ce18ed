"""Pairing as the daemon does it: the line to paste, the other end of it, and what screens show."""

import ipaddress
import sqlite3
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from agentmbx_node import joining, pairing, reports, tokens
from agentmbx_node.errors import Failure
from agentmbx_node.hops.direct import DirectHop
from agentmbx_node.hops.http import HopRefused
from agentmbx_node.machine import RunningMachine
from agentmbx_node.outbox import Move
from agentmbx_node.pairing import fingerprint
from agentmbx_node.store.database import StoreFailed
from agentmbx_node.store.rows import PEER, Peer, machine_of
from agentmbx_node.tokens import Event, EventKind, Tokens
from agentmbx_protocol import bodies
from agentmbx_protocol.errors import Unavailable
from agentmbx_protocol.pairing import token_id

Step = Mapping[str, object]

LOOK_S: Final = 0.2
REASONS: Final = {
    EventKind.REUSED: "another machine came with the same line, and was refused",
    EventKind.LATE: "a machine came after the ten minutes, and was refused",
    EventKind.BAD_PROOF: "somebody who does not know the token tried, and was refused",
    EventKind.WORN_OUT: "too many wrong tries ended the line",
    EventKind.OWN: "the line was pasted on this very machine",
}


class PairRequests:
    """`pair` and `join`, and what `POST /v1/pair` answers."""

    def __init__(self, machine: RunningMachine) -> None:
        self._machine = machine
        self._tokens = Tokens()
        self._events: list[Event] = []

    async def answer(self, body: bytes, address: str) -> bytes:
        """The answer's body to a step of a joiner at that IP; raises a `Refusal`."""
        frames = bodies.split_frames(body, 1)
        machine = self._machine

        def work(connection: sqlite3.Connection) -> pairing.Answered:
            return pairing.answer_pair(
                connection,
                self._tokens,
                machine.keyring,
                machine.clock.now(),
                machine_of(connection).card,
                frames,
                loopback=ipaddress.ip_address(address).is_loopback,
                on_replaced=self._end_old,
            )

        try:
            answered = await machine.write(work)
        except StoreFailed as error:
            raise Unavailable from error
        finally:
            machine.changes.tell()
        pairing.settle(self._tokens, answered)
        if answered.peer is not None:
            await machine.parts_changed()
        machine.changes.tell()
        return bodies.join_frames([answered.frame])

    async def pair(self, _request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """The line, then what happens to it, until it made a peer or ends."""
        machine = self._machine
        addresses = machine.addresses
        if not addresses:
            raise Failure(
                "not_listening",
                "This machine listens nowhere, so no other one can join it.",
                "Run `agentmbx pair` on the other machine, or start this one with --listen.",
                3,
            )
        token = self._tokens.offer(machine.clock.now())
        named = token_id(token)
        ends_s = time.monotonic() + tokens.TOKEN_MS / 1000
        yield {"event": "line", "line": tokens.line(addresses, token)}
        try:
            with machine.changes.watch() as watch:
                while time.monotonic() < ends_s:
                    for event in self._take_events(named):
                        if event.kind is EventKind.PAIRED:
                            yield await self._paired(event.identity)
                            return
                        yield {
                            "event": "refused",
                            "reason": REASONS[event.kind],
                            "fingerprint": fingerprint(event.identity),
                        }
                        if event.kind is EventKind.WORN_OUT:
                            raise Failure(
                                "refused",
                                "The line was ended.",
                                "`agentmbx pair` makes a new one.",
                                3,
                            )
                    await watch.wait(LOOK_S)
        finally:
            self._tokens.end(named)
        raise Failure(
            "expired",
            "Nobody joined within ten minutes, so the line is of no use any more.",
            "`agentmbx pair` makes a new one.",
            1,
        )

    async def join(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Pair with the machine that made the line."""
        machine = self._machine
        own = await machine.database.read(machine_of)
        peer = await joining.join(
            machine.database,
            machine.keyring,
            machine.clock,
            self._call,
            str(request.get("line", "")),
            own.card,
            own.name,
            self._end_old,
        )
        await machine.parts_changed()
        yield self._told(peer)

    async def _call(self, address: str, frames: Sequence[bytes]) -> Sequence[bytes]:
        try:
            return await DirectHop(self._machine.session, address).pair(frames)
        except HopRefused as refused:
            raise refused.refusal from refused

    async def _paired(self, identity: bytes) -> Step:
        peers = await self._machine.database.read(
            lambda c: PEER.find(c, "WHERE state = 'paired' AND identity = ?", (identity,))
        )
        return self._told(peers[0])

    def _told(self, peer: Peer) -> Step:
        return {
            "peer": {"name": peer.name, "fingerprint": fingerprint(peer.identity)},
            "own_fingerprint": fingerprint(self._machine.keyring.identity.public),
        }

    def _take_events(self, named: bytes) -> list[Event]:
        self._events += self._tokens.take_events()
        mine = [event for event in self._events if event.token_id == named]
        self._events = [event for event in self._events if event.token_id != named][-64:]
        return mine

    def _end_old(self, connection: sqlite3.Connection, old: Peer) -> None:
        detail = "the peer was paired anew; send it again"
        reports.leave(connection, old, self._machine.clock.now(), Move.GIVE_UP, detail)
        PEER.save(connection, old)
