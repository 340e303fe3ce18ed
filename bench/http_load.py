"""A load generator that costs little: many kept-alive HTTP/1.1 connections, requests made ahead."""

import asyncio
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, cast

import msgspec

from agentmbx_protocol import bodies

PATIENCE_S: Final = 120.0
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)


class LoadFailed(Exception):
    """A request was not answered with 200, or not at all."""


class Line(asyncio.Protocol):
    """One connection that asks one request after the other; `answers` holds the bodies so far."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.seconds: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self._requests: Iterator[bytes] = iter(())
        self._received = bytearray()
        self._body_at = self._whole = 0
        self._asked_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def begin(self, requests: Iterable[bytes]) -> None:
        """Ask all of `requests`; `done` when the last is answered."""
        self._requests = iter(requests)
        self._ask_next()

    def data_received(self, data: bytes) -> None:
        """Take a part of an answer; when it is whole, ask the next."""
        self._received += data
        if not self._whole:
            head_end = self._received.find(_HEAD_END)
            if head_end < 0:
                return
            length = _LENGTH.search(self._received, 0, head_end)
            if length is None or not self._received.startswith(b"HTTP/1.1 200 "):
                self.connection_lost(LoadFailed(self._received.decode("ascii", "replace")))
                return
            self._body_at = head_end + len(_HEAD_END)
            self._whole = self._body_at + int(length[1])
        if len(self._received) >= self._whole:
            self.seconds.append(time.perf_counter() - self._asked_at)
            self.answers.append(bytes(self._received[self._body_at : self._whole]))
            self._received.clear()
            self._whole = 0
            self._ask_next()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail unless all was answered."""
        if not self.done.done():
            self.done.set_exception(exc or LoadFailed("the connection was closed"))

    def _ask_next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self.done.set_result(None)
            return
        self._asked_at = time.perf_counter()
        self.transport.write(request)


Script = Callable[[Line], Iterable[bytes]]


class Load(msgspec.Struct, frozen=True):
    """What came of one slice of load: the answers of each line, and how long it all took."""

    answers: Sequence[Sequence[bytes]]
    latencies_s: Sequence[Sequence[float]]
    seconds: float
    cpu_seconds: float

    def percentile_ms(self, percent: int, lines: int) -> float:
        """The latency of a request in the first `lines` lines."""
        latencies = [each for line in self.latencies_s[:lines] for each in line]
        return statistics.quantiles(latencies, n=100, method="inclusive")[percent - 1] * 1000


def request(path: str, frames: Iterable[bytes]) -> bytes:
    """The bytes of a POST of `frames`."""
    body = bodies.join_frames(frames)
    head = (
        f"POST /{path} HTTP/1.1\r\nHost: relay\r\nContent-Type: {bodies.FRAMES_MEDIA_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run(host: str, port: int, scripts: Sequence[Script]) -> Load:
    """Open a line for each script, then begin all at once; raises `LoadFailed`."""
    loop = asyncio.get_running_loop()
    lines = [(await loop.create_connection(Line, host, port))[1] for _ in scripts]
    gc.collect()
    gc.disable()
    cpu_started, started = time.process_time(), time.perf_counter()
    try:
        for line, script in zip(lines, scripts, strict=True):
            line.begin(script(line))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(line.done for line in lines))
        seconds = time.perf_counter() - started
        cpu_seconds = time.process_time() - cpu_started
    except (TimeoutError, OSError) as error:
        raise LoadFailed(f"the relay does not answer: {error!r}") from error
    finally:
        gc.enable()
        for line in lines:
            line.transport.abort()
            if line.done.done() and not line.done.cancelled():
                line.done.exception()  # seen, so that the loop does not warn of it
    return Load(
        [line.answers for line in lines], [line.seconds for line in lines], seconds, cpu_seconds
    )
