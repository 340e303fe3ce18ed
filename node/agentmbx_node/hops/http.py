"""One bounded HTTP exchange with whatever answers at an address; both hops stand on it."""

import asyncio
import io
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

import aiohttp
import msgspec

from agentmbx_node.errors import OperatingError
from agentmbx_protocol import bodies
from agentmbx_protocol.errors import Refusal
from agentmbx_protocol.queue_commands import QueueState

_CHUNK_BYTES: Final = 64 * 1024
_OK: Final = 200
# A router that forgot a connection, or a peer that is gone, is found out while a poll waits.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPALIVE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class HopRefused(Exception):
    """A hop's refusal; `state` is a relay's signed word about the queue, if it gave one."""

    def __init__(self, refusal: Refusal, state: QueueState | None = None) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal
        self.state = state


class FarEnd(msgspec.Struct, frozen=True):
    """Who should answer: its name in errors, and what an exchange with it may cost at most."""

    name: str
    foreign: str
    connect_s: float
    answer_bytes_max: int

    def not_ours(self) -> OperatingError:
        """The error for an answer that no program of ours gives."""
        return OperatingError(self.foreign, retry=True)


class Answer(msgspec.Struct, frozen=True):
    """An answer that came whole and within its bounds."""

    status: int
    body: bytes
    retry_after_s: int | None

    @property
    def is_ok(self) -> bool:
        """Whether the body is what was asked for."""
        return self.status == _OK

    def read_refusal(self, far_end: FarEnd) -> tuple[Refusal, bytes | None]:
        """The refusal that this is, and its proof; raises `OperatingError` when it is none."""
        problem = bodies.parse_problem(self.body, self.retry_after_s)
        if problem is None:
            raise far_end.not_ours()
        return problem


def open_session() -> aiohttp.ClientSession:
    """A session that keeps no cookies, follows no proxy settings and expands nothing."""
    return aiohttp.ClientSession(
        connector=_Connector(),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


def end_connections(session: aiohttp.ClientSession) -> None:
    """End what is connected: requests under way fail at once, and the next ones connect anew.

    After a change of networks nobody says that the old connections are dead.
    """
    if isinstance(session.connector, _Connector):
        session.connector.end_all()


async def post_frames(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    far_end: FarEnd,
    total_s: float,
    *,
    closes: bool = False,
) -> Answer:
    """The answer to a POST of frames; `closes` uses a connection of its own for it."""
    headers = {"Content-Type": bodies.FRAMES_MEDIA_TYPE}
    if closes:
        headers["Connection"] = "close"
    return await exchange(session, "POST", url, far_end, total_s, data=body, headers=headers)


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    far_end: FarEnd,
    total_s: float,
    *,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """The answer to one request, within `total_s` from name look-up to last byte.

    No redirect is followed. Raises `OperatingError` when no whole answer comes in time or when it
    is too long; nothing that came is in the error's text.
    """
    # aiohttp rounds its own long time-outs up to whole seconds, so the total is kept here.
    timeout = aiohttp.ClientTimeout(total=None, connect=far_end.connect_s)
    # As a stream aiohttp sends it in pieces; it warns of bytes of more than a MiB.
    stream = None if data is None else io.BytesIO(data)
    try:
        async with (
            asyncio.timeout(total_s),
            session.request(
                method, url, data=stream, headers=headers, timeout=timeout, allow_redirects=False
            ) as response,
        ):
            body = await _read_body(response, far_end)
            return Answer(response.status, body, _seconds(response.headers.get("Retry-After")))
    except TimeoutError as error:
        raise OperatingError(f"The {far_end.name} does not answer in time.", retry=True) from error
    except (aiohttp.ClientConnectorError, OSError) as error:
        raise OperatingError(
            f"The {far_end.name} cannot be reached: {_reason(error)}.", retry=True
        ) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise OperatingError(f"The connection to the {far_end.name} broke.", retry=True) from error


class _Connector(aiohttp.TCPConnector):
    """Knows its sockets, so that it can end them."""

    def __init__(self) -> None:
        super().__init__(socket_factory=self._make_plug)
        self._plugs: WeakSet[socket.socket] = WeakSet()

    def end_all(self) -> None:
        """Shut down all that are open."""
        for plug in list(self._plugs):
            with suppress(OSError):
                plug.shutdown(socket.SHUT_RDWR)

    def _make_plug(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, number, _, _ = address
        plug = socket.socket(family, kind, number)
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                plug.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._plugs.add(plug)
        return plug


async def _read_body(response: aiohttp.ClientResponse, far_end: FarEnd) -> bytes:
    chunks, length = [], 0
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        length += len(chunk)
        if length > far_end.answer_bytes_max:
            raise far_end.not_ours()
        chunks.append(chunk)
    return b"".join(chunks)


def _reason(error: Exception) -> str:
    source = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = getattr(source, "errno", None)
    return os.strerror(number).lower() if number else type(source).__name__


def _seconds(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch("[0-9]{1,5}", text) else None
