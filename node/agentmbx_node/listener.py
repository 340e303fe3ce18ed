"""Where other machines reach this one: deposits and pairing over HTTP, in bounds; no rule of mail.

aiohttp does HTTP. This keeps what a stranger can cost within bounds: how many connections, how
long a head and a body may take, how many bytes. A peer that finds no room here uses a relay.
"""

import asyncio
import errno
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import structlog
from aiohttp import HttpVersion11, web

from agentmbx_node.errors import OperatingError
from agentmbx_protocol import bodies, limits
from agentmbx_protocol.errors import Malformed, Refusal, TooLarge, Unavailable

HEAD_S: Final = 10.0
BODY_S: Final = 30.0
LINGER_S: Final = 2.0
STOP_S: Final = 3.0
CONNECTIONS_MAX: Final = 256
BODIES_BYTES_MAX: Final = 16 * limits.DEPOSIT_BYTES_MAX
HEAD_BYTES_MAX: Final = 8190
HEAD_LINES_MAX: Final = 64
OTHER_PORTS_MAX: Final = 20
RETRY_S: Final = 5
_PORT_MAX: Final = 65535
_NO_SUCH_ADDRESS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

log = structlog.get_logger("agentmbx.node")

Deposit = Callable[[bytes], Awaitable[bytes]]
Pair = Callable[[bytes, str], Awaitable[bytes]]
_Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


class _HttpRefusal(Exception):
    """A refusal with a status of its own (SPEC section 9, last paragraph)."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.refusal = Malformed(text)
        self.status = status


class Listener:
    """The machine's one port for its peers.

    `deposit` takes the body of a deposit and gives the body of the answer; `pair` takes the body
    of a step of pairing and the joiner's IP. A `Refusal` that either raises becomes the answer;
    any other error becomes `unavailable`. `ready` says what `/readyz` shows.
    """

    def __init__(self, deposit: Deposit, pair: Pair, ready: Callable[[], bool]) -> None:
        self._deposit = deposit
        self._pair = pair
        self._ready = ready
        self._bodies_bytes = 0
        self._runner: web.ServerRunner | None = None
        self._routes: Mapping[str, Mapping[str, _Handler]] = {
            "/v1/deposit": {"POST": self._answer_deposit},
            "/v1/pair": {"POST": self._answer_pair},
            "/livez": {"GET": self._answer_livez},
            "/readyz": {"GET": self._answer_readyz},
        }

    async def start(self, host: str, port: int) -> int:
        """Listen, and give the port that it came to; an empty `host` means every address.

        When `port` is taken it is the next free one of the 20 after it; 0 means any. Raises
        `OperatingError` when none is free or this machine has no such address.
        """
        loop = asyncio.get_running_loop()
        plugs = await loop.run_in_executor(None, _open_plugs, host, port)
        self._runner = web.ServerRunner(_Server(self._handle), shutdown_timeout=STOP_S)
        await self._runner.setup()
        for plug in plugs:
            await web.SockSite(self._runner, plug).start()
        return int(plugs[0].getsockname()[1])

    async def stop(self) -> None:
        """Take nothing more, and end what is under way within seconds."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._find(request)(request)
        except Refusal as refusal:
            return _problem(refusal, refusal.status)
        except _HttpRefusal as refused:
            return _problem(refused.refusal, refused.status)
        except Exception as error:  # noqa: BLE001 - a bug of one request is not the end of all
            log.error("request_failed", error=type(error).__name__)
            return _problem(Unavailable(), Unavailable.status)

    def _find(self, request: web.BaseRequest) -> _Handler:
        methods = self._routes.get(request.path)
        if methods is None:
            raise _HttpRefusal("There is nothing at this path.", 404)
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            raise _HttpRefusal("This path takes another method.", 405)
        return methods[method]

    async def _answer_deposit(self, request: web.BaseRequest) -> web.Response:
        return await self._take(request, limits.DEPOSIT_BYTES_MAX, self._deposit)

    async def _answer_pair(self, request: web.BaseRequest) -> web.Response:
        joiner_ip = (request.remote or "").partition("%")[0]
        return await self._take(
            request, limits.COMMAND_BYTES_MAX, lambda body: self._pair(body, joiner_ip)
        )

    async def _answer_livez(self, _request: web.BaseRequest) -> web.Response:
        return _json({"alive": True}, 200)

    async def _answer_readyz(self, _request: web.BaseRequest) -> web.Response:
        ready = self._ready()
        return _json({"ready": ready}, 200 if ready else 503)

    async def _take(self, request: web.BaseRequest, bytes_max: int, act: Deposit) -> web.Response:
        parts: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    await self._read(request, bytes_max, parts)
            except TimeoutError:
                raise _HttpRefusal("The body took too long.", 408) from None
            except (ConnectionError, web.RequestPayloadError):
                raise Malformed("The request was cut short.") from None
            answer = await act(b"".join(parts))
        finally:
            self._bodies_bytes -= sum(map(len, parts))
        return _answer(200, bodies.FRAMES_MEDIA_TYPE, answer)

    async def _read(self, request: web.BaseRequest, bytes_max: int, parts: list[bytes]) -> None:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _HttpRefusal("A body is never compressed.", 415)
        try:
            length = request.content_length or 0
        except ValueError:
            # The parser passes thousands of zeros in front, and Python counts digits.
            raise Malformed("The length of the body is not understood.") from None
        if length > bytes_max:
            raise TooLarge
        if request.version >= HttpVersion11 and (
            request.headers.get("Expect", "").lower() == "100-continue"
        ):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        length = 0
        async for part in request.content.iter_any():
            parts.append(part)
            length += len(part)
            self._bodies_bytes += len(part)
            if length > bytes_max:
                raise TooLarge
            if self._bodies_bytes > BODIES_BYTES_MAX:
                raise Unavailable


