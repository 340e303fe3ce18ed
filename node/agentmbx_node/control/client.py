"""The caller's side of the control socket: one request, its events, its answer.

Commands that run at every prompt import this, so it stands on the standard library alone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator

from agentmbx_node.control.wire import LINE_BYTES_MAX, peer_user
from agentmbx_node.errors import Failure
from agentmbx_node.home import lock_holder, socket_path

# `typing` costs as much as all of this; type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agentmbx_node.home import AnyPath

CONNECT_S = 5.0
_CHUNK_BYTES = 64 * 1024


def call(home: AnyPath, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The daemon's answer to `request`, its events passed over; raises `Failure`."""
    answer: dict[str, Any] = {}
    for answer in _exchange(home, request, timeout_s):  # noqa: B007 - the last one counts
        pass
    return answer


def stream(home: AnyPath, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The daemon's events on `request` as they happen, then its answer; raises `Failure`.

    It waits as long as the daemon does; leaving the iterator ends the request.
    """
    return _exchange(home, request, None)


def _exchange(
    home: AnyPath, request: dict[str, Any], timeout_s: float | None
) -> Iterator[dict[str, Any]]:
    line = _request_line(request)
    ends_s = None if timeout_s is None else time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plug:
        plug.settimeout(CONNECT_S if timeout_s is None else timeout_s)
        try:
            _connect(plug, home)
            _send(plug, line)
            for text in _lines(plug, ends_s):
                answer = _read_answer(text)
                yield answer
                if "event" not in answer:
                    return
        except TimeoutError as error:
            raise _silent(home, "The daemon does not answer in time.") from error
        except OSError as error:
            raise _silent(home, f"The daemon hung up: {error.strerror}.") from error
    raise _silent(home, "The daemon stopped before it answered.")


def _connect(plug: socket.socket, home: AnyPath) -> None:
    try:
        plug.connect(socket_path(home))
        user = peer_user(plug)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        raise _unreachable(home) from error
    except PermissionError as error:
        raise _foreign(home) from error
    if user != os.geteuid():
        raise _foreign(home)


def _send(plug: socket.socket, line: bytes) -> None:
    try:
        plug.sendall(line)
    except (BrokenPipeError, ConnectionResetError):
        # The daemon did not read on; what it answered says why.
        return


def _lines(plug: socket.socket, ends_s: float | None) -> Iterator[bytes]:
    waiting = bytearray()
    while True:
        if ends_s is None:
            plug.settimeout(None)
        else:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            plug.settimeout(left_s)
        try:
            chunk = plug.recv(_CHUNK_BYTES)
        except ConnectionResetError:
            return
        if not chunk:
            return
        searched = len(waiting)
        waiting += chunk
        while (end := waiting.find(b"\n", searched)) >= 0:
            yield bytes(waiting[:end])
            del waiting[: end + 1]
            searched = 0
        if len(waiting) > LINE_BYTES_MAX:
            raise Failure("too_large", "The daemon's answer is too long.", "", 1)


def _request_line(request: dict[str, Any]) -> bytes:
    try:
        line = json.dumps(request, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise Failure("usage", "What was given is no valid UTF-8 text.", "", 2) from error
    if len(line) > LINE_BYTES_MAX:
        raise Failure("usage", "What was given is too long.", "", 2)
    return line


def _read_answer(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not ("event" in answer or "ok" in answer):
        step = "Is it of another version? `agentmbx down`, then `agentmbx up --detach`."
        raise Failure("failed", "The daemon's answer is not understood.", step, 1)
    if "event" not in answer and answer["ok"] is not True:
        raise Failure(
            str(answer.get("code", "failed")),
            str(answer.get("message", "The daemon failed.")),
            str(answer.get("next", "")),
            int(answer.get("exit_code", 1)),
        )
    return answer


def _unreachable(home: AnyPath) -> Failure:
    process = lock_holder(home)
    if process is not None:
        return _silent(home, f"A daemon (process {process}) starts or ends on {os.fspath(home)}.")
    text = f"No daemon runs on {os.fspath(home)}."
    return Failure("unreachable", text, "`agentmbx up --detach` starts it.", 4)


def _silent(home: AnyPath, text: str) -> Failure:
    step = f"Try again; else see {os.fspath(home)}/daemon.log."
    return Failure("unreachable", text, step, 4)


def _foreign(home: AnyPath) -> Failure:
    text = f"The daemon of {os.fspath(home)} belongs to another user."
    return Failure("refused", text, "Run this as that user, or set MBX_HOME.", 3)
