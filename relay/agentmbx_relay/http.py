"""The HTTP front of the relay: bodies in and out, problems, health; no rule of the relay."""

import json
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog
from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time

from agentmbx_protocol import bodies, limits
from agentmbx_protocol.errors import Malformed, Refusal, ShuttingDown, TooLarge, Unavailable
from agentmbx_relay.connections import Connection, problem_response
from agentmbx_relay.health import Health
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.relay import ProvenRefusal, Relay

RETURN_S_MAX: Final = 5
DEFAULT_RETRY_S: Final = 5
_SERVER: Final = {"Server": "agentmbx"}
_FRAMES_HEAD: Final = (
    f"HTTP/1.1 200 OK\r\nServer: agentmbx\r\nContent-Type: {bodies.FRAMES_MEDIA_TYPE}\r\n"
)

log = structlog.get_logger("agentmbx.relay")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpRefusal(Exception):
    """A refusal with a status of its own (SPEC section 9, last paragraph)."""

    def __init__(self, refusal: Refusal, status: int) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal
        self.status = status


class FramesAnswer(web.StreamResponse):
    """A 200 with frames in one piece: an answer of aiohttp's own takes three times as long.

    Only for answers to POST, which have no other form.
    """

    def __init__(self, frames: bytes) -> None:
        super().__init__()
        self._frames = frames
        self._asked: web.BaseRequest | None = None

    async def prepare(self, request: web.BaseRequest) -> None:
        """Remember whom to answer; the connection stays open if the request wants that."""
        self._asked = request
        if not request.keep_alive:
            self.force_close()

    async def write_eof(self, data: bytes = b"") -> None:
        """Write the head and the frames, and wait while the peer reads too slowly."""
        del data
        if self._asked is None:
            raise RuntimeError("an answer is prepared before it is written")
        stays = self.keep_alive is not False
        named = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = (
            f"{_FRAMES_HEAD}{named}Content-Length: {len(self._frames)}\r\n"
            f"Date: {rfc822_formatted_time()}\r\n"
            f"Connection: {'keep-alive' if stays else 'close'}\r\n\r\n"
        )
        self._keep_alive = stays
        await self._asked.writer.write(head.encode("ascii") + self._frames)


class Front:
    """Routes by the end of the path, so that it works below any prefix of a proxy."""

    def __init__(self, relay: Relay, health: Health, metrics: Metrics) -> None:
        self._relay = relay
        self._health = health
        self._metrics = metrics
        self._routes: Mapping[str, Mapping[str, Handler]] = {
            "v1/deposit": {"POST": self._deposit},
            "v1/collect": {"POST": self._collect},
            "v1/register": {"POST": self._register},
            "v1/retire": {"POST": self._retire},
            "v1/info": {"GET": self._info},
            "livez": {"GET": self._livez},
            "readyz": {"GET": self._readyz},
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to any request; whatever goes wrong becomes a problem."""
        try:
            return await self._route(request)(request)
        except Refusal as refusal:
            return self._problem(refusal, refusal.status)
        except ProvenRefusal as proven:
            return self._problem(proven.refusal, proven.refusal.status, proven.queue_state)
        except HttpRefusal as refused:
            return self._problem(refused.refusal, refused.status)
        except (ConnectionError, web.RequestPayloadError):
            # The peer is gone or broke its own framing; aiohttp closes the connection.
            return self._problem(Malformed("The request was cut short."), Malformed.status)
        except Exception as error:
            self._metrics.fault()
            log.error("request_failed", error=type(error).__name__, exc_info=error)
            return self._problem(Unavailable(), Unavailable.status)

    def _route(self, request: web.BaseRequest) -> Handler:
        methods = self._routes.get(request.raw_path[1:])
        if methods is None:
            parts = request.path.rstrip("/").split("/")
            methods = self._routes.get(parts[-1]) or self._routes.get("/".join(parts[-2:]))
        if methods is None:
            raise HttpRefusal(Malformed("There is nothing at this path."), 404)
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            raise HttpRefusal(Malformed("This path takes another method."), 405)
        return methods[method]

    async def _deposit(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _read_body(request, limits.DEPOSIT_BYTES_MAX)
        return FramesAnswer(await self._relay.deposit(body))

    async def _collect(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _read_body(request, limits.COMMAND_BYTES_MAX)
        response = FramesAnswer(bodies.join_frames(await self._relay.collect(body)))
        if self._relay.draining:
            # Each poller comes back at a moment of its own, so that they do not all come at once.
            response.headers["Retry-After"] = str(_return_s())
            response.force_close()
        return response

    async def _register(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _read_body(request, limits.COMMAND_BYTES_MAX)
        return FramesAnswer(bodies.join_frames([await self._relay.register(body)]))

    async def _retire(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _read_body(request, limits.COMMAND_BYTES_MAX)
        return FramesAnswer(bodies.join_frames([await self._relay.retire(body)]))

    async def _info(self, _request: web.BaseRequest) -> web.Response:
        return _json_response(self._relay.info(), 200)

    async def _livez(self, _request: web.BaseRequest) -> web.Response:
        return _json_response({"alive": True}, 200)

    async def _readyz(self, _request: web.BaseRequest) -> web.Response:
        ready = self._health.ready
        return _json_response({"ready": ready}, 200 if ready else 503)

    def _problem(
        self, refusal: Refusal, status: int, queue_state: bytes | None = None
    ) -> web.Response:
        self._metrics.refused(refusal)
        log.info("refused", code=refusal.code, status=status)
        response = problem_response(refusal, status, queue_state)
        if isinstance(refusal, ShuttingDown):
            response.headers["Retry-After"] = str(_return_s())
            response.force_close()
        elif refusal.retryable:
            response.headers["Retry-After"] = str(refusal.retry_after_s or DEFAULT_RETRY_S)
        return response


async def metrics_page(
    metrics: Metrics, totals: Callable[[], Mapping[str, int]], request: web.BaseRequest
) -> web.StreamResponse:
    """What the metrics listener answers: the page at `/metrics`, and nothing else."""
    if request.method not in ("GET", "HEAD") or request.path != "/metrics":
        return problem_response(Malformed("Only GET /metrics is here."), 404)
    return web.Response(
        body=metrics.page(totals()),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8", **_SERVER},
    )


async def _read_body(request: web.BaseRequest, bytes_max: int) -> bytes:
    connection = request.protocol
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpRefusal(Malformed("A body is never compressed."), 415)
    if (request.content_length or 0) > bytes_max:
        raise TooLarge
    chunks = connection.reading_body() if isinstance(connection, Connection) else []
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    length = 0
    while chunk := await request.content.readany():
        length += len(chunk)
        if length > bytes_max:
            raise TooLarge
        if isinstance(connection, Connection):
            connection.took(len(chunk))
        chunks.append(chunk)
    if isinstance(connection, Connection):
        connection.working()
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _json_response(document: Mapping[str, object], status: int) -> web.Response:
    return web.Response(
        body=json.dumps(document).encode(),
        status=status,
        content_type="application/json",
        headers=_SERVER,
    )


def _return_s() -> int:
    return random.randint(1, RETURN_S_MAX)  # noqa: S311 - spreads load, protects nothing
