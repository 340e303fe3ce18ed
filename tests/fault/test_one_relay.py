"""One relay on one folder (case S2), and folders whose parts do not belong together."""

import asyncio
import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from agentmbx_protocol.keys import SigningKey, key_text
from agentmbx_relay.sqlite_store import create
from relay_process import AGENTMBX, RelayProcess
from scene import queue_at, stretched_s

REFUSED_S = 3.0
AT_ONCE = 10
FILES = ("relay.key", "relay.db", "relay.db-wal")
PAGE_BYTES = 4096
SERVE = ("--listen", "127.0.0.1:0", "--metrics-listen", "off")


def _serve_command(folder: Path) -> list[str]:
    return [*AGENTMBX, "relay", "serve", "--data", str(folder), *SERVE]


def _serve(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = _serve_command(folder)
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=40)


def _hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name in FILES and (path.stat().st_size or path.name != "relay.db-wal")
    }


async def test_s2_a_second_relay_on_the_same_folder_is_refused_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        async with queue_at(relay) as scene:
            letter = scene.sender.write()
            await scene.wire.deposit(letter)
            (tmp_path / "by-another-name").symlink_to(relay.data)
            took_s = []
            for folder in (relay.data, tmp_path / "by-another-name", relay.data / "." / ""):
                started = time.monotonic()
                ended = await asyncio.to_thread(_serve, folder)
                took_s.append(time.monotonic() - started)
                assert ended.returncode == 3
                assert ended.stdout == ""
                assert f"Another relay runs on {folder}" in ended.stderr
                assert f"process {relay.pid}" in ended.stderr
                assert "Traceback" not in ended.stderr
            assert min(took_s) < stretched_s(REFUSED_S)
            assert await scene.wire.drain(scene.owner) == [letter.frame.data]
        assert relay.stop() == 0


