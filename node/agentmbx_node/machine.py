"""The running machine: its store, keys and loops, and what may be asked of them.

Network events only write to the store and ring alarms; each peer's courier and each queue's
collector reads what is due and runs at its own pace.
"""

import asyncio
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Final, TypeVar

import aiohttp
import structlog

from agentmbx_node import own_card
from agentmbx_node.addresses import interfaces_fingerprint, own_addresses
from agentmbx_node.arrivals import Arrivals
from agentmbx_node.clock import Clock
from agentmbx_node.collector import Collector
from agentmbx_node.courier import Courier
from agentmbx_node.hops.http import end_connections
from agentmbx_node.inbox import Receipt
from agentmbx_node.keyring import Keyring
from agentmbx_node.peers import forget_failures
from agentmbx_node.store.database import Database, StoreFailed, open_database
from agentmbx_node.store.rows import MACHINE, PEER, QUEUE, Machine, machine_of
from agentmbx_node.waiting import Alarm, Changes

DATABASE_NAME: Final = "node.db"
KEYRING_NAME: Final = "keyring"
SAVE_CLOCK_MS: Final = 60 * 1000
LOOK_AT_NETWORK_MS: Final = 5 * 1000

T = TypeVar("T")

log = structlog.get_logger("agentmbx.node")


def open_store(home: Path, name: str) -> tuple[Keyring, sqlite3.Connection]:
    """The keyring and database of the folder, made when both are missing; raises `Failure`."""
    database = home / DATABASE_NAME
    keyring = Keyring.open(home / KEYRING_NAME, may_make=not database.exists())
    connection = open_database(database)
    found = MACHINE.get(connection, 1)
    if found is None:
        MACHINE.add(connection, Machine(1, name, secrets.token_bytes(16), 0, b"", 0, 0))
    elif name and found.name != name:
        found.name = name
        MACHINE.save(connection, found)
    return keyring, connection


