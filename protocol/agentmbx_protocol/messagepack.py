"""One form of MessagePack: what decodes must encode back to the very same bytes."""

from typing import TypeVar

import msgspec

from agentmbx_protocol.errors import Malformed

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def pack(value: object) -> bytes:
    """The one encoding of `value` (SPEC section 3.3); strings must be valid Unicode.

    Raises `Malformed` for a string with a lone surrogate or an integer beyond 64 bits.
    """
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError as error:
        raise Malformed("A text holds something that is not a Unicode character.") from error
    except OverflowError as error:
        raise Malformed("A number is larger than this protocol writes.") from error


def unpack(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The value of `data`; raises `Malformed` unless it is typed as said and in its one form."""
    try:
        value = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("The inner bytes are not as this protocol writes them.") from error
    if _encoder.encode(value) != data:
        raise Malformed("The inner bytes are not in the one form that this protocol writes.")
    return value
