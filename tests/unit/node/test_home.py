"""The data folder: where it is, who may use it, and that one daemon holds it (C1, C3)."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentmbx_node import home
from agentmbx_node.errors import Failure
from agentmbx_node.home import HomeLock, home_folder, lock_holder, make_private_folder, socket_path

HOLD = (
    "import sys, time; from agentmbx_node.home import HomeLock; "
    "lock = HomeLock.take(sys.argv[1]); print('held', flush=True); time.sleep(60)"
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder `home`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "home")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_mbx_home_is_the_folder_else_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setattr(sys, "platform", "linux")
    for value in ("/data", "~/data", "data"):
        monkeypatch.setenv("MBX_HOME", value)
        assert home_folder() == Path(value).expanduser().absolute()
    monkeypatch.setenv("MBX_HOME", "")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert home_folder() == Path("/home/x/.local/share/agentmbx")
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    assert home_folder() == Path("/home/x/.local/share/agentmbx")
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert home_folder() == Path("/xdg/agentmbx")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert home_folder() == Path("/home/x/Library/Application Support/agentmbx")


def test_the_socket_is_in_the_folder_or_by_its_hash_where_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    short = Path(tempfile.mkdtemp(prefix="mbx", dir="/tmp"))
    request.addfinalizer(short.rmdir)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    room = home.SOCKET_PATH_BYTES_MAX - len("//control.sock")
    assert socket_path("/" + "x" * room) == f"/{'x' * room}/control.sock"
    first, second = (socket_path("/" + letter * (room + 1)) for letter in "xy")
    assert first != second
    for path in (first, second):
        assert Path(path).parent == short / "agentmbx"
    assert len(os.fsencode(socket_path("/" + "\u00fc" * 90))) <= home.SOCKET_PATH_BYTES_MAX
    (tmp_path / ("y" * 100)).mkdir()
    usual = Path(f"/run/user/{os.geteuid()}")
    expected = usual / "agentmbx" if usual.is_dir() else Path(f"/tmp/agentmbx-{os.geteuid()}")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/" + "t" * 100)
    for unfit in (tmp_path / "none", tmp_path / ("y" * 100)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(unfit))
        assert Path(socket_path("/" + "x" * 200)).parent == expected


@pytest.mark.usefixtures("umask")
def test_the_folder_and_those_above_are_the_owners_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "home"
    with HomeLock.take(folder):
        assert mode(folder.parent) == 0o700
        assert mode(folder) == 0o700
        assert mode(folder / home.LOCK_NAME) == 0o600


def test_a_folder_of_ours_that_was_open_is_closed_and_one_of_other_files_is_refused(
    tmp_path: Path,
) -> None:
    empty, ours, foreign = (tmp_path / name for name in ("empty", "ours", "foreign"))
    for folder in (empty, ours, foreign):
        folder.mkdir()
        folder.chmod(0o755)
    (ours / home.LOCK_NAME).touch()
    (foreign / "notes.txt").touch()
    make_private_folder(empty)
    make_private_folder(ours)
    assert mode(empty) == mode(ours) == 0o700
    with pytest.raises(Failure, match="is open to other users") as caught:
        make_private_folder(foreign)
    assert (caught.value.code, caught.value.exit_code) == ("unfit_folder", 1)
    assert mode(foreign) == 0o755


def test_a_file_or_the_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(Failure) as caught:
            HomeLock.take(path)
        assert caught.value.code == "unfit_folder"
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(Failure, match="belongs to user 12345"):
        HomeLock.take(folder)


def test_one_daemon_holds_a_folder_and_the_second_is_refused(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    folder = tmp_path / "home"
    assert lock_holder(folder) == holder.pid
    with pytest.raises(Failure, match=f"process {holder.pid}") as caught:
        HomeLock.take(folder)
    assert (caught.value.code, caught.value.exit_code) == ("already_running", 3)
    HomeLock.take(tmp_path / "another").close()


def test_a_crash_lets_go_of_the_folder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock_holder(tmp_path / "home") is None
    with HomeLock.take(tmp_path / "home"):
        assert lock_holder(tmp_path / "home") == os.getpid()
    assert lock_holder(tmp_path / "home") is None


def test_asking_who_holds_the_folder_makes_and_keeps_nothing(tmp_path: Path) -> None:
    assert lock_holder(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()
    HomeLock.take(tmp_path / "home").close()
    for _ in range(3):
        assert lock_holder(tmp_path / "home") is None
    HomeLock.take(tmp_path / "home").close()
