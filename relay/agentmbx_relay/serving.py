"""A relay from its first breath to its last: folder, store, listeners, and stopping in order."""

import asyncio
import gc
import os
import resource
import signal
import sys
from contextlib import AsyncExitStack
from functools import partial
from importlib import metadata
from typing import Final

import structlog
import uvloop
from aiohttp import web

from agentmbx_protocol.keys import key_text
from agentmbx_relay import logs, sqlite_store
from agentmbx_relay import settings as relay_settings
from agentmbx_relay.clock import wall_ms
from agentmbx_relay.data_folder import DataFolder, FolderRefused, FolderUnfit
from agentmbx_relay.failure import Failure
from agentmbx_relay.parts import build
from agentmbx_relay.sqlite_store import SqliteStore
from agentmbx_relay.store import StoreUnfit

SPARE_DESCRIPTORS: Final = 64
HANDLERS_S: Final = 2.5

log = structlog.get_logger("agentmbx.relay")


def run(settings: relay_settings.Settings) -> None:
    """Run a relay until it is told to stop; raises `Failure`."""
    uvloop.run(_run(settings))


async def _run(settings: relay_settings.Settings) -> None:

    logs.configure(settings.log_level)
    try:
        folder = _open_folder(settings)
    except FolderRefused as error:
        raise Failure("refused", str(error), "", 3) from error
    except (FolderUnfit, StoreUnfit) as error:
        raise Failure("unfit_folder", str(error), "", 1) from error
    try:
        broken = await _run_in(folder, settings)
    except StoreUnfit as error:
        raise Failure("unfit_store", str(error), "", 1) from error
    except BaseExceptionGroup as group:
        failures, rest = group.split(Failure)
        if failures is None or rest is not None:
            raise
        raise failures.exceptions[0] from None
    finally:
        folder.close()
    if broken:
        raise Failure(
            "store_failed",
            "The disk failed under the store, so the relay stopped; nothing unsafe was signed.",
            "Check the disk, then start the relay again: it checks its store before it signs.",
            1,
        )


def _open_folder(settings: relay_settings.Settings) -> DataFolder:

    now_ms = wall_ms()
    create = partial(sqlite_store.create, clock_ms=now_ms, wall_ms=now_ms)
    return DataFolder.open(settings.data, create)


async def _run_in(folder: DataFolder, settings: relay_settings.Settings) -> bool:
    """Serve until told to stop; whether it stopped because the store is broken."""
    for warning in folder.warnings:
        log.warning("data_folder", warning=warning)
    version = metadata.version("agentmbx")
    stopping = _stop_signals()
    store = await SqliteStore.open(folder.store_path, folder.key.public)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        limit = _connections_max(settings.connections_max)
        parts = build(folder.key, store, settings, version=version, connections_max=limit)
        async with asyncio.TaskGroup() as group:
            tasks = {worker.name: group.create_task(worker.run()) for worker in parts.workers}
            async with AsyncExitStack() as listeners:
                address = await _listen(listeners, parts.server, settings.listen)
                if settings.metrics_listen is not None:
                    await _listen(listeners, parts.metrics_server, settings.metrics_listen)
                url = settings.public_url or _local_url(address)
                if url:
                    await parts.save_url(url)
                # What is here now stays; looking through it again for garbage costs 3 percent.
                gc.freeze()
                _say_ready(address, folder)
                log.info("relay_ready", version=version, open=settings.open)
                await _either(stopping, parts.commits.broken)
                log.info("relay_stopping", broken=parts.commits.broken.is_set())
                parts.relay.drain()
            for name, task in tasks.items():
                if name != "commits":
                    task.cancel()
            parts.commits.stop()
    log.info("relay_stopped")
    return parts.commits.broken.is_set()


async def _listen(
    stack: AsyncExitStack, server: web.Server, address: relay_settings.Address
) -> relay_settings.Address:

    runner = web.ServerRunner(server, shutdown_timeout=HANDLERS_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, address.host, address.port, backlog=1024)
    try:
        await site.start()
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else str(error)
        text = f"The relay cannot listen on {address}: {reason}."
        step = "Choose another --listen or --metrics-listen."
        raise Failure("cannot_listen", text, step, 1) from error
    host, port = runner.addresses[0][:2]
    return relay_settings.Address(host, port)


def _say_ready(address: relay_settings.Address, folder: DataFolder) -> None:

    sys.stdout.write(f"relay ready on http://{address} with key {key_text(folder.key.public)}\n")
    sys.stdout.flush()


def _local_url(address: relay_settings.Address) -> str:
    wildcard = address.host in ("0.0.0.0", "::")  # noqa: S104 - it is compared, not bound
    return "" if wildcard else f"http://{address}/"


def _connections_max(wanted: int) -> int:
    # All descriptors that the system gives, less what the store, logs and listeners need.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(min(wanted, limit - SPARE_DESCRIPTORS), 1)


def _stop_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
