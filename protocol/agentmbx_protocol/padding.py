"""Padme padding: how long a plaintext becomes so that its true length hides in a bucket."""

from agentmbx_protocol import limits
from agentmbx_protocol.errors import Malformed, TooLarge


def padded_length(length: int) -> int:
    """The length in bytes that `length` bytes are padded to (SPEC section 5.1).

    At least 1,024; above that the Padme length (Nikitin et al., "Reducing Metadata Leakage from
    Encrypted Files and Communication with PURBs", 2019), which adds at most 12 percent. Raises
    `TooLarge` when no envelope could hold the result.
    """
    exponent = max(length, 1).bit_length() - 1
    free_bits = exponent - exponent.bit_length()
    mask = (1 << max(free_bits, 0)) - 1
    padded = max((length + mask) & ~mask, limits.PADDED_BYTES_MIN)
    if padded > limits.PADDED_BYTES_MAX:
        raise TooLarge("The letter is too large for one envelope.")
    return padded


def pad(plaintext: bytes) -> bytes:
    """`plaintext` followed by zeros up to its padded length; raises `TooLarge`."""
    return plaintext.ljust(padded_length(len(plaintext)), b"\0")


def check_padding(padded: bytes, length: int) -> None:
    """Raise unless `padded` is exactly `length` bytes with their padding.

    `TooLarge` when `padded` is longer than any envelope holds, else `Malformed`.
    """
    if len(padded) > limits.PADDED_BYTES_MAX:
        raise TooLarge("The plaintext is larger than one envelope holds.")
    if length > len(padded) or padded_length(length) != len(padded) or any(padded[length:]):
        raise Malformed("The padding is not as this protocol makes it.")
