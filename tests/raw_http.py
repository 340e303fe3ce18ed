"""A client of bare sockets: any bytes in any pieces, and every way of going away."""

import asyncio
import json
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Self
from urllib.parse import urlsplit

import msgspec

from agentmbx_protocol.bodies import FRAMES_MEDIA_TYPE, PROBLEM_MEDIA_TYPE, join_frames

ANSWER_S = 15.0
PROBLEM_KEYS = {"type", "title", "status", "detail", "code", "retryable"}
Headers = Sequence[tuple[str, str]]


class Answer(msgspec.Struct):
    """An HTTP answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def problem(self) -> str:
        """The code of the problem that this is; fails unless it is a well-formed one."""
        assert self.headers["content-type"] == PROBLEM_MEDIA_TYPE, self
        document = json.loads(self.body)
        assert set(document) - {"queue_state"} == PROBLEM_KEYS, document
        assert document["status"] == self.status, document
        assert document["type"] == "urn:agentmbx:problem:" + document["code"]
        assert isinstance(document["retryable"], bool)
        assert self.headers["server"] == "agentmbx"
        assert b"Traceback" not in self.body
        return str(document["code"])


def request(
    path: str,
    body: bytes | None = None,
    *,
    method: str = "",
    headers: Headers = (),
    version: str = "1.1",
    host: str = "relay.example",
) -> bytes:
    """The bytes of a request: POST with `body` and its length, else GET."""
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/{version}"]
    lines.append(f"Host: {host}")
    if body is not None:
        lines.append(f"Content-Type: {FRAMES_MEDIA_TYPE}")
        if not any(name.lower() in ("content-length", "transfer-encoding") for name, _ in headers):
            lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + (body or b"")


def deposit_request(*envelopes: bytes, headers: Headers = ()) -> bytes:
    """The bytes of a deposit."""
    return request("/v1/deposit", join_frames(envelopes), headers=headers)


def chunked(body: bytes, chunk: int = 65536) -> bytes:
    """A body in the chunked encoding, with its end."""
    pieces = [body[at : at + chunk] for at in range(0, len(body), chunk)]
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


class RawConnection:
    """One TCP connection to a relay."""

    def __init__(self, plug: socket.socket) -> None:
        self._plug = plug
        self._unread = b""

    @classmethod
    async def open(cls, url: str, *, receive_bytes: int = 0) -> Self:
        """Connect; `receive_bytes` makes the receive buffer small."""
        parts = urlsplit(url)
        family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
        plug = socket.socket(family, socket.SOCK_STREAM)
        plug.setblocking(False)  # noqa: FBT003 - the name of the method says it
        if receive_bytes:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            address = (parts.hostname, parts.port)
            await asyncio.get_running_loop().sock_connect(plug, address)
        except OSError:
            plug.close()
            raise
        return cls(plug)

    async def send(self, data: bytes) -> None:
        """Send all of `data`; raises `ConnectionError` when the relay has closed."""
        await asyncio.get_running_loop().sock_sendall(self._plug, data)

    async def receive(self) -> bytes:
        """What comes next; nothing at the end; raises `ConnectionError` when it was reset."""
        return await asyncio.get_running_loop().sock_recv(self._plug, 65536)

    async def answer(self, *, to_head: bool = False) -> Answer:
        """The next answer; raises `ConnectionError` when it is cut short."""
        async with asyncio.timeout(ANSWER_S):
            head = await self._read_until(b"\r\n\r\n")
            lines = head.decode("ascii").split("\r\n")
            pairs = [line.partition(":") for line in lines[1:] if line]
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            status = int(lines[0].split()[1])
            length = 0 if to_head or status < 200 else int(headers["content-length"])
            while len(self._unread) < length:
                await self._fill()
            body, self._unread = self._unread[:length], self._unread[length:]
            return Answer(status, headers, body)

    async def ask(self, data: bytes) -> Answer:
        """Send a request and read its answer."""
        await self.send(data)
        return await self.answer()

    async def ended(self) -> None:
        """Read until the relay ends the connection, however it does it."""
        async with asyncio.timeout(ANSWER_S):
            try:
                while await self.receive():
                    pass
            except ConnectionError:
                pass

    @property
    def broken(self) -> bool:
        """Whether the relay has cut it off, seen without reading."""
        poll = select.poll()
        poll.register(self._plug, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Go away politely (FIN)."""
        self._plug.close()

    def reset(self) -> None:
        """Go away at once (RST)."""
        self._plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._plug.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._plug.close()

    async def _read_until(self, end: bytes) -> bytes:
        while end not in self._unread:
            await self._fill()
        head, _, self._unread = self._unread.partition(end)
        return head

    async def _fill(self) -> None:
        data = await self.receive()
        if not data:
            raise ConnectionError("the relay closed before its answer was whole")
        self._unread += data
