"""Why is it stuck: what the daemon knows of each part, and tries of each way."""

import shutil
import sqlite3
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Final

from agentmbx_node import outbox, reports
from agentmbx_node.clock import Now
from agentmbx_node.errors import Failure, OperatingError
from agentmbx_node.hops.direct import DirectHop
from agentmbx_node.hops.http import HopRefused
from agentmbx_node.hops.relay import fetch_info
from agentmbx_node.machine import RunningMachine
from agentmbx_node.parcels import Sealer
from agentmbx_node.peers import find_peer, list_paths, paired
from agentmbx_node.store.rows import PEER, QUEUE, Peer
from agentmbx_protocol.card import parse_card
from agentmbx_protocol.custody import NotBelieved
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.keys import key_text

PING_S: Final = 3.0
FREE_BYTES_MIN: Final = 16 * 1024 * 1024

Step = Mapping[str, object]


class Doctor:
    """`doctor` and `ping`."""

    def __init__(self, machine: RunningMachine, home: Path) -> None:
        self._machine = machine
        self._home = home

    async def doctor(self, _request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Findings about each part, with a remedy for each that does not work."""
        listens = self._machine.listens_at
        findings = [
            _finding("daemon", f"runs on {self._home}"),
            _finding(
                "listener",
                f"listens on {listen_text(listens)}" if listens else "is off",
                "Peers reach this machine by a relay only; `up --listen HOST:PORT` changes that.",
                ok=listens is not None,
            ),
            _disk_finding(self._home),
        ]
        findings += await self._machine.database.read(lambda c: _findings(c, self._now()))
        yield {"findings": findings}

    async def ping(self, request: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """Each way to a peer, tried now; raises `Failure` when none works."""
        machine = self._machine
        peer = await machine.database.read(lambda c: find_peer(c, str(request.get("peer", ""))))
        card = parse_card(peer.card)
        paths = [await self._ping_direct(peer.id or 0, each) for each in card.addresses]
        paths += [await self._ping_relay(route.url, route.relay) for route in card.routes]
        if not any(path["ok"] for path in paths):
            raise Failure(
                "unreachable",
                f"No way to {peer.name}: "
                + ("; ".join(f"{each['path']}: {each['error']}" for each in paths) or "none known"),
                "Its mail waits in the outbox; `agentmbx doctor` says more.",
                4,
            )
        yield {"peer": peer.name, "paths": paths}

    async def _ping_direct(self, number: int, address: str) -> dict[str, object]:
        machine = self._machine

        def work(connection: sqlite3.Connection) -> tuple[Peer, Envelope]:
            peer = PEER.get(connection, number)
            if peer is None:
                raise LookupError("the peer is gone")
            sealer = Sealer.of(connection, machine.keyring)
            data = reports.make(connection, sealer.machine, peer, self._now(), ask=False)
            PEER.save(connection, peer)
            return peer, sealer.seal(peer, data)

        peer, parcel = await machine.write(work)
        started = time.perf_counter()
        error = ""
        try:
            hop = DirectHop(machine.session, address, peer.pair_key)
            deposited = await hop.deposit([parcel], total_s=PING_S)
            if parcel.digest not in deposited.stored:
                error = "it did not take the letter"
        except (OperatingError, NotBelieved, HopRefused) as failure:
            error = str(failure)
        return _path(f"direct {address}", started, error)

    async def _ping_relay(self, url: str, relay_key: bytes) -> dict[str, object]:
        started = time.perf_counter()
        error = ""
        try:
            info = await fetch_info(self._machine.session, url)
            if info["relay_key"] != key_text(relay_key):
                error = "another relay answers there"
        except OperatingError as failure:
            error = str(failure)
        return _path(f"relay {url}", started, error)

    def _now(self) -> Now:
        return self._machine.clock.now()


def _path(path: str, started: float, error: str) -> dict[str, object]:
    ms = round((time.perf_counter() - started) * 1000, 1)
    return {"path": path, "ok": not error, "ms": ms, "error": error}


def listen_text(listens: tuple[str, int]) -> str:
    """Where the machine listens, as a person reads it."""
    return f"{listens[0] or '*'}:{listens[1]}"


def _finding(part: str, text: str, remedy: str = "", *, ok: bool = True) -> dict[str, object]:
    return {"ok": ok, "part": part, "text": text, "remedy": "" if ok else remedy}


def _disk_finding(home: Path) -> dict[str, object]:
    free = shutil.disk_usage(home).free
    return _finding(
        "disk",
        f"has {free // 1024**2:,} MiB of room",
        "Make room; until then mail for this machine waits at its senders or at the relay.",
        ok=free >= FREE_BYTES_MIN,
    )


def _findings(connection: sqlite3.Connection, now: Now) -> list[dict[str, object]]:
    findings = []
    queues = QUEUE.find(connection, "WHERE state IN ('new', 'live') ORDER BY id DESC")
    if not queues:
        step = "`agentmbx relay set URL#KEY.INVITE` sets one."
        text = "none is set, so mail for a sleeping peer waits here"
        findings.append(_finding("relay", text, step, ok=False))
    findings += [
        _finding(
            f"relay {row.url}",
            row.error or row.state,
            "It is tried again by itself; `agentmbx relay probe` says more.",
            ok=row.state == "live" and not row.error,
        )
        for row in queues
    ]
    for peer in paired(connection):
        paths = list_paths(peer)
        works = any(path["ok"] for path in paths)
        untried = all(path["ok"] is None for path in paths)
        texts = [f"{each['path']}: {each['error'] or 'works'}" for each in paths if each["last_ms"]]
        findings.append(
            _finding(
                f"peer {peer.name}",
                "; ".join(texts) or ("not tried yet" if paths else "no way to it is known"),
                "Is it up? `agentmbx ping` tries each way now.",
                ok=bool(paths) and (works or untried),
            )
        )
        apart_s = abs(peer.clock_ahead_ms) // 1000
        if apart_s > 120:  # noqa: PLR2004 - two minutes
            step = "Mail arrives all the same; set the clock of one machine right."
            findings.append(
                _finding(f"peer {peer.name}", f"its clock is {apart_s} s apart", step, ok=False)
            )
        waiting = outbox.find_open(connection, peer)
        if waiting:
            oldest_s = (now.wall_ms - min(row.queued_ms for row in waiting)) // 1000
            why = next((row.why for row in waiting if row.why), "not tried yet")
            findings.append(
                _finding(
                    f"outbox for {peer.name}",
                    f"{len(waiting)} wait, the oldest for {oldest_s} s: {why}",
                    "`agentmbx outbox` shows each; `agentmbx outbox retry` tries at once.",
                    ok=oldest_s < 300,  # noqa: PLR2004 - five minutes are no trouble
                )
            )
    return findings
