import operator

import pytest

from agentmbx_protocol import padding
from agentmbx_protocol.errors import Malformed, TooLarge


@pytest.mark.parametrize(
    ("length", "padded"),
    [
        (0, 1024),
        (1, 1024),
        (1023, 1024),
        (1024, 1024),
        (1025, 1088),
        (1088, 1088),
        (1089, 1152),
        (2047, 2048),
        (2048, 2048),
        (2049, 2176),
        (65_535, 65_536),
        (65_537, 67_584),
        (100_000, 100_352),
        (262_144, 262_144),
        (262_145, 270_336),
        (507_904, 507_904),
    ],
)
def test_lengths_are_padded_as_padme_says_over_a_floor(length: int, padded: int) -> None:
    assert padding.padded_length(length) == padded


def test_padding_adds_at_most_12_percent_above_the_floor() -> None:
    for length in range(1024, 507_905, 7):
        assert padding.padded_length(length) <= length * 1.12


def test_a_padded_length_is_padded_to_itself_and_grows_with_the_length() -> None:
    padded = [padding.padded_length(length) for length in range(507_905)]
    assert all(map(operator.ge, padded, range(507_905)))
    assert padded == sorted(padded)
    assert all(padded[length] == length for length in set(padded))
    assert len(set(padded)) < 200


@pytest.mark.parametrize("length", [507_905, 524_288, 2**40])
def test_what_no_envelope_holds_is_too_large(length: int) -> None:
    with pytest.raises(TooLarge):
        padding.padded_length(length)


def test_padding_is_zeros_behind_the_plaintext() -> None:
    padded = padding.pad(b"abc")
    assert padded == b"abc" + bytes(1021)
    padding.check_padding(padded, 3)


@pytest.mark.parametrize("at", [3, 4, 500, 1023])
def test_padding_that_is_not_zero_is_malformed(at: int) -> None:
    padded = bytearray(padding.pad(b"abc"))
    padded[at] = 1
    with pytest.raises(Malformed):
        padding.check_padding(bytes(padded), 3)


@pytest.mark.parametrize("length", [0, 3, 1023, 1025, 1088])
def test_padding_of_another_length_is_malformed(length: int) -> None:
    with pytest.raises(Malformed):
        padding.check_padding(bytes(length), 3)


@pytest.mark.parametrize("length", [1025, 507_905, 2**32 + 3])
def test_a_length_beyond_what_is_there_is_malformed(length: int) -> None:
    with pytest.raises(Malformed):
        padding.check_padding(bytes(1024), length)


@pytest.mark.parametrize("length", [3, 507_905, 2**32 + 3])
def test_a_plaintext_beyond_the_largest_is_too_large(length: int) -> None:
    with pytest.raises(TooLarge):
        padding.check_padding(bytes(507_905), length)


def test_the_largest_plaintext_passes() -> None:
    padding.check_padding(bytes(507_904), 500_000)
