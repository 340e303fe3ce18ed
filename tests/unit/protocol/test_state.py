import msgspec
import pytest

from agentmbx_protocol import limits, state
from agentmbx_protocol.errors import Malformed, TooLarge
from agentmbx_protocol.letter import Letter, encode_letter
from agentmbx_protocol.state import (
    PeerCard,
    Range,
    RefusedLetter,
    SentStream,
    State,
    StoredDigest,
    StoredStream,
    VoidStream,
)
from vector_parts.raw_forms import filler, mapping
from vector_parts.state_cases import HIGH, LOW, TOP, large_states
from vector_parts.typical import state_entries

DIGEST = filler("letter", 32)
OTHER_DIGEST = DIGEST[:7] + bytes((DIGEST[7] ^ 1,)) + DIGEST[8:]
ALL = (Range(1, TOP),)


def said(**changes: object) -> State:
    return State(**({"card_sequence": 5, "card_digest": bytes(32), "sequence": 1} | changes))


def stored(*numbers: int, listed: tuple[int, ...] = (), stream: bytes = LOW) -> StoredStream:
    return StoredStream(
        stream,
        tuple(Range(number, number + 1) for number in numbers),
        tuple(StoredDigest(number, DIGEST[:8]) for number in listed),
    )


FULL = said(
    streams=(stored(1, 5, listed=(1, 6)), stored(TOP - 1, stream=HIGH)),
    refused=(RefusedLetter(LOW, 2, OTHER_DIGEST[:8]), RefusedLetter(HIGH, 1, bytes(8))),
    sent=(SentStream(LOW, 9, 0), SentStream(HIGH, TOP, TOP)),
    void=(VoidStream(HIGH, (Range(1, 1), Range(3, TOP))),),
    void_seen=(VoidStream(LOW, ALL),),
    peer_cards=(PeerCard(5, bytes(32)), PeerCard(4, DIGEST)),
    unopened=(bytes(32), DIGEST),
    ask_seen=TOP,
    now_ms=TOP,
    ask=True,
    bye=True,
)


def test_a_state_is_read_as_it_was_made() -> None:
    assert state.parse_state(state.make_state(FULL)) == FULL
    assert state.parse_state(state.make_state(said())) == said()


def test_what_is_empty_is_not_written() -> None:
    assert state.make_state(said()) == mapping(state_entries(card_digest=b"\xc4\x20" + bytes(32)))


def test_a_full_state_fits_a_letter() -> None:
    streams = sorted(filler(f"stream {number}", 16) for number in range(64))
    top = 2**62
    ranges = tuple(Range(top + 9 * number, top + 9 * number + 7) for number in range(16))
    listed = [StoredDigest(each.first + more, bytes(8)) for each in ranges for more in range(4)]
    void = tuple(VoidStream(stream, ranges) for stream in streams)
    full = State(
        card_sequence=TOP,
        card_digest=DIGEST,
        sequence=TOP,
        streams=tuple(StoredStream(stream, ranges, tuple(listed)) for stream in streams),
        refused=tuple(RefusedLetter(LOW, top + number, bytes(8)) for number in range(256)),
        sent=tuple(SentStream(stream, TOP, TOP) for stream in streams),
        void=void,
        void_seen=void,
        peer_cards=tuple(PeerCard(TOP - number, DIGEST) for number in range(16)),
        unopened=tuple(sorted(filler(f"envelope {number}", 32) for number in range(32))),
        ask_seen=TOP,
        now_ms=TOP,
        ask=True,
        bye=True,
    )
    content = state.make_state(full)
    assert limits.STATE_BYTES_MAX - 1024 < len(content) <= limits.STATE_BYTES_MAX
    assert state.parse_state(content) == full
    carried = Letter(
        stream=bytes(16), number=0, sent_ms=TOP, lifetime_s=1, content_type="state", content=content
    )
    assert len(encode_letter(carried)) <= limits.STATE_BYTES_MAX + 64


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": 0},
        {"sequence": 2**63},
        {"sequence": 2**64},
        {"sequence": -1},
        {"card_sequence": 0},
        {"card_digest": bytes(31)},
        {"card_digest": "d" * 32},
        {"streams": (StoredStream(LOW, ()),)},
        {"streams": (stored(1, stream=HIGH), stored(1))},
        {"streams": (stored(1), stored(4))},
        {"streams": (stored(1, 2),)},
        {"streams": (stored(1, 3),)},
        {"streams": (stored(4, 1),)},
        {"streams": (stored(1, listed=(3,)),)},
        {"streams": (stored(1, listed=(2, 1)),)},
        {"streams": (stored(1, listed=(1, 1)),)},
        {"streams": (StoredStream(LOW, (Range(2, 1),)),)},
        {"streams": (StoredStream(LOW, (Range(0, 1),)),)},
        {"streams": []},
        {"refused": (RefusedLetter(LOW, 1, bytes(8)),) * 2},
        {"refused": (RefusedLetter(LOW, 1, bytes(32)),)},
        {"sent": (SentStream(LOW, 1, 2),)},
        {"sent": (SentStream(LOW, 0, 0),)},
        {"void": (VoidStream(LOW, ()),)},
        {"void_seen": (VoidStream(LOW, ALL),) * 2},
        {"peer_cards": (PeerCard(1, DIGEST), PeerCard(2, DIGEST))},
        {"peer_cards": tuple(PeerCard(number, DIGEST) for number in range(17, 0, -1))},
        {"unopened": (DIGEST, bytes(32))},
        {"now_ms": 2**63},
        {"ask": 1},
        {"bye": None},
    ],
    ids=repr,
)
def test_a_state_that_breaks_a_rule_is_never_made(changes: dict[str, object]) -> None:
    with pytest.raises(
        ValueError, match=r"^(A list|A state|The ranges|The inner bytes|A number|A text)"
    ):
        state.make_state(said(**changes))


