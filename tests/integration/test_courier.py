"""What a courier does about a change of networks while it is on its way."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from agentmbx_node.clock import Clock
from agentmbx_node.courier import Courier
from agentmbx_node.hops.http import end_connections, open_session
from agentmbx_node.store.database import Database
from letter_sides import Side, pair

NOBODY = "http://127.0.0.1:9/"


class SilentHost:
    """Takes connections and answers nothing; `asked` counts the requests."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)
        self.port = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked.release()
        await reader.read(-1)
        writer.close()


def laptop_that_writes_to(port: int) -> Side:
    """Its peer is at that port, and has a relay that nobody reaches."""
    laptop, server = Side("laptop"), Side("server")
    server.address = f"127.0.0.1:{port}"
    server.add_queue()
    server.connection.execute("UPDATE queue SET url = ?", (NOBODY,))
    server.renew_card()
    pair(laptop, server)
    server.close()
    laptop.change_peer(loopback=True)
    laptop.send(b"hello")
    return laptop


def courier_of(side: Side, session: aiohttp.ClientSession) -> tuple[Courier, Database]:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    side.connection.backup(connection)
    database = Database(connection)
    clock = Clock(side.age_ms, side.wall_ms)
    number = side.peer.id or 0
    return Courier(number, database, side.keyring, clock, session, lambda: None), database


async def test_an_attempt_that_a_change_of_networks_ended_is_made_again_at_once() -> None:
    host = SilentHost()
    async with host.listening(), open_session() as session, asyncio.timeout(5):
        laptop = laptop_that_writes_to(host.port)
        courier, database = courier_of(laptop, session)
        running = asyncio.create_task(courier.run())
        await host.asked.acquire()
        end_connections(session)
        courier.forget_network()
        # It would be left alone for minutes, had it failed in the network that is here now.
        await host.asked.acquire()
        running.cancel()
        await asyncio.wait([running])
        await database.close()
        laptop.close()
