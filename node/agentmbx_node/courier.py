"""Carries the letters for one peer: runs its rounds, first directly, then by its relay."""

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Final, TypeVar

import aiohttp
import structlog

from agentmbx_node import rounds
from agentmbx_node.clock import Clock, Now
from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.direct import DirectHop
from agentmbx_node.hops.http import HopRefused
from agentmbx_node.hops.relay import RelayHop
from agentmbx_node.keyring import Keyring
from agentmbx_node.peers import forget_failures
from agentmbx_node.rounds import Round
from agentmbx_node.store.database import Database, StoreFailed, Work
from agentmbx_node.waiting import Alarm
from agentmbx_protocol.custody import HeldFact, NotBelieved
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.errors import Refusal

DIRECT_S: Final = 10.0
STORE_PAUSE_MS: Final = 5000
NO_WAY: Final = "The peer has no address that works here, and no relay."

T = TypeVar("T")
_End = Callable[[sqlite3.Connection, Now], Round | int | None]

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
        self._turn = asyncio.Lock()
        self._begun: Round | int | None = None
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

    async def submit(self, work: Work[T]) -> T:
        """What `work` returns, durable; a round with what it adds begins in the same commit.

        When a round is on, it goes with the next.
        """
        if self._turn.locked():
            result = await self._database.write(work)
        else:
            async with self._turn:
                result, self._begun = await self._database.write(
                    lambda connection: (work(connection), self._begin_too(connection))
                )
        self.alarm.ring()
        return result

    async def _go(self) -> int | None:
        """Run rounds while there are any; how long until the next may be due."""
        async with self._turn:
            begun, self._begun = self._begun, None
            if not isinstance(begun, Round):
                begun = await self._database.write(self._begin)
            while isinstance(begun, Round):
                begun = await self._carry(begun)
                self._changed()
        return None if begun is None else max(begun - self._clock.now().age_ms, 1)

    def _begin(self, connection: sqlite3.Connection) -> Round | int | None:
        if self._has_moved:
            # What failed since may have failed for a reason that is gone.
            self._has_moved = False
            forget_failures(connection, self._peer)
        return rounds.begin(connection, self._keyring, self._peer, self._clock.now())

    def _begin_too(self, connection: sqlite3.Connection) -> Round | int | None:
        # What the commit is for must not be lost with a round that fails.
        connection.execute("SAVEPOINT round")
        try:
            return self._begin(connection)
        except Exception as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            log.exception("round_failed", error=type(error).__name__)
            connection.execute("ROLLBACK TO round")
            return None
        finally:
            connection.execute("RELEASE round")

    async def _carry(self, round_: Round) -> Round | int | None:
        """What is next, as `rounds.begin` says it: its commit is that of the end of `round_`."""
        end = await (self._try_directly(round_) if round_.addresses else self._try_relay(round_))
        return await self._database.write(lambda connection: end(connection, self._clock.now()))

    async def _try_directly(self, round_: Round) -> _End:
        try:
            stored = await self._direct(round_)
        except (OperatingError, NotBelieved, HopRefused) as error:
            text = str(error)
            return lambda connection, now: (
                rounds.fall_back(connection, self._keyring, round_, text, now)
                or self._begin(connection)
            )

        def end(connection: sqlite3.Connection, now: Now) -> Round | int | None:
            rounds.direct_done(connection, round_, stored, now)
            return self._begin(connection)

        return end

    async def _try_relay(self, round_: Round) -> _End:
        held, refused, text, answered = await self._by_relay(round_)

        def end(connection: sqlite3.Connection, now: Now) -> Round | int | None:
            rounds.relay_done(connection, round_, held, refused, text, now, answered=answered)
            return self._begin(connection)

        return end

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