class RunningMachine:
    """What the parts share; `run_loops` keeps a courier for each peer, a collector for each queue.

    Every method that changes the store returns when the change is durable.
    """

    def __init__(
        self,
        keyring: Keyring,
        connection: sqlite3.Connection,
        session: aiohttp.ClientSession,
        advertise: Sequence[str] = (),
    ) -> None:
        machine = machine_of(connection)
        self.keyring = keyring
        self.database = Database(connection)
        self.clock = Clock(machine.age_ms, machine.wall_ms)
        self.session = session
        self.changes = Changes()
        self._by_key: dict[bytes, Courier] = {}
        self.arrivals = Arrivals(
            self.database, keyring, self.clock, self._by_key.get, self._arrived
        )
        self.listens_at: tuple[str, int] | None = None
        self.stopping = asyncio.Event()
        self._advertise = advertise
        self._couriers: dict[int, Courier] = {}
        self._collectors: dict[int, Collector] = {}
        self._loops: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._parts_changed = Alarm()
        self._network = interfaces_fingerprint()

    @property
    def addresses(self) -> list[str]:
        """Where peers may reach this machine directly."""
        if self.listens_at is None:
            return []
        return own_addresses(*self.listens_at, self._advertise)

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """See `Database.write`; what looks at the store is told."""
        result = await self.database.write(work)
        self.changes.tell()
        return result

    async def submit(self, peer: int, work: Callable[[sqlite3.Connection], T]) -> T:
        """`write` of a letter to the peer, which leaves at once if nothing is on the way there."""
        courier = self._couriers.get(peer)
        if courier is None:
            return await self.write(work)
        result = await courier.submit(work)
        self.changes.tell()
        return result

    async def renew_card(self) -> None:
        """Make the card say what is true now, and tell the peers if it changed."""
        addresses = self.addresses
        if await self.write(
            lambda connection: own_card.renew(connection, self.keyring, self.clock.now(), addresses)
        ):
            self.ring_couriers()

    async def parts_changed(self) -> None:
        """Look at once which peers and queues there are; returns when their loops run."""
        await self._match_loops()
        for collector in self._collectors.values():
            collector.alarm.ring()
        self.ring_couriers()

    def ring_courier(self, peer: int) -> None:
        """Let the peer's courier look for something to carry."""
        courier = self._couriers.get(peer)
        if courier is not None:
            courier.alarm.ring()

    def ring_couriers(self) -> None:
        """Let all of them look."""
        for courier in self._couriers.values():
            courier.alarm.ring()

    async def run(self) -> None:
        """Keep all loops until cancelled; the clock is saved, and the network watched."""
        try:
            await self._match_loops()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_loops())
                group.create_task(self._keep_clock())
                group.create_task(self._watch_network())
        finally:
            loops = list(self._loops.values())
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await self._save_clock()

    def _arrived(self, receipts: Collection[Receipt]) -> None:
        for peer in {receipt.peer for receipt in receipts if receipt.peer}:
            self.ring_courier(peer)
        self.changes.tell()
        if not all(receipt.is_new for receipt in receipts):
            # A state letter may have shown that this machine's card is to be made anew, and mail
            # from one who left that a courier must say bye again; new mail changes no part.
            self._parts_changed.ring()

    async def _keep_loops(self) -> None:
        while True:
            await self._parts_changed.wait(SAVE_CLOCK_MS)
            try:
                card = await self.database.read(lambda connection: machine_of(connection).card)
                if not card:
                    await self.renew_card()
                await self._match_loops()
            except StoreFailed as error:
                log.error("store_failed", reason=str(error))

    async def _match_loops(self) -> None:
        peers, queues = await self.database.read(
            lambda connection: (
                PEER.find(connection, "WHERE state != 'left'"),
                QUEUE.find(connection, "WHERE state != 'retired'"),
            )
        )
        for peer in peers:
            number = peer.id or 0
            if number not in self._couriers:
                self._couriers[number] = self._courier(number)
            self._keep("courier", number, self._couriers[number].run)
        for queue in queues:
            number = queue.id or 0
            if number not in self._collectors:
                self._collectors[number] = self._collector(number)
            self._keep("collector", number, self._collectors[number].run)
            if queue.state == "draining":
                # Perhaps every peer knows the newer route now.
                self._collectors[number].alarm.ring()
        gone = set(self._couriers) - {peer.id for peer in peers}
        for number in gone:
            del self._couriers[number]
            loop = self._loops.pop(("courier", number), None)
            if loop is not None:
                loop.cancel()
        self._by_key.clear()
        self._by_key.update((peer.pair_key, self._couriers[peer.id or 0]) for peer in peers)

    def _keep(self, kind: str, number: int, run: Callable[[], Awaitable[None]]) -> None:
        loop = self._loops.get((kind, number))
        if loop is None or loop.done():
            self._loops[kind, number] = asyncio.create_task(self._guard(kind, run))

    async def _guard(self, kind: str, run: Callable[[], Awaitable[None]]) -> None:
        # A bug in one loop must not end the others; it is begun anew with the next change.
        try:
            await run()
        except Exception as error:
            log.exception("loop_failed", loop=kind, error=type(error).__name__)

    def _courier(self, number: int) -> Courier:
        return Courier(
            number, self.database, self.keyring, self.clock, self.session, self.changes.tell
        )

    def _collector(self, number: int) -> Collector:
        return Collector(
            number,
            self.database,
            self.keyring,
            self.clock,
            self.session,
            self.arrivals,
            self._queue_changed,
        )

    def _queue_changed(self) -> None:
        self.changes.tell()
        self._parts_changed.ring()

    async def _keep_clock(self) -> None:
        alarm = Alarm()
        while True:
            await alarm.wait(SAVE_CLOCK_MS)
            await self._save_clock()

    async def _save_clock(self) -> None:
        def work(connection: sqlite3.Connection) -> None:
            now = self.clock.now()
            connection.execute(
                "UPDATE machine SET age_ms = ?, wall_ms = ?", (now.age_ms, now.wall_ms)
            )

        try:
            await self.database.write(work)
        except StoreFailed as error:
            log.error("clock_not_saved", reason=str(error))

    async def _watch_network(self) -> None:
        alarm = Alarm()
        while True:
            await alarm.wait(LOOK_AT_NETWORK_MS)
            network = await asyncio.to_thread(interfaces_fingerprint)
            if network == self._network:
                continue
            self._network = network
            log.info("network_changed")
            try:
                await self.write(forget_failures)
                await self.renew_card()
            except StoreFailed as error:
                log.error("store_failed", reason=str(error))
            end_connections(self.session)
            for collector in self._collectors.values():
                collector.alarm.ring()
            for courier in self._couriers.values():
                courier.forget_network()
