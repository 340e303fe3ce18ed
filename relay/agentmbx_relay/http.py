"""The HTTP front of the relay: bodies in and out, problems, health; no rule of the relay."""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Final
from urllib.parse import unquote

import msgspec
import structlog
from aiohttp.web import RequestPayloadError

from agentmbx_protocol import bodies, limits
from agentmbx_protocol.errors import Malformed, Refusal, ShuttingDown, Unavailable
from agentmbx_relay.connections import Answer, Handler, Request, problem_answer
from agentmbx_relay.health import Health
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.relay import ProvenRefusal, Relay

RETURN_S_MAX: Final = 5
DEFAULT_RETRY_S: Final = 5

log = structlog.get_logger("agentmbx.relay")


class HttpRefusal(Exception):
    """A refusal with a status of its own (SPEC section 9, last paragraph)."""

    def __init__(self, refusal: Refusal, status: int) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal
        self.status = status


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

    async def handle(self, request: Request) -> Answer:
        """The answer to any request; whatever goes wrong becomes a problem."""
        try:
            return await self._route(request)(request)
        except Refusal as refusal:
            return self._problem(refusal, refusal.status)
        except ProvenRefusal as proven:
            return self._problem(proven.refusal, proven.refusal.status, proven.queue_state)
        except HttpRefusal as refused:
            return self._problem(refused.refusal, refused.status)
        except (ConnectionError, RequestPayloadError):
            # The peer is gone or broke its own framing; the connection closes.
            return self._problem(Malformed("The request was cut short."), Malformed.status)
        except Exception as error:
            self._metrics.fault()
            log.error("request_failed", error=type(error).__name__, exc_info=error)
            return self._problem(Unavailable(), Unavailable.status)

    def _route(self, request: Request) -> Handler:
        methods = self._routes.get(request.target[1:])
        if methods is None:
            parts = unquote(request.target.partition("?")[0]).rstrip("/").split("/")
            methods = self._routes.get(parts[-1]) or self._routes.get("/".join(parts[-2:]))
        if methods is None:
            raise HttpRefusal(Malformed("There is nothing at this path."), 404)
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            raise HttpRefusal(Malformed("This path takes another method."), 405)
        return methods[method]

    async def _deposit(self, request: Request) -> Answer:
        body = await _read_body(request, limits.DEPOSIT_BYTES_MAX)
        return Answer(200, bodies.FRAMES_MEDIA_TYPE, await self._relay.deposit(body))

    async def _collect(self, request: Request) -> Answer:
        body = await _read_body(request, limits.COMMAND_BYTES_MAX)
        frames = await self._relay.collect(body)
        # Each poller comes back at a moment of its own, so that they do not all come at once.
        return _frames_answer(frames, returns_s=_return_s() if self._relay.draining else None)

    async def _register(self, request: Request) -> Answer:
        body = await _read_body(request, limits.COMMAND_BYTES_MAX)
        return _frames_answer([await self._relay.register(body)])

    async def _retire(self, request: Request) -> Answer:
        body = await _read_body(request, limits.COMMAND_BYTES_MAX)
        return _frames_answer([await self._relay.retire(body)])

    async def _info(self, _request: Request) -> Answer:
        return _json_answer(self._relay.info(), 200)

    async def _livez(self, _request: Request) -> Answer:
        return _json_answer({"alive": True}, 200)

    async def _readyz(self, _request: Request) -> Answer:
        ready = self._health.ready
        return _json_answer({"ready": ready}, 200 if ready else 503)

    def _problem(self, refusal: Refusal, status: int, queue_state: bytes | None = None) -> Answer:
        self._metrics.refused(refusal)
        log.info("refused", code=refusal.code, status=status)
        answer = problem_answer(refusal, status, queue_state)
        if isinstance(refusal, ShuttingDown):
            return _returning(answer, _return_s())
        if refusal.retryable:
            wait_s = refusal.retry_after_s or DEFAULT_RETRY_S
            return msgspec.structs.replace(answer, headers={"Retry-After": str(wait_s)})
        return answer


async def metrics_page(
    metrics: Metrics, totals: Callable[[], Mapping[str, int]], request: Request
) -> Answer:
    """What the metrics listener answers: the page at `/metrics`, and nothing else."""
    path = request.target.partition("?")[0]
    if request.method not in ("GET", "HEAD") or path != "/metrics":
        return problem_answer(Malformed("Only GET /metrics is here."), 404)
    return Answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics.page(totals()))


async def _read_body(request: Request, bytes_max: int) -> bytes:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpRefusal(Malformed("A body is never compressed."), 415)
    return await request.read(bytes_max)


def _frames_answer(frames: Iterable[bytes], *, returns_s: int | None = None) -> Answer:
    answer = Answer(200, bodies.FRAMES_MEDIA_TYPE, bodies.join_frames(frames))
    return answer if returns_s is None else _returning(answer, returns_s)


def _json_answer(document: Mapping[str, object], status: int) -> Answer:
    return Answer(status, "application/json", json.dumps(document).encode())


def _returning(answer: Answer, wait_s: int) -> Answer:
    """The same answer, after which the connection ends and the peer is to come back later."""
    return msgspec.structs.replace(answer, headers={"Retry-After": str(wait_s)}, closes=True)


def _return_s() -> int:
    return random.randint(1, RETURN_S_MAX)  # noqa: S311 - spreads load, protects nothing
