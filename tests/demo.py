"""`./dev demo`: the whole story with real processes, told as it happens."""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.http import HopRefused, open_session
from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.keys import SigningKey, key_text
from correspondents import Correspondent, Owner, Wire
from relay_process import RelayProcess

LETTERS_EACH = 100
SINGLES = 40
BATCH = 10
SECRET_TEXT = "the-ferry-leaves-at-noon"
NAMES = ("demo-laptop-name", "demo-server-name")


class StoryFailed(Exception):
    """Something did not go as the story says."""


class Machine:
    """One of the two: its name, its queue, and the letters that the other writes to it."""

    def __init__(self, name: str, relay_key: bytes, own_pair: SigningKey) -> None:
        self.name = name
        self.owner = Owner(relay_key)
        self.owner.pair = own_pair
        self.expected: list[Envelope] = []
        self.facts: dict[bytes, HeldFact] = {}
        self.deposited_as: dict[bytes, str] = {}
        self.opened: list[bytes] = []


class Story:
    """The steps in order; each returns one sentence about what it showed."""

    def __init__(self, folder: Path) -> None:
        self._metrics = f"127.0.0.1:{_free_port()}"
        self._relay = RelayProcess(folder / "relay", "--metrics-listen", self._metrics)
        self._machines: list[Machine] = []
        self._well_under_way = asyncio.Event()

    @property
    def steps(self) -> Sequence[tuple[str, Callable[[], Awaitable[str]]]]:
        """Name and action of each step."""
        return [
            ("a closed relay starts", self._start),
            ("two queues are admitted by invite", self._admit),
            ("a stranger is not admitted", self._stranger),
            ("letters are deposited one by one", self._deposit_singly),
            ("the relay is killed in the middle of batches", self._kill_in_the_middle),
            ("a repeated deposit gets the same facts", self._repeat),
            ("all is collected, opened and acked, exactly once", self._collect),
            ("a repeat after the ack gets the same facts", self._repeat),
            ("nothing that travelled can be read at the relay", self._search),
            ("the relay stops when told", self._stop),
        ]

    @property
    def letters(self) -> list[dict[str, object]]:
        """What became of each letter."""
        return [
            {
                "to": machine.name,
                "number": number,
                "way": "relay",
                "deposited": machine.deposited_as[parcel.digest],
                "held_ms": machine.facts[parcel.digest].accepted_ms,
                "until_ms": machine.facts[parcel.digest].until_ms,
                "opened": machine.opened.count(parcel.digest),
            }
            for machine in self._machines
            for number, parcel in enumerate(machine.expected, 1)
            if parcel.digest in machine.facts
        ]

    def end(self) -> None:
        """Leave no process behind."""
        if self._relay.running:
            self._relay.kill()

    async def _start(self) -> str:
        self._relay.start()
        pairs = [SigningKey.generate(), SigningKey.generate()]
        self._machines = [
            Machine(name, self._relay.relay_key, pair)
            for name, pair in zip(NAMES, pairs, strict=True)
        ]
        for machine, other in zip(self._machines, reversed(self._machines), strict=True):
            writer = Correspondent(machine.owner, other.owner.pair)
            machine.owner.senders = (writer.pair.public,)
            machine.expected = [
                writer.write(f"{SECRET_TEXT} {n} from {other.name}".encode())
                for n in range(LETTERS_EACH)
            ]
        return f"{self._relay.url} (process {self._relay.pid})"

    async def _admit(self) -> str:
        for machine in self._machines:
            async with self._wire(self._relay.invite()) as wire:
                await wire.register(machine.owner)
        return "each invite made one queue"

    async def _stranger(self) -> str:
        stranger = Owner(self._relay.relay_key)
        async with self._wire() as wire:
            try:
                await wire.register(stranger)
            except HopRefused as error:
                return f"refused: {error.refusal.code}"
        raise StoryFailed("a stranger made a queue on a closed relay")

    async def _deposit_singly(self) -> str:
        async with self._wire() as wire:
            for machine in self._machines:
                for parcel in machine.expected[:SINGLES]:
                    await _deposit(wire, machine, [parcel], "singly")
        return f"{2 * SINGLES} held, each signature checked"

    async def _kill_in_the_middle(self) -> str:
        async with self._wire() as wire:
            depositing = asyncio.create_task(self._deposit_batches(wire))
            await self._well_under_way.wait()
            self._relay.kill()
            lost = await depositing
        held_before = self._held_count
        self._relay.restart()
        async with self._wire() as wire:
            lost_again = await self._deposit_batches(wire)
        if lost_again or self._held_count != 2 * LETTERS_EACH:
            raise StoryFailed("a batch was refused after the restart")
        return f"SIGKILL after {held_before} were held, {lost} batches tried again, all held"

    async def _repeat(self) -> str:
        async with self._wire() as wire:
            for machine in self._machines:
                for batch in _batches(machine.expected):
                    again = await wire.deposit(*batch)
                    if dict(again.held) != {p.digest: machine.facts[p.digest] for p in batch}:
                        raise StoryFailed("a repeated deposit got other facts")
        return f"{2 * LETTERS_EACH} repeats, the same times to the millisecond"

    async def _collect(self) -> str:
        async with self._wire() as wire:
            for machine in self._machines:
                for data in await wire.drain(machine.owner):
                    opened = machine.owner.open(data)
                    if SECRET_TEXT.encode() not in opened.letter.content:
                        raise StoryFailed("a letter opened to something else")
                    machine.opened.append(parse_envelope(data).digest)
                accepted = [machine.facts[digest].accepted_ms for digest in machine.opened]
                if sorted(machine.opened) != sorted(p.digest for p in machine.expected):
                    raise StoryFailed("letters are missing, or came twice")
                if accepted != sorted(accepted):
                    raise StoryFailed("letters came in another order than they were accepted")
        return f"{2 * LETTERS_EACH} letters, none missing, none twice"

    async def _search(self) -> str:
        async with (
            open_session() as session,
            session.get(f"http://{self._metrics}/metrics") as page,
        ):
            metrics = await page.read()
        places: dict[str, bytes] = {"metrics": metrics, "log": self._relay.log().encode()}
        for path in sorted(self._relay.data.iterdir()):
            if path.name.startswith("relay.db"):
                places[path.name] = await asyncio.to_thread(path.read_bytes)
        needles: dict[str, bytes] = {name: name.encode() for name in NAMES}
        needles["the text"] = SECRET_TEXT.encode()
        for machine in self._machines:
            needles[f"the sealing key of {machine.name}"] = machine.owner.sealing.public
            needles[f"the secret queue key of {machine.name}"] = machine.owner.queue.seed
        for where, content in places.items():
            for what, needle in needles.items():
                if needle in content:
                    raise StoryFailed(f"{what} stands in the relay's {where}")
        return f"{len(needles)} things looked for in {', '.join(places)}"

    async def _stop(self) -> str:
        started = time.perf_counter()
        code = await asyncio.to_thread(self._relay.stop)
        if code != 0:
            raise StoryFailed(f"the relay ended with code {code}")
        return f"SIGTERM, exit 0 after {(time.perf_counter() - started) * 1000:.0f} ms"

    async def _deposit_batches(self, wire: Wire) -> int:
        lost = 0
        for machine in self._machines:
            for batch in _batches(machine.expected[SINGLES:]):
                missing = [parcel for parcel in batch if parcel.digest not in machine.facts]
                try:
                    if missing:
                        await _deposit(wire, machine, missing, "in a batch")
                        self._well_under_way.set()
                except OperatingError:
                    lost += 1
        return lost

    @property
    def _held_count(self) -> int:
        return sum(len(machine.facts) for machine in self._machines)

    @asynccontextmanager
    async def _wire(self, line: str | None = None) -> AsyncIterator[Wire]:
        async with open_session() as session:
            yield Wire(session, line or f"{self._relay.url}#{key_text(self._relay.relay_key)}")


