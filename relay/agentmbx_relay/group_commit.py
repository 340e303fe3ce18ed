"""Adaptive group commit: what has queued while the last commit ran goes into the next one."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, TypeVar, cast

import msgspec
import structlog

from agentmbx_protocol.errors import Refusal, RelayFull, Unavailable
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.store import (
    Store,
    StoreBroken,
    StoreError,
    StoreFull,
    Work,
)

T = TypeVar("T")

BATCH_WORKS_MAX: Final = 512
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
RETRY_S: Final = 5

log = structlog.get_logger("agentmbx.relay")


class _Waiting(msgspec.Struct):
    work: Work[object]
    length: int
    digests: Sequence[bytes]
    done: asyncio.Future[object]


class GroupCommit:
    """Runs work in the store, many at a time, one commit after the other.

    An answer may be given only when `submit` has returned: then the commit is durable. Any error
    of a commit fails every work in it (rule 1). `broken` is set when the store failed in a way
    after which the process must stop; `failing` is true from a failed commit to the next good one.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._stopping = False
        self.broken = asyncio.Event()
        self.failing = False

    def submit(
        self, work: Work[T], *, length: int = 0, digests: Sequence[bytes] = ()
    ) -> asyncio.Future[T]:
        """Will be what `work` returns, once that is durable.

        `length` is how many bytes of envelopes it may add; work with a length is refused first
        when the disk is full. `digests` are those that it will ask the store
        about. The future raises the `Refusal` that the work raised, or `RelayFull` or
        `Unavailable` when the commit did not happen. If the caller is cancelled the work may
        still be done; nothing else is affected.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._stopping or self.broken.is_set():
            done.set_exception(Unavailable(retry_after_s=RETRY_S))
            return done
        self._waiting.append(
            _Waiting(
                cast("Work[object]", work), length, digests, cast("asyncio.Future[object]", done)
            )
        )
        self._arrived.set()
        return done

    async def run(self) -> None:
        """Commit until `stop`; returns when all that was submitted is answered."""
        while True:
            await self._arrived.wait()
            if not self._waiting:
                if self._stopping:
                    return
                self._arrived.clear()
                continue
            batch = self._take()
            try:
                await self._commit(batch)
            finally:
                # Nothing is left to answer, unless this was cancelled or has a bug.
                _refuse(batch)

    async def retry(self) -> None:
        """See whether the store takes a write again after a failed commit.

        Raises a `StoreError` while it does not.
        """
        try:
            await self._store.check()
        except StoreBroken:
            self.broken.set()
            raise
        self.failing = False

    def stop(self) -> None:
        """Let `run` return when nothing waits any more; later work is refused."""
        self._stopping = True
        self._arrived.set()

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        length = 0
        while self._waiting and len(batch) < BATCH_WORKS_MAX and length < BATCH_BYTES_MAX:
            batch.append(self._waiting.popleft())
            length += batch[-1].length
        return batch

    async def _commit(self, batch: Sequence[_Waiting]) -> None:
        if self.broken.is_set():
            _refuse(batch)
            return
        started = time.perf_counter()
        try:
            outcomes = await self._store.commit(
                [each.work for each in batch], [name for each in batch for name in each.digests]
            )
        except StoreError as error:
            await self._failed(batch, error)
        except Exception as error:  # noqa: BLE001 - whatever work does wrong must not stop others
            await self._isolate(batch, error)
        else:
            self.failing = False
            self._metrics.committed(len(batch), time.perf_counter() - started)
            for each, outcome in zip(batch, outcomes, strict=True):
                _settle(each, outcome)

    async def _failed(self, batch: Sequence[_Waiting], error: StoreError) -> None:
        self.failing = True
        self._metrics.commit_failed()
        log.error("commit_failed", reason=str(error))
        refusal: type[Refusal] = Unavailable
        if isinstance(error, StoreBroken):
            self.broken.set()
        elif isinstance(error, StoreFull):
            refusal = RelayFull
            rest = [each for each in batch if not each.length]
            if rest and len(rest) < len(batch):
                # Acks and commands need little room, and make some.
                batch = [each for each in batch if each.length]
                await self._commit(rest)
        _refuse(batch, refusal)

    async def _isolate(self, batch: Sequence[_Waiting], error: Exception) -> None:
        if len(batch) > 1:
            for each in batch:
                await self._commit([each])
            return
        log.error("work_failed", error=type(error).__name__, exc_info=error)
        self._metrics.commit_failed()
        _refuse(batch)


def _refuse(batch: Sequence[_Waiting], refusal: type[Refusal] = Unavailable) -> None:
    for each in batch:
        if not each.done.done():
            each.done.set_exception(refusal(retry_after_s=RETRY_S))


def _settle(each: _Waiting, outcome: object) -> None:
    # The caller may be gone: a connection dropped in the middle of a commit cancels it.
    if each.done.done():
        return
    if isinstance(outcome, Refusal):
        each.done.set_exception(outcome)
    else:
        each.done.set_result(outcome)
