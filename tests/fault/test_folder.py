"""Data folders that are unfit (case F2), and who may read what is in them (case A7)."""

import asyncio
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import relay_process
from agentmbx_protocol.envelope import parse_envelope
from relay_process import AGENTMBX, RelayProcess
from scene import queue_at, stretched_s
from tracing import strace_path

ENDS_S = 5.0
NOBODY = 65534
# The interpreter may be where only root can read, so all is imported first.
BECOME_NOBODY = f"""
import importlib.resources, os, pkgutil, uvloop, agentmbx_node, agentmbx_protocol, agentmbx_relay
for room in agentmbx_protocol, agentmbx_relay, agentmbx_node:
    for found in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(found.name)
(importlib.resources.files("agentmbx_relay") / "schema" / "0001.sql").read_text()
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
from agentmbx_node.cli import main; main()
"""
AS_NOBODY = [sys.executable, "-c", BECOME_NOBODY]
# For a program that does more than refuse: another user who may read, but not write, everything.
AS_READER = [
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
    *AGENTMBX,
]
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
OPENED_NEW = re.compile(r'openat\(\S+, "([^"]+)", \S*O_CREAT\S*, (0\d+)\)')
MADE_FOLDER = re.compile(r'mkdir\("([^"]+)", (0\d+)\)')


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that takes nothing away, for this process and those that it starts."""
    before = os.umask(0)
    yield
    os.umask(before)


def _agentmbx(
    *arguments: str, command: Sequence[str] = AGENTMBX
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*command, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=stretched_s(ENDS_S),
    )


def _serve(
    folder: Path, *, command: Sequence[str] = AGENTMBX
) -> "subprocess.CompletedProcess[str]":
    flags = ["--listen", "127.0.0.1:0", "--metrics-listen", "off"]
    return _agentmbx("relay", "serve", "--data", str(folder), *flags, command=command)


def _need_reader() -> None:
    if subprocess.run([*AS_READER, "--version"], check=False, capture_output=True).returncode:
        pytest.skip("no other user can be given the right to read this interpreter here")


def _let_through(folder: Path) -> None:
    """Let another user reach `folder`, as temporary folders of pytest do not."""
    for parent in (folder, *folder.parents):
        parent.chmod(stat.S_IMODE(parent.stat().st_mode) | 0o011)


def _modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder.parent)): stat.S_IMODE(path.stat().st_mode)
        for path in (folder, *folder.rglob("*"))
    }


def _folders(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()]


def _assert_clear(ended: "subprocess.CompletedProcess[str]", *words: str) -> None:
    assert ended.returncode == 1, ended
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    for word in words:
        assert word in ended.stderr, ended.stderr


@NEEDS_ROOT
def test_a_folder_on_a_read_only_mount_is_refused_with_its_path_and_the_reason(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "agentmbx-test", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        (disk / "there").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for folder in (disk / "there", disk / "new" / "deeper"):
            _assert_clear(_serve(folder), str(folder), "read-only")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@NEEDS_ROOT
def test_another_users_folder_is_refused_with_the_user_that_is_needed(tmp_path: Path) -> None:
    _let_through(tmp_path)
    folder = tmp_path / "of-root"
    folder.mkdir(mode=0o700)
    _assert_clear(
        _serve(folder, command=AS_NOBODY), str(folder), f"chown -R {NOBODY}:{NOBODY} {folder}"
    )
    folder.chmod(0o755)
    _assert_clear(
        _serve(folder, command=AS_NOBODY), str(folder), f"chown -R {NOBODY}:{NOBODY} {folder}"
    )
    assert list(folder.iterdir()) == []


@NEEDS_ROOT
def test_an_invite_for_another_users_relay_is_refused_with_its_path(tmp_path: Path) -> None:
    _let_through(tmp_path)
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        ended = _agentmbx("relay", "invite", "--data", str(relay.data), command=AS_NOBODY)
        _assert_clear(ended, str(relay.data))


@NEEDS_ROOT
async def test_root_making_invites_leaves_no_file_that_the_relays_user_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _need_reader()
    _let_through(tmp_path)
    folder = tmp_path / "relay"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    relay = RelayProcess(folder)
    with monkeypatch.context() as patch:
        patch.setattr(relay_process, "AGENTMBX", AS_READER)
        relay.start()
    with relay:
        line = relay.invite()
        async with queue_at(relay, line=line) as scene:
            await scene.wire.deposit(scene.sender.write())
        assert relay.stop() == 0
        relay.invite()
        assert {path.stat().st_uid for path in folder.rglob("*")} == {NOBODY}
        with monkeypatch.context() as patch:
            patch.setattr(relay_process, "AGENTMBX", AS_READER)
            relay.restart()


@pytest.mark.parametrize("below", [(), ("deeper",)], ids=["itself", "as-a-parent"])
def test_a_file_in_place_of_the_folder_is_refused_with_its_path(
    tmp_path: Path, below: Sequence[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("a file")
    folder = file.joinpath(*below)
    _assert_clear(_serve(folder), str(folder), "Name a folder")
    _assert_clear(_agentmbx("relay", "invite", "--data", str(folder)), str(folder))
    assert file.read_text() == "a file"


def test_a_folder_that_cannot_be_listened_for_names_the_address_and_no_traceback(
    tmp_path: Path,
) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        address = relay.url.removeprefix("http://").rstrip("/")
        ended = _agentmbx(
            "relay", "serve", "--data", str(tmp_path / "other"), "--listen", address,
            "--metrics-listen", "off",
        )  # fmt: skip
        _assert_clear(ended, "cannot listen", "in use", "--listen")


@pytest.mark.parametrize(
    "name",
    ["with spaces and 'quotes'", "Grüße-日本", "100%?#&=;", "new\nline"],
    ids=["spaces", "non-ascii", "url-signs", "newline"],
)
async def test_a_folder_of_any_name_works_from_start_to_invite_to_restart(
    tmp_path: Path, name: str
) -> None:
    relay = RelayProcess(tmp_path / name / "relay")
    relay.log_path = tmp_path / "log"
    with relay:
        async with queue_at(relay, line=relay.invite()) as scene:
            letter = scene.sender.write()
            await scene.wire.deposit(letter)
            assert relay.stop() == 0
            await asyncio.to_thread(relay.restart)
            assert await scene.wire.drain(scene.owner) == [letter.frame.data]
    assert _folders(tmp_path) == [name]


async def test_with_an_open_umask_every_file_is_the_owners_alone_and_so_is_each_new_folder(
    tmp_path: Path, open_umask: None
) -> None:
    del open_umask
    top = tmp_path / "made" / "by" / "us"
    relay = RelayProcess(top / "relay")
    relay.log_path = tmp_path / "log"
    with relay:
        line = relay.invite()
        async with queue_at(relay, line=line) as scene:
            await scene.wire.deposit(*(scene.sender.write() for _ in range(64)))
            collected = await scene.wire.collect(scene.owner)
            acks = [parse_envelope(each).digest for each in collected.envelopes]
            await scene.wire.collect(scene.owner, acks[:32])
            assert relay.stop() == 0
            await asyncio.to_thread(relay.restart)
            await scene.wire.drain(scene.owner)
        modes = _modes(tmp_path / "made")
        folders = {name for name in modes if (tmp_path / name).is_dir()}
        assert {"made/by/us/relay/relay.key", "made/by/us/relay/relay.db-wal"} <= set(modes)
        assert {name: modes[name] for name in folders} == dict.fromkeys(folders, 0o700)
        files = set(modes) - folders
        assert {name: modes[name] for name in files} == dict.fromkeys(files, 0o600)


def test_no_file_of_the_first_start_is_open_to_others_even_for_a_moment(
    tmp_path: Path, open_umask: None
) -> None:
    del open_umask
    output = tmp_path / "trace"
    folder = tmp_path / "a" / "relay"
    program = (
        "import os, signal, sys\n"
        "from agentmbx_node.cli import main\n"
        f"sys.argv[1:] = ['relay', 'serve', '--data', {str(folder)!r}, '--listen', '127.0.0.1:0',"
        " '--metrics-listen', 'off']\n"
        "said = sys.stdout.write\n"
        "sys.stdout.write = lambda text: (said(text), os.kill(os.getpid(), signal.SIGTERM))\n"
        "main()\n"
    )
    trace = [strace_path(), "-f", "-o", str(output), "-e", "trace=mkdir,openat,open,creat,mkdirat"]
    ended = subprocess.run(
        [*trace, sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 0, ended
    text = output.read_text()
    below = str(tmp_path / "a")
    made = {path: mode for path, mode in MADE_FOLDER.findall(text) if path.startswith(below)}
    opened = OPENED_NEW.findall(text)
    first = {path: mode for path, mode in reversed(opened) if path.startswith(below)}
    assert made == {below: "0700", str(folder): "0700"}
    assert {Path(path).name for path in first} >= {
        "relay.key.new", "relay.db.new", "relay.lock", "relay.db-wal", "relay.db-shm", "reserve",
    }  # fmt: skip
    assert set(first.values()) == {"0600"}


async def test_a_key_that_others_may_read_is_closed_and_that_is_said(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay") as relay:
        assert relay.stop() == 0
        key = relay.data / "relay.key"
        key.chmod(0o644)
        relay.log_path.write_text("")
        relay.restart()
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert "relay.key was open to others (mode 644)" in relay.log()