class _Connection(web.RequestHandler):
    def data_received(self, data: bytes) -> None:
        """End the body of a request when its framing turns out to be broken."""
        super().data_received(data)
        request = self._current_request
        if request is not None and self._messages and not request.content.is_eof():
            # Only an error can follow a request whose body is not here.
            request.content.set_exception(web.RequestPayloadError("the body's framing is broken"))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A problem, where aiohttp would show and log what came."""
        _ = request, message
        log.info("bad_http", error=type(exc).__name__)
        refusal = Malformed("This is not HTTP as a node speaks it.")
        answer = _problem(refusal, status)
        answer.force_close()
        return answer


class _Server(web.Server):
    def __call__(self) -> _Connection:
        """The protocol of a new connection."""
        # Until its first request is here, and between two, a connection has HEAD_S.
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type] # aiohttp's way to have none
            auto_decompress=False,
            keepalive_timeout=HEAD_S,
            lingering_time=LINGER_S,
            max_line_size=HEAD_BYTES_MAX,
            max_field_size=HEAD_BYTES_MAX,
            max_headers=HEAD_LINES_MAX,
        )

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Take the connection, or cut it off when there are too many."""
        super().connection_made(handler, transport)
        if len(self.connections) > CONNECTIONS_MAX:
            log.warning("too_many_connections", connections_max=CONNECTIONS_MAX)
            transport.abort()


def _open_plugs(host: str, port: int) -> list[socket.socket]:
    last = min(port + OTHER_PORTS_MAX, _PORT_MAX)
    ports = range(port, last + 1) if port else [0] * (1 + OTHER_PORTS_MAX)
    try:
        hosts = _resolve(host)
        for candidate in ports:
            plugs = _bind(hosts, candidate)
            if plugs:
                return plugs
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise OperatingError(f"This machine cannot listen there: {reason}.", retry=True) from error
    raise OperatingError(f"The ports {port} to {last} are all taken.", retry=True)


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    if not host:
        return [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]  # noqa: S104 - asked for
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _bind(hosts: Iterable[tuple[socket.AddressFamily, str]], port: int) -> list[socket.socket]:
    """A socket on `port` for each of `hosts` that this machine has; none if one is taken."""
    plugs: list[socket.socket] = []
    missing: OSError | None = None
    for family, host in hosts:
        try:
            plug = socket.create_server((host, port), family=family)
        except OSError as error:
            if error.errno in _NO_SUCH_ADDRESS:
                missing = error
                continue
            for opened in plugs:
                opened.close()
            if error.errno == errno.EADDRINUSE:
                return []
            raise
        plugs.append(plug)
        port = int(plug.getsockname()[1])
    if not plugs and missing is not None:
        raise missing
    return plugs


def _problem(refusal: Refusal, status: int) -> web.Response:
    answer = _answer(status, bodies.PROBLEM_MEDIA_TYPE, bodies.problem(refusal, status=status))
    if refusal.retryable:
        answer.headers["Retry-After"] = str(refusal.retry_after_s or RETRY_S)
    return answer


def _json(document: Mapping[str, object], status: int) -> web.Response:
    return _answer(status, "application/json", json.dumps(document).encode())


def _answer(status: int, media_type: str, body: bytes) -> web.Response:
    headers = {"Server": "agentmbx", "Content-Type": media_type}
    return web.Response(status=status, body=body, headers=headers)
