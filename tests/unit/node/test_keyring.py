"""The keyring: owner-only, whole or not at all, and never begun anew where a machine has been."""

import os
import stat
from pathlib import Path

import pytest

from agentmbx_node.errors import Failure
from agentmbx_node.keyring import Keyring

SALT = bytes(16)


def test_it_is_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Keyring.open(tmp_path / "keyring", may_make=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "keyring").stat().st_mode) == 0o600


def test_the_same_keys_come_back(tmp_path: Path) -> None:
    first = Keyring.open(tmp_path / "keyring", may_make=True)
    again = Keyring.open(tmp_path / "keyring", may_make=False)
    assert first.identity.public == again.identity.public
    assert first.sealing.public == again.sealing.public
    assert first.pair_key(SALT).public == again.pair_key(SALT).public
    assert first.queue_key(SALT).public == again.queue_key(SALT).public


def test_no_two_of_its_keys_are_the_same(tmp_path: Path) -> None:
    keyring = Keyring.open(tmp_path / "keyring", may_make=True)
    other = b"\1" * 16
    keys = {
        keyring.identity.public,
        keyring.sealing.public,
        keyring.pair_key(SALT).public,
        keyring.pair_key(other).public,
        keyring.queue_key(SALT).public,
        keyring.queue_key(other).public,
    }
    assert len(keys) == 6


def test_a_draft_that_a_crash_left_is_no_keyring(tmp_path: Path) -> None:
    (tmp_path / "keyring.new").write_bytes(b"half")
    keyring = Keyring.open(tmp_path / "keyring", may_make=True)
    assert Keyring.open(tmp_path / "keyring", may_make=False).identity.seed == keyring.identity.seed
    assert not (tmp_path / "keyring.new").exists()


def test_one_that_is_missing_beside_a_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="missing"):
        Keyring.open(tmp_path / "keyring", may_make=False)
    assert not (tmp_path / "keyring").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 1}',
        b'{"version":1,"identity":"AA==","sealing":"","root":""}',
    ],
)
def test_a_damaged_one_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keyring"
    path.write_bytes(content)
    with pytest.raises(Failure) as refused:
        Keyring.open(path, may_make=True)
    assert refused.value.code == "unfit_keyring"
    assert path.read_bytes() == content


def test_one_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keyring"
    Keyring.open(path, may_make=True)
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises(Failure, match="newer"):
        Keyring.open(path, may_make=False)


def test_it_shows_nothing_of_itself(tmp_path: Path) -> None:
    keyring = Keyring.open(tmp_path / "keyring", may_make=True)
    assert repr(keyring) == "Keyring(...)"
