"""Checks the signatures of deposits: in place when it is quiet, else in a process of its own."""

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

import msgspec
import structlog

from agentmbx_protocol import frame
from agentmbx_protocol.errors import BadSignature
from agentmbx_relay import signature_worker

INLINE_MAX: Final = 2
PART_MAX: Final = 8
RESTART_S: Final = 1.0

log = structlog.get_logger("agentmbx.relay")

Verdict = BadSignature | None


class _Check(msgspec.Struct):
    frames: Sequence[frame.Frame]
    done: asyncio.Future[list[Verdict]]
    answer: bytes = b""


class Signatures:
    """Checks of deposits, off the event loop.

    A check costs about 80 microseconds. A few of a single request are done in place, without the
    way to another process; it is started when there is more to do at once. What arrives in one
    turn of the loop goes to it at once, without waiting for earlier answers, so that it is never
    idle while something waits; it answers in small parts, so that a commit begins meanwhile.
    (Making the relay's own signatures there too was slower.)
    `failing` is true while the process is not to be had; then all is done in place.
    """

    def __init__(self) -> None:
        self._waiting: list[_Check] = []
        self._asked: deque[_Check] = deque()
        self._wanted = asyncio.Event()
        self._lost = asyncio.Event()
        self._pipe: asyncio.WriteTransport | None = None
        self.failing = False

    def verify(
        self, frames: Sequence[frame.Frame], *, alone: bool
    ) -> asyncio.Future[list[Verdict]]:
        """For each frame of one kind, None, or the `BadSignature` that it is refused with.

        `alone` says that no other request is under way that needs this thread.
        """
        loop = asyncio.get_running_loop()
        check = _Check(frames, loop.create_future())
        if self.failing or (alone and len(frames) <= INLINE_MAX):
            _settle(check, [_verdict(each) for each in frames])
            return check.done
        if not self._waiting:
            loop.call_soon(self._ask)
        self._waiting.append(check)
        self._wanted.set()
        return check.done

    async def run(self) -> None:
        """Keep the process, from the first time that it is wanted, until cancelled."""
        await self._wanted.wait()
        while True:
            try:
                await self._keep_process()
            except OSError as error:
                log.error("signature_process_failed", error=type(error).__name__)
            self.failing = True
            self._check_here()
            await asyncio.sleep(RESTART_S)
            self.failing = False

    async def _keep_process(self) -> None:
        self._lost.clear()
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Answers(self), sys.executable, "-m", signature_worker.__name__, stderr=None
        )
        try:
            self._pipe = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
            self._ask()
            await self._lost.wait()
            log.error("signature_process_failed", error="it ended")
        finally:
            self._pipe = None
            with contextlib.suppress(ProcessLookupError):
                transport.kill()
            transport.close()

    def _ask(self) -> None:
        if self._pipe is None or not self._waiting:
            return
        checks, self._waiting = self._waiting, []
        frames = [each for check in checks for each in check.frames]
        parts: list[bytes] = []
        for at in range(0, len(frames), PART_MAX):
            part = frames[at : at + PART_MAX]
            parts.append(signature_worker.HEAD.pack(len(part), len(part[0].message)))
            parts += [each.signer + each.signature + each.message for each in part]
        self._asked.extend(checks)
        self._pipe.write(b"".join(parts))

    def answered(self, data: bytes) -> None:
        """Take the next verdicts, in the order in which they were asked for."""
        at = 0
        while at < len(data) and self._asked:
            check = self._asked[0]
            end = at + len(check.frames) - len(check.answer)
            check.answer += data[at:end]
            at = min(end, len(data))
            if len(check.answer) == len(check.frames):
                self._asked.popleft()
                good = signature_worker.GOOD
                _settle(check, [None if each == good else BadSignature() for each in check.answer])

    def lost(self) -> None:
        """Say that the process has ended."""
        self._lost.set()

    def _check_here(self) -> None:
        left, self._waiting = [*self._asked, *self._waiting], []
        self._asked.clear()
        for check in left:
            _settle(check, [_verdict(each) for each in check.frames])


class _Answers(asyncio.SubprocessProtocol):
    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        del fd
        self._signatures.answered(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        del fd, exc
        self._signatures.lost()

    def process_exited(self) -> None:
        self._signatures.lost()


def _settle(check: _Check, verdicts: list[Verdict]) -> None:
    # The caller may be gone.
    if not check.done.done():
        check.done.set_result(verdicts)


def _verdict(each: frame.Frame) -> Verdict:
    try:
        each.verify()
    except BadSignature as refusal:
        return refusal
    return None
