"""Tries a relay with one letter through a throw-away queue, step by step."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import aiohttp
import msgspec

from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.http import HopRefused
from agentmbx_node.hops.relay import RelayHop, RelayLine, fetch_info
from agentmbx_protocol.envelope import make_envelope, parse_envelope
from agentmbx_protocol.errors import NotAdmitted, ProtocolError
from agentmbx_protocol.keys import SealingKey, SigningKey, key_from_text
from agentmbx_protocol.letter import Letter, encode_letter, open_letter, seal_letter
from agentmbx_protocol.queue_commands import (
    Collect,
    Register,
    Retire,
    make_admit,
    make_collect,
    make_register,
    make_retire,
    senders_digest,
)

LIFETIME_S: Final = 900
TTL_S: Final = 600
TEXT: Final = b"probe"


class Step(msgspec.Struct, frozen=True):
    """One step that went well: its name, how long it took, and what it showed."""

    name: str
    duration_ms: float
    shows: str


class ProbeFailed(Exception):
    """The step that did not go well, and why."""

    def __init__(self, step: str, reason: str, *, refused: bool) -> None:
        super().__init__(reason)
        self.step = step
        self.refused = refused


class _Probe:
    def __init__(self, session: aiohttp.ClientSession, line: RelayLine) -> None:
        self._session = session
        self._line = line
        self._hop = RelayHop(session, line.url, line.relay_key or b"")
        self._queue, self._pair = SigningKey.generate(), SigningKey.generate()
        self._receiver, self._sealing = SigningKey.generate(), SealingKey.generate()
        self._instance = SigningKey.generate().public[:16]
        self._counter = time.time_ns() // 1_000_000
        self._envelope = b""
        self._collected: bytes = b""

    @property
    def steps(self) -> list[tuple[str, Callable[[], Awaitable[str]]]]:
        return [
            ("reach", self._reach),
            ("register", self._register),
            ("deposit", self._deposit),
            ("collect", self._collect),
            ("open", self._open),
            ("ack", self._ack),
            ("retire", self._retire),
        ]

    async def _reach(self) -> str:
        info = await fetch_info(self._session, self._line.url)
        key_shown = str(info["relay_key"])
        if self._line.relay_key is not None and key_from_text(key_shown) != self._line.relay_key:
            raise OperatingError("The relay has another key than the line says.", retry=False)
        self._hop.relay_key = key_from_text(key_shown)
        if info.get("admission") != "open" and self._line.invite is None:
            raise NotAdmitted("The relay is closed; add #KEY.INVITE from `agentmbx relay invite`.")
        return f"key {key_shown[:16]}..., admission by {info.get('admission')}"

    async def _register(self) -> str:
        admit = None
        if self._line.invite is not None:
            admit = make_admit(
                self._line.invite, self._hop.relay_key, self._queue.public, LIFETIME_S
            )
        command = Register(
            queue=self._queue.public,
            relay=self._hop.relay_key,
            counter=self._next(),
            instance=self._instance,
            takeover=0,
            senders=(self._pair.public,),
        )
        await self._hop.register(make_register(self._queue, command), admit)
        return "a throw-away queue"

    async def _deposit(self) -> str:
        letter = Letter(
            stream=bytes(16),
            number=1,
            sent_ms=0,
            lifetime_s=TTL_S,
            content_type="probe",
            content=TEXT,
        )
        sealed = seal_letter(
            encode_letter(letter),
            sender=self._pair.public,
            receiver=self._receiver.public,
            sealing_public=self._sealing.public,
        )
        self._envelope = make_envelope(self._pair, self._queue.public, TTL_S, sealed)
        parcel = parse_envelope(self._envelope)
        deposited = await self._hop.deposit([parcel])
        if parcel.digest not in deposited.held:
            raise OperatingError("The relay did not take the letter.", retry=True)
        return f"held, {parcel.length} bytes, signed by the relay"

    async def _collect(self) -> str:
        collected = await self._hop.collect(self._collect_frame(()))
        if list(collected.envelopes) != [self._envelope]:
            raise OperatingError("The relay handed out something else.", retry=True)
        self._collected = collected.envelopes[0]
        return "the same bytes"

    async def _open(self) -> str:
        parcel = parse_envelope(self._collected)
        parcel.frame.verify()
        opened = open_letter(parcel, self._sealing, receiver=self._receiver.public)
        if opened.letter.content != TEXT:
            raise OperatingError("The letter holds something else.", retry=False)
        return "the same letter"

    async def _ack(self) -> str:
        ack = (parse_envelope(self._collected).digest,)
        await self._hop.collect(self._collect_frame(ack))
        collected = await self._hop.collect(self._collect_frame(()))
        if collected.envelopes:
            raise OperatingError("The letter came again after its ack.", retry=True)
        return "gone from the relay"

    async def _retire(self) -> str:
        command = Retire(
            queue=self._queue.public,
            relay=self._hop.relay_key,
            counter=self._next(),
            instance=self._instance,
        )
        await self._hop.retire(make_retire(self._queue, command))
        return "the queue is gone"

    def _collect_frame(self, acks: tuple[bytes, ...]) -> bytes:
        command = Collect(
            queue=self._queue.public,
            relay=self._hop.relay_key,
            counter=self._next(),
            instance=self._instance,
            senders_digest=senders_digest((self._pair.public,)),
            bytes_max=1_000_000,
            wait_s=0,
            acks=acks,
        )
        return make_collect(self._queue, command)

    def _next(self) -> int:
        self._counter += 1
        return self._counter


async def probe_relay(session: aiohttp.ClientSession, line: RelayLine) -> AsyncIterator[Step]:
    """Each step as it goes well; raises `ProbeFailed` at the first that does not."""
    for name, run in _Probe(session, line).steps:
        started = time.perf_counter()
        try:
            shows = await run()
        except HopRefused as error:
            raise ProbeFailed(name, str(error), refused=True) from error
        except NotAdmitted as error:
            raise ProbeFailed(name, str(error), refused=True) from error
        except (OperatingError, ProtocolError) as error:
            raise ProbeFailed(name, str(error), refused=False) from error
        yield Step(name, round((time.perf_counter() - started) * 1000, 2), shows)
