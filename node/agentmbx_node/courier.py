"""Carries the letters for one peer: runs its rounds, first directly, then by its relay."""

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp
import structlog

from agentmbx_node import rounds
from agentmbx_node.clock import Clock
from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.direct import DirectHop
from agentmbx_node.hops.http import HopRefused
from agentmbx_node.hops.relay import RelayHop
from agentmbx_node.keyring import Keyring
from agentmbx_node.peers import forget_failures
from agentmbx_node.rounds import Round
from agentmbx_node.store.database import Database, StoreFailed
from agentmbx_node.waiting import Alarm
from agentmbx_protocol.custody import HeldFact, NotBelieved
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.errors import Refusal

DIRECT_S: Final = 10.0
STORE_PAUSE_MS: Final = 5000
NO_WAY: Final = "The peer has no address that works here, and no relay."

log = structlog.get_logger("agentmbx.node")


class Courier:
    """One peer's; `ring` its alarm when there may be something to carry."""

    def __init__(
        self,
        peer: int,
        database: Database,
        keyring: Keyring,
        clock: Clock,
        session: aiohttp.ClientSession,
        changed: Callable[[], None],
    ) -> None:
        self._peer = peer
        self._database = database
        self._keyring = keyring
        self._clock = clock
        self._session = session
        self._changed = changed
        self._last_good = ""
        self._has_moved = False
        self.alarm = Alarm()

    def forget_network(self) -> None:
        """Look for another way at once: what fails now may fail for a reason that is gone."""
        self._has_moved = True
        self._last_good = ""
        self.alarm.ring()

    async def run(self) -> None:
        """Carry until cancelled; one failure of the store is not the end."""
        while True:
            try:
                delay_ms = await self._go()
            except StoreFailed as error:
                log.error("round_failed", reason=str(error))
                delay_ms = STORE_PAUSE_MS
            await self.alarm.wait(delay_ms)

    async def _go(self) -> int | None:
        """Run rounds while there are any; how long until the next may be due."""
        while True:
            self._has_moved = False
            begun = await self._database.write(
                lambda connection: rounds.begin(
                    connection, self._keyring, self._peer, self._clock.now()
                )
            )
            if not isinstance(begun, Round):
                now_ms = self._clock.now().age_ms
                return None if begun is None else max(begun - now_ms, 1)
            await self._carry(begun)
            if self._has_moved:
                await self._database.write(
                    lambda connection: forget_failures(connection, self._peer)
                )
            self._changed()

    async def _carry(self, begun: Round) -> None:
        if begun.addresses:
            try:
                stored = await self._direct(begun)
            except (OperatingError, NotBelieved, HopRefused) as error:
                fallen = await self._database.write(
                    lambda connection, text=str(error): rounds.fall_back(  # type: ignore[misc]
                        connection, self._keyring, begun, text, self._clock.now()
                    )
                )
                if fallen is None:
                    return
                begun = fallen
            else:
                await self._database.write(
                    lambda connection: rounds.direct_done(
                        connection, begun, stored, self._clock.now()
                    )
                )
                return
        held, refused, text, answered = await self._by_relay(begun)
        await self._database.write(
            lambda connection: rounds.relay_done(
                connection,
                begun,
                held,
                refused,
                text,
                self._clock.now(),
                answered=answered,
            )
        )

    async def _direct(self, begun: Round) -> frozenset[bytes]:
        """What the peer has stored; tries its addresses for at most 10 s together."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + DIRECT_S
        failure: Exception = OperatingError("The peer has no address.", retry=True)
        for address in sorted(begun.addresses, key=lambda each: each != self._last_good):
            left_s = ends_s - loop.time()
            if left_s <= 0:
                break
            hop = DirectHop(self._session, address, begun.peer_key)
            try:
                deposited = await hop.deposit(begun.parcels, total_s=left_s)
            except (OperatingError, NotBelieved, HopRefused) as error:
                failure = error
            else:
                self._last_good = address
                return deposited.stored
        raise failure

    async def _by_relay(
        self, begun: Round
    ) -> tuple[dict[bytes, HeldFact], dict[bytes, Refusal], str, bool]:
        """Facts and refusals by digest, why nothing is known, and whether anybody answered."""
        if begun.route is None:
            return {}, {}, NO_WAY, False
        hop = RelayHop(self._session, begun.route.url, begun.route.relay)
        try:
            return await self._deposit(hop, begun.parcels)
        except HopRefused as refused:
            if refused.refusal.retryable or len(begun.parcels) == 1:
                every = {parcel.digest: refused.refusal for parcel in begun.parcels}
                return {}, every, "", True
        # The request as a whole is not taken: perhaps only one in it is at fault.
        held: dict[bytes, HeldFact] = {}
        refusals: dict[bytes, Refusal] = {}
        text = ""
        for parcel in begun.parcels:
            try:
                facts, refused_here, text, _ = await self._deposit(hop, [parcel])
            except HopRefused as refused:
                refusals[parcel.digest] = refused.refusal
            else:
                held |= facts
                refusals |= refused_here
                if text:
                    break
        return held, refusals, text, True

    async def _deposit(
        self, hop: RelayHop, parcels: list[Envelope]
    ) -> tuple[dict[bytes, HeldFact], dict[bytes, Refusal], str, bool]:
        try:
            deposited = await hop.deposit(parcels)
        except (OperatingError, NotBelieved) as error:
            return {}, {}, str(error), False
        refused = {parcels[each.position].digest: each.refusal for each in deposited.refused}
        return dict(deposited.held), refused, "", True
