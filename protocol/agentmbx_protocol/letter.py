"""Letters: what is inside the seal, named by (pairing, stream, number)."""

import hashlib
import struct
from typing import Annotated, Final

import msgspec

from agentmbx_protocol import envelope, limits, padding
from agentmbx_protocol.errors import CannotOpen, Malformed, ProtocolError, TooLarge
from agentmbx_protocol.keys import SealingKey, seal
from agentmbx_protocol.messagepack import pack, unpack

STATE: Final = "state"
_DIGEST_LABEL: Final = b"agentmbx/1 letter\0"
_LENGTH: Final = struct.Struct(">I")

_KeyBytes = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Letter(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True
):
    """One letter (SPEC section 5.2); a re-seal for another hop or key leaves its bytes alone.

    `stream` is 16 random bytes, `number` counts up from 1 within it; a letter of type "state" is
    unnumbered and has number 0. `sent_ms` is the sender's own clock, `lifetime_s` at most 72 h.
    """

    stream: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    number: Annotated[int, msgspec.Meta(ge=0, le=limits.COUNTER_MAX)]
    sent_ms: Annotated[int, msgspec.Meta(ge=0, le=limits.TIME_MS_MAX)]
    lifetime_s: Annotated[int, msgspec.Meta(ge=1, le=limits.LETTER_LIFETIME_S_MAX)]
    content_type: Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9][a-z0-9./-]*\Z", max_length=64)]
    content: bytes


class Inside(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a plaintext holds (SPEC section 5.2); its letter and its frames are not yet checked."""

    sender: _KeyBytes
    receiver: _KeyBytes
    letter: Annotated[bytes, msgspec.Meta(min_length=1, max_length=limits.LETTER_BYTES_MAX)]
    card: bytes
    rotations: Annotated[list[bytes], msgspec.Meta(max_length=limits.ROTATION_CHAIN_MAX)]


class Opened(msgspec.Struct, frozen=True):
    """What one seal held: the exact letter bytes, and the sender's news of itself.

    `card` is the bytes of a card frame or empty; `rotations` the frames from the oldest on. The
    frames are not yet checked.
    """

    letter_bytes: bytes
    letter: Letter
    card: bytes
    rotations: tuple[bytes, ...]

    @property
    def digest(self) -> bytes:
        """What identifies these letter bytes, whatever they travelled in."""
        return letter_digest(self.letter_bytes)


_letter_decoder = msgspec.msgpack.Decoder(Letter)
_inside_decoder = msgspec.msgpack.Decoder(Inside)


def letter_digest(letter_bytes: bytes) -> bytes:
    """SHA-256 of "agentmbx/1 letter", a zero byte and the letter's bytes."""
    return hashlib.sha256(_DIGEST_LABEL + letter_bytes).digest()


def encode_letter(letter: Letter) -> bytes:
    """The bytes of `letter`; raises `Malformed` for values out of range, or `TooLarge`."""
    data = pack(letter)
    if len(data) > limits.LETTER_BYTES_MAX:
        raise TooLarge("The letter is larger than 320 KiB.")
    decode_letter(data)
    return data


def decode_letter(data: bytes) -> Letter:
    """The letter that `data` is, strictly typed and in its one form; raises `Malformed`."""
    if len(data) > limits.LETTER_BYTES_MAX:
        raise Malformed("The letter is larger than 320 KiB.")
    letter = unpack(data, _letter_decoder)
    if (letter.number == 0) != (letter.content_type == STATE):
        raise Malformed("A letter has number 0 if and only if its type is state.")
    return letter


def seal_letter(
    letter_bytes: bytes,
    *,
    sender: bytes,
    receiver: bytes,
    sealing_public: bytes,
    card: bytes = b"",
    rotations: tuple[bytes, ...] = (),
) -> bytes:
    """The sealed bytes for one hop: header, letter and padding, sealed to `sealing_public`.

    `sender` and `receiver` are the pair keys that the two machines use with each other. Raises
    `TooLarge`.
    """
    if len(rotations) > limits.ROTATION_CHAIN_MAX:
        raise TooLarge("A letter carries at most 16 rotations.")
    packed = pack(Inside(sender, receiver, letter_bytes, card, list(rotations)))
    return seal(padding.pad(_LENGTH.pack(len(packed)) + packed), sealing_public)


def parse_plaintext(padded: bytes) -> Inside:
    """What an opened plaintext holds; raises `Malformed`, or `TooLarge` for its padded length."""
    if len(padded) < _LENGTH.size:
        raise Malformed("The plaintext is cut short.")
    length = _LENGTH.unpack_from(padded)[0] + _LENGTH.size
    padding.check_padding(padded, length)
    return unpack(padded[_LENGTH.size : length], _inside_decoder)


def open_letter(parcel: envelope.Envelope, sealing_key: SealingKey, *, receiver: bytes) -> Opened:
    """What the envelope's seal holds for this machine (SPEC section 5.3).

    `receiver` is this machine's own pair key for the envelope's signer, so that sealed bytes can
    neither be passed on to a third machine nor signed again by another sender. Every failure is
    the one `CannotOpen`; the envelope's signature is the caller's to check first.
    """
    padded = sealing_key.open(parcel.sealed)
    try:
        inside = parse_plaintext(padded)
        letter = decode_letter(inside.letter)
    except ProtocolError as error:
        raise CannotOpen from error
    if inside.sender != parcel.signer or inside.receiver != receiver:
        raise CannotOpen
    return Opened(inside.letter, letter, inside.card, tuple(inside.rotations))