@pytest.mark.parametrize(
    ("code", "data"), [pytest.param(*case, id=str(at)) for at, case in enumerate(large_states())]
)
def test_a_list_at_its_bound_is_read_and_one_beyond_is_too_large(code: str, data: bytes) -> None:
    errors = {"too_large": TooLarge, "malformed": Malformed}
    if code == "ok":
        state.parse_state(data)
    else:
        with pytest.raises(errors[code]):
            state.parse_state(data)


def test_unknown_keys_change_nothing() -> None:
    known = msgspec.msgpack.decode(state.make_state(FULL))
    news = {"fresh": {"a": [None, -1, 1.5]}, **known, "zebra": b"z", "unopened_too": ["x"]}
    assert state.parse_state(msgspec.msgpack.encode(news)) == FULL


@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1k", b"\x81", b"\xdc\0\1"])
@pytest.mark.parametrize("key", ["k", "streams"])
def test_deep_nesting_is_malformed(head: bytes, key: str) -> None:
    with pytest.raises(Malformed):
        state.parse_state(mapping(state_entries(**{key: head * 5000 + b"\0"})))


def test_states_are_ordered_by_card_and_then_by_sequence() -> None:
    orders = [
        said(card_sequence=card, sequence=sequence).order
        for card, sequence in ((4, 9), (5, 1), (5, 2), (5, 10), (6, 1))
    ]
    assert orders == sorted(set(orders))
    assert said(now_ms=1).order == said(ask=True).order


def test_a_letter_is_covered_by_its_number_in_a_range_with_its_digest() -> None:
    each = said(streams=(stored(1, 5, listed=(2, 5)), stored(8, listed=(8,), stream=HIGH)))
    assert each.covers(LOW, 2, DIGEST)
    assert each.covers(LOW, 5, DIGEST)
    assert each.covers(HIGH, 8, DIGEST)


@pytest.mark.parametrize(
    ("stream", "number", "digest"),
    [
        (LOW, 2, OTHER_DIGEST),
        (LOW, 1, DIGEST),  # in a range, its digest not listed
        (LOW, 6, DIGEST),
        (LOW, 3, DIGEST),
        (LOW, 7, DIGEST),
        (LOW, 8, DIGEST),  # that of another stream
        (HIGH, 2, DIGEST),
        (bytes(16), 2, DIGEST),
    ],
)
def test_a_letter_is_not_covered_without_all_three(
    stream: bytes, number: int, digest: bytes
) -> None:
    each = said(streams=(stored(1, 5, listed=(2, 5)), stored(8, listed=(8,), stream=HIGH)))
    assert not each.covers(stream, number, digest)
    assert not said().covers(stream, number, digest)


def test_a_digest_outside_the_ranges_covers_nothing() -> None:
    each = said(streams=(stored(1, listed=(3,)),))
    assert not each.covers(LOW, 3, DIGEST)


def test_refused_wins_over_stored() -> None:
    refused = (RefusedLetter(LOW, 2, DIGEST[:8]),)
    each = said(streams=(stored(1, listed=(1, 2)),), refused=refused)
    assert each.refuses(LOW, 2, DIGEST)
    assert not each.covers(LOW, 2, DIGEST)
    assert each.covers(LOW, 1, DIGEST)


def test_a_letter_stays_covered_when_another_of_its_number_is_refused() -> None:
    refused = (RefusedLetter(LOW, 2, OTHER_DIGEST[:8]),)
    each = said(streams=(stored(1, listed=(2,)),), refused=refused)
    assert each.covers(LOW, 2, DIGEST)
    assert not each.refuses(LOW, 2, DIGEST)
    assert each.refuses(LOW, 2, OTHER_DIGEST)
    assert not each.covers(LOW, 2, OTHER_DIGEST)
    assert not each.refuses(HIGH, 2, OTHER_DIGEST)
    assert not each.refuses(LOW, 1, OTHER_DIGEST)
