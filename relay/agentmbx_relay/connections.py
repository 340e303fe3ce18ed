"""The relay's side of TCP connections: how many there may be, and how slow a peer may be.

aiohttp parses HTTP; this keeps an absolute deadline for each phase of each connection, so that
a peer that sends or reads a byte at a time is cut off whatever it does.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, cast

import msgspec
import structlog
from aiohttp import web

from agentmbx_protocol import bodies, limits
from agentmbx_protocol.errors import Malformed, Refusal, ShuttingDown, Unavailable

SCAN_S: Final = 1.0
DRAIN_S: Final = 2.0
DRAIN_BYTES_MAX: Final = 4 * limits.DEPOSIT_BYTES_MAX
BODIES_BYTES_MAX: Final = 64 * limits.DEPOSIT_BYTES_MAX
HEAD_BYTES_MAX: Final = 8190
HEAD_LINES_MAX: Final = 64
NEVER: Final = float("inf")

log = structlog.get_logger("agentmbx.relay")


class Deadlines(msgspec.Struct, frozen=True):
    """Seconds that a phase of a connection may take at most."""

    head_s: float
    body_s: float
    write_s: float
    idle_s: float


class Connection(web.RequestHandler):
    """One connection; `deadline` is when it is cut off unless its phase has ended by then."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_broken",
        "_deadlines",
        "_drain_bytes",
        "_drained",
        "_loop_time",
        "_resting",
        "_server",
        "deadline",
        "reading",
    )

    def __init__(self, server: "ConnectionServer", **kwargs: Any) -> None:  # noqa: ANN401 - they are aiohttp's
        super().__init__(server, **kwargs)
        self._deadlines = server.deadlines
        self._loop_time = asyncio.get_running_loop().time
        self._server = server
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._resting = True
        self._broken = False
        self.reading = False
        self._drained: asyncio.Event | None = None
        self._drain_bytes = DRAIN_BYTES_MAX
        self.deadline = self._loop_time() + self._deadlines.head_s

    def data_received(self, data: bytes) -> None:
        """Start the deadline of the head with its first byte; drop what comes after a refusal."""
        if self._drained is not None:
            self._drain_bytes -= len(data)
            if self._drain_bytes < 0:
                self._drained.set()
            return
        if self._resting:
            self._resting = False
            self.deadline = self._loop_time() + self._deadlines.head_s
        super().data_received(data)

    def reading_body(self) -> list[bytes]:
        """Say that the head is here; the list is for the parts of the body, while they are wanted.

        It is emptied when the connection ends, however long others still refer to it.
        """
        self.reading = True
        self.deadline = self._loop_time() + self._deadlines.body_s
        return self._body

    def took(self, length: int) -> None:
        """Say that so many bytes of a body were read."""
        self._body_bytes += length
        self._server.count_body(length)

    def refuse(self, refusal: Refusal) -> None:
        """Let the reader of the body meet this refusal instead of the rest of it."""
        if self._current_request is not None:
            self._current_request.content.set_exception(refusal)

    def working(self) -> None:
        """Say that the request is here, and how long its answer takes is ours to decide."""
        self.reading = False
        self.deadline = NEVER

    def cut_off(self) -> None:
        """End it at once; what the peer has not read is dropped from the system's buffers too."""
        self._let_go_of_body()
        if self.transport is not None:
            plug = self.transport.get_extra_info("socket")
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def _let_go_of_body(self) -> None:
        self.reading = False
        self._server.count_body(-self._body_bytes)
        self._body_bytes = 0
        self._body.clear()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer within its deadline, then rest until the next request.

        An answer before the end of the request ends the connection.
        """
        self._let_go_of_body()
        self.deadline = self._loop_time() + self._deadlines.write_s
        early = not request.content.is_eof() or self._broken
        if early:
            resp.force_close()
        result = await super().finish_response(request, resp, start_time)
        if early:
            await self._drain()
        self._resting = True
        self.deadline = self._loop_time() + self._deadlines.idle_s
        return result

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop waiting for a peer that is gone."""
        self._let_go_of_body()
        if self._drained is not None:
            self._drained.set()
        super().connection_lost(exc)

    async def _drain(self) -> None:
        # A peer that is cut off while it still sends meets a reset, and never reads the answer.
        transport = self.transport
        if transport is None:
            return
        self._drained = asyncio.Event()
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._drained.wait()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP with a problem that repeats nothing of it."""
        del request, message
        self._broken = True
        log.info("bad_http", error=type(exc).__name__)
        refusal: Refusal = Malformed("This is not HTTP as the relay speaks it.")
        if status >= 500:  # noqa: PLR2004 - the HTTP class of server errors
            refusal = Unavailable()
        response = problem_response(refusal, status)
        response.force_close()
        return response


class ConnectionServer(web.Server):
    """Makes a `Connection` for each peer, and cuts off those beyond a bound or a deadline."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        deadlines: Deadlines,
        connections_max: int,
    ) -> None:
        super().__init__(handler)
        self.deadlines = deadlines
        self._connections_max = connections_max
        self._bodies_bytes = 0
        self.refused_count = 0

    def __call__(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self.deadlines.idle_s,
            lingering_time=0,
            max_line_size=HEAD_BYTES_MAX,
            max_field_size=HEAD_BYTES_MAX,
            max_headers=HEAD_LINES_MAX,
        )

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Take the connection, or cut it off when there are too many."""
        super().connection_made(handler, transport)
        if len(self.connections) > self._connections_max:
            self.refused_count += 1
            log.warning("too_many_connections", connections_max=self._connections_max)
            transport.abort()

    def pre_shutdown(self) -> None:
        """Refuse the requests that are still arriving; aiohttp reads no more of them after this."""
        for connection in self.connections:
            if cast("Connection", connection).reading:
                cast("Connection", connection).refuse(ShuttingDown())
        super().pre_shutdown()

    def count_body(self, length: int) -> None:
        """Count bytes of bodies; beyond a bound the slowest one, which began first, is cut off.

        An honest body is here within moments; one that helps to fill the bound is not.
        """
        self._bodies_bytes += length
        while self._bodies_bytes > BODIES_BYTES_MAX:
            each = (cast("Connection", connection) for connection in self.connections)
            reading = [connection for connection in each if connection.reading]
            if not reading:
                return
            log.warning("too_many_bytes_of_bodies", bytes_max=BODIES_BYTES_MAX)
            min(reading, key=lambda connection: connection.deadline).cut_off()

    async def cut_off_slow(self) -> None:
        """Look at every connection once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SCAN_S)
            now = loop.time()
            for connection in self.connections:
                if cast("Connection", connection).deadline < now and connection.transport:
                    log.info("slow_connection_cut_off")
                    cast("Connection", connection).cut_off()


def problem_response(
    refusal: Refusal, status: int, queue_state: bytes | None = None
) -> web.Response:
    """A problem as an answer, without a word about the software or this machine."""
    return web.Response(
        body=bodies.problem(refusal, queue_state, status=status),
        status=status,
        content_type=bodies.PROBLEM_MEDIA_TYPE,
        headers={"Server": "agentmbx"},
    )
