"""Frames and MessagePack with exactly one thing wrong: what the package itself never writes.

For the vectors and the tests.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from agentmbx_protocol import keys
from agentmbx_protocol.frame import Kind

NIL: Final = b"\xc0"
BAD_UTF8: Final = {
    "an overlong NUL": b"\xc0\x80",
    "a lone surrogate": b"\xed\xa0\xbd",
    "a cut character": b"a\xf0\x9f\x98",
    "a byte of no character": b"a\xff",
    "a code point beyond the last": b"\xf4\x90\x80\x80",
}


class _Type(NamedTuple):
    """A MessagePack type: its one-byte heads, then its heads by the width of their number."""

    short: range
    longer: dict[int, int]


_UINT: Final = _Type(range(0x80), {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8})
_BIN: Final = _Type(range(0), {0xC4: 1, 0xC5: 2, 0xC6: 4})
_STR: Final = _Type(range(0xA0, 0xC0), {0xD9: 1, 0xDA: 2, 0xDB: 4})
_ARRAY: Final = _Type(range(0x90, 0xA0), {0xDC: 2, 0xDD: 4})
_MAP: Final = _Type(range(0x80, 0x90), {0xDE: 2, 0xDF: 4})
_INT_HEADS: Final = {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


class Signer(NamedTuple):
    """A public key and how it signs, honestly or not."""

    public: bytes
    sign: Callable[[bytes], bytes]


AnySigner = Signer | keys.SigningKey


def signing_key(name: str) -> keys.SigningKey:
    """A key that is the same at every run."""
    return keys.SigningKey(filler(f"signing key {name}", 32))


def sealing_key(name: str) -> keys.SealingKey:
    """A key that is the same at every run."""
    return keys.SealingKey(filler(f"sealing key {name}", 32))


def filler(name: str, length: int) -> bytes:
    """`length` bytes that look random and are the same at every run."""
    blocks = range(0, length, 32)
    return b"".join(hashlib.sha256(f"{name} {at}".encode()).digest() for at in blocks)[:length]


class RawFrame(NamedTuple):
    """A frame in parts, none of them checked; `_replace` puts one fault in."""

    kind: int
    signer: AnySigner
    fields: bytes
    tail: bytes = b""
    magic: bytes = b"MBX1"
    reserved: bytes = b"\0\0\0"
    tail_length: int | None = None
    word: str = ""

    @property
    def data(self) -> bytes:
        """The bytes of the frame, signed as they are."""
        length = len(self.tail) if self.tail_length is None else self.tail_length
        head = self.magic + bytes((self.kind,)) + self.reserved + self.signer.public + self.fields
        unsigned = head + length.to_bytes(4, "big") + self.tail
        word = self.word or (Kind(self.kind).name.lower() if self.kind in set(Kind) else "unknown")
        label = b"agentmbx/1 " + word.encode() + b"\0"
        return unsigned + self.signer.sign(label + hashlib.sha256(unsigned).digest())


def array(elements: Sequence[bytes], *, counted: int | None = None) -> bytes:
    """An array of elements that are packed already, its head as short as may be."""
    count = len(elements) if counted is None else counted
    return _head(_ARRAY, count) + b"".join(elements)


def mapping(entries: Sequence[tuple[bytes, bytes]], *, counted: int | None = None) -> bytes:
    """A map of values that are packed already under keys of any bytes, its head short."""
    count = len(entries) if counted is None else counted
    return _head(_MAP, count) + b"".join(text(key) + value for key, value in entries)


def text(utf8: bytes) -> bytes:
    """A str of any bytes, its head as short as may be."""
    return _head(_STR, len(utf8)) + utf8


def _head(kind: _Type, number: int) -> bytes:
    if number < len(kind.short):
        return bytes((kind.short.start + number,))
    head, width = next(form for form in kind.longer.items() if number < 1 << (8 * form[1]))
    return bytes((head,)) + number.to_bytes(width, "big")


def longer_forms(element: bytes) -> Iterator[bytes]:
    """Every other way to write the same unsigned integer, bin, str or array head."""
    kind = _type_of(element)
    width = kind.longer.get(element[0], 0)
    number = int.from_bytes(element[1 : 1 + width], "big") if width else element[0]
    number -= 0 if width else kind.short.start
    for head, wider in kind.longer.items():
        if wider > width:
            yield bytes((head,)) + number.to_bytes(wider, "big") + element[1 + width :]
    for head, signed in _INT_HEADS.items():
        if kind is _UINT and number < 1 << (8 * signed - 1):
            yield bytes((head,)) + number.to_bytes(signed, "big")


def _type_of(element: bytes) -> _Type:
    types = (_UINT, _BIN, _STR, _ARRAY)
    return next(each for each in types if element[0] in each.short or element[0] in each.longer)


def other_types(element: bytes) -> Iterator[tuple[str, bytes]]:
    """Values of types that do not belong in the element's place."""
    yield "nil", NIL
    yield "true", b"\xc3"
    yield "a map", b"\x80"
    yield "an extension", b"\xd4\x01\x00"
    yield "a float", b"\xcb" + bytes(8)
    yield "a negative number", b"\xff"
    if _type_of(element) is _BIN:
        yield "a str", b"\xd9\x20" + b"k" * 32
        yield "an array", b"\x90"
    elif _type_of(element) is _STR:
        yield "a bin", b"\xc4\x05study"
        yield "a number", b"\x05"
    else:
        yield "a bin", b"\xc4\x00"


def pack_faults(elements: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    """The same array with one fault in its form at a time, and what the fault is."""
    good = array(elements)
    for number, form in enumerate(longer_forms(good)):
        yield f"array head in longer form {number}", form
    yield "an element more", array([*elements, NIL])
    yield "an element less", array(elements[:-1])
    yield "counts one more than there are", array(elements, counted=len(elements) + 1)
    yield "counts one less than there are", array(elements, counted=len(elements) - 1)
    yield "a byte behind", good + NIL
    yield "twice", good + good
    yield "a map instead", b"\x80"
    yield "a number instead", b"\x00"
    yield "a byte of no type", b"\xc1"
    yield "an array of 2^32 - 1 elements", b"\xdd\xff\xff\xff\xff"
    yield "a bin of 2^32 - 1 bytes", array([b"\xc6\xff\xff\xff\xff"], counted=len(elements))
    for at, element in enumerate(elements):
        for number, form in enumerate(longer_forms(element)):
            yield f"element {at} in longer form {number}", _with(elements, at, form)
        for name, value in other_types(element):
            yield f"element {at} is {name}", _with(elements, at, value)


def _with(elements: Sequence[bytes], at: int, value: bytes) -> bytes:
    return array([*elements[:at], value, *elements[at + 1 :]])
