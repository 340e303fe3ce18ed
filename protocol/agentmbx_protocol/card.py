"""Cards: what a machine says of itself, signed by its identity key; and rotations of that key."""

import ipaddress
import re
import struct
import unicodedata
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from agentmbx_protocol import frame, keys, limits
from agentmbx_protocol.errors import Malformed, UnsupportedVersion
from agentmbx_protocol.keys import SigningKey
from agentmbx_protocol.messagepack import pack, unpack

_SEQUENCE: Final = struct.Struct(">Q")
_URL: Final = re.compile(
    r"https?://(?:[a-z0-9.-]+|\[([0-9A-Fa-f:.]+)\])(?::([1-9][0-9]{0,4}))?"
    r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?"
)
_PORT_MAX: Final = 65535
_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))

_Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Route(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a machine collects: a relay's URL and key, and the machine's queue there."""

    url: str
    relay: _Key
    queue: _Key


class _Tail(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    sealing: _Key
    addresses: Annotated[list[str], msgspec.Meta(max_length=limits.ADDRESSES_MAX)]
    routes: Annotated[list[Route], msgspec.Meta(max_length=limits.ROUTES_MAX)]


class Card(msgspec.Struct, frozen=True):
    """A machine's card (SPEC section 6.1).

    `sequence` only goes up; a lower one never replaces a higher one. `name` is a suggestion, 1 to
    64 bytes of UTF-8 without hidden characters. `addresses` are IP literals with a port, such as
    "192.0.2.7:7420" or "[2001:db8::7]:7420", in the order in which to try them.
    """

    identity: bytes
    sequence: int
    name: str
    sealing: bytes
    addresses: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()


class Rotation(msgspec.Struct, frozen=True):
    """The old identity's word for its successor: the card of the new one (SPEC section 6.2)."""

    identity: bytes
    sequence: int
    card: Card


_tail_decoder = msgspec.msgpack.Decoder(_Tail)


def make_card(identity: SigningKey, card: Card) -> bytes:
    """The signed frame of `card`; raises `Malformed` for what a reader would refuse."""
    _check_sequence(card.sequence)
    data = frame.sign(
        frame.Kind.CARD,
        identity,
        _SEQUENCE.pack(card.sequence),
        pack(_Tail(card.name, card.sealing, list(card.addresses), list(card.routes))),
    )
    parse_card(data)
    return data


def parse_card(data: bytes) -> Card:
    """The card that `data` is, its signature and all keys checked; raises a `Refusal`."""
    parsed, card = _parse_card_form(data)
    parsed.verify()
    return _check_keys(card)


def _parse_card_form(data: bytes) -> tuple[frame.Frame, Card]:
    parsed = frame.parse(data, frame.Kind.CARD)
    sequence = _parse_sequence(parsed)
    tail = unpack(parsed.tail, _tail_decoder)
    check_name(tail.name)
    for address in tail.addresses:
        _check_address(address)
    for route in tail.routes:
        _check_url(route.url)
    card = Card(
        identity=parsed.signer,
        sequence=sequence,
        name=tail.name,
        sealing=tail.sealing,
        addresses=tuple(tail.addresses),
        routes=tuple(tail.routes),
    )
    return parsed, card


def _check_keys(card: Card) -> Card:
    keys.check_signing_public(card.identity)
    keys.check_sealing_public(card.sealing)
    for route in card.routes:
        keys.check_signing_public(route.relay)
        keys.check_signing_public(route.queue)
    return card


def make_rotation(old_identity: SigningKey, new_card: bytes) -> bytes:
    """The signed frame by which the old identity names the new one's card."""
    sequence = parse_card(new_card).sequence
    return frame.sign(frame.Kind.ROTATION, old_identity, _SEQUENCE.pack(sequence), new_card)


def parse_rotation(data: bytes) -> Rotation:
    """The rotation that `data` is, both signatures checked; raises a `Refusal`."""
    parsed = frame.parse(data, frame.Kind.ROTATION)
    sequence = _parse_sequence(parsed)
    try:
        inner, card = _parse_card_form(parsed.tail)
    except UnsupportedVersion as error:
        raise Malformed("A rotation holds a card of its own version.") from error
    if card.sequence != sequence or card.identity == parsed.signer:
        raise Malformed("A rotation names the card of another identity, with its sequence.")
    parsed.verify()
    inner.verify()
    return Rotation(parsed.signer, sequence, _check_keys(card))


def follow_rotations(identity: bytes, rotations: Sequence[bytes]) -> bytes:
    """The newest identity that a chain of rotations leads to from the known `identity`.

    Links before the known identity are skipped; the rest must hang together with rising
    sequences. Raises a `Refusal` for a link that is not valid or does not hang on the last.
    """
    if len(rotations) > limits.ROTATION_CHAIN_MAX:
        raise Malformed("A chain of rotations has at most 16 links.")
    known, sequence, previous = identity, -1, None
    for data in rotations:
        link = parse_rotation(data)
        if previous is not None and link.identity != previous:
            raise Malformed("A chain of rotations does not hang together.")
        if link.sequence <= sequence:
            raise Malformed("The sequences of a chain of rotations do not rise.")
        previous, sequence = link.card.identity, link.sequence
        if link.identity == known:
            known = link.card.identity
    return known


def check_name(name: str) -> None:
    """Raise `Malformed` unless `name` is 1 to 64 bytes of UTF-8 that a person can see."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        raise Malformed("A name holds something that is not a Unicode character.") from error
    if (
        not 1 <= length <= limits.NAME_BYTES_MAX
        or name != name.strip()
        or any(_is_hidden(character) for character in name)
    ):
        raise Malformed("A name is 1 to 64 bytes of visible text without spaces around it.")


def _is_hidden(character: str) -> bool:
    # Unassigned characters pass, since the next Unicode version may assign them; the code points
    # that never will be assigned do not.
    number = ord(character)
    never = number & 0xFFFE == 0xFFFE or 0xFDD0 <= number <= 0xFDEF  # noqa: PLR2004 - Unicode's
    return never or unicodedata.category(character) in _HIDDEN


def _parse_sequence(parsed: frame.Frame) -> int:
    return _check_sequence(_SEQUENCE.unpack(parsed.fields)[0])


def _check_sequence(sequence: int) -> int:
    if not 1 <= sequence <= limits.COUNTER_MAX:
        raise Malformed("A sequence is 1 to 2^63 - 1.")
    return sequence


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        six = ip if isinstance(ip, ipaddress.IPv6Address) else None
        canonical = f"[{ip}]:{int(port)}" if six else f"{ip}:{int(port)}"
        # A zone means something on one machine alone, and what stands in it may be any text. An
        # IPv4 address in IPv6 form would pass by the checks below, and has no one text form.
        valid = address == canonical and 0 < int(port) <= _PORT_MAX and "%" not in address
        valid = valid and (six is None or six.ipv4_mapped is None)
        valid = valid and not (ip.is_link_local or ip.is_multicast or ip.is_unspecified)
    except ValueError:
        valid = False
    if not valid:
        raise Malformed("An address is an IP literal and a port, and not a link-local one.")


def _check_url(url: str) -> None:
    match = _URL.fullmatch(url)
    if match is None or len(url) > limits.URL_BYTES_MAX or int(match[2] or 1) > _PORT_MAX:
        raise Malformed("A route's URL is http or https with a host, and nothing secret.")
    try:
        ipaddress.IPv6Address(match[1] or "::")
    except ValueError as error:
        raise Malformed("A route's URL has no valid host.") from error
