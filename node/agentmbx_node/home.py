"""The node's data folder: where it is, its control socket's path, the lock of its one daemon.

A status line runs this at every prompt, and pathlib alone costs a fifth of that.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import time

from agentmbx_node.errors import Failure

# `typing` costs as much as all of this; type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    AnyPath = str | os.PathLike[str]

LOCK_NAME = "daemon.lock"
LOG_NAME = "daemon.log"
SOCKET_NAME = "control.sock"
# The field of a Unix socket's address (108 bytes, 104 on macOS and BSD) with its final zero.
SOCKET_PATH_BYTES_MAX = 107 if sys.platform == "linux" else 103
_HASH_CHARACTERS = 24
# Who only asks whether the folder is locked holds the lock for an instant.
_LOCK_TRIES = 5
_LOCK_PAUSE_S = 0.05


def home_folder() -> Path:
    """The data folder: MBX_HOME, else this user's data folder; it need not exist."""
    from pathlib import Path  # noqa: PLC0415 - the caller's side does without

    return Path(home_text())


def home_text() -> str:
    """`home_folder` as an absolute path in text, for commands that must start fast."""
    path = os.path.expanduser(os.environ.get("MBX_HOME") or _user_data())
    if path.startswith("~"):
        raise Failure("usage", "No home folder is known.", "Set MBX_HOME to a folder.", 2)
    return os.path.abspath(path)


def socket_path(home: AnyPath) -> str:
    """Where the daemon of this folder listens for commands.

    In the folder, or in the user's runtime folder where that path would be too long for a socket.
    """
    path = os.path.join(os.path.abspath(home), SOCKET_NAME)
    if _fits(path):
        return path
    import hashlib  # noqa: PLC0415 - seldom needed

    name = hashlib.sha256(os.fsencode(os.path.realpath(home))).hexdigest()[:_HASH_CHARACTERS]
    paths = [os.path.join(folder, f"{name}.sock") for folder in _runtime_folders()]
    return next((each for each in paths if _fits(each)), paths[-1])


def make_private_folder(folder: AnyPath) -> None:
    """Make the folder, for its owner only whatever the umask.

    Raises `Failure` for one that another user owns, or that is open to others and holds files that
    are not ours: closing it then could break what else lives there.
    """
    path = os.path.abspath(folder)
    try:
        _make_missing(path)
        found = os.stat(path)
        if not stat.S_ISDIR(found.st_mode):
            raise _unfit(path, "is a file", "Name a folder.")
        if found.st_uid != os.geteuid():
            raise _unfit(
                path,
                f"belongs to user {found.st_uid}, and this is user {os.geteuid()}",
                "Run it as that user, or set MBX_HOME to another folder.",
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            names = os.listdir(path)
            if names and LOCK_NAME not in names and not all(n.endswith(".sock") for n in names):
                step = f"Close it (`chmod 700 {path}`), or set MBX_HOME to another folder."
                raise _unfit(path, "is open to other users", step)
            os.chmod(path, 0o700)
    except OSError as error:
        raise _unfit(path, f"cannot be used: {error.strerror}", "") from error


def lock_holder(home: AnyPath) -> int | None:
    """The process id of the daemon that holds the folder (0: unknown); None when there is none."""
    try:
        handle = os.open(os.path.join(home, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_process(handle)
    except OSError:
        return None
    else:
        return None
    finally:
        os.close(handle)


class HomeLock:
    """The right to be the one daemon of a folder; a crash lets go of it, `close` does too."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, home: AnyPath) -> Self:
        """Make the folder if need be and lock it; raises `Failure` (3 when another daemon runs)."""
        make_private_folder(home)
        path = os.path.join(home, LOCK_NAME)
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            handle = os.open(path, flags, 0o600)
        except OSError as error:
            raise _unfit(path, f"cannot be used: {error.strerror}", "") from error
        try:
            os.fchmod(handle, 0o600)
            _lock(handle, home)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(handle)
            raise _unfit(
                path, f"cannot be locked: {error.strerror}", "Use a local disk."
            ) from error
        except BaseException:
            os.close(handle)
            raise
        return cls(handle)

    def close(self) -> None:
        """Let go of the folder."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def already_running(home: AnyPath, process: int) -> Failure:
    """The refusal of a second daemon on a folder."""
    shown = f" (process {process})" if process else ""
    return Failure(
        "already_running",
        f"Another daemon{shown} runs on {os.fspath(home)}.",
        "`agentmbx down` stops it; another MBX_HOME is another machine.",
        3,
    )


def _lock(handle: int, home: AnyPath) -> None:
    for left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not left:
                raise already_running(home, _read_process(handle)) from error
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


def _read_process(handle: int) -> int:
    text = os.pread(handle, 32, 0).strip()
    return int(text) if text.isdigit() else 0


def _user_data() -> str:
    # What platformdirs.user_data_dir("agentmbx") answers, at none of its time.
    if sys.platform == "darwin":
        return "~/Library/Application Support/agentmbx"
    given = os.environ.get("XDG_DATA_HOME", "")
    return os.path.join(given if os.path.isabs(given) else "~/.local/share", "agentmbx")


def _fits(path: str) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def _runtime_folders() -> list[str]:
    # The caller may run where the variable is not set, as from cron, so the usual place is tried.
    import tempfile  # noqa: PLC0415 - seldom needed

    given, usual = os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.geteuid()}"
    found = [
        os.path.join(folder, "agentmbx")
        for folder in (given, usual)
        if os.path.isabs(folder) and os.path.isdir(folder)
    ]
    ours = f"agentmbx-{os.geteuid()}"
    return [*found, os.path.join(tempfile.gettempdir(), ours), os.path.join("/tmp", ours)]  # noqa: S108 - a private folder is made there


def _make_missing(path: str) -> None:
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            continue
        os.chmod(folder, 0o700)


def _unfit(path: str, reason: str, next_step: str) -> Failure:
    return Failure("unfit_folder", f"{path} {reason}.", next_step, 1)
