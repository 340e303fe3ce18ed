"""A real relay process for tests, the demo and the benches; killed by pid, never by name."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from agentmbx_protocol.keys import key_from_text

READY = re.compile(r"relay ready on (http://\S+) with key (\S+)")
START_S = 20.0
AGENTMBX = [sys.executable, "-c", "from agentmbx_node.cli import main; main()"]


class RelayProcess:
    """`agentmbx relay serve` on free loopback ports; restart it on the same folder with `start`.

    `prefix` is a command that runs it, as the same process.
    """

    def __init__(
        self,
        data: Path,
        *flags: str,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.data = data
        self.log_path = data.with_name(data.name + ".log")
        self._flags = flags
        self._environment = environment or {}
        self._prefix = prefix
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self.relay_key = b""

    def start(self, *, listen: str = "127.0.0.1:0") -> Self:
        """Start it and wait until it says that it is ready; raises `RuntimeError` if it ends."""
        command = [*self._prefix, *AGENTMBX, "relay", "serve", "--data", str(self.data)]
        command += ["--listen", listen]
        if not any(flag.startswith("--metrics-listen") for flag in self._flags):
            command += ["--metrics-listen", "off"]
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | self._environment,
            )
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        match = READY.match(self._process.stdout.readline())
        if match is None:
            self._process.wait(START_S)
            raise RuntimeError(f"the relay did not start: {self.log_path.read_text()}")
        self.url, self.relay_key = match[1] + "/", key_from_text(match[2])
        return self

    @property
    def pid(self) -> int:
        """The process id."""
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.pid

    def restart(self) -> Self:
        """Start it again on the same port."""
        return self.start(listen=self.url.removeprefix("http://").rstrip("/"))

    def kill(self) -> None:
        """SIGKILL, as a power cut would stop the process."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 15.0) -> int:
        """Wait until it has ended; the exit code."""
        if self._process is None:
            raise RuntimeError("not started")
        code = self._process.wait(timeout_s)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None
        return code

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """All that it has logged, over restarts."""
        return self.log_path.read_text()

    def invite(self, *flags: str) -> str:
        """The URL#KEY.INVITE of a new invite."""
        command = [*AGENTMBX, "relay", "invite", "--data", str(self.data), *flags]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return result.stdout.split()[-1]

    def __enter__(self) -> Self:
        return self if self._process else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self.wait()
