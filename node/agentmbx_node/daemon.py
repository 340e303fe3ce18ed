"""The daemon: opens the folder, builds the parts, runs until told to stop, closes in order."""

import asyncio
import os
import platform
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec
import structlog
import uvloop

from agentmbx_node.control.requests import Requests
from agentmbx_node.control.server import ControlServer
from agentmbx_node.errors import Failure, OperatingError
from agentmbx_node.home import HomeLock, socket_path
from agentmbx_node.hops.http import open_session
from agentmbx_node.listener import Listener
from agentmbx_node.machine import RunningMachine, open_store
from agentmbx_protocol import limits
from agentmbx_protocol.card import check_name
from agentmbx_protocol.errors import Malformed

DEFAULT_PORT: Final = 7420

log = structlog.get_logger("agentmbx.node")


class UpOptions(msgspec.Struct, frozen=True):
    """How the daemon is started: the machine's name, where it listens, what its card says."""

    name: str | None = None
    listen: str | None = None
    advertise: Sequence[str] = ()


def run(home: Path, options: UpOptions) -> None:
    """Run the daemon of the folder until it is told to stop; raises `Failure`."""
    with HomeLock.take(home):
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
        uvloop.run(_run(home, options))


async def _run(home: Path, options: UpOptions) -> None:
    host, port = parse_listen(options.listen)
    keyring, connection = open_store(home, _name(options.name, home))
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        machine = RunningMachine(keyring, connection, session, options.advertise)
        stack.push_async_callback(machine.database.close)
        requests = Requests(machine, home)
        listener = Listener(machine.arrivals.answer_deposit, requests.answer_pair, lambda: True)
        if host is not None:
            try:
                taken = await listener.start(host, port)
            except OperatingError as error:
                text = f"The machine cannot listen on {options.listen}: {error}"
                raise Failure("cannot_listen", text, "Choose another --listen.", 1) from error
            stack.push_async_callback(listener.stop)
            machine.listens_at = host, taken
        await machine.renew_card()
        running = asyncio.create_task(machine.run())
        stack.push_async_callback(_end, running)
        await stack.enter_async_context(ControlServer(socket_path(home), requests.handle))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, machine.stopping.set)
        log.info("node_ready")
        ends = [
            asyncio.create_task(each.wait()) for each in (machine.stopping, machine.database.broken)
        ]
        await asyncio.wait([*ends, running], return_when=asyncio.FIRST_COMPLETED)
        for each in ends:
            each.cancel()
        log.info("node_stopping")
    if machine.database.broken.is_set():
        raise Failure(
            "store_failed",
            "The disk failed under the machine's database, so the daemon stopped. What it called "
            "stored or sent is kept.",
            "Check the disk, then `agentmbx up`.",
            1,
        )


async def _end(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled() and (error := running.exception()) is not None:
        raise error


def parse_listen(text: str | None) -> tuple[str | None, int]:
    """The host ("" for all) and port of HOST:PORT; no host for `off`; raises `Failure`."""
    if text is None:
        return "", DEFAULT_PORT
    if text == "off":
        return None, 0
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:  # noqa: PLR2004 - the highest port
        raise Failure("usage", "--listen is HOST:PORT or off.", "", 2)
    # `status` shows all addresses as "*".
    return "" if host == "*" else host.removeprefix("[").removesuffix("]"), int(port)


def _name(given: str | None, home: Path) -> str:
    from agentmbx_node.machine import DATABASE_NAME  # noqa: PLC0415

    wanted = given or os.environ.get("MBX_NAME")
    if not wanted and (home / DATABASE_NAME).exists():
        return ""
    name = wanted or platform.node().split(".")[0] or "machine"
    try:
        check_name(name)
    except Malformed as error:
        text = f"{error} At most {limits.NAME_BYTES_MAX} bytes."
        raise Failure("usage", text, "Choose another --name.", 2) from error
    if "@" in name:
        raise Failure("usage", "A machine's name has no @.", "Choose another --name.", 2)
    return name
