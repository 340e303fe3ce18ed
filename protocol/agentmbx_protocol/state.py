"""State letters: what a machine has stored from a peer, what it sent there, and what went wrong.

The content of a letter of type "state" (SPEC section 5.4). The receiver of a state letter is the
one whose letters its `streams`, `refused`, `void_seen`, `peer_cards` and `unopened` are about.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec

from agentmbx_protocol import limits
from agentmbx_protocol.errors import Malformed, Refusal, TooLarge
from agentmbx_protocol.messagepack import pack, unpack

_Stream = Annotated[
    bytes, msgspec.Meta(min_length=limits.STREAM_BYTES, max_length=limits.STREAM_BYTES)
]
_Digest = Annotated[
    bytes, msgspec.Meta(min_length=limits.DIGEST_BYTES, max_length=limits.DIGEST_BYTES)
]
_ShortDigest = Annotated[
    bytes, msgspec.Meta(min_length=limits.SHORT_DIGEST_BYTES, max_length=limits.SHORT_DIGEST_BYTES)
]
_From0 = Annotated[int, msgspec.Meta(ge=0, le=limits.COUNTER_MAX)]
_From1 = Annotated[int, msgspec.Meta(ge=1, le=limits.COUNTER_MAX)]
_Key = Annotated[
    str, msgspec.Meta(pattern=r"\A[a-z_]+\Z", max_length=limits.STATE_KEY_CHARACTERS_MAX)
]


class _Element(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One element of a list in a state letter: an array of exactly its fields."""


class Range(_Element, frozen=True):
    """All numbers from `first` to `last`, both of them included."""

    first: _From1
    last: _From1


class StoredDigest(_Element, frozen=True):
    """The first 8 bytes of the digest of the letter that is stored under `number`."""

    number: _From1
    digest: _ShortDigest


class StoredStream(_Element, frozen=True):
    """What is stored of one stream of the receiver's: at least one range, the lowest first.

    `digests` are for those numbers in the ranges that the sender of the state does not know to be
    confirmed, the lowest first.
    """

    stream: _Stream
    ranges: tuple[Range, ...]
    digests: tuple[StoredDigest, ...] = ()


class RefusedLetter(_Element, frozen=True):
    """A letter of the receiver's that came with the number of another one, which is stored."""

    stream: _Stream
    number: _From1
    digest: _ShortDigest


class SentStream(_Element, frozen=True):
    """One stream of the sender's: the `last` number sent, the highest known to be `confirmed`."""

    stream: _Stream
    last: _From1
    confirmed: _From0


class VoidStream(_Element, frozen=True):
    """Numbers of one stream that were cancelled or given up: at least one range, lowest first."""

    stream: _Stream
    ranges: tuple[Range, ...]


class PeerCard(_Element, frozen=True):
    """A card of the receiver's that the sender of the state holds: sequence and frame digest."""

    sequence: _From1
    digest: _Digest


