"""Two paired machines and a relay, real processes, for tests of the whole."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from node_process import NodeProcess, pair, set_relay
from relay_process import RelayProcess


class TwoMachines:
    """`laptop` and `server`, paired; `set_relays` makes each collect from the relay too."""

    def __init__(self, folder: Path, *relay_flags: str, names: tuple[str, str] = ("", "")) -> None:
        self.relay = RelayProcess(folder / "relay", *relay_flags)
        self.laptop = NodeProcess(folder / "laptop", names[0] or "laptop")
        self.server = NodeProcess(folder / "server", names[1] or "server")
        processes = (self.relay, self.laptop, self.server)
        try:
            with ThreadPoolExecutor(len(processes)) as threads:
                for started in [threads.submit(each.start) for each in processes]:
                    started.result()
            pair(self.laptop, self.server)
        except BaseException:
            self.end()
            raise

    def set_relays(self) -> None:
        """Let both collect from the relay."""
        for node in (self.laptop, self.server):
            set_relay(node, self.relay)

    def send(self, subject: str, **more: object) -> dict[str, Any]:
        """One letter from the laptop to the server."""
        return self.laptop.send(f"owner@{self.server.name}", subject, **more)

    def arrived(self) -> list[str]:
        """The subjects at the server, the newest first."""
        return [message["subject"] for message in self.server.messages()]

    def end(self) -> None:
        """Kill what still runs."""
        for process in (self.laptop, self.server, self.relay):
            if process.running:
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def eventually(holds: Callable[[], bool], patience_s: float = 30.0) -> None:
    """Ask until it holds; fails when it never does."""
    ends_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < ends_s, "it did not happen in time"
        time.sleep(0.05)
