"""Envelopes: what travels one hop, a signed frame around bytes sealed for one machine."""

import struct
from typing import Final

import msgspec

from agentmbx_protocol import frame, limits, padding
from agentmbx_protocol.errors import Malformed
from agentmbx_protocol.keys import SigningKey

DIRECT: Final = bytes(limits.KEY_BYTES)
_FIELDS: Final = struct.Struct(">32sI")
_AROUND: Final = limits.FRAME_OVERHEAD_BYTES + limits.ENVELOPE_FIELDS_BYTES


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A well-formed envelope, its signature not yet checked (SPEC section 4.1).

    `queue` is the queue's key, or `DIRECT`; `ttl_s` is how long a relay shall hold it, 1 s to
    7 days, counted by the relay's clock from its acceptance.
    """

    frame: frame.Frame
    queue: bytes
    ttl_s: int

    @property
    def signer(self) -> bytes:
        """The sender's pair key."""
        return self.frame.signer

    @property
    def digest(self) -> bytes:
        """The envelope's name."""
        return self.frame.digest

    @property
    def length(self) -> int:
        """All bytes of the envelope."""
        return len(self.frame.data)

    @property
    def sealed(self) -> bytes:
        """The bytes that only the receiving machine can open."""
        return self.frame.tail


def parse_envelope(data: bytes) -> Envelope:
    """The envelope that `data` is; raises `Malformed`, `TooLarge` or `UnsupportedVersion`."""
    parsed = frame.parse(data, frame.Kind.ENVELOPE)
    queue, ttl_s = _FIELDS.unpack_from(data, frame.FIELDS_AT)
    if not limits.TTL_S_MIN <= ttl_s <= limits.TTL_S_MAX:
        raise Malformed("The ttl of an envelope is 1 second to 7 days.")
    plain_length = len(data) - _AROUND - limits.SEAL_OVERHEAD_BYTES
    if (
        plain_length > limits.PADDED_BYTES_MAX
        or padding.padded_length(plain_length) != plain_length
    ):
        raise Malformed("The sealed bytes are not of a padded length.")
    return Envelope(parsed, queue, ttl_s)


def make_envelope(pair_key: SigningKey, queue: bytes, ttl_s: int, sealed: bytes) -> bytes:
    """The bytes of an envelope around `sealed`; raises `TooLarge`, or `ValueError` for the ttl."""
    if not limits.TTL_S_MIN <= ttl_s <= limits.TTL_S_MAX:
        raise ValueError("ttl_s is 1 to 604800")
    return frame.sign(frame.Kind.ENVELOPE, pair_key, _FIELDS.pack(queue, ttl_s), sealed)
