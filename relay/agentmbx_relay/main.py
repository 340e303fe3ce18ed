"""`agentmbx relay serve`: builds the relay's parts, runs them, and stops them in order."""

import asyncio
import os
import resource
import signal
import sys
from contextlib import AsyncExitStack
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Final

import click

from agentmbx_relay import settings as relay_settings
from agentmbx_relay.failure import Failure

if TYPE_CHECKING:
    from aiohttp import web

    from agentmbx_relay.data_folder import DataFolder

SPARE_DESCRIPTORS: Final = 64
HANDLERS_S: Final = 2.5
STORE_S: Final = 2.0


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = []
    for row in relay_settings.TABLE:
        text = f"{row.text} [{row.variable}]"
        if row.default:
            text += f" Default: {row.default}."
        if row.name == "open":
            options.append(click.Option([row.flag, row.name], flag_value="true", help=text))
        else:
            options.append(click.Option([row.flag, row.name], metavar=row.metavar, help=text))
    return options


def _serve(**flags: str | None) -> None:
    """Run a relay: hold sealed envelopes for queues, and sign that they are held.

    The first start makes the relay's key and store in the data folder. Each setting can also be
    given in the environment or in DIR/relay.toml; a flag beats both. Stop it with SIGTERM or
    Ctrl-C: it finishes what it has begun.

    \b
    Examples:
      agentmbx relay serve --data ./relay
      agentmbx relay serve --data /var/lib/agentmbx --public-url https://relay.example.com
    """  # noqa: D301 - \b keeps click from joining the lines
    try:
        settings = relay_settings.resolve(relay_settings.find(flags, os.environ))
    except relay_settings.SettingsError as error:
        raise Failure("usage", str(error), "See `agentmbx relay serve --help`.", 2) from error
    import uvloop  # noqa: PLC0415 - not needed for --help

    uvloop.run(_run(settings))


serve = click.Command(
    "serve",
    params=_options(),
    callback=_serve,
    help=_serve.__doc__,
    short_help="Run a relay.",
)


async def _run(settings: relay_settings.Settings) -> None:
    # The imports are here so that `--help` does not pay for a web server.
    from agentmbx_relay import logs  # noqa: PLC0415
    from agentmbx_relay.data_folder import FolderRefused, FolderUnfit  # noqa: PLC0415
    from agentmbx_relay.store import StoreUnfit  # noqa: PLC0415

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
    except OSError as error:
        text = f"The relay cannot listen: {os.strerror(error.errno or 0)}."
        raise Failure(
            "cannot_listen", text, "Choose another --listen or --metrics-listen.", 1
        ) from error
    finally:
        folder.close()
    if broken:
        raise Failure(
            "store_failed",
            "The disk failed under the store, so the relay stopped; nothing unsafe was signed.",
            "Check the disk, then start the relay again: it checks its store before it signs.",
            1,
        )


def _open_folder(settings: relay_settings.Settings) -> "DataFolder":
    from agentmbx_relay import sqlite_store  # noqa: PLC0415
    from agentmbx_relay.clock import wall_ms  # noqa: PLC0415
    from agentmbx_relay.data_folder import DataFolder  # noqa: PLC0415

    now_ms = wall_ms()
    create = partial(sqlite_store.create, clock_ms=now_ms, wall_ms=now_ms)
    return DataFolder.open(settings.data, create)


async def _run_in(folder: "DataFolder", settings: relay_settings.Settings) -> bool:
    """Serve until told to stop; whether it stopped because the store is broken."""
    import structlog  # noqa: PLC0415

    from agentmbx_relay.parts import build  # noqa: PLC0415
    from agentmbx_relay.sqlite_store import SqliteStore  # noqa: PLC0415

    log = structlog.get_logger("agentmbx.relay")
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
                await parts.save_url(settings.public_url or _local_url(address))
                _say_ready(address, folder)
                log.info("relay_ready", version=version, open=settings.open)
                await _either(stopping, parts.commits.broken)
                log.info("relay_stopping", broken=parts.commits.broken.is_set())
                parts.relay.drain()
            for name in ("connections", "maintenance", "verifier"):
                tasks[name].cancel()
            parts.commits.stop()
    log.info("relay_stopped")
    return parts.commits.broken.is_set()


async def _listen(
    stack: AsyncExitStack, server: "web.Server", address: relay_settings.Address
) -> relay_settings.Address:
    from aiohttp import web  # noqa: PLC0415

    runner = web.ServerRunner(server, shutdown_timeout=HANDLERS_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, address.host, address.port, backlog=1024)
    await site.start()
    host, port = runner.addresses[0][:2]
    return relay_settings.Address(host, port)


def _say_ready(address: relay_settings.Address, folder: "DataFolder") -> None:
    from agentmbx_protocol.keys import key_text  # noqa: PLC0415

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
