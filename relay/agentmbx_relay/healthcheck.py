"""Asks the relay of this container whether it is ready: the image's HEALTHCHECK runs it.

It takes the address from where the relay takes it: MBX_RELAY_LISTEN, else `listen` in relay.toml,
else the default. A flag of `relay serve` is not seen here, so a container sets it by environment.
Imports nothing of ours and little of the standard library: it runs as long as the relay does, every
few seconds, and its start-up is nearly all of its cost.
"""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LISTEN_DEFAULT: Final = "0.0.0.0:7421"
TIMEOUT_S: Final = 2.0
_LOOPBACK_OF: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound


def find_listen(environment: Mapping[str, str]) -> str:
    """Where the relay listens, as it is written in its settings; raises `OSError`, `ValueError`."""
    text = environment.get("MBX_RELAY_LISTEN")
    path = Path(environment.get("MBX_RELAY_DATA", "."), "relay.toml")
    if text is None and path.exists():
        import tomllib  # noqa: PLC0415 - most relays have no such file

        text = tomllib.loads(path.read_text("utf-8")).get("listen")
    return LISTEN_DEFAULT if text is None else str(text)


def probe_address(listen: str) -> tuple[str, int]:
    """The host and port to ask a relay that listens there; raises `ValueError`.

    Never a name such as `localhost`, which may mean ::1 while the relay listens on IPv4 only.
    """
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return _LOOPBACK_OF.get(host, host), int(port)


def ask(host: str, port: int) -> bool:
    """Whether /readyz answers 200 there; raises `OSError`, as a `TimeoutError` when it is slow."""
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: relay\r\nConnection: close\r\n\r\n")
        with connection.makefile("rb") as answer:
            return answer.readline(64).split(b" ")[:2] == [b"HTTP/1.1", b"200"]


def main() -> int:
    """Print one line for the container's health log; 0 when the relay is ready, else 1."""
    try:
        host, port = probe_address(find_listen(os.environ))
        ready = ask(host, port)
    except (OSError, ValueError) as error:
        sys.stdout.write(f"not ready: {type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write("ready\n" if ready else "not ready\n")
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
