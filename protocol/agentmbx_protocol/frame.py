"""The one signed frame: a fixed layout that is parsed strictly and never re-serialised.

    magic "MBX1" | kind u8 | three zero bytes | signer 32 | fields | tail length u32 | tail |
    signature 64

The signature covers "agentmbx/1 " + the kind's word + 0x00 + the SHA-256 of every byte before it;
a frame's name is its digest, the SHA-256 of all its bytes (SPEC section 3).
"""

import hashlib
import struct
from collections.abc import Mapping
from enum import IntEnum, unique
from typing import Final

import msgspec

from agentmbx_protocol import keys, limits
from agentmbx_protocol.errors import Malformed, TooLarge, UnsupportedVersion

MAGIC: Final = b"MBX1"
FIELDS_AT: Final = 40
_FAMILY: Final = b"MBX"
_TAIL_LENGTH: Final = struct.Struct(">I")


@unique
class Kind(IntEnum):
    """What a frame is; its lower-case name is the word in the signature."""

    ENVELOPE = 1
    HELD = 2
    STORED = 3
    REGISTER = 4
    ADMIT = 5
    COLLECT = 6
    RETIRE = 7
    QUEUE_STATE = 8
    CARD = 9
    ROTATION = 10
    HELLO = 11
    REPLY = 12
    PROOF = 13
    RESULT = 14


class Layout(msgspec.Struct, frozen=True):
    """How long a kind's fields are, and which lengths its tail may have, all in bytes."""

    fields: int
    tail_min: int
    tail_max: int
    tail_step: int = 1


_KEY: Final = limits.KEY_BYTES
_COMMAND: Final = _KEY + 8 + limits.INSTANCE_BYTES
_HELLO_TAIL_MAX: Final = 2 * _KEY + limits.NAME_BYTES_MAX + 16
_HELLO: Final = Layout(limits.TOKEN_ID_BYTES + limits.NONCE_BYTES, 1, _HELLO_TAIL_MAX)
_PROOF: Final = Layout(
    limits.TOKEN_ID_BYTES + limits.NONCE_BYTES + limits.DIGEST_BYTES,
    limits.SEAL_OVERHEAD_BYTES + 1,
    limits.CARD_BYTES_MAX + limits.SEAL_OVERHEAD_BYTES,
)

LAYOUTS: Final[Mapping[int, Layout]] = {
    Kind.ENVELOPE: Layout(
        limits.ENVELOPE_FIELDS_BYTES,
        limits.PADDED_BYTES_MIN + limits.SEAL_OVERHEAD_BYTES,
        limits.SEALED_BYTES_MAX,
    ),
    Kind.HELD: Layout(_KEY, 52, 52 * limits.DEPOSIT_ENVELOPES_MAX, 52),
    Kind.STORED: Layout(0, 36, 36 * limits.DEPOSIT_ENVELOPES_MAX, 36),
    Kind.REGISTER: Layout(_COMMAND + 8, 0, _KEY * limits.SENDERS_MAX, _KEY),
    Kind.ADMIT: Layout(_KEY + _KEY + 4, 0, 0),
    Kind.COLLECT: Layout(
        _COMMAND + limits.DIGEST_BYTES + 4 + 2,
        0,
        limits.DIGEST_BYTES * limits.COLLECT_ACKS_MAX,
        limits.DIGEST_BYTES,
    ),
    Kind.RETIRE: Layout(_COMMAND, 0, 0),
    Kind.QUEUE_STATE: Layout(_KEY + 8 + limits.INSTANCE_BYTES + limits.DIGEST_BYTES + 1, 0, 0),
    Kind.CARD: Layout(8, 1, limits.CARD_TAIL_BYTES_MAX),
    Kind.ROTATION: Layout(8, limits.FRAME_OVERHEAD_BYTES + 9, limits.CARD_BYTES_MAX),
    Kind.HELLO: _HELLO,
    Kind.REPLY: _HELLO,
    Kind.PROOF: _PROOF,
    Kind.RESULT: _PROOF,
}
_LABELS: Final = {kind: f"agentmbx/1 {kind.name.lower()}".encode() + b"\0" for kind in Kind}
_FORMS: Final = {kind.value: (kind, LAYOUTS[kind], _LABELS[kind]) for kind in Kind}


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A well-formed frame, its signature not yet checked.

    `data` is all its bytes, `digest` its name, `message` the bytes that were signed (the label
    and the SHA-256 of what stands before the signature).
    """

    data: bytes
    kind: Kind
    signer: bytes
    digest: bytes
    message: bytes

    @property
    def fields(self) -> bytes:
        """The fixed fields, as long as the kind's layout says."""
        return self.data[FIELDS_AT : FIELDS_AT + LAYOUTS[self.kind].fields]

    @property
    def tail(self) -> bytes:
        """The bytes after the fields."""
        tail_at = FIELDS_AT + LAYOUTS[self.kind].fields + _TAIL_LENGTH.size
        return self.data[tail_at : -limits.SIGNATURE_BYTES]

    @property
    def signature(self) -> bytes:
        """The last 64 bytes."""
        return self.data[-limits.SIGNATURE_BYTES :]

    def verify(self) -> None:
        """Raise `BadSignature` unless the signature is the signer's."""
        keys.verify(self.signer, self.message, self.signature)


