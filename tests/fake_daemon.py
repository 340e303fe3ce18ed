"""A daemon of canned answers on a real control socket, which remembers what it was asked."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentmbx_node.control.server import ControlServer
from agentmbx_node.errors import Failure
from agentmbx_node.home import HomeLock, socket_path

START_S = 10.0
Answer = Mapping[str, object] | Failure


class FakeDaemon:
    """Answers each request by its "do": events first, the answer last, or a failure.

    With `hangs` the answer does not come after them.
    """

    def __init__(
        self, home: Path, answers: Mapping[str, list[Answer]], *, hangs: bool = False
    ) -> None:
        self.home = home
        self._hangs = hangs
        self.requests: list[dict[str, Any]] = []
        self._answers = answers
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        path = socket_path(self.home)
        with HomeLock.take(self.home):
            async with ControlServer(path, self._handle):
                self._ready.set()
                await self._stopping.wait()

    async def _handle(self, request: dict[str, Any]) -> AsyncGenerator[Mapping[str, object], None]:
        self.requests.append(request)
        if request["do"] == "stop" and self._stopping is not None:
            self._stopping.set()
            yield {}
            return
        for step in self._answers[request["do"]]:
            if isinstance(step, Failure):
                raise step
            yield step
        if self._hangs:
            await asyncio.Event().wait()

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(START_S):
            raise RuntimeError("the fake daemon did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(START_S)
