"""A real daemon process for tests and benches; killed by pid, never by name."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentmbx_node.control import client
from agentmbx_node.errors import Failure
from relay_process import AGENTMBX, RelayProcess

START_S = 20.0
ASK_S = 60.0


class NodeProcess:
    """`agentmbx up` on a folder of its own; start it again on the same folder with `start`.

    `prefix` is a command that runs it, as the same process.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        *flags: str,
        listen: str = "127.0.0.1:0",
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.home = home
        self.name = name
        self.listen = listen
        self.log_path = home.with_name(home.name + ".log")
        self._flags = flags
        self._environment = environment or {}
        self._prefix = prefix
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it and wait until it answers; raises `RuntimeError` if it ends."""
        command = [*self._prefix, *AGENTMBX, "up", "--name", self.name, "--listen", self.listen]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"MBX_HOME": str(self.home)} | self._environment,
            )
        ends_s = time.monotonic() + START_S
        while time.monotonic() < ends_s and self._process.poll() is None:
            try:
                status = client.call(self.home, {"do": "status"}, 2.0)
            except Failure:
                time.sleep(0.02)
            else:
                # Where its peers know it, also after a restart.
                self.listen = status["listen"] or self.listen
                return self
        self.kill()
        raise RuntimeError(f"the node did not start: {self.log()}")

    @property
    def pid(self) -> int:
        """The process id."""
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def ask(self, request: dict[str, Any], timeout_s: float = ASK_S) -> dict[str, Any]:
        """The daemon's answer; raises `Failure`."""
        return client.call(self.home, request, timeout_s)

    def stream(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The daemon's events, then its answer; raises `Failure`."""
        return client.stream(self.home, request)

    def letters(self) -> list[dict[str, Any]]:
        """All that was sent from here, as `sent` shows it."""
        return list(self.ask({"do": "sent"})["letters"])

    def messages(self) -> list[dict[str, Any]]:
        """All that arrived here, as `inbox` shows it."""
        return list(self.ask({"do": "inbox"})["messages"])

    def send(self, to: str, subject: str, **more: object) -> dict[str, Any]:
        """Send one message; the answer."""
        return self.ask({"do": "send", "to": to, "subject": subject, "body": "", **more})

    def kill(self) -> None:
        """SIGKILL, as a power cut would stop the process."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = 15.0) -> int:
        """Wait until it has ended; the exit code."""
        process, self._process = self._process, None
        return 0 if process is None else process.wait(timeout_s)

    def log(self) -> str:
        """All that it has logged, over restarts."""
        return self.log_path.read_text("utf-8", "replace")

    def __enter__(self) -> Self:
        return self if self._process else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def pair(initiator: NodeProcess, joiner: NodeProcess) -> None:
    """Pair two running nodes by a token."""
    steps = initiator.stream({"do": "pair"})
    line = next(steps)["line"]
    joiner.ask({"do": "join", "line": line})
    for step in steps:
        if "ok" in step:
            return
    raise RuntimeError("the initiator did not pair")


def set_relay(node: NodeProcess, relay: RelayProcess) -> dict[str, Any]:
    """Let the node collect from the relay, by a new invite; the answer."""
    return node.ask({"do": "relay_set", "line": relay.invite()})


def wait_until_stored(*nodes: NodeProcess, patience_s: float = 90.0) -> None:
    """Wait until every letter of the nodes is stored; raises `TimeoutError` with what is not."""
    ends_s = time.monotonic() + patience_s
    while True:
        left = [letter for node in nodes for letter in node.ask({"do": "outbox"})["letters"]]
        if not left:
            return
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{len(left)} letters are not stored, the first: {left[0]}")
        time.sleep(0.1)
