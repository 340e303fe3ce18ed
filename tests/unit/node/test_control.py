"""The control socket: requests, events, answers, who may ask, and callers that misbehave."""

import asyncio
import json
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentmbx_node.control import client, server, wire
from agentmbx_node.control.server import ControlServer
from agentmbx_node.errors import Failure
from agentmbx_node.home import HomeLock, socket_path

ANSWER_S = 10.0
Steps = AsyncGenerator[Mapping[str, object], None]
SERVE = """
import asyncio, sys
from agentmbx_node.control.server import ControlServer
from agentmbx_node.home import HomeLock, socket_path
async def handle(request):
    yield {"home": sys.argv[1]}
async def main():
    with HomeLock.take(sys.argv[1]):
        async with ControlServer(socket_path(sys.argv[1]), handle):
            print("ready", flush=True)
            await asyncio.sleep(60)
asyncio.run(main())
"""


async def handle(request: dict[str, Any]) -> Steps:
    """What each test asks for."""
    match request["do"]:
        case "echo":
            yield {"got": request}
        case "count":
            for number in range(3):
                yield {"event": "number", "number": number}
            yield {"count": 3}
        case "refuse":
            raise Failure("not_so", "That is refused.", "Ask for something else.", 3)
        case "break":
            raise KeyError("a secret in an error's text")
        case "many":
            yield {"text": "x" * wire.LINE_BYTES_MAX}
        case "odd":
            yield {"odd": object()}
        case "wait":
            await asyncio.sleep(60)
            yield {}


async def call(home: Path, **request: object) -> dict[str, Any]:
    return await asyncio.to_thread(client.call, home, request, ANSWER_S)


async def failure(home: Path, **request: object) -> Failure:
    with pytest.raises(Failure) as caught:
        await call(home, **request)
    return caught.value


async def say(path: str, data: bytes) -> list[dict[str, Any]]:
    """What the server answers to these very bytes."""
    reader, writer = await asyncio.open_unix_connection(path, limit=wire.LINE_BYTES_MAX)
    writer.write(data)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), ANSWER_S)
    writer.close()
    return [json.loads(line) for line in answer.splitlines()]


def is_socket(home: Path) -> bool:
    return Path(socket_path(home)).is_socket()


def open_to_all(home: Path) -> None:
    """Leave nothing but the kernel's word to stop another user."""
    Path(socket_path(home)).chmod(0o666)
    for folder in (home, *home.parents):
        if folder.parent == folder.parent.parent:
            return
        folder.chmod(0o755)


@pytest.fixture
async def home(tmp_path: Path) -> AsyncGenerator[Path, None]:
    """A folder whose control socket is served by `handle`."""
    with HomeLock.take(tmp_path / "home"):
        async with ControlServer(socket_path(tmp_path / "home"), handle):
            yield tmp_path / "home"


async def test_a_request_gets_its_answer(home: Path) -> None:
    for text in ("plain", "\u2028 \U0001f4ec \x00 \n", "x" * 1_000_000):
        assert await call(home, do="echo", text=text) == {
            "ok": True,
            "got": {"do": "echo", "text": text},
        }


async def test_events_come_before_the_answer(home: Path) -> None:
    steps = await asyncio.to_thread(lambda: list(client.stream(home, {"do": "count"})))
    assert [step.get("number") for step in steps] == [0, 1, 2, None]
    assert steps[-1] == {"ok": True, "count": 3}
    assert await call(home, do="count") == {"ok": True, "count": 3}


async def test_a_failure_crosses_whole(home: Path) -> None:
    error = await failure(home, do="refuse")
    assert (error.code, str(error)) == ("not_so", "That is refused.")
    assert (error.next_step, error.exit_code) == ("Ask for something else.", 3)


