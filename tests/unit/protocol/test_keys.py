import pytest

from agentmbx_protocol import keys
from agentmbx_protocol.errors import BadSignature, CannotOpen, Malformed
from vector_parts import crooked_keys, typical
from vector_parts.frame_cases import BAD_SIGNING_KEYS

BAD_SEALING_KEYS = {**crooked_keys.SEALING_TOO_LARGE, **crooked_keys.SEALING_LOW_ORDER}
# RFC 8032, section 7.1, test 2.
RFC_SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
RFC_PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
RFC_SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_a_signing_key_makes_the_signature_of_rfc_8032() -> None:
    key = keys.SigningKey(RFC_SEED)
    assert key.public == RFC_PUBLIC
    assert key.sign(b"\x72") == RFC_SIGNATURE
    keys.verify(RFC_PUBLIC, b"\x72", RFC_SIGNATURE)


def test_a_signature_of_another_message_is_bad() -> None:
    with pytest.raises(BadSignature):
        keys.verify(RFC_PUBLIC, b"\x73", RFC_SIGNATURE)


def test_a_signature_by_another_key_is_bad() -> None:
    with pytest.raises(BadSignature):
        keys.verify(typical.PAIR.public, b"\x72", RFC_SIGNATURE)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_signer_that_is_not_32_bytes_is_a_bad_signature(length: int) -> None:
    with pytest.raises(BadSignature):
        keys.verify(RFC_PUBLIC.ljust(33, b"\0")[:length], b"\x72", RFC_SIGNATURE)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_signature_that_is_not_64_bytes_is_bad(length: int) -> None:
    with pytest.raises(BadSignature):
        keys.verify(RFC_PUBLIC, b"\x72", (RFC_SIGNATURE + b"\x72")[:length])


def test_generated_keys_differ_and_work() -> None:
    first, second = keys.SigningKey.generate(), keys.SigningKey.generate()
    assert first.public != second.public
    keys.verify(first.public, b"m", first.sign(b"m"))
    assert keys.SigningKey(first.seed).public == first.public


def test_a_sealing_key_comes_back_from_its_secret() -> None:
    key = keys.SealingKey.generate()
    assert keys.SealingKey(key.secret).open(keys.seal(b"m", key.public)) == b"m"


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_seed_or_secret_of_another_length_than_32_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        keys.SigningKey(bytes(length))
    with pytest.raises(ValueError, match="32 bytes"):
        keys.SealingKey(bytes(length))


def test_no_secret_is_shown() -> None:
    signing, sealing = keys.SigningKey.generate(), keys.SealingKey.generate()
    for shown in (repr(signing), str(signing), repr(sealing), f"{sealing}"):
        assert shown in ("SigningKey(...)", "SealingKey(...)")


def test_a_seal_is_48_bytes_longer_and_new_at_every_call() -> None:
    sealed = keys.seal(b"m" * 100, typical.SEALING.public)
    assert len(sealed) == 148
    assert sealed != keys.seal(b"m" * 100, typical.SEALING.public)


@pytest.mark.parametrize("length", [0, 1, 47, 48, 147])
def test_a_seal_cut_short_does_not_open(length: int) -> None:
    sealed = keys.seal(b"m" * 100, typical.SEALING.public)
    with pytest.raises(CannotOpen):
        typical.SEALING.open(sealed[:length])


def test_a_seal_for_another_key_does_not_open() -> None:
    with pytest.raises(CannotOpen):
        typical.OTHER_SEALING.open(keys.seal(b"m", typical.SEALING.public))


@pytest.mark.parametrize("at", [0, 31, 32, 47, 48, 147])
def test_a_seal_with_a_flipped_bit_does_not_open(at: int) -> None:
    sealed = bytearray(keys.seal(b"m" * 100, typical.SEALING.public))
    sealed[at] ^= 1
    with pytest.raises(CannotOpen):
        typical.SEALING.open(bytes(sealed))


@pytest.mark.parametrize("name", BAD_SIGNING_KEYS)
def test_a_signing_key_that_is_no_point_of_prime_order_is_refused(name: str) -> None:
    with pytest.raises(Malformed):
        keys.check_signing_public(BAD_SIGNING_KEYS[name])


@pytest.mark.parametrize("name", BAD_SEALING_KEYS)
def test_a_sealing_key_that_is_too_large_or_of_low_order_is_refused(name: str) -> None:
    with pytest.raises(Malformed):
        keys.check_sealing_public(BAD_SEALING_KEYS[name])


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_public_key_of_another_length_than_32_is_refused(length: int) -> None:
    with pytest.raises(Malformed):
        keys.check_signing_public(typical.PAIR.public.ljust(33, b"\0")[:length])
    with pytest.raises(Malformed):
        keys.check_sealing_public(typical.SEALING.public.ljust(33, b"\0")[:length])


def test_good_public_keys_pass_unchanged() -> None:
    assert keys.check_signing_public(typical.PAIR.public) == typical.PAIR.public
    assert keys.check_sealing_public(typical.SEALING.public) == typical.SEALING.public


def test_an_honest_signature_with_a_larger_s_is_bad() -> None:
    with pytest.raises(BadSignature):
        keys.verify(RFC_PUBLIC, b"\x72", crooked_keys.with_larger_s(RFC_SIGNATURE))


@pytest.mark.parametrize("holds", [True, False])
def test_a_signature_that_needs_the_cofactor_is_bad(*, holds: bool) -> None:
    public = crooked_keys.mixed_order(crooked_keys.point(7))
    signature = crooked_keys.mixed_signature(b"m", public, 7, holds=holds)
    if holds:
        keys.verify(public, b"m", signature)
    else:
        with pytest.raises(BadSignature):
            keys.verify(public, b"m", signature)


def test_a_key_is_written_as_52_lower_case_characters_and_read_back() -> None:
    written = keys.key_text(typical.PAIR.public)
    assert len(written) == 52
    assert written == written.lower()
    assert keys.key_from_text(written) == typical.PAIR.public
    assert keys.key_from_text(written.upper()) == typical.PAIR.public
    assert keys.key_text(bytes(32)) == "a" * 52


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 51,
        "a" * 53,
        "a" * 51 + "b",
        "a" * 51 + "=",
        "a" * 51 + " ",
        "a" * 51 + "\n",
        "1" + "a" * 51,
        "-" + "a" * 51,
        "=" * 52,
        "\u0131" + "a" * 51,
        "\u017f" + "a" * 51,
        "\u212a" + "a" * 51,
        "\xdf" + "a" * 50,
        "\ud83d" + "a" * 51,
        "\0" + "a" * 51,
    ],
)
def test_a_key_written_in_any_other_way_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        keys.key_from_text(text)
