"""Ed25519 and X25519 values at the edges that libsodium decides, for the vectors and the tests.

An honest signer makes none of these; whoever holds a secret can make all of them.
"""

import hashlib
from typing import Final

from nacl import bindings

GROUP_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
FIELD_PRIME: Final = 2**255 - 19


def _encoded(number: int) -> bytes:
    return number.to_bytes(32, "little")


IDENTITY: Final = _encoded(1)
ORDER_8: Final = bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a")
SMALL_ORDER: Final = {
    "order 1": IDENTITY,
    "order 2": _encoded(FIELD_PRIME - 1),
    "order 4": _encoded(0),
    "order 4, other sign": _encoded(2**255),
    "order 8": ORDER_8,
}
NON_CANONICAL: Final = {
    "y of p + 1": _encoded(FIELD_PRIME + 1),
    "y of p + 3": _encoded(FIELD_PRIME + 3),
    "x of 0 with the sign set": _encoded(1 | 2**255),
    "all bits set": b"\xff" * 32,
}
NOT_ON_CURVE: Final = _encoded(2)

SEALING_TOO_LARGE: Final = {
    "p": _encoded(FIELD_PRIME),
    "p + 9": _encoded(FIELD_PRIME + 9),
    "high bit set": _encoded(9 | 2**255),
    "all bits set": b"\xff" * 32,
}
SEALING_LOW_ORDER: Final = {
    "0": _encoded(0),
    "1": _encoded(1),
    "p - 1": _encoded(FIELD_PRIME - 1),
    "order 8": bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    "order 8, other": bytes.fromhex(
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"
    ),
}


def point(scalar: int) -> bytes:
    """`scalar` times the base point."""
    return bindings.crypto_scalarmult_ed25519_base_noclamp(_encoded(scalar % GROUP_ORDER))


def mixed_order(straight: bytes) -> bytes:
    """`straight` plus a point of order 8: on the curve, canonical, not of prime order."""
    return bindings.crypto_core_ed25519_add(straight, ORDER_8)


def signature(message: bytes, signer: bytes, scalar: int, nonce: int, commitment: bytes) -> bytes:
    """R | S with R = `commitment` and S = nonce + h * scalar, whatever these are."""
    s = (nonce + _challenge(message, signer, commitment) * scalar) % GROUP_ORDER
    return commitment + _encoded(s)


def mixed_signature(message: bytes, signer: bytes, scalar: int, *, holds: bool) -> bytes:
    """A signature by the key `mixed_order(point(scalar))`.

    Its equation `holds` without cofactor, or only with it: h is a multiple of 8, or is not.
    """
    nonce = 1
    while (_challenge(message, signer, point(nonce)) % 8 == 0) is not holds:
        nonce += 1
    return signature(message, signer, scalar, nonce, point(nonce))


def with_larger_s(honest: bytes) -> bytes:
    """The same signature with S + the group order: the same residue, not below the order."""
    return honest[:32] + _encoded(int.from_bytes(honest[32:], "little") + GROUP_ORDER)


def _challenge(message: bytes, signer: bytes, commitment: bytes) -> int:
    digest = hashlib.sha512(commitment + signer + message).digest()
    return int.from_bytes(digest, "little") % GROUP_ORDER
