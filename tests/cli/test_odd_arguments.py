"""Arguments that no test of a happy day has: one clear line and an exit code, never a traceback."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relay_process import AGENTMBX

ENDS_S = 30
Ended = subprocess.CompletedProcess[bytes]


def _run(*arguments: str | bytes) -> Ended:
    ended = subprocess.run(
        [*AGENTMBX, *arguments], check=False, capture_output=True, timeout=ENDS_S
    )
    assert b"Traceback" not in ended.stderr, ended.stderr
    return ended


@pytest.mark.parametrize(
    ("listen", "exit_code", "text"),
    [
        ("no-such-host.invalid:0", 1, b"cannot listen on no-such-host.invalid:0"),
        ("a..b:0", 1, b"cannot listen on a..b:0"),
        ("203.0.113.7:0", 1, b"cannot listen on 203.0.113.7:0"),
        ("[127.0.0.1]:0", 2, b"listen = '[127.0.0.1]:0' (flag --listen)"),
        ("[x:0", 2, b"listen = '[x:0' (flag --listen)"),
        ("a b:0", 2, b"listen = 'a b:0' (flag --listen)"),
        ("b\u00fccher:0", 2, b"(flag --listen)"),
        (" 127.0.0.1:0", 2, b"(flag --listen)"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_named(
    tmp_path: Path, listen: str, exit_code: int, text: bytes
) -> None:
    ended = _run(
        "relay", "serve", "--data", str(tmp_path / "r"), "--listen", listen,
        "--metrics-listen", "off",
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (exit_code, b"")
    assert text in ended.stderr


@pytest.mark.parametrize(
    "url", ["http://h:99999/", "http://:secret@h/", "http://@h/", "http://h:x/"]
)
def test_a_public_url_with_an_odd_port_or_a_password_is_a_usage_error(
    tmp_path: Path, url: str
) -> None:
    for command in (["serve"], ["invite"]):
        ended = _run("relay", *command, "--data", str(tmp_path), "--public-url", url)
        assert (ended.returncode, ended.stdout) == (2, b"")


@pytest.mark.parametrize("command", ["serve", "invite", "probe"])
def test_bytes_that_are_no_text_are_shown_escaped(tmp_path: Path, command: str) -> None:
    path = os.fsencode(tmp_path / "file") + b"\xff"
    Path(os.fsdecode(path)).write_bytes(b"")
    arguments = [path] if command == "probe" else ["--data", path]
    ended = _run("relay", command, *arguments)
    assert ended.returncode in (1, 2)
    ended.stderr.decode("utf-8")


def test_a_reader_that_goes_away_early_is_no_fault() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ended = subprocess.run(
            [*AGENTMBX, "relay", "serve", "--help"],
            check=False,
            stdout=write_end,
            stderr=subprocess.PIPE,
            timeout=ENDS_S,
        )
    finally:
        os.close(write_end)
    assert ended.returncode == 1
    assert b"Traceback" not in ended.stderr


@contextmanager
def _server(answer: bytes | None) -> Iterator[str]:
    """A server that gives each connection these bytes, or none and waits."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    plug, _ = listener.accept()
                except OSError:
                    return
                held.append(plug)
                if answer is not None:
                    plug.recv(65536)
                    plug.sendall(answer)
                    plug.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(ENDS_S)
            for plug in held:
                plug.close()


@pytest.mark.parametrize(
    "answer",
    [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n<html>hi</html>",
     b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"],
)  # fmt: skip
def test_a_probe_of_what_is_no_relay_exits_with_4_and_one_json_object(answer: bytes) -> None:
    with _server(answer) as url:
        ended = _run("relay", "probe", url, "--json")
    assert (ended.returncode, ended.stderr) == (4, b"")
    document = json.loads(ended.stdout)
    assert (document["ok"], document["code"]) == (False, "unreachable")
    assert b"html" not in ended.stdout


def test_ctrl_c_ends_a_probe_with_130_and_no_traceback() -> None:
    with _server(None) as url:
        process = subprocess.Popen(
            [*AGENTMBX, "relay", "probe", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            _wait_until_connected(process.pid)
            process.send_signal(signal.SIGINT)
            said, noise = process.communicate(timeout=ENDS_S)
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, said) == (130, b"")
    assert b"Traceback" not in noise


def _wait_until_connected(pid: int) -> None:
    deadline = time.monotonic() + ENDS_S
    while time.monotonic() < deadline:
        sockets = [
            link
            for link in Path(f"/proc/{pid}/fd").iterdir()
            if link.is_symlink() and "socket" in _target(link)
        ]
        # Two belong to the event loop itself.
        if len(sockets) > 2:
            return
        time.sleep(0.01)
    raise AssertionError("the probe never connected")


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""
