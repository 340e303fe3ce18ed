"""`bench/relay.py [--quick] [--json]`: what a relay accepts, beside what this machine can do.

A real relay process on loopback takes 4 KiB letters in real envelopes, sealed ahead. Only what it
answers with a `held` that a sender would believe counts; one envelope that is not believed fails
the bench. Each slice is short, is run once a round on a fresh store, and medians are reported.
"""

import argparse
import collections
import hashlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import http_load
import machine

from agentmbx_node.hops.http import open_session
from agentmbx_protocol import bodies, custody, limits
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.errors import ProtocolError
from agentmbx_protocol.keys import SigningKey, key_text
from correspondents import Correspondent, Owner, Wire
from relay_process import RelayProcess

QUEUES: Final = 8
SENDERS: Final = 64
BATCH: Final = 32
BODY_BYTES: Final = 4096
POLL_S: Final = 5
MARKS: Final = {"senders_64_to_verify_ratio": 0.25, "batches_32_to_verify_ratio": 0.35}

Mail = Sequence[Sequence[Envelope]]  # for each sender, what it deposits


class Size(msgspec.Struct, frozen=True):
    """How much is measured: rounds, and what each sender deposits in a slice.

    No round is begun that would end after `budget_s`, but one round is always made.
    """

    rounds: int
    budget_s: float
    alone: int
    each_of_64: int
    batches_of_each: int
    each_in_cycle: int

    @property
    def backlog(self) -> int:
        """Envelopes that are held already: ten times what 64 senders deposit in a slice."""
        return 10 * SENDERS * self.each_of_64


QUICK: Final = Size(3, 36.0, 300, 32, 16, 24)
WHOLE: Final = Size(3, 110.0, 1200, 96, 64, 64)


class BenchFailed(Exception):
    """The relay did not do what is measured, so there is nothing to report."""


class Figures(msgspec.Struct, frozen=True):
    """One slice: envelopes per second, the latency of a request, and who used the processors.

    `relay_cpu_us` is of one envelope, with the relay's children; the client's percentage is of one
    core, that of other programs of all cores. The last one high means that the rates are too low.
    """

    per_second: float
    p50_ms: float
    p99_ms: float
    relay_cpu_us: float
    client_cpu_percent: float
    others_cpu_percent: float


class People:
    """The owners of the queues and the senders that each lists; the same at every relay."""

    def __init__(self) -> None:
        self.pairs = [SigningKey.generate() for _ in range(SENDERS)]
        self.owners = [
            Owner(b"", [pair.public for pair in self.pairs[at::QUEUES]]) for at in range(QUEUES)
        ]

    def seal(self, pool: ProcessPoolExecutor, senders: int, count: int) -> Mail:
        """`count` new envelopes of each of the first `senders` senders."""
        owners = [self.owners[at % QUEUES] for at in range(senders)]
        sealed = pool.map(_seal, owners, self.pairs[:senders], [count] * senders)
        return [[parse_envelope(data) for data in of_sender] for of_sender in sealed]


class Target:
    """A relay process with the people's queues registered; checks all that it answers."""

    def __init__(self, folder: Path, people: People) -> None:
        self._people = people
        self.process = RelayProcess(folder, "--open", "--log-level", "warning").start()
        address = urlsplit(self.process.url)
        self._host, self._port = str(address.hostname), int(address.port or 0)

    async def register(self) -> None:
        """Make the queues."""
        async with open_session() as session:
            wire = Wire(session, f"{self.process.url}#{key_text(self.process.relay_key)}")
            for owner in self._people.owners:
                owner.relay_key = self.process.relay_key
                await wire.register(owner)

    async def deposit(self, mail: Mail, batch: int = 1) -> Figures:
        """Each sender deposits its envelopes over its own connection, `batch` in a request."""
        sent = [_batches(of_sender, batch) for of_sender in mail]
        load, figures = await self._run(_deposit_scripts(sent), mail)
        self._check_held(sent, load)
        return figures

    async def cycle(self, mail: Mail) -> Figures:
        """The same one by one while the owners collect and ack; all is done when all is acked."""
        expected: list[list[Envelope]] = [[] for _ in self._people.owners]
        for at, of_sender in enumerate(mail):
            expected[at % QUEUES] += of_sender
        sent = [_batches(of_sender, 1) for of_sender in mail]
        collected: list[list[bytes]] = [[] for _ in expected]
        scripts = _deposit_scripts(sent)
        for owner, digests, parcels in zip(self._people.owners, collected, expected, strict=True):
            owner.relay_key = self.process.relay_key
            scripts.append(_owner_script(owner, digests, len(parcels)))
        load, figures = await self._run(scripts, mail)
        self._check_held(sent, load)
        for digests, parcels in zip(collected, expected, strict=True):
            if collections.Counter(digests) != collections.Counter(p.digest for p in parcels):
                raise BenchFailed("an owner did not collect exactly what was deposited, once each")
        if any(answers[-1] for answers in load.answers[len(mail) :]):
            raise BenchFailed("what was acked was handed out again")
        return figures

    async def _run(
        self, scripts: Sequence[http_load.Script], mail: Mail
    ) -> tuple[http_load.Load, Figures]:
        relay_s, busy_s = machine.process_s(self.process.pid), machine.busy_s()
        load = await http_load.run(self._host, self._port, scripts)
        relay_s = machine.process_s(self.process.pid) - relay_s
        others_s = machine.busy_s() - busy_s - relay_s - load.cpu_seconds
        envelopes = sum(map(len, mail))
        figures = Figures(
            per_second=envelopes / load.seconds,
            p50_ms=load.percentile_ms(50, len(mail)),
            p99_ms=load.percentile_ms(99, len(mail)),
            relay_cpu_us=1_000_000 * relay_s / envelopes,
            client_cpu_percent=100 * load.cpu_seconds / load.seconds,
            others_cpu_percent=100 * max(others_s, 0) / load.seconds / (os.cpu_count() or 1),
        )
        return load, figures

    def _check_held(
        self, sent: Sequence[Sequence[Sequence[Envelope]]], load: http_load.Load
    ) -> None:
        for requests, answers in zip(sent, load.answers, strict=False):
            for parcels, answer in zip(requests, answers, strict=True):
                statement, refused = bodies.parse_deposit_answer(answer, len(parcels))
                held = custody.believe_held(statement, self.process.relay_key, parcels)
                if refused or len(held) != len(parcels):
                    raise BenchFailed("the relay refused an envelope")


