"""A laptop, a server and a relay on a network of their own, and what is written meanwhile."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from lab.network import HOME, VPS_IP, Network
from node_process import NodeProcess, pair
from relay_process import RelayProcess
from views import assert_views_agree

LISTEN: Final = ":7420"
RELAY_LISTEN: Final = f"{VPS_IP}:7421"
WRITE_EVERY_S: Final = 0.3
BURST: Final = 3
LOOK_EVERY_S: Final = 0.25
PATIENCE_S: Final = 100.0


class Homes:
    """Two paired machines on the LAN of home-b, with queues at the relay on the vps."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.laptop, self.server = (
            NodeProcess(folder / name, name, listen=LISTEN, prefix=network.command_prefix(name))
            for name in ("laptop", "server")
        )
        self.relay = RelayProcess(folder / "relay", prefix=network.command_prefix("vps"))
        self._written: dict[str, list[str]] = {"laptop": [], "server": []}

    def take_laptop_away(self) -> None:
        """To home-a, where it gets the address that the server has in home-b."""
        self.network.move("laptop", "home-a", f"{HOME}.11")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Both write to the other all the time, until the block is left."""
        over = threading.Event()
        with ThreadPoolExecutor(2) as threads:
            writers = [threads.submit(self._write, over, *pair) for pair in self._pairs()]
            try:
                yield
            finally:
                over.set()
            for writer in writers:
                writer.result()

    def some_arrive(self, way: str = "") -> None:
        """Wait until each side has one that it had not; one that came by that way, if given."""
        before = self._arrived(way)
        _wait(lambda: all(now > then for now, then in zip(self._arrived(way), before, strict=True)))

    def none_arrive(self, within_s: float) -> None:
        """Nothing comes through for that long, but for what was on its way at the beginning."""
        time.sleep(within_s / 2)
        before = self._arrived()
        time.sleep(within_s / 2)
        assert self._arrived() == before

    def check(self) -> None:
        """All that was written arrives once, and who wrote it comes to know; this is the end."""
        _wait(lambda: not any(_open(sender) for sender, _ in self._pairs()))
        for sender, receiver in self._pairs():
            arrived = Counter(each["subject"] for each in receiver.messages())
            assert arrived == Counter(self._written[sender.name])
            assert arrived
        assert [self.laptop.stop(), self.server.stop()] == [0, 0]
        for sender, receiver in self._pairs():
            assert_views_agree(sender, receiver)
            assert '"level": "error"' not in sender.log(), sender.log()

    def ways(self) -> set[str]:
        """The ways by which mail has come so far."""
        return {each["way"] for _, node in self._pairs() for each in node.messages()}

    def __enter__(self) -> Self:
        try:
            self.relay.start(listen=RELAY_LISTEN)
            self.laptop.start()
            self.server.start()
            pair(self.laptop, self.server)
            line = self.relay.invite("--uses", "2")
            for node in (self.laptop, self.server):
                node.ask({"do": "relay_set", "line": line})
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _arrived(self, way: str = "") -> list[int]:
        """How many have arrived at each side, by that way if given."""
        messages = [receiver.messages() for _, receiver in self._pairs()]
        return [sum(way in ("", each["way"]) for each in listed) for listed in messages]

    def _end(self) -> None:
        for process in (self.laptop, self.server, self.relay):
            if process.running:
                process.kill()

    def _pairs(self) -> tuple[tuple[NodeProcess, NodeProcess], tuple[NodeProcess, NodeProcess]]:
        return (self.laptop, self.server), (self.server, self.laptop)

    def _write(self, over: threading.Event, sender: NodeProcess, receiver: NodeProcess) -> None:
        written = self._written[sender.name]
        while not over.wait(WRITE_EVERY_S):
            for _ in range(BURST):
                written.append(f"{len(written)} of {sender.name}")
                body = "x" * (len(written) * 997 % 20_000)
                sender.send(f"owner@{receiver.name}", written[-1], body=body)


def _open(node: NodeProcess) -> int:
    (peer,) = node.ask({"do": "status"})["peers"]
    return sum(peer["outbox"].values())


def _wait(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends_s, "it did not happen in time"
        time.sleep(LOOK_EVERY_S)
