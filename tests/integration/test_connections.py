"""Connections of an earlier network are ended, so that nobody waits for what is dead."""

import asyncio

import pytest

from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.http import FarEnd, end_connections, exchange, open_session

FAR_END = FarEnd(name="machine", foreign="no", connect_s=3.0, answer_bytes_max=1000)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Host:
    """Answers each request, or none; counts who has connected."""

    def __init__(self, *, answers: bool) -> None:
        self.connections = 0
        self.asked = asyncio.Event()
        self._answers = answers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.asked.set()
                if self._answers:
                    writer.write(ANSWER)
        except asyncio.IncompleteReadError:
            writer.close()

    async def listen(self) -> tuple[asyncio.Server, str]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def test_a_request_under_way_fails_at_once() -> None:
    host = Host(answers=False)
    server, url = await host.listen()
    async with server, open_session() as session:
        asking = asyncio.create_task(exchange(session, "POST", url, FAR_END, 60.0))
        await host.asked.wait()
        end_connections(session)
        async with asyncio.timeout(5):
            with pytest.raises(OperatingError, match="broke"):
                await asking


async def test_a_kept_connection_is_not_used_again() -> None:
    host = Host(answers=True)
    server, url = await host.listen()
    async with server, open_session() as session:
        for _ in range(2):
            await exchange(session, "GET", url, FAR_END, 5.0)
        assert host.connections == 1
        end_connections(session)
        await asyncio.sleep(0)
        answer = await exchange(session, "GET", url, FAR_END, 5.0)
    assert (host.connections, answer.body) == (2, b"ok")