async def _deposit(wire: Wire, machine: Machine, parcels: Sequence[Envelope], how: str) -> None:
    deposited = await wire.deposit(*parcels)
    if deposited.refused:
        raise StoryFailed(f"a deposit was refused: {deposited.refused[0].refusal.code}")
    for digest, fact in deposited.held.items():
        machine.facts[digest] = fact
        machine.deposited_as[digest] = how


def _batches(parcels: Sequence[Envelope]) -> list[Sequence[Envelope]]:
    return [parcels[at : at + BATCH] for at in range(0, len(parcels), BATCH)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def tell(story: Story, say: Callable[[str], None]) -> Mapping[str, object]:
    """Run the steps until one fails; the document that --json prints."""
    steps: list[dict[str, object]] = []
    for name, act in story.steps:
        started = time.perf_counter()
        try:
            shown, ok = await act(), True
        except (StoryFailed, OperatingError, HopRefused, RuntimeError, OSError) as error:
            shown, ok = f"{type(error).__name__}: {error}", False
        duration_ms = round((time.perf_counter() - started) * 1000, 1)
        steps.append({"name": name, "ok": ok, "ms": duration_ms})
        say(f"{'ok ' if ok else 'NOT'} {duration_ms:8.1f} ms  {name}: {shown}")
        if not ok:
            break
    ok = all(step["ok"] for step in steps) and len(steps) == len(story.steps)
    return {"ok": ok, "steps": steps, "letters": story.letters}


def main() -> int:
    """Tell the story; the exit code."""
    parser = argparse.ArgumentParser(prog="./dev demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    out = sys.stderr if arguments.json else sys.stdout
    with tempfile.TemporaryDirectory(prefix="agentmbx-demo-") as folder:
        story = Story(Path(folder))
        try:
            document = asyncio.run(tell(story, lambda line: print(line, file=out, flush=True)))
        finally:
            story.end()
    if arguments.json:
        print(json.dumps(document))
    elif document["ok"]:
        print(f"The story is true: {len(story.letters)} letters.")
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
