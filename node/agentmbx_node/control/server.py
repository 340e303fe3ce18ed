"""The daemon's side of the control socket: reads a request, passes on what its handler yields."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import structlog

from agentmbx_node.control.wire import LINE_BYTES_MAX, peer_user
from agentmbx_node.errors import Failure
from agentmbx_node.home import make_private_folder

# It yields events ({"event": ...}) and then the answer, which has no such key; or raises `Failure`.
# When the caller goes away it is cancelled where it waits.
Handler = Callable[[dict[str, Any]], AsyncGenerator[Mapping[str, object], None]]

REQUEST_S: Final = 10.0
CALLERS_MAX: Final = 256
GRACE_S: Final = 0.5

log = structlog.get_logger("agentmbx.node")


class ControlServer:
    """Answers callers of this user at a Unix socket, one request a connection.

    Only who holds the folder's `HomeLock` makes one: a socket that is there already is of a daemon
    that has died, and is replaced.
    """

    def __init__(self, path: str | os.PathLike[str], handler: Handler) -> None:
        self._path = Path(path)
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._callers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; raises `Failure` when the socket cannot be made."""
        make_private_folder(self._path.parent)
        plug = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self._path.is_socket():
                self._path.unlink()
            # The folder is closed to others, so nobody reaches it before its own mode is set.
            plug.bind(os.fspath(self._path))
            self._path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            self._server = await asyncio.start_unix_server(
                self._serve, sock=plug, limit=LINE_BYTES_MAX, backlog=CALLERS_MAX
            )
        except OSError as error:
            plug.close()
            text = f"The control socket {self._path} cannot be made: {error.strerror}."
            raise Failure("unfit_folder", text, "", 1) from error

    async def close(self) -> None:
        """Stop listening; who waits for an answer gets half a second, then the line is cut."""
        if self._server is None:
            return
        self._server.close()
        self._path.unlink(missing_ok=True)
        callers = self._callers - {asyncio.current_task()}
        if callers:
            _, slow = await asyncio.wait(callers, timeout=GRACE_S)
            for caller in slow:
                caller.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
        self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = asyncio.current_task()
        if caller is None:
            raise RuntimeError("a caller is served by a task")
        self._callers.add(caller)
        try:
            # `close` alone cancels it, and it ends here; the streams of Python 3.11 would take a
            # cancelled task for a bug and print it.
            with suppress(ConnectionError, asyncio.CancelledError):
                await self._answer(reader, writer)
        finally:
            self._callers.discard(caller)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self._admit(writer)
            request = await _read_request(reader)
        except Failure as error:
            await _write(writer, _failure_line(error))
            return
        passing_on = asyncio.create_task(self._pass_on(request, writer))
        # A caller says nothing more, so what comes is its end.
        leaving = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait([passing_on, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (passing_on, leaving):
                task.cancel()
            await asyncio.gather(passing_on, leaving, return_exceptions=True)

    def _admit(self, writer: asyncio.StreamWriter) -> None:
        if len(self._callers) > CALLERS_MAX:
            raise Failure("busy", "Too many commands wait for the daemon.", "Try again.", 1)
        try:
            user = peer_user(writer.get_extra_info("socket"))
        except OSError:
            user = -1
        if user != os.geteuid():
            log.warning("control_refused", user=user)
            raise Failure("refused", "This daemon belongs to another user.", "", 3)

    async def _pass_on(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        async with aclosing(self._lines(request)) as lines:
            async for line in lines:
                await _write(writer, line)

    async def _lines(self, request: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._handler(request)) as steps:
                async for step in steps:
                    if "event" not in step:
                        yield _line({"ok": True, **step})
                        return
                    yield _line(step)
            log.error("control_gave_no_answer", do=request["do"])
            yield _failure_line(Failure("bug", "The daemon gave no answer. This is a bug.", "", 1))
        except Failure as error:
            yield _failure_line(error)
        except Exception as error:
            log.exception("control_failed", do=request["do"])
            text = f"The daemon failed: {type(error).__name__}. This is a bug."
            yield _failure_line(Failure("bug", text, "Its log, daemon.log, says more.", 1))


async def _read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        async with asyncio.timeout(REQUEST_S):
            line = await reader.readuntil(b"\n")
        request = msgspec.json.decode(line, type=dict[str, Any])
    except asyncio.LimitOverrunError as error:
        raise _not_understood("it is too long") from error
    except asyncio.IncompleteReadError as error:
        raise _not_understood("it has no end") from error
    except TimeoutError as error:
        raise _not_understood("it did not come in time") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_understood("it is no JSON object") from error
    if not isinstance(request.get("do"), str):
        raise _not_understood('it has no "do"')
    return request


async def _write(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(line)
    await writer.drain()


def _line(step: Mapping[str, object]) -> bytes:
    line = msgspec.json.encode(step) + b"\n"
    if len(line) > LINE_BYTES_MAX:
        text = "The answer is too long for the control socket."
        raise Failure("too_large", text, "Ask for less.", 1)
    return line


def _failure_line(error: Failure) -> bytes:
    return _line(
        {
            "ok": False,
            "code": error.code,
            "message": str(error),
            "next": error.next_step,
            "exit_code": error.exit_code,
        }
    )


def _not_understood(reason: str) -> Failure:
    return Failure("usage", f"The request is not understood: {reason}.", "", 2)
