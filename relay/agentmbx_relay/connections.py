"""The relay's side of TCP connections: how many there may be, and how slow a peer may be.

aiohttp parses HTTP; this keeps an absolute deadline for each phase of each connection, so that
a peer that sends or reads a byte at a time is cut off whatever it does.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
import structlog
from aiohttp import StreamReader, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion11, RawRequestMessage

from agentmbx_protocol import bodies, limits
from agentmbx_protocol.errors import Malformed, Refusal, ShuttingDown, TooLarge

SCAN_S: Final = 1.0
DRAIN_S: Final = 2.0
DRAIN_BYTES_MAX: Final = 4 * limits.DEPOSIT_BYTES_MAX
BODIES_BYTES_MAX: Final = 64 * limits.DEPOSIT_BYTES_MAX
HEAD_BYTES_MAX: Final = 8190
HEAD_LINES_MAX: Final = 64
NEVER: Final = float("inf")
_REASONS: Final = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}

log = structlog.get_logger("agentmbx.relay")


class Deadlines(msgspec.Struct, frozen=True):
    """Seconds that a phase of a connection may take at most."""

    head_s: float
    body_s: float
    write_s: float
    idle_s: float


class Answer(msgspec.Struct, frozen=True):
    """A whole answer; `closes` ends the connection with it."""

    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str] = {}
    closes: bool = False


class Request(msgspec.Struct):
    """The head of a request: `target` is as it stands in the request line."""

    method: str
    target: str
    headers: Mapping[str, str]
    connection: "Connection"

    async def read(self, bytes_max: int) -> bytes:
        """The body; raises `TooLarge` before all of a larger one is here."""
        return await self.connection.read_body(self.headers, bytes_max)


Handler = Callable[[Request], Awaitable[Answer]]


class Connection(web.RequestHandler):
    """One connection; `deadline` is when it is cut off unless its phase has ended by then."""

    __slots__ = (
        "_deadlines",
        "_drain_bytes",
        "_drained",
        "_handler",
        "_is_new",
        "_loop_time",
        "_parts",
        "_parts_bytes",
        "_payload",
        "_resting",
        "_server",
        "deadline",
        "reading",
    )

    def __init__(self, server: "ConnectionServer", **kwargs: Any) -> None:  # noqa: ANN401 - they are aiohttp's
        super().__init__(server, **kwargs)
        self._deadlines = server.deadlines
        self._handler = server.handler
        self._loop_time = asyncio.get_running_loop().time
        self._server = server
        self._payload: StreamReader | None = None
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._resting = True
        self._is_new = True
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
        if self._payload is not None and self._messages and not self._payload.is_eof():
            # Only an error can follow a request whose body is not here, and it ends that body.
            self._payload.set_exception(web.RequestPayloadError("the body's framing is broken"))

    async def start(self) -> None:
        """Answer one request after the other.

        It stands in for aiohttp's own loop, which makes a task and three objects for each of
        them and so costs twice as much as all the rest of HTTP.
        """
        with suppress(ConnectionError):
            stays = True
            while stays and not self._force_close and not self._close:
                message, payload = await self._next_message()
                self._request_in_progress = True
                try:
                    stays = await self._answer(message, payload)
                finally:
                    self._payload = None
                    self._request_in_progress = False
                    if self._handler_waiter is not None and not self._handler_waiter.done():
                        self._handler_waiter.set_result(None)
        if self.transport is not None:
            self.transport.close()

    async def _next_message(self) -> tuple[object, StreamReader]:
        if not self._messages:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message, payload = self._messages.popleft()
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        return message, payload

    async def _answer(self, message: object, payload: StreamReader) -> bool:
        """Answer one request; whether the connection stays for another.

        An answer before the end of the request ends the connection.
        """
        if isinstance(message, RawRequestMessage):
            self._payload = payload
            # HTTP/1.0 knows no interim answers (RFC 9110 section 10.1.1).
            self._is_new = message.version >= HttpVersion11
            request = Request(message.method, message.path, message.headers, self)
            answer = await self._handler(request)
            unread = not payload.is_eof() or self._reading_paused
            stays = not (unread or message.should_close or self._upgraded or answer.closes)
            head_only = message.method == "HEAD"
        else:
            log.info("bad_http", error=type(getattr(message, "exc", None)).__name__)
            answer = problem_answer(Malformed("This is not HTTP as the relay speaks it."), 400)
            unread, stays, head_only = True, False, False
        self._let_go_of_body()
        await self._write(_encode(answer, stays=stays, head_only=head_only))
        if unread:
            await self._drain()
        self._resting = True
        self.deadline = self._loop_time() + self._deadlines.idle_s
        return stays

    async def read_body(self, headers: Mapping[str, str], bytes_max: int) -> bytes:
        """The body of the request that is being answered; see `Request.read`."""
        if _content_length(headers) > bytes_max:
            raise TooLarge
        payload = self._payload
        if payload is None or self.transport is None:
            raise ConnectionResetError
        self.reading = True
        self.deadline = self._loop_time() + self._deadlines.body_s
        if self._is_new and headers.get("Expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Emptied when the connection ends, however long others still refer to it.
        parts = self._parts
        while not payload.at_eof():
            part = await payload.readany()
            parts.append(part)
            self._parts_bytes += len(part)
            self._server.count_body(len(part))
            if self._parts_bytes > bytes_max:
                raise TooLarge
        # The request is here; how long its answer takes is ours to decide.
        self.reading = False
        self.deadline = NEVER
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def refuse(self, refusal: Refusal) -> None:
        """Let the reader of the body meet this refusal instead of the rest of it."""
        if self._payload is not None:
            self._payload.set_exception(refusal)

    def cut_off(self) -> None:
        """End it at once; what the peer has not read is dropped from the system's buffers too."""
        self._let_go_of_body()
        if self.transport is not None:
            plug = self.transport.get_extra_info("socket")
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop waiting for a peer that is gone."""
        self._let_go_of_body()
        if self._drained is not None:
            self._drained.set()
        if self._payload is not None:
            self._payload.set_exception(exc or ConnectionResetError("the peer is gone"))
        super().connection_lost(exc)

    def _let_go_of_body(self) -> None:
        self.reading = False
        self._server.count_body(-self._parts_bytes)
        self._parts_bytes = 0
        self._parts.clear()

    async def _write(self, data: bytes) -> None:
        if self.transport is None:
            raise ConnectionResetError
        self.deadline = self._loop_time() + self._deadlines.write_s
        self.transport.write(data)
        if self.writing_paused:
            await self._drain_helper()

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


class ConnectionServer(web.Server):
    """Makes a `Connection` for each peer, and cuts off those beyond a bound or a deadline."""

    def __init__(self, handler: Handler, deadlines: Deadlines, connections_max: int) -> None:
        super().__init__(_unused)
        self.handler = handler
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
            keepalive_timeout=0,
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


def problem_answer(refusal: Refusal, status: int, queue_state: bytes | None = None) -> Answer:
    """A problem as an answer, without a word about the software or this machine."""
    body = bodies.problem(refusal, queue_state, status=status)
    return Answer(status, bodies.PROBLEM_MEDIA_TYPE, body)


def _content_length(headers: Mapping[str, str]) -> int:
    try:
        return int(headers.get("Content-Length", "0"))
    except ValueError as error:
        # The parser passes thousands of zeros in front, and Python counts digits.
        raise Malformed("The length of the body is not understood.") from error


async def _unused(_request: web.BaseRequest) -> web.StreamResponse:
    raise NotImplementedError("connections answer with the handler of their server")


def _encode(answer: Answer, *, stays: bool, head_only: bool) -> bytes:
    named = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    head = (
        f"HTTP/1.1 {_REASONS[answer.status]}\r\nServer: agentmbx\r\n"
        f"Content-Type: {answer.media_type}\r\n{named}Content-Length: {len(answer.body)}\r\n"
        f"Date: {rfc822_formatted_time()}\r\nConnection: {'keep-alive' if stays else 'close'}"
        "\r\n\r\n"
    )
    return head.encode("ascii") + (b"" if head_only else answer.body)
