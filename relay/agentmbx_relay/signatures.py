"""Checks and makes signatures: in place when it is quiet, else in a process of its own."""

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

import msgspec
import structlog

from agentmbx_protocol import frame
from agentmbx_protocol.errors import BadSignature
from agentmbx_protocol.keys import SigningKey
from agentmbx_relay import signature_worker as worker

INLINE_MAX: Final = 2
PART_MAX: Final = 16
RESTART_S: Final = 1.0

T = TypeVar("T")

log = structlog.get_logger("agentmbx.relay")

Verdict = BadSignature | None


class _Job(msgspec.Struct):
    """What one request wants: records of one task, and what becomes of their answers."""

    task: int
    records: Sequence[bytes]
    settle: Callable[[bytes], None]

    @property
    def answer_bytes(self) -> int:
        return worker.ANSWER_BYTES[self.task] * len(self.records)


class Signatures:
    """Checks the signatures of deposits and makes the relay's own, off the event loop.

    A check costs about 80 microseconds and a signature 40. Those of a single request are done in
    place, without the way to another process; it is started when there is more to do at once.
    What arrives in one turn of the loop goes to it at once, without waiting for earlier answers,
    so that it is never idle while something waits; it answers in small parts, so that a commit
    begins meanwhile. `failing` is true while the process is not to be had; then all is done in
    place.
    """

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self._waiting: list[_Job] = []
        self._asked: deque[_Job] = deque()
        self._answer = b""
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
        records = [each.signer + each.signature + each.message for each in frames]
        alone = alone and len(frames) <= INLINE_MAX
        return self._do(worker.CHECK, records, _verdicts, alone=alone)

    def sign(self, message: bytes, *, alone: bool) -> asyncio.Future[bytes]:
        """The relay's 64-byte signature of `message`; see `verify`."""
        return self._do(worker.SIGN, [message], bytes, alone=alone)

    def _do(
        self, task: int, records: Sequence[bytes], read: Callable[[bytes], T], *, alone: bool
    ) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(answer: bytes) -> None:
            # The caller may be gone.
            if not done.done():
                done.set_result(read(answer))

        job = _Job(task, records, settle)
        if alone or self.failing:
            self._do_here(job)
            return done
        if not self._waiting:
            loop.call_soon(self._ask)
        self._waiting.append(job)
        self._wanted.set()
        return done

    async def run(self) -> None:
        """Keep the process, from the first time that it is wanted, until cancelled."""
        await self._wanted.wait()
        while True:
            try:
                await self._keep_process()
            except OSError as error:
                log.error("signature_process_failed", error=type(error).__name__)
            self.failing = True
            self._do_all_here()
            await asyncio.sleep(RESTART_S)
            self.failing = False

    async def _keep_process(self) -> None:
        self._lost.clear()
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Answers(self), sys.executable, "-m", worker.__name__, stderr=None
        )
        try:
            self._pipe = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
            self._pipe.write(self._key.secret)
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
        jobs, self._waiting = self._waiting, []
        parts: list[bytes] = []
        # Signatures first: they are short, and the last thing that an answer waits for.
        for task in (worker.SIGN, worker.CHECK):
            same = [job for job in jobs if job.task == task]
            self._asked.extend(same)
            records = [record for job in same for record in job.records]
            for at in range(0, len(records), PART_MAX):
                part = records[at : at + PART_MAX]
                parts += [worker.HEAD.pack(task, len(part), len(part[0])), *part]
        self._pipe.write(b"".join(parts))

    def answered(self, data: bytes) -> None:
        """Take the next answers, in the order in which they were asked for."""
        data, at = self._answer + data, 0
        while self._asked and at + (length := self._asked[0].answer_bytes) <= len(data):
            self._asked.popleft().settle(data[at : at + length])
            at += length
        self._answer = data[at:]

    def lost(self) -> None:
        """Say that the process has ended."""
        self._lost.set()

    def _do_all_here(self) -> None:
        left, self._waiting = [*self._asked, *self._waiting], []
        self._asked.clear()
        self._answer = b""
        for job in left:
            self._do_here(job)

    def _do_here(self, job: _Job) -> None:
        do = self._key.sign if job.task == worker.SIGN else worker.check
        job.settle(b"".join(map(do, job.records)))


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


def _verdicts(answer: bytes) -> list[Verdict]:
    return [
        None if answer[at : at + 1] == worker.GOOD else BadSignature() for at in range(len(answer))
    ]
