"""The relay's data folder: its lock, its key, and a first start that no crash can leave half."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from agentmbx_protocol.errors import Malformed
from agentmbx_protocol.keys import SigningKey, key_from_text, key_text

KEY_NAME: Final = "relay.key"
STORE_NAME: Final = "relay.db"
LOCK_NAME: Final = "relay.lock"
_NEW: Final = ".new"
_NETWORK_FILE_SYSTEMS: Final = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "afs", "ceph", "gluster")


class FolderUnfit(Exception):
    """The folder cannot be used; the text says what is wrong and what to do."""


class FolderRefused(FolderUnfit):
    """Using the folder would lose something, or another relay runs on it."""


class DataFolder:
    """An opened folder, locked until `close`; a crash of the process lets go of the lock.

    `warnings` are words about it for the log, such as permissions that were mended.
    """

    def __init__(self, path: Path, key: SigningKey, lock: int, warnings: list[str]) -> None:
        self.path = path
        self.key = key
        self.warnings = warnings
        self._lock = lock

    @property
    def store_path(self) -> Path:
        """Where the store is."""
        return self.path / STORE_NAME

    @classmethod
    def open(cls, path: Path, create_store: Callable[[Path, bytes], None]) -> Self:
        """Lock the folder; make key and store at the first start.

        `create_store` makes a store at a path for a relay's public key. Raises `FolderUnfit`, or
        `FolderRefused` when another relay runs here or only one of key and store is here.
        """
        warnings: list[str] = []
        try:
            _make_folder(path)
            _check_access(path)
            lock = _take_lock(path)
        except OSError as error:
            raise FolderUnfit(_access_text(path, error)) from error
        try:
            _finish_first_start(path, create_store)
            key = read_key(path, warnings)
        except FolderUnfit:
            os.close(lock)
            raise
        except OSError as error:
            os.close(lock)
            raise FolderUnfit(_access_text(path, error)) from error
        kind = _file_system(path)
        if kind.startswith(_NETWORK_FILE_SYSTEMS):
            warnings.append(f"{path} is on a network file system ({kind}): use a local disk")
        return cls(path, key, lock, warnings)

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._lock)


def read_key(path: Path, warnings: list[str]) -> SigningKey:
    """The relay's key in the folder; permissions that are too wide are mended and warned about.

    Raises `FolderUnfit`.
    """
    key_path = path / KEY_NAME
    try:
        handle = os.open(key_path, os.O_RDONLY | os.O_NOFOLLOW)
        # Not "ascii": that codec is loaded when it is used, and `relay invite` acts as the folder's
        # owner by now, who perhaps may not read the interpreter's files.
        with os.fdopen(handle, "r", encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(handle).st_mode)
            if mode & 0o077:
                os.fchmod(handle, 0o600)
                warnings.append(
                    f"{key_path} was open to others (mode {mode:o}) and is closed now; if somebody "
                    "may have read it, set up a new relay"
                )
            return SigningKey(key_from_text(file.read().strip()))
    except OSError as error:
        raise FolderUnfit(_access_text(key_path, error)) from error
    except (Malformed, UnicodeDecodeError) as error:
        raise FolderUnfit(
            f"{key_path} holds no relay's key. Restore it from a backup; nothing was changed."
        ) from error


def _finish_first_start(path: Path, create_store: Callable[[Path, bytes], None]) -> None:
    # The store comes first, then the key, each written whole under another name: wherever a crash
    # falls, the next start either goes on or begins again, and neither ever serves half of it.
    key_path, store_path = path / KEY_NAME, path / STORE_NAME
    new_key, new_store = path / (KEY_NAME + _NEW), path / (STORE_NAME + _NEW)
    has_key, has_store = key_path.exists(), store_path.exists()
    if has_key and not has_store:
        raise FolderRefused(
            f"{store_path} is missing, but the relay's key is here. What the relay held is in that "
            "file: restore it. Nothing was changed. To begin anew, use another folder."
        )
    if has_store and not has_key:
        if not new_key.exists():
            raise FolderRefused(
                f"{key_path} is missing, but the relay's store is here. Restore the key from a "
                "backup: nodes trust only that key. Nothing was changed."
            )
        new_key.rename(key_path)
    elif not has_key:
        for left in (new_key, *path.glob(STORE_NAME + _NEW + "*")):
            left.unlink(missing_ok=True)
        key = SigningKey.generate()
        create_store(new_store, key.public)
        _write_whole(new_key, key_text(key.seed) + "\n")
        new_store.rename(store_path)
        _sync_folder(path)
        new_key.rename(key_path)
    _sync_folder(path)


def _make_folder(path: Path) -> None:
    # With parents=True those above it would be as open as the umask is, and who may write there
    # may put another folder in its place.
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in (*reversed(missing), path):
        folder.mkdir(mode=0o700, exist_ok=True)


def _check_access(path: Path) -> None:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, "read-only")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "not writable")


def _take_lock(path: Path) -> int:
    handle = os.open(path / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise FolderRefused(
            f"Another relay runs on {path} (process {holder}). Stop it, or use another folder."
        ) from error
    except OSError:
        os.close(handle)
        raise
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle


def _write_whole(path: Path, text: str) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(handle)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _access_text(path: Path, error: OSError) -> str:
    uid, gid = os.getuid(), os.getgid()
    shown = os.strerror(error.errno) if error.errno else type(error).__name__
    hint = {
        errno.EACCES: f"This program runs as user {uid}; give it the folder: chown -R {uid}:{gid}",
        errno.EPERM: f"This program runs as user {uid}; give it the folder: chown -R {uid}:{gid}",
        errno.EEXIST: "Name a folder: a file has the name",
        errno.ENOTDIR: "Name a folder: a file is in the way to",
        errno.EROFS: "The file system is mounted read-only; mount it read-write:",
        errno.ENOSPC: "The disk is full; make room on the disk of",
        errno.ENOLCK: "The file system cannot lock files; use a local disk instead of",
        errno.EOPNOTSUPP: "The file system cannot lock files; use a local disk instead of",
    }.get(error.errno or 0, "Check the folder")
    return f"{path} cannot be used: {shown}. {hint} {path}"


def _file_system(path: Path) -> str:
    # The mount point that is the longest parent of the folder says what it is on (proc(5)).
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    folder = str(path.resolve())
    for line in lines:
        fields = line.split()
        mount = fields[4]
        inside = folder == mount or folder.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best) and "-" in fields:
            best, kind = mount, fields[fields.index("-") + 1]
    return kind