def _seal(owner: Owner, pair: SigningKey, count: int) -> list[bytes]:
    sender = Correspondent(owner, pair)
    return [sender.write(os.urandom(BODY_BYTES)).frame.data for _ in range(count)]


def _batches(parcels: Sequence[Envelope], batch: int) -> list[Sequence[Envelope]]:
    return [parcels[at : at + batch] for at in range(0, len(parcels), batch)]


def _deposit_scripts(sent: Sequence[Sequence[Sequence[Envelope]]]) -> list[http_load.Script]:
    def script(requests: Sequence[bytes]) -> http_load.Script:
        return lambda _line: requests

    return [
        script(
            [
                http_load.request("v1/deposit", [parcel.frame.data for parcel in parcels])
                for parcels in requests
            ]
        )
        for requests in sent
    ]


def _owner_script(owner: Owner, digests: list[bytes], count: int) -> http_load.Script:
    def script(line: http_load.Line) -> Iterator[bytes]:
        acks: list[bytes] = []
        while len(digests) < count:
            yield http_load.request("v1/collect", [owner.collect_frame(acks, wait_s=POLL_S)])
            frames = bodies.split_frames(line.answers[-1], limits.COLLECT_ACKS_MAX + 1)
            acks = [hashlib.sha256(data).digest() for data in frames]
            digests.extend(acks)
        yield http_load.request("v1/collect", [owner.collect_frame(acks)])

    return script