def test_s2_of_ten_that_start_at_once_on_a_new_folder_exactly_one_runs(tmp_path: Path) -> None:
    folder = tmp_path / "relay"
    started = [
        subprocess.Popen(
            _serve_command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(AT_ONCE)
    ]
    try:
        deadline = time.monotonic() + 40
        while sum(process.poll() is not None for process in started) < AT_ONCE - 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running = [process for process in started if process.poll() is None]
        assert len(running) == 1
        assert running[0].stdout is not None
        assert running[0].stdout.readline().startswith("relay ready on ")
        for process in started:
            if process not in running:
                text = process.communicate()[1]
                assert (process.returncode, "Another relay runs on" in text) == (3, True), text
    finally:
        for process in started:
            process.kill()
            process.communicate()


async def test_s2_after_a_kill_the_next_start_works_at_once(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        took_s = []
        for _ in range(3):
            relay.kill()
            started = time.monotonic()
            await asyncio.to_thread(relay.start)
            took_s.append(time.monotonic() - started)
        assert min(took_s) < stretched_s(REFUSED_S)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of two relays that were killed, so that the log is still beside the store."""
    folders = []
    for name in ("one", "another"):
        with RelayProcess(tmp_path_factory.mktemp("killed") / name, "--open") as relay:
            relay.kill()
            folders.append(relay.data)
    return folders


@pytest.fixture
def folder(killed: Sequence[Path], tmp_path: Path) -> Path:
    """A copy of the folder of a relay that was killed."""
    return shutil.copytree(killed[0], tmp_path / "relay")


def _take_store_of_another(folder: Path) -> None:
    (folder / "relay.db-wal").unlink()
    (folder / "relay.db").unlink()
    create(folder / "relay.db", SigningKey.generate().public, clock_ms=1, wall_ms=1)


def _make_newer(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "relay.db")) as connection:
        connection.execute("PRAGMA user_version = 99")


def _make_newer_with_its_log(folder: Path) -> None:
    # A copy is made while the change is only in the log, as after a crash of a newer program.
    with closing(sqlite3.connect(folder / "relay.db")) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA user_version = 99")
        copies = {name: (folder / name).read_bytes() for name in ("relay.db", "relay.db-wal")}
    for name, data in copies.items():
        (folder / name).write_bytes(data)


def _make_foreign(folder: Path) -> None:
    (folder / "relay.db-wal").unlink()
    (folder / "relay.db").unlink()
    with closing(sqlite3.connect(folder / "relay.db")) as connection:
        connection.execute("CREATE TABLE relay (key BLOB)")


def _cut(folder: Path) -> None:
    (folder / "relay.db-wal").unlink()
    data = (folder / "relay.db").read_bytes()
    (folder / "relay.db").write_bytes(data[: len(data) // 2])


def _damage_schema(folder: Path) -> None:
    """As a disk does that flips bits: SQLite's own message about it is no text any more."""
    (folder / "relay.db-wal").unlink()
    data = (folder / "relay.db").read_bytes()
    (folder / "relay.db").write_bytes(data.replace(b"CREATE TABLE", b"CRE\xe9TE TABLE"))


def _damage_pages(folder: Path) -> None:
    (folder / "relay.db-wal").unlink()
    data = (folder / "relay.db").read_bytes()
    noise = random.Random(1).randbytes(len(data) - PAGE_BYTES)
    (folder / "relay.db").write_bytes(data[:PAGE_BYTES] + noise)


def _damage_rows(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "relay.db", isolation_level=None)) as connection:
        connection.execute("INSERT INTO sender (queue, key, listed) VALUES (99, zeroblob(32), 1)")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _fill_with(name: str, data: bytes) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        if name == "relay.db":
            (folder / "relay.db-wal").unlink()
        (folder / name).write_bytes(data)

    return fill


UNFIT = {
    "no-store": (lambda folder: (folder / "relay.db").unlink(), 3, "relay.db is missing"),
    "no-key": (lambda folder: (folder / "relay.key").unlink(), 3, "relay.key is missing"),
    "empty-store": (_fill_with("relay.db", b""), 1, "empty or not a relay's store"),
    "garbage-store": (_fill_with("relay.db", os.urandom(20_000)), 1, "SQLITE_NOTADB"),
    "empty-key": (_fill_with("relay.key", b""), 1, "holds no relay's key"),
    "garbage-key": (_fill_with("relay.key", os.urandom(53)), 1, "holds no relay's key"),
    "other-key": (
        _fill_with("relay.key", key_text(SigningKey.generate().seed).encode()),
        1,
        "belongs to another relay key",
    ),
    "other-store": (_take_store_of_another, 1, "belongs to another relay key"),
    "newer-store": (_make_newer, 1, "newer agentmbx (schema 99"),
    "newer-store-and-log": (_make_newer_with_its_log, 1, "newer agentmbx (schema 99"),
    "foreign-store": (_make_foreign, 1, "not a relay's store"),
    "cut-store": (_cut, 1, "SQLITE_CORRUPT"),
    "damaged-schema-of-the-store": (_damage_schema, 1, "relay.db cannot be used"),
    "damaged-pages-of-the-store": (_damage_pages, 1, "relay.db cannot be used"),
    "damaged-rows-of-the-store": (_damage_rows, 1, "relay.db cannot be used"),
}  # fmt: skip
# An invite is made beside a key and does not ask whose it is, nor what queues there are.
UNFIT_FOR_INVITES = [
    kind
    for kind in UNFIT
    if "store" in kind and kind not in ("other-store", "damaged-rows-of-the-store")
]


@pytest.mark.parametrize("kind", UNFIT)
def test_a_folder_whose_parts_do_not_belong_together_is_refused_and_nothing_in_it_is_changed(
    folder: Path, kind: str
) -> None:
    spoil, code, text = UNFIT[kind]
    spoil(folder)
    _assert_refused_and_unchanged(folder, code, text)


def test_the_store_of_another_relay_with_its_log_is_refused_and_neither_is_changed(
    folder: Path, killed: Sequence[Path]
) -> None:
    for name in ("relay.db", "relay.db-wal"):
        shutil.copy(killed[1] / name, folder / name)
    _assert_refused_and_unchanged(folder, 1, "belongs to another relay key")


def _assert_refused_and_unchanged(folder: Path, code: int, text: str) -> None:
    before = _hashes(folder)
    ended = _serve(folder)
    assert ended.returncode == code, ended
    assert ended.stdout == ""
    assert text in ended.stderr
    assert str(folder) in ended.stderr
    assert "Traceback" not in ended.stderr
    assert _hashes(folder) == before


@pytest.mark.parametrize("kind", UNFIT_FOR_INVITES)
def test_an_invite_for_a_store_that_is_unfit_is_refused_and_nothing_is_changed(
    folder: Path, kind: str
) -> None:
    spoil, _, _ = UNFIT[kind]
    spoil(folder)
    before = _hashes(folder)
    command = [*AGENTMBX, "relay", "invite", "--data", str(folder)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert str(folder) in ended.stderr
    assert "Traceback" not in ended.stderr
    assert _hashes(folder) == before


def _left_after(step: int, folder: Path, key: SigningKey) -> None:
    """What a first start leaves when it is cut off after so many of its steps."""
    text = key_text(key.seed) + "\n"
    steps: list[Callable[[], object]] = [
        (folder / "relay.lock").touch,
        (folder / "relay.db.new").touch,
        lambda: (folder / "relay.db.new-journal").write_bytes(b"half a journal"),
        lambda: _whole_new_store(folder, key),
        (folder / "relay.key.new").touch,
        lambda: (folder / "relay.key.new").write_text(text[:20]),
        lambda: (folder / "relay.key.new").write_text(text),
        lambda: (folder / "relay.db.new").rename(folder / "relay.db"),
        lambda: (folder / "relay.key.new").rename(folder / "relay.key"),
    ]
    folder.mkdir(mode=0o700)
    for act in steps[:step]:
        act()


def _whole_new_store(folder: Path, key: SigningKey) -> None:
    for left in folder.glob("relay.db.new*"):
        left.unlink()
    create(folder / "relay.db.new", key.public, clock_ms=1, wall_ms=1)


@pytest.mark.parametrize("step", range(10))
async def test_a_first_start_that_was_cut_off_at_any_step_is_finished_by_the_next_one(
    tmp_path: Path, step: int
) -> None:
    key = SigningKey.generate()
    _left_after(step, tmp_path / "relay", key)
    with RelayProcess(tmp_path / "relay", "--open") as relay:
        # Once the store has its name the key that it was made for is the relay's.
        assert (relay.relay_key == key.public) == (step >= 8)
        async with queue_at(relay) as scene:
            await scene.wire.deposit(scene.sender.write())
        assert not list(relay.data.glob("*.new*"))