@pytest.mark.parametrize("do", ["break", "odd"])
async def test_a_bug_is_logged_and_answered_without_its_text(
    home: Path, do: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = await failure(home, do=do)
    assert (error.code, error.exit_code) == ("bug", 1)
    assert "secret" not in str(error)
    assert "control_failed" in capsys.readouterr().out
    assert (await call(home, do="count"))["ok"]


async def test_a_handler_without_an_answer_is_a_bug(home: Path) -> None:
    assert (await failure(home, do="nothing")).code == "bug"


async def test_an_answer_that_is_too_long_says_so(home: Path) -> None:
    assert (await failure(home, do="many")).code == "too_large"


@pytest.mark.parametrize(
    "data",
    [
        b"\n", b"null\n", b"[]\n", b"{}\n", b'{"do": 1}\n', b'{"do": "echo"\n', b"GET / HTTP/1.1\n",
        b'{"do": "echo", "text": "\\ud800"}\n', b'{"do": "\xff"}\n', b'{"do": "echo"}', b"",
        b"[" * 100_000 + b"\n", b'{"do":' * 100_000 + b"\n", b"x" * (wire.LINE_BYTES_MAX + 2),
    ],
    ids=range(14),
)  # fmt: skip
async def test_what_is_no_request_is_a_usage_error(home: Path, data: bytes) -> None:
    try:
        (answer,) = await say(socket_path(home), data)
    except ConnectionError:
        # The rest of what is far too long was not read; the answer was cut off with it.
        assert len(data) > wire.LINE_BYTES_MAX
    else:
        assert (answer["ok"], answer["code"], answer["exit_code"]) == (False, "usage", 2)
    assert (await call(home, do="count"))["ok"]


async def test_a_caller_that_says_nothing_is_let_go(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    reader, writer = await asyncio.open_unix_connection(socket_path(home))
    assert b"in time" in await asyncio.wait_for(reader.read(), ANSWER_S)
    writer.close()


async def test_too_many_callers_are_refused_and_the_others_answered(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CALLERS_MAX", 2)
    waiting = [await asyncio.open_unix_connection(socket_path(home)) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert (await failure(home, do="count")).code == "busy"
    for _, writer in waiting:
        writer.close()
    await asyncio.sleep(0.05)
    assert (await call(home, do="count"))["ok"]


async def test_a_caller_that_vanishes_cancels_its_request(tmp_path: Path) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def hold(_request: dict[str, Any]) -> Steps:
        try:
            yield {"event": "began"}
            began.set()
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with ControlServer(tmp_path / "c.sock", hold):
        _, writer = await asyncio.open_unix_connection(tmp_path / "c.sock")
        writer.write(b'{"do": "hold"}\n')
        await asyncio.wait_for(began.wait(), ANSWER_S)
        assert not ended.is_set()
        writer.close()
        await asyncio.wait_for(ended.wait(), ANSWER_S)


async def test_a_caller_that_leaves_its_stream_ends_the_request(home: Path) -> None:
    def first() -> dict[str, Any]:
        steps = client.stream(home, {"do": "count"})
        return next(iter(steps))

    assert (await asyncio.to_thread(first))["event"] == "number"
    assert (await call(home, do="count"))["ok"]


async def test_closing_cuts_the_line_of_who_waits_and_takes_the_socket_away(
    tmp_path: Path,
) -> None:
    path = socket_path(tmp_path)
    async with ControlServer(path, handle):
        waiting = asyncio.create_task(failure(tmp_path, do="wait"))
        await asyncio.sleep(0.1)
    error = await waiting
    assert (error.code, error.exit_code) == ("unreachable", 4)
    assert not is_socket(tmp_path)


async def test_an_answer_given_while_closing_still_arrives(tmp_path: Path) -> None:
    stopping = asyncio.Event()

    async def stop(_request: dict[str, Any]) -> Steps:
        stopping.set()
        await asyncio.sleep(0.05)
        yield {"stopped": True}

    async with ControlServer(socket_path(tmp_path), stop):
        waiting = asyncio.create_task(call(tmp_path, do="stop"))
        await stopping.wait()
    assert (await waiting)["stopped"]


async def test_a_daemon_that_does_not_answer_in_time_is_unreachable(home: Path) -> None:
    def ask() -> None:
        client.call(home, {"do": "wait"}, 0.1)

    with pytest.raises(Failure, match="in time") as caught:
        await asyncio.to_thread(ask)
    assert caught.value.exit_code == 4


def test_without_a_daemon_the_failure_says_what_starts_it(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(Failure, match="No daemon runs") as caught:
            client.call(folder, {"do": "status"}, ANSWER_S)
        assert (caught.value.code, caught.value.exit_code) == ("unreachable", 4)
        assert "agentmbx up --detach" in caught.value.next_step


def test_a_daemon_that_starts_is_told_from_none(tmp_path: Path) -> None:
    with HomeLock.take(tmp_path), pytest.raises(Failure, match="starts or ends") as caught:
        client.call(tmp_path, {"do": "status"}, ANSWER_S)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("text", ["\udcff", "x\ud800"])
def test_text_that_is_no_unicode_is_a_usage_error_before_anything_is_sent(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(Failure) as caught:
        client.call(tmp_path, {"do": "send", "subject": text}, ANSWER_S)
    assert (caught.value.code, caught.value.exit_code) == ("usage", 2)


@pytest.mark.parametrize(
    "answer",
    [b"garbage\n", b"[]\n", b"{}\n", b"\xff\n", b"{", b"", b'{"ok": false}\n', b'{"ok": 1}\n'],
)
def test_an_answer_that_is_none_is_a_failure(tmp_path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path(tmp_path))
        listener.listen()
        steps = client.stream(tmp_path, {"do": "status"})

        def serve() -> None:
            plug, _ = listener.accept()
            with plug:
                plug.recv(4096)
                plug.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Failure) as caught:
            next(iter(steps))
        thread.join()
    assert caught.value.exit_code in (1, 4)


async def test_the_socket_is_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with ControlServer(tmp_path / "home" / "c.sock", handle):
            for path, mode in ((tmp_path / "home", 0o700), (tmp_path / "home" / "c.sock", 0o600)):
                assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "c.sock").write_text("precious")
    with pytest.raises(Failure, match="cannot be made"):
        await ControlServer(tmp_path / "c.sock", handle).start()
    assert (tmp_path / "c.sock").read_text() == "precious"


async def test_the_socket_that_a_killed_daemon_left_is_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, str(home), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    assert (await call(home, do="any"))["home"] == str(home)
    with pytest.raises(Failure) as caught:
        HomeLock.take(home)
    assert caught.value.exit_code == 3
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert is_socket(home)
    assert (await failure(home, do="any")).code == "unreachable"
    with HomeLock.take(home):
        async with ControlServer(socket_path(home), handle):
            assert (await call(home, do="count"))["ok"]


async def test_a_folder_with_a_long_path_has_a_socket_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="mbx", dir="/tmp"))
    home = tmp_path / ("deep" * 40)
    with HomeLock.take(home):
        async with ControlServer(socket_path(home), handle):
            assert (await call(home, do="count"))["ok"]
            folder = Path(socket_path(home)).parent
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    folder.parent.rmdir()


async def test_another_user_is_refused_by_both_ends(home: Path) -> None:
    """S1, S2: also where the file system would let them in."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    path = socket_path(home)
    open_to_all(home)
    script = (
        "import os, socket, sys; os.setgid(12345); os.setuid(12345)\n"
        "plug = socket.socket(socket.AF_UNIX); plug.connect(sys.argv[1])\n"
        "try: plug.sendall(b'{}\\n')\n"
        "except BrokenPipeError: pass\n"
        "print(plug.recv(4096).decode())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, path, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), ANSWER_S)
    answer = json.loads(out)
    assert (answer["ok"], answer["code"], answer["exit_code"]) == (False, "refused", 3)


def test_a_caller_refuses_the_daemon_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path(tmp_path))
        listener.listen()
        monkeypatch.setattr(client, "peer_user", lambda _plug: os.geteuid() + 1)
        with pytest.raises(Failure, match="another user") as caught:
            client.call(tmp_path, {"do": "send", "body": "secret"}, ANSWER_S)
        assert caught.value.exit_code == 3
        plug, _ = listener.accept()
        with plug:
            assert plug.recv(4096) == b""


async def test_a_handler_that_is_left_early_is_closed(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def two_answers(_request: dict[str, Any]) -> Steps:
        try:
            yield {"first": True}
            yield {"second": True}
        finally:
            closed.set()

    async with ControlServer(socket_path(tmp_path), two_answers):
        assert "second" not in await call(tmp_path, do="any")
    assert closed.is_set()