class State(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of one state letter (SPEC section 5.4); its lists are tuples in a fixed order.

    `card_sequence` and `card_digest` name the sender's newest card, and so which copy of the
    machine speaks; `sequence` counts that copy's state letters to this peer. `streams`, `sent`,
    `void` (of the sender's own streams) and `void_seen` (of the receiver's) rise by stream,
    `refused` by stream, number and digest, `unopened` (digests of envelopes) as byte strings;
    `peer_cards` fall from the newest on. `ask_seen` is the highest sequence of a state letter of
    the receiver's that asked, 0 for none; `now_ms` the sender's wall clock. `ask` wants a state
    letter as answer; `bye` says that the pairing is over.
    """

    card_sequence: _From1
    card_digest: _Digest
    sequence: _From1
    streams: tuple[StoredStream, ...] = ()
    refused: tuple[RefusedLetter, ...] = ()
    sent: tuple[SentStream, ...] = ()
    void: tuple[VoidStream, ...] = ()
    void_seen: tuple[VoidStream, ...] = ()
    peer_cards: tuple[PeerCard, ...] = ()
    unopened: tuple[_Digest, ...] = ()
    ask_seen: _From0 = 0
    now_ms: Annotated[int, msgspec.Meta(ge=0, le=limits.TIME_MS_MAX)] = 0
    ask: bool = False
    bye: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """What a newer state letter of the same peer has more of; one with no more is ignored."""
        return self.card_sequence, self.sequence

    def covers(self, stream: bytes, number: int, digest: bytes) -> bool:
        """Whether this state confirms the receiver's letter of that name and that whole digest.

        A range alone confirms nothing, since another copy of the receiver may have used the
        number: its digest must be listed too. What is refused is not confirmed.
        """
        short = digest[: limits.SHORT_DIGEST_BYTES]
        stored = next((each for each in self.streams if each.stream == stream), None)
        if stored is None or self.refuses(stream, number, digest):
            return False
        at = bisect_left(stored.digests, number, key=lambda each: each.number)
        if at == len(stored.digests) or stored.digests[at] != StoredDigest(number, short):
            return False
        return _is_within(number, stored.ranges)

    def refuses(self, stream: bytes, number: int, digest: bytes) -> bool:
        """Whether this state refuses the receiver's letter of that name and that whole digest.

        Another letter of the same number may be stored; this one needs a new stream.
        """
        return RefusedLetter(stream, number, digest[: limits.SHORT_DIGEST_BYTES]) in self.refused


# The values stay packed, so that what comes under an unknown key is passed over unread.
_map_decoder = msgspec.msgpack.Decoder(
    Annotated[dict[_Key, msgspec.Raw], msgspec.Meta(max_length=limits.STATE_KEYS_MAX)]
)
_state_decoder = msgspec.msgpack.Decoder(State)


def make_state(state: State) -> bytes:
    """The content of a state letter; raises `ValueError` for what a reader would refuse."""
    try:
        data = pack(state)
        parse_state(data)
    except Refusal as refusal:
        raise ValueError(refusal.detail) from refusal
    return data


def parse_state(data: bytes) -> State:
    """The state that `data` is, unknown keys passed over; raises `Malformed`, or `TooLarge`."""
    if len(data) > limits.LETTER_BYTES_MAX:
        raise TooLarge("The state is larger than a letter.")
    present: dict[str, msgspec.Raw] = unpack(data, _map_decoder)
    known = {key: value for key, value in present.items() if key in State.__struct_fields__}
    state = unpack(pack(known), _state_decoder)
    _check_order(state)
    _check_counts(state)
    return state


def _check_order(state: State) -> None:
    for listed in (state.streams, state.sent, state.void, state.void_seen):
        _check_rising([each.stream for each in listed])
    _check_rising([(each.stream, each.number, each.digest) for each in state.refused])
    _check_rising([(each.sequence, each.digest) for each in reversed(state.peer_cards)])
    _check_rising(state.unopened)
    for stored in state.streams:
        _check_ranges(stored.ranges)
        _check_rising([each.number for each in stored.digests])
        if not all(_is_within(each.number, stored.ranges) for each in stored.digests):
            raise Malformed("A state gives the digest of a number that is not stored.")
    for void in (*state.void, *state.void_seen):
        _check_ranges(void.ranges)
    if any(each.confirmed > each.last for each in state.sent):
        raise Malformed("A state calls a number confirmed that was not sent.")


def _check_rising(values: Sequence[Any]) -> None:
    if not all(lower < higher for lower, higher in pairwise(values)):
        raise Malformed("A list in a state is not in its order, or names something twice.")


def _check_ranges(ranges: Sequence[Range]) -> None:
    before = -1
    for each in ranges:
        if not before + 1 < each.first <= each.last:
            raise Malformed("The ranges of a state do not rise with gaps between them.")
        before = each.last
    if not ranges:
        raise Malformed("A state names a stream without a range.")


def _check_counts(state: State) -> None:
    counts: Final = (
        (len(state.streams), limits.STATE_STREAMS_MAX),
        (len(state.sent), limits.STATE_STREAMS_MAX),
        (len(state.void), limits.STATE_STREAMS_MAX),
        (len(state.void_seen), limits.STATE_STREAMS_MAX),
        (sum(len(each.ranges) for each in state.streams), limits.STATE_RANGES_MAX),
        (sum(len(each.ranges) for each in state.void), limits.STATE_RANGES_MAX),
        (sum(len(each.ranges) for each in state.void_seen), limits.STATE_RANGES_MAX),
        (sum(len(each.digests) for each in state.streams), limits.STATE_DIGESTS_MAX),
        (len(state.refused), limits.STATE_REFUSED_MAX),
        (len(state.peer_cards), limits.STATE_CARDS_MAX),
        (len(state.unopened), limits.STATE_UNOPENED_MAX),
    )
    if any(count > most for count, most in counts):
        raise TooLarge("A list in a state is longer than the limits allow.")


def _is_within(number: int, ranges: Sequence[Range]) -> bool:
    at = bisect_right(ranges, number, key=lambda each: each.first)
    return at > 0 and number <= ranges[at - 1].last
