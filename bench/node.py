"""`bench/node.py [--quick] [--json]`: how fast mail gets from one machine to another, and at rest.

Real daemons and a real relay on loopback. Latencies stand beside this disk's fdatasync, start-up
times beside the same interpreter's `python -c pass`, all in one run.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import machine as this_machine

from agentmbx_node import outbox
from agentmbx_node.clock import Now, since_boot_ms, wall_ms
from agentmbx_node.machine import open_store
from agentmbx_node.mail import message
from agentmbx_node.store.rows import PEER
from agentmbx_protocol import limits
from agentmbx_protocol.card import Card, make_card
from agentmbx_protocol.keys import SealingKey, SigningKey
from node_process import NodeProcess, pair, set_relay
from relay_process import RelayProcess

LETTER_BODY: Final = "x" * 2000
IDLE_PEERS: Final = 20
MARKS: Final = {
    "direct_p50_to_bound_ratio": 1.0,
    "relay_p50_to_bound_ratio": 1.0,
    "idle_cpu_percent": 0.5,
    "idle_mb": 70.0,
    "status_to_python_ratio": 3.0,
    "inbox_to_python_ratio": 3.0,
}
DRAIN_MARK: Final = 1000.0


class Size:
    """How much is measured."""

    def __init__(self, *, quick: bool) -> None:
        self.direct = 40 if quick else 200
        self.by_relay = 5 if quick else 20
        self.backlog = 2000 if quick else 10_000
        self.idle_s = 5.0 if quick else 20.0
        self.starts = 5 if quick else 15


def measure(folder: Path, size: Size) -> dict[str, Any]:
    """The whole report."""
    limit_ms = this_machine.append_p50_ms(folder)
    with ExitStack() as stack:
        relay = stack.enter_context(RelayProcess(folder / "relay").start())
        laptop = stack.enter_context(NodeProcess(folder / "laptop", "laptop").start())
        server = stack.enter_context(NodeProcess(folder / "server", "server").start())
        pair(laptop, server)
        set_relay(laptop, relay)
        set_relay(server, relay)
        direct_ms = [_send_ms(laptop) for _ in range(size.direct)]
        starts = _start_ups(laptop, size.starts)
        server.stop()
        server.listen = "off"
        server.start()
        _wait(lambda: not laptop.ask({"do": "outbox"})["letters"])
        relay_ms = []
        for _ in range(size.by_relay):
            # One state letter a second goes directly; a machine that writes less often waits less.
            time.sleep(1.5)
            relay_ms.append(_send_ms(laptop))
    drained = _drain(folder / "drain", size.backlog)
    idle = _idle(folder / "idle", size.idle_s)
    bound_ms = 12 * limit_ms + 5
    figures = {
        "fdatasync_p50_ms": limit_ms,
        "direct_p50_ms": statistics.median(direct_ms),
        "relay_p50_ms": statistics.median(relay_ms),
        "drained_per_second": drained,
        **idle,
        **starts,
    }
    ratios = {
        "direct_p50_to_bound_ratio": figures["direct_p50_ms"] / bound_ms,
        "relay_p50_to_bound_ratio": figures["relay_p50_ms"] / (2 * bound_ms),
        "idle_cpu_percent": idle["idle_cpu_percent"],
        "idle_mb": idle["idle_mb"],
        "status_to_python_ratio": starts["status_ms"] / starts["python_ms"],
        "inbox_to_python_ratio": starts["inbox_ms"] / starts["python_ms"],
    }
    marks: dict[str, Mapping[str, object]] = {
        name: {"at_most": mark, "met": ratios[name] <= mark} for name, mark in MARKS.items()
    }
    marks["drained_per_second"] = {"at_least": DRAIN_MARK, "met": drained >= DRAIN_MARK}
    return {
        "ok": True,
        "results": {name: round(value, 3) for name, value in figures.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items() if "ratio" in name},
        "marks": marks,
    }


def _send_ms(laptop: NodeProcess) -> float:
    started = time.perf_counter()
    request = {"do": "send", "to": "owner@server", "subject": "bench", "body": LETTER_BODY}
    answer = laptop.ask(request | {"wait": "stored"}, timeout_s=90)
    if answer["state"] != "stored":
        raise RuntimeError(f"a letter ended as {answer['state']}")
    return (time.perf_counter() - started) * 1000


def _start_ups(laptop: NodeProcess, count: int) -> dict[str, float]:
    environment = os.environ | {"MBX_HOME": str(laptop.home)}
    agentmbx = str(Path(sys.executable).with_name("agentmbx"))

    def median_ms(command: list[str]) -> float:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            times.append((time.perf_counter() - started) * 1000)
        return statistics.median(times)

    return {
        "python_ms": median_ms([sys.executable, "-c", "pass"]),
        "status_ms": median_ms([agentmbx, "status"]),
        "inbox_ms": median_ms([agentmbx, "inbox"]),
    }


def _drain(folder: Path, count: int) -> float:
    """Letters per second of a backlog that goes directly, from both being up to all stored."""
    folder.mkdir()
    laptop = NodeProcess(folder / "laptop", "laptop").start()
    server = NodeProcess(folder / "server", "server").start()
    with laptop, server:
        pair(laptop, server)
        _send_ms(laptop)
        laptop.stop()
        _write_backlog(laptop.home, count)
        laptop.start()
        started = time.perf_counter()
        _wait(lambda: not _queued(laptop), patience_s=120)
        return count / (time.perf_counter() - started)


def _write_backlog(home: Path, count: int) -> None:
    _, connection = open_store(home, "")
    content = message.encode(message.Message(subject="backlog", body=LETTER_BODY))
    connection.execute("BEGIN IMMEDIATE")
    (peer,) = PEER.find(connection, "WHERE state = 'paired'")
    (age_ms,) = connection.execute("SELECT age_ms FROM machine").fetchone()
    for _ in range(count):
        outbox.submit(
            connection,
            peer,
            content_type=message.CONTENT_TYPE,
            content=content,
            now=Now(wall_ms(), age_ms),
        )
    connection.execute("COMMIT")
    connection.close()


def _queued(laptop: NodeProcess) -> int:
    counts = laptop.ask({"do": "status"})["peers"][0]["outbox"]
    return int(counts["queued"]) + int(counts["held"])


def _idle(home: Path, seconds: float) -> dict[str, float]:
    """A daemon with 20 peers that are known and silent, and know its newest card."""
    home.mkdir(mode=0o700)
    with NodeProcess(home, "idle").start() as node:
        pass
    _, connection = open_store(home, "")
    (sequence,) = connection.execute("SELECT card_sequence FROM machine").fetchone()
    connection.execute("BEGIN IMMEDIATE")
    for number in range(IDLE_PEERS):
        PEER.add(connection, _silent_peer(number, int(sequence) + 10))
    connection.execute("COMMIT")
    connection.close()
    with node.start():
        time.sleep(2)
        before = this_machine.process_s(node.pid)
        time.sleep(seconds)
        used_s = this_machine.process_s(node.pid) - before
        pages = int(Path(f"/proc/{node.pid}/statm").read_text("ascii").split()[1])
    return {
        "idle_cpu_percent": 100 * used_s / seconds,
        "idle_mb": pages * resource.getpagesize() / 1_000_000,
    }


def _silent_peer(number: int, sequence: int) -> Any:  # noqa: ANN401 - a row of the store
    from agentmbx_node.store.rows import Peer, name_key  # noqa: PLC0415

    identity, sealing = SigningKey.generate(), SealingKey.generate()
    name = f"peer-{number}"
    card = Card(identity.public, 1, name, sealing.public, (f"192.0.2.{number + 1}:7420",))
    return Peer(
        id=None,
        salt=os.urandom(16),
        name=name,
        name_key=name_key(name),
        state="paired",
        identity=identity.public,
        sealing=sealing.public,
        pair_key=SigningKey.generate().public,
        card=make_card(identity, card),
        card_sequence=1,
        loopback=True,
        paired_ms=wall_ms(),
        stream=os.urandom(limits.STREAM_BYTES),
        confirmed_card=sequence,
    )


def _wait(done: Callable[[], object], patience_s: float = 90.0) -> None:
    ends_ms = since_boot_ms() + int(patience_s * 1000)
    while not done():
        if since_boot_ms() > ends_ms:
            raise RuntimeError("what was waited for did not happen")
        time.sleep(0.25)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="half a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=this_machine.disk_folder()) as folder:
        try:
            report = measure(Path(folder), Size(quick=arguments.quick))
        except (RuntimeError, OSError) as error:
            failure = {"ok": False, "code": "bench_failed", "message": str(error), "next": ""}
            print(json.dumps(failure) if arguments.json else f"bench failed: {error}")
            return 1
    if arguments.json:
        print(json.dumps(report))
        return 0
    for name, value in (report["results"] | report["ratios"]).items():
        mark = report["marks"].get(name)
        verdict = f"  {'met' if mark['met'] else 'NOT met'}: {dict(mark)}" if mark else ""
        print(f"{name:30} {value:12,.3f}{verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
