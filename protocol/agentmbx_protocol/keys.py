"""Keys: Ed25519 for signing, X25519 for sealing, and their text form.

The rules of libsodium are the rules of the protocol (SPEC section 2). A public key is checked
once, when it is learned; after that it is 32 plain bytes.
"""

import base64
import binascii
from typing import Final, Self

from nacl import bindings
from nacl import exceptions as nacl_exceptions

from agentmbx_protocol import limits
from agentmbx_protocol.errors import BadSignature, CannotOpen, Malformed

_X25519_PRIME: Final = 2**255 - 19
_PROBE_SCALAR: Final = b"\x01".ljust(limits.KEY_BYTES, b"\0")
_TEXT_LENGTH: Final = 52


class SigningKey:
    """The secret half of an Ed25519 key (RFC 8032), made from its 32-byte seed.

    Raises `ValueError` when the seed is not 32 bytes. Never shown: `repr` holds no part of it.
    """

    __slots__ = ("_secret", "public", "seed")

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        self.public, self._secret = bindings.crypto_sign_seed_keypair(seed)

    @classmethod
    def generate(cls) -> Self:
        """A new key from the operating system's randomness."""
        return cls(bindings.randombytes(limits.KEY_BYTES))

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature of `message`."""
        return bindings.crypto_sign(message, self._secret)[: limits.SIGNATURE_BYTES]

    @property
    def secret(self) -> bytes:
        """The 64 secret bytes as libsodium takes them: the seed and the public key."""
        return self._secret

    def __repr__(self) -> str:
        return "SigningKey(...)"


class SealingKey:
    """The secret half of an X25519 key (RFC 7748): opens what was sealed to its public half.

    Raises `ValueError` when the secret is not 32 bytes.
    """

    __slots__ = ("_secret", "public")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != limits.KEY_BYTES:  # the binding would read past the end of a shorter one
            raise ValueError("the secret of a sealing key is 32 bytes")
        self._secret = secret
        self.public = bindings.crypto_scalarmult_base(secret)

    @classmethod
    def generate(cls) -> Self:
        """A new key from the operating system's randomness."""
        return cls(bindings.randombytes(limits.KEY_BYTES))

    @property
    def secret(self) -> bytes:
        """The 32 secret bytes, for the keyring alone."""
        return self._secret

    def open(self, sealed: bytes) -> bytes:
        """The plaintext of `sealed` (libsodium's SealedBox); raises `CannotOpen`."""
        if len(sealed) < limits.SEAL_OVERHEAD_BYTES:
            raise CannotOpen
        try:
            return bindings.crypto_box_seal_open(sealed, self.public, self._secret)
        except nacl_exceptions.CryptoError as error:
            raise CannotOpen from error

    def __repr__(self) -> str:
        return "SealingKey(...)"


def seal(plaintext: bytes, sealing_public: bytes) -> bytes:
    """`plaintext` sealed to a checked X25519 key: 48 bytes longer, new bytes at every call."""
    return bindings.crypto_box_seal(plaintext, sealing_public)


def verify(signer: bytes, message: bytes, signature: bytes) -> None:
    """Raise `BadSignature` unless libsodium accepts `signature` of `message` by `signer`."""
    if len(signer) != limits.KEY_BYTES or len(signature) != limits.SIGNATURE_BYTES:
        raise BadSignature
    try:
        bindings.crypto_sign_open(signature + message, signer)
    except nacl_exceptions.CryptoError as error:
        raise BadSignature from error


def check_signing_public(key: bytes) -> bytes:
    """`key`, if it is a point of prime order in canonical form; raises `Malformed`."""
    if len(key) != limits.KEY_BYTES or not bindings.crypto_core_ed25519_is_valid_point(key):
        raise Malformed("A signing key is not a valid Ed25519 point.")
    return key


def check_sealing_public(key: bytes) -> bytes:
    """`key`, if it is below p and gives no zero secret; raises `Malformed`."""
    if len(key) != limits.KEY_BYTES or int.from_bytes(key, "little") >= _X25519_PRIME:
        raise Malformed("A sealing key is not a canonical X25519 key.")
    try:
        bindings.crypto_scalarmult(_PROBE_SCALAR, key)
    except (nacl_exceptions.CryptoError, RuntimeError) as error:
        raise Malformed("A sealing key gives an all-zero secret.") from error
    return key


def key_text(key: bytes) -> str:
    """A 32-byte key as 52 lower-case base32 characters (RFC 4648, no padding)."""
    return base64.b32encode(key).decode("ascii").rstrip("=").lower()


def key_from_text(text: str) -> bytes:
    """The 32 bytes of `key_text`; case does not matter; raises `Malformed`."""
    try:
        key = base64.b32decode(text.upper().encode("ascii") + b"====")
    except (ValueError, binascii.Error):
        key = b""
    if len(text) != _TEXT_LENGTH or key_text(key) != text.lower():
        raise Malformed("A key is written as 52 letters a-z and digits 2-7.")
    return key
