"""The machine's secret keys: one small file, owner-only, written whole or not at all.

Pair keys and queue keys come from a root secret and a salt in the database, so the database holds
no secret.
"""

import hmac
import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

from agentmbx_node.errors import Failure
from agentmbx_protocol.keys import SealingKey, SigningKey

KEYRING_VERSION: Final = 1
_SECRET_BYTES: Final = 32


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    identity: bytes
    sealing: bytes
    root: bytes


class Keyring:
    """The keys of one machine; nothing of them is ever shown or logged."""

    def __init__(self, identity: bytes, sealing: bytes, root: bytes) -> None:
        self.identity = SigningKey(identity)
        self.sealing = SealingKey(sealing)
        self._root = root
        self._made: dict[bytes, SigningKey] = {}

    @classmethod
    def open(cls, path: Path, *, may_make: bool) -> "Keyring":
        """The keyring at `path`; made there when it is missing and `may_make`.

        Raises `Failure` when the file is damaged, or missing where a machine has been.
        """
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_File)
        except FileNotFoundError:
            if not may_make:
                raise _unfit("is missing, though this folder has a database") from None
            kept = _File(KEYRING_VERSION, *(secrets.token_bytes(_SECRET_BYTES) for _ in range(3)))
            _write_whole(path, msgspec.json.encode(kept))
        except (msgspec.DecodeError, OSError) as error:
            raise _unfit("cannot be read") from error
        if kept.version != KEYRING_VERSION:
            raise _unfit("was written by a newer version of agentmbx")
        if {len(kept.identity), len(kept.sealing), len(kept.root)} != {_SECRET_BYTES}:
            raise _unfit("is damaged")
        return cls(kept.identity, kept.sealing, kept.root)

    def pair_key(self, salt: bytes) -> SigningKey:
        """This machine's key for the peer of that salt."""
        return self._derive(b"pair", salt)

    def queue_key(self, salt: bytes) -> SigningKey:
        """The key of this machine's queue of that salt."""
        return self._derive(b"queue", salt)

    def _derive(self, purpose: bytes, salt: bytes) -> SigningKey:
        if (made := self._made.get(purpose + salt)) is None:
            label = b"agentmbx/1 keyring " + purpose + b"\0"
            made = SigningKey(hmac.digest(self._root, label + salt, "sha256"))
            self._made[purpose + salt] = made
        return made

    def __repr__(self) -> str:
        return "Keyring(...)"


def _write_whole(path: Path, data: bytes) -> None:
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unfit(reason: str) -> Failure:
    return Failure(
        "unfit_keyring",
        f"The machine's keyring {reason}. Nothing was changed.",
        "Restore it from a backup; without it no peer knows this machine.",
        1,
    )
