"""State letters come back as they were made; whatever else arrives is refused or is a state."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmbx_protocol.errors import Malformed, Refusal, TooLarge
from agentmbx_protocol.state import (
    PeerCard,
    Range,
    RefusedLetter,
    SentStream,
    State,
    StoredDigest,
    StoredStream,
    VoidStream,
    make_state,
    parse_state,
)
from frame_values import counters, digests, instances, many, numbers, some
from mutations import mutated
from second_reader import read
from vector_parts.fields import expected
from vector_parts.raw_forms import mapping

shorts = digests.map(lambda digest: digest[:8])
from_0 = st.integers(0, 2**63 - 1)
numbers_stored = st.one_of(st.integers(1, 40), counters)


def ranges_of(chosen: set[int]) -> tuple[Range, ...]:
    """The numbers as a state writes them, worked out one by one."""
    firsts = sorted(number for number in chosen if number - 1 not in chosen)
    lasts = sorted(number for number in chosen if number + 1 not in chosen)
    return tuple(map(Range, firsts, lasts))


@st.composite
def stored_streams(draw: st.DrawFn, stream: bytes) -> StoredStream:
    chosen = draw(st.sets(numbers_stored, min_size=1, max_size=12))
    listed = draw(st.sets(st.sampled_from(sorted(chosen))))
    found = tuple(StoredDigest(number, draw(shorts)) for number in sorted(listed))
    return StoredStream(stream, ranges_of(chosen), found)


@st.composite
def states(draw: st.DrawFn) -> State:
    def streams() -> list[bytes]:
        return sorted(draw(st.sets(instances, max_size=3)))

    def void() -> tuple[VoidStream, ...]:
        sets = st.sets(numbers_stored, min_size=1, max_size=12)
        return tuple(VoidStream(stream, ranges_of(draw(sets))) for stream in streams())

    def sent(stream: bytes) -> SentStream:
        last = draw(counters)
        return SentStream(stream, last, draw(st.integers(0, last)))

    refused = draw(st.sets(st.tuples(instances, counters, shorts), max_size=5))
    cards = draw(st.sets(st.tuples(counters, digests), max_size=3))
    return State(
        card_sequence=draw(counters),
        card_digest=draw(digests),
        sequence=draw(counters),
        streams=tuple(draw(stored_streams(stream)) for stream in streams()),
        refused=tuple(RefusedLetter(*each) for each in sorted(refused)),
        sent=tuple(sent(stream) for stream in streams()),
        void=void(),
        void_seen=void(),
        peer_cards=tuple(PeerCard(*each) for each in sorted(cards, reverse=True)),
        unopened=tuple(sorted(draw(st.sets(digests, max_size=4)))),
        ask_seen=draw(from_0),
        now_ms=draw(from_0),
        ask=draw(st.booleans()),
        bye=draw(st.booleans()),
    )


@some
@given(each=states())
def test_a_state_comes_back(each: State) -> None:
    data = make_state(each)
    assert parse_state(data) == each
    assert read("state", data) == expected("state", data)


@many
@given(data=st.data(), each=states())
def test_a_damaged_state_is_refused_or_is_another_state_in_its_one_form(
    data: st.DataObject, each: State
) -> None:
    wrong = data.draw(mutated([make_state(each)]))
    assert read("state", wrong) == expected("state", wrong)
    try:
        other = parse_state(wrong)
    except (Malformed, TooLarge):
        return
    assert parse_state(make_state(other)) == other
    # Only unknown keys are passed over, and none of them has a part in what is written anew.
    assert len(make_state(other)) < len(wrong) or make_state(other) == wrong


@many
@given(data=st.binary(max_size=600))
def test_any_bytes_behind_any_key_are_refused_or_are_a_state(data: bytes) -> None:
    for key in State.__struct_fields__:
        wrong = mapping([(key.encode(), data)])
        with suppress(Malformed, TooLarge):
            parse_state(wrong)
        assert read("state", wrong) == expected("state", wrong)


@some
@given(each=states(), cut=st.floats(0, 1, exclude_max=True))
def test_a_state_that_is_cut_short_is_malformed(each: State, cut: float) -> None:
    data = make_state(each)
    with pytest.raises(Malformed):
        parse_state(data[: int(cut * len(data))])


@some
@given(number=numbers, other=numbers)
def test_any_numbers_are_refused_or_come_back(number: int, other: int) -> None:
    each = State(
        card_sequence=number,
        card_digest=bytes(32),
        sequence=other,
        streams=(StoredStream(bytes(16), (Range(number, other),)),),
        sent=(SentStream(bytes(16), other, number),),
    )
    in_order = 1 <= number <= other < 2**63
    try:
        made = make_state(each)
    except ValueError as error:
        assert isinstance(error.__cause__, Refusal)  # noqa: PT017
        assert not in_order
    else:
        assert in_order
        assert parse_state(made) == each


@some
@given(each=states(), digest=digests)
def test_a_state_covers_just_the_letters_that_it_lists_and_does_not_refuse(
    each: State, digest: bytes
) -> None:
    listed = {
        (stored.stream, found.number, found.digest)
        for stored in each.streams
        for found in stored.digests
    }
    refused = {(one.stream, one.number, one.digest) for one in each.refused}
    for stream, number, short in listed | refused:
        whole = short + digest[8:]
        assert each.refuses(stream, number, whole) is ((stream, number, short) in refused)
        assert each.covers(stream, number, whole) is ((stream, number, short) in listed - refused)
        assert each.covers(stream, number, digest) is (
            (stream, number, digest[:8]) in listed - refused
        )
