"""Checks the signatures of deposits: in place when it is quiet, else in a process of its own."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

import structlog

from agentmbx_protocol import frame
from agentmbx_protocol.errors import BadSignature
from agentmbx_relay import verify_worker

INLINE_MAX: Final = 2
BATCH_MAX: Final = 256
RESTART_S: Final = 1.0

log = structlog.get_logger("agentmbx.relay")

Verdict = BadSignature | None


class Verifier:
    """Checks signatures off the event loop; what has queued goes in one batch, as with commits.

    One check costs about 80 microseconds. A few of a single request are done in place, without
    the way to another process; the process is started when there is more to do at once.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence[frame.Frame], asyncio.Future[list[Verdict]]]] = []
        self._arrived = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self.failing = False

    async def verify(self, frames: Sequence[frame.Frame], *, alone: bool) -> list[Verdict]:
        """For each frame of one kind, None, or the `BadSignature` that it is refused with.

        `alone` says that no other request is under way that needs this thread.
        """
        if self.failing or (alone and len(frames) <= INLINE_MAX):
            return _verify_here(frames)
        future: asyncio.Future[list[Verdict]] = asyncio.get_running_loop().create_future()
        self._waiting.append((frames, future))
        self._arrived.set()
        return await future

    async def run(self) -> None:
        """Serve the queue until cancelled; ends the process then."""
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                while self._waiting:
                    await self._serve_batch()
        finally:
            await self._end_process()

    async def _serve_batch(self) -> None:
        batch, count = [], 0
        while self._waiting and count < BATCH_MAX:
            batch.append(self._waiting.pop(0))
            count += len(batch[-1][0])
        frames = [each for asked, _ in batch for each in asked]
        try:
            verdicts = await self._ask_process(frames)
        except (OSError, asyncio.IncompleteReadError) as error:
            # The work goes on here, slower; the process is tried again after a while.
            self.failing = True
            log.error("verifier_failed", error=type(error).__name__)
            verdicts = _verify_here(frames)
            await self._end_process()
            asyncio.get_running_loop().call_later(RESTART_S, self._recover)
        at = 0
        for asked, future in batch:
            if not future.done():
                future.set_result(verdicts[at : at + len(asked)])
            at += len(asked)

    def _recover(self) -> None:
        self.failing = False

    async def _ask_process(self, frames: Sequence[frame.Frame]) -> list[Verdict]:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                verify_worker.__name__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise OSError("the verifier has no pipes")
        message_length = len(frames[0].message)
        head = verify_worker.COUNT.pack(len(frames)) + verify_worker.COUNT.pack(message_length)
        records = [each.signer + each.signature + each.message for each in frames]
        stdin.write(head + b"".join(records))
        answer = await stdout.readexactly(len(frames))
        return [None if verdict == verify_worker.GOOD else BadSignature() for verdict in answer]

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


def _verify_here(frames: Sequence[frame.Frame]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for each in frames:
        try:
            each.verify()
        except BadSignature as refusal:
            verdicts.append(refusal)
        else:
            verdicts.append(None)
    return verdicts
