"""Checks and makes signatures: in place when it is quiet, else in a process of its own."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
import structlog

from agentmbx_protocol import frame, limits
from agentmbx_protocol.errors import BadSignature
from agentmbx_protocol.keys import SigningKey
from agentmbx_relay import signature_worker

INLINE_MAX: Final = 2
BATCH_MAX: Final = 256
RESTART_S: Final = 1.0

log = structlog.get_logger("agentmbx.relay")

T = TypeVar("T")
Verdict = BadSignature | None


class _Check(msgspec.Struct):
    frames: Sequence[frame.Frame]
    done: asyncio.Future[list[Verdict]]


class _Sign(msgspec.Struct):
    message: bytes
    done: asyncio.Future[bytes]


class Signatures:
    """Checks of deposits and statements by the relay's key, off the event loop.

    What has queued goes in one batch, as with commits. A check costs about 80 microseconds and a
    signature 40, and both more beside a busy loop. A few of a single request are done in place,
    without the way to another process; it is started when there is more to do at once.
    """

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self._checks: list[_Check] = []
        self._signs: list[_Sign] = []
        self._arrived = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self.failing = False

    async def verify(self, frames: Sequence[frame.Frame], *, alone: bool) -> list[Verdict]:
        """For each frame of one kind, None, or the `BadSignature` that it is refused with.

        `alone` says that no other request is under way that needs this thread.
        """
        if self.failing or (alone and len(frames) <= INLINE_MAX):
            return [_verdict(each) for each in frames]
        check = _Check(frames, asyncio.get_running_loop().create_future())
        self._checks.append(check)
        self._arrived.set()
        return await check.done

    async def sign(self, message: bytes, *, alone: bool) -> bytes:
        """The relay's signature of a message; see `frame.unsigned`."""
        if self.failing or alone or self._process is None:
            return self._key.sign(message)
        sign = _Sign(message, asyncio.get_running_loop().create_future())
        self._signs.append(sign)
        self._arrived.set()
        return await sign.done

    async def run(self) -> None:
        """Serve the queues until cancelled; ends the process then."""
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                while self._checks or self._signs:
                    await self._serve_batch()
        finally:
            await self._end_process()

    async def _serve_batch(self) -> None:
        checks, count = [], 0
        while self._checks and count < BATCH_MAX:
            checks.append(self._checks.pop(0))
            count += len(checks[-1].frames)
        signs, self._signs = self._signs[:BATCH_MAX], self._signs[BATCH_MAX:]
        try:
            await self._ask_process(checks, signs)
        except (OSError, asyncio.IncompleteReadError) as error:
            # The work goes on here, slower; the process is tried again after a while.
            self.failing = True
            log.error("signature_process_failed", error=type(error).__name__)
            await self._end_process()
            asyncio.get_running_loop().call_later(RESTART_S, self._recover)
            for sign in signs:
                _settle(sign.done, self._key.sign(sign.message))
            for check in checks:
                _settle(check.done, [_verdict(each) for each in check.frames])

    async def _ask_process(self, checks: Sequence[_Check], signs: Sequence[_Sign]) -> None:
        stdin, stdout = await self._pipes()
        frames = [each for check in checks for each in check.frames]
        if signs:
            stdin.write(_head(signature_worker.SIGN, len(signs), signs[0].message))
            stdin.write(b"".join(sign.message for sign in signs))
        if frames:
            stdin.write(_head(signature_worker.CHECK, len(frames), frames[0].message))
            records = [each.signer + each.signature + each.message for each in frames]
            stdin.write(b"".join(records))
        for sign in signs:
            _settle(sign.done, await stdout.readexactly(limits.SIGNATURE_BYTES))
        answer = await stdout.readexactly(len(frames)) if frames else b""
        at = 0
        for check in checks:
            end = at + len(check.frames)
            good = [answer[index : index + 1] == signature_worker.GOOD for index in range(at, end)]
            _settle(check.done, [None if each else BadSignature() for each in good])
            at = end

    async def _pipes(self) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
        process = self._process
        if process is None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                signature_worker.__name__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            if process.stdin is not None:
                process.stdin.write(self._key.seed)
        if process.stdin is None or process.stdout is None:
            raise OSError("the process has no pipes")
        return process.stdin, process.stdout

    def _recover(self) -> None:
        self.failing = False

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


def _head(kind: int, count: int, message: bytes) -> bytes:
    return signature_worker.HEAD.pack(kind, count, len(message))


def _settle(done: asyncio.Future[T], outcome: T) -> None:
    # The caller may be gone.
    if not done.done():
        done.set_result(outcome)


def _verdict(each: frame.Frame) -> Verdict:
    try:
        each.verify()
    except BadSignature as refusal:
        return refusal
    return None
