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
LOOK_S: Final = 1.0
STUCK_S: Final = 3.0

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
    begins meanwhile. `failing` is true from the end of a process, for whatever reason, until the
    next one is there; then all is done in place, and what the old one left is too.
    """

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self._waiting: list[_Job] = []
        self._wanted = asyncio.Event()
        self._process: _Process | None = None
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
        """The relay's 64-byte signature of a frame's `message`; see `verify`."""
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
                reason = await self._keep_process()
            except Exception as error:  # noqa: BLE001 - no way to fail may leave callers waiting
                reason = type(error).__name__
            self.failing = True
            log.error("signature_process_failed", reason=reason)
            left, self._waiting = self._waiting, []
            for job in left:
                self._do_here(job)
            await asyncio.sleep(RESTART_S)

    async def _keep_process(self) -> str:
        """Run one process until it ends or answers no more; why it is over."""
        process = _Process()
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: process, sys.executable, "-m", worker.__name__, stderr=None
        )
        try:
            process.begin(
                cast("asyncio.WriteTransport", transport.get_pipe_transport(0)), self._key
            )
            self._process, self.failing = process, False
            self._ask()
            return await process.watch()
        finally:
            self._process = None
            self._waiting = [*process.give_up(), *self._waiting]
            with contextlib.suppress(ProcessLookupError):
                transport.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await process.exited.wait()
            transport.close()

    def _ask(self) -> None:
        if self._process is None or not self._waiting:
            return
        jobs, self._waiting = self._waiting, []
        self._process.ask(jobs)

    def _do_here(self, job: _Job) -> None:
        do = self._key.sign if job.task == worker.SIGN else worker.check
        job.settle(b"".join(map(do, job.records)))


class _Process(asyncio.SubprocessProtocol):
    """One process from its start to its end; what it was asked and what it answers end with it."""

    def __init__(self) -> None:
        self._asked: deque[_Job] = deque()
        self._answer = b""
        self._pipe: asyncio.WriteTransport | None = None
        self._ended = asyncio.Event()
        self.exited = asyncio.Event()
        self._loop_time = asyncio.get_running_loop().time
        self._moved_s = self._loop_time()

    def begin(self, pipe: asyncio.WriteTransport, key: SigningKey) -> None:
        """Give it the secret key, by the pipe to it."""
        self._pipe = pipe
        self._write(key.secret)

    def ask(self, jobs: Sequence[_Job]) -> None:
        """Send it these jobs, behind those that it has."""
        if not self._asked:
            self._moved_s = self._loop_time()
        parts: list[bytes] = []
        # Signatures first: they are short, and the last thing that an answer waits for.
        for task in (worker.SIGN, worker.CHECK):
            same = [job for job in jobs if job.task == task]
            self._asked.extend(same)
            # All of one task have one length, since what is signed is always a digest.
            records = [record for job in same for record in job.records]
            for at in range(0, len(records), PART_MAX):
                part = records[at : at + PART_MAX]
                parts += [worker.HEAD.pack(task, len(part), len(part[0])), *part]
        self._write(b"".join(parts))

    async def watch(self) -> str:
        """Return when it has ended, or has answered nothing for a while though it was asked."""
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._ended.wait()
            if self._asked and self._loop_time() - self._moved_s > STUCK_S:
                return "it answers no more"
        return "it ended"

    def give_up(self) -> list[_Job]:
        """What it has not answered; whatever still comes of it is dropped."""
        left = list(self._asked)
        self._asked.clear()
        return left

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take the next answers, in the order in which they were asked for."""
        del fd
        self._moved_s = self._loop_time()
        data, at = self._answer + data, 0
        while self._asked and at + (length := self._asked[0].answer_bytes) <= len(data):
            self._asked.popleft().settle(data[at : at + length])
            at += length
        self._answer = data[at:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """It has ended, or is about to."""
        del fd, exc
        self._ended.set()

    def process_exited(self) -> None:
        """It has ended."""
        self._ended.set()
        self.exited.set()

    def _write(self, data: bytes) -> None:
        # Writing to a pipe that is closed would raise; what was asked is given up with the rest.
        if self._pipe is not None and not self._pipe.is_closing():
            self._pipe.write(data)


def _verdicts(answer: bytes) -> list[Verdict]:
    return [
        None if answer[at : at + 1] == worker.GOOD else BadSignature() for at in range(len(answer))
    ]