class Unsigned(msgspec.Struct, frozen=True, gc=False):
    """A frame without its last 64 bytes, which are its signer's signature of `message`."""

    data: bytes
    message: bytes


def parse(data: bytes, *kinds: Kind) -> Frame:
    """The frame that `data` is, if it is one of `kinds` (any kind when none is given).

    Checks everything but the signature and the meaning of fields and tail. Raises
    `UnsupportedVersion`, `TooLarge` or `Malformed`.
    """
    length = len(data)
    if length > limits.FRAME_BYTES_MAX:
        raise TooLarge("A frame is larger than 512 KiB.")
    if data[:4] != MAGIC:
        if data[:3] == _FAMILY and length > FIELDS_AT:
            raise UnsupportedVersion
        raise Malformed("The bytes do not begin as a frame does.")
    form = _FORMS.get(data[4]) if length > FIELDS_AT else None
    if form is None:
        raise Malformed("The frame is cut short or of an unknown kind.")
    kind, layout, label = form
    if data[5:8] != b"\0\0\0":
        raise Malformed("A reserved byte of the frame is not zero.")
    if kinds and kind not in kinds:
        raise Malformed("The frame is of another kind than belongs here.")
    tail_length = length - limits.FRAME_OVERHEAD_BYTES - layout.fields
    if (
        not layout.tail_min <= tail_length <= layout.tail_max
        or tail_length % layout.tail_step
        or _TAIL_LENGTH.unpack_from(data, FIELDS_AT + layout.fields)[0] != tail_length
    ):
        raise Malformed("The lengths of the frame do not fit its kind.")
    sha = hashlib.sha256(memoryview(data)[: -limits.SIGNATURE_BYTES])
    message = label + sha.digest()
    sha.update(data[-limits.SIGNATURE_BYTES :])
    return Frame(data, kind, data[8:FIELDS_AT], sha.digest(), message)


def prepare(kind: Kind, signer: bytes, fields: bytes, tail: bytes = b"") -> Unsigned:
    """A new frame of `kind` by `signer`, up to its signature.

    Raises `TooLarge` when the tail is longer than the kind's layout allows and `ValueError` for
    any other length that it does not allow.
    """
    layout = LAYOUTS[kind]
    if len(tail) > layout.tail_max:
        raise TooLarge("The content is too large for one frame.")
    if len(fields) != layout.fields or len(tail) < layout.tail_min or len(tail) % layout.tail_step:
        raise ValueError(f"wrong lengths for a frame of kind {kind.name}")
    head = MAGIC + bytes((kind, 0, 0, 0)) + signer + fields
    data = head + _TAIL_LENGTH.pack(len(tail)) + tail
    return Unsigned(data, _LABELS[kind] + hashlib.sha256(data).digest())


def sign(kind: Kind, key: keys.SigningKey, fields: bytes, tail: bytes = b"") -> bytes:
    """The bytes of a new frame of `kind` by `key`; raises as `prepare` does."""
    unsigned = prepare(kind, key.public, fields, tail)
    return unsigned.data + key.sign(unsigned.message)