class Bench:
    """All that is run, in one temporary folder on a disk."""

    def __init__(self, folder: Path, pool: ProcessPoolExecutor, size: Size) -> None:
        self._folder = folder
        self._pool = pool
        self._size = size
        self._people = People()
        self._slices: dict[str, list[Figures]] = collections.defaultdict(list)
        self._backlog_ratios: list[float] = []
        self._limits: list[machine.Limits] = []
        self._started = time.monotonic()

    async def run(self) -> dict[str, object]:
        """Measure rounds, and the limits of the machine before each and at the end."""
        size = self._size
        self._say("sealing letters")
        warm_up = self._people.seal(self._pool, SENDERS, 4)
        alone = self._people.seal(self._pool, 1, size.alone)
        batches = self._people.seal(self._pool, QUEUES, size.batches_of_each * BATCH)
        cycle = self._people.seal(self._pool, SENDERS, size.each_in_cycle)
        parcel = warm_up[0][0]
        full = await self._start("full", warm_up)
        with full.process:
            await self._fill(full)
            longest_s = 0.0
            for number in range(size.rounds):
                began = time.monotonic()
                if began - self._started + longest_s > size.budget_s and number:
                    break
                self._say(f"round {number + 1} of {size.rounds}")
                self._measure_limits(parcel)
                many = self._people.seal(self._pool, SENDERS, size.each_of_64)
                empty = await self._start(f"empty{number}", warm_up)
                with empty.process:
                    await self._note("deposit_collect_ack", empty.cycle(cycle))
                    await self._note("one_sender", empty.deposit(alone))
                    await self._compare_backlog(empty, full, many, full_first=bool(number % 2))
                    await self._note("batches_32", empty.deposit(batches, BATCH))
                longest_s = max(longest_s, time.monotonic() - began)
        self._measure_limits(parcel)
        at_once = list(self._pool.map(machine.verifies_per_second, warm_up[0][:2]))
        return self._report(sum(at_once), parcel.length)

    def _measure_limits(self, parcel: Envelope) -> None:
        key = self._people.pairs[0]
        self._limits.append(machine.measure_limits(self._folder, parcel, key))

    async def _start(self, name: str, warm_up: Mail) -> Target:
        target = Target(self._folder / name, self._people)
        try:
            await target.register()
            await target.cycle(warm_up)
        except BaseException:
            target.process.kill()
            raise
        return target

    async def _fill(self, full: Target) -> None:
        self._say(f"making a backlog of {self._size.backlog}")
        each = self._size.backlog // SENDERS
        for done in range(0, each, BATCH):
            mail = self._people.seal(self._pool, SENDERS, min(BATCH, each - done))
            await full.deposit(mail, BATCH)

    async def _compare_backlog(
        self, empty: Target, full: Target, mail: Mail, *, full_first: bool
    ) -> None:
        pair = [("senders_64", empty), ("senders_64_with_backlog", full)]
        for name, target in reversed(pair) if full_first else pair:
            await self._note(name, target.deposit(mail))
        rates = {name: self._slices[name][-1].per_second for name, _ in pair}
        self._backlog_ratios.append(rates["senders_64_with_backlog"] / rates["senders_64"])

    async def _note(self, name: str, measured: Awaitable[Figures]) -> None:
        self._slices[name].append(await measured)

    def _report(self, two_at_once: float, length: int) -> dict[str, object]:
        limit = machine.median(self._limits)
        results = {name: _median(slices) for name, slices in self._slices.items()}
        many, verifies = results["senders_64"], limit.verifies_per_second
        extra_ms = results["one_sender"].p50_ms - limit.fdatasync_p50_ms
        ratios = {
            "senders_64_to_verify_ratio": many.per_second / verifies,
            "batches_32_to_verify_ratio": results["batches_32"].per_second / verifies,
            "deposit_collect_ack_to_verify_ratio": results["deposit_collect_ack"].per_second
            / verifies,
            "p99_to_p50_ratio_64": many.p99_ms / many.p50_ms,
            "backlog_ratio": statistics.median(self._backlog_ratios),
        }
        return {
            "ok": True,
            "machine": {
                "cores": os.cpu_count(),
                "file_system": machine.file_system(self._folder),
                "folder": str(self._folder.parent),
                "before": _rounded(self._limits[0]),
                "after": _rounded(self._limits[-1]),
                "median": _rounded(limit),
                "two_processes_verifies_per_second": round(two_at_once),
            },
            "results": {
                **{name: _rounded(figures) for name, figures in results.items()},
                "one_sender_p50_minus_fdatasync_ms": round(extra_ms, 3),
                "envelope_bytes": length,
                "backlog_envelopes": self._size.backlog,
                "rounds": len(self._backlog_ratios),
                "took_s": round(time.monotonic() - self._started, 1),
            },
            "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
            "marks": {
                name: {"at_least": mark, "met": ratios[name] >= mark}
                for name, mark in MARKS.items()
            },
        }

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:5.1f} s  {text}", file=sys.stderr, flush=True)


def _median(slices: Sequence[Figures]) -> Figures:
    columns = zip(*map(msgspec.structs.astuple, slices), strict=True)
    return Figures(*map(statistics.median, columns))


def _rounded(figures: msgspec.Struct) -> dict[str, float]:
    return {name: round(value, 3) for name, value in msgspec.structs.asdict(figures).items()}


def _print_table(report: Mapping[str, Any]) -> None:
    limits_now, results = report["machine"], report["results"]
    print(f"{limits_now['cores']} cores, {limits_now['file_system']} at {limits_now['folder']}")
    print(f"{'per second':26}{'append + fdatasync':>20}{'verify':>9}{'sign':>9}")
    for name in ("before", "after", "median"):
        row = limits_now[name]
        print(
            f"{name:26}{row['fdatasyncs_per_second']:20,.0f}{row['verifies_per_second']:9,.0f}"
            f"{row['signs_per_second']:9,.0f}"
        )
    titles = ("envelopes/s", "p50 ms", "p99 ms", "relay us", "client %", "others %")
    print(f"{'two processes at once':46}{limits_now['two_processes_verifies_per_second']:9,.0f}")
    print(f"{'':26}" + "".join(f"{title:>12}" for title in titles))
    for name, row in results.items():
        if isinstance(row, Mapping):
            print(f"{name:26}" + "".join(f"{value:12,.2f}" for value in row.values()))
        else:
            print(f"{name:34} {row}")
    for name, ratio in report["ratios"].items():
        mark = report["marks"].get(name)
        verdict = (
            f"  mark {mark['at_least']}: {'met' if mark['met'] else 'NOT met'}" if mark else ""
        )
        print(f"{name:36} {ratio:6.3f}{verdict}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="at most 40 s instead of 2 minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args()


def main() -> int:
    arguments = _parse_arguments()
    size = QUICK if arguments.quick else WHOLE
    # Told to stop, it takes its relays with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="mbx-bench-", dir=machine.disk_folder()) as folder,
            ProcessPoolExecutor(2) as pool,
        ):
            report = uvloop.run(Bench(Path(folder), pool, size).run())
    except (BenchFailed, http_load.LoadFailed, ProtocolError, OSError, RuntimeError) as error:
        text = str(error) or type(error).__name__
        failure = {"ok": False, "code": "bench_failed", "message": text, "next": ""}
        print(json.dumps(failure) if arguments.json else f"bench failed: {text}")
        return 1
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
