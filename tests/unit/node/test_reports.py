"""State letters: what a machine says of both stores, and what it makes of what it hears."""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import msgspec
import pytest

from agentmbx_node import reports
from agentmbx_node.reports import BELIEVED_MAX
from agentmbx_node.rounds import Round
from agentmbx_node.store.rows import PEER, LetterRow, machine_of
from agentmbx_protocol import limits
from agentmbx_protocol.letter import decode_letter
from agentmbx_protocol.state import (
    PeerCard,
    Range,
    RefusedLetter,
    SentStream,
    State,
    StoredDigest,
    StoredStream,
    VoidStream,
    parse_state,
)
from letter_sides import HOUR, Relay, Side, collect, give_directly, give_to_relay, pair

SHORT: Final = limits.SHORT_DIGEST_BYTES


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with closing(Side("laptop")) as laptop, closing(Side("server")) as server:
        pair(laptop, server)
        for side in (laptop, server):
            side.change_peer(confirmed_card=side.card_sequence)
        yield laptop, server


def made(side: Side, *, ask: bool = False) -> State:
    """The state letter that the side would send now."""

    def work_on_peer() -> bytes:
        peer = side.peer
        data = side.write(
            lambda each: reports.make(each, machine_of(each), peer, side.now, ask=ask)
        )
        side.write(lambda each: PEER.save(each, peer))
        return data

    return parse_state(decode_letter(work_on_peer()).content)


def heard(side: Side, state: State) -> None:
    peer = side.peer
    side.write(lambda each: reports.take(each, machine_of(each), peer, state, side.now))
    side.write(lambda each: PEER.save(each, peer))


def said(side: Side, **changes: object) -> State:
    """A state of the side's peer that knows all of the side and has stored nothing."""
    peer = side.peer
    card = PeerCard(machine_of(side.connection).card_sequence, digest_of(side.card))
    plain = State(
        card_sequence=max(peer.seen_card, 1),
        card_digest=bytes(32),
        sequence=peer.seen_sequence + 1,
        peer_cards=(card,),
        now_ms=side.wall_ms,
    )
    return msgspec.structs.replace(plain, **changes)


def digest_of(card: bytes) -> bytes:
    return hashlib.sha256(card).digest()


def has(row: LetterRow, digest: bytes | None = None) -> tuple[StoredStream, ...]:
    """What a peer lists that has stored the letter; with a digest, another one of its number."""
    listed = StoredDigest(row.number, (digest or row.digest)[:SHORT])
    return (StoredStream(row.stream, (Range(row.number, row.number),), (listed,)),)


def held(side: Side) -> LetterRow:
    """A letter that a relay holds, asked about since."""
    row = side.send(b"one")
    side.write(
        lambda each: each.execute(
            "UPDATE letter SET state = 'held', ask_sequence = 3, was_tried = 1,"
            " held_age_ms = 5, envelope = x'01', envelope_digest = ?",
            (bytes(32),),
        )
    )
    side.change_peer(state_sequence=3)
    return side.letter(row.id)


def test_rule_5_a_state_that_lists_the_digest_ends_the_letter(sides: tuple[Side, Side]) -> None:
    """Rule 5: a letter ends by a state letter that covers it with the right digest."""
    row = held(sides[0])
    heard(sides[0], said(sides[0], streams=has(row)))
    assert sides[0].letter(row.id).state == "stored"


def test_a_range_without_the_digest_ends_nothing(sides: tuple[Side, Side]) -> None:
    row = held(sides[0])
    streams = (StoredStream(row.stream, (Range(1, 1),)),)
    heard(sides[0], said(sides[0], streams=streams))
    assert sides[0].letter(row.id).state == "held"


def test_another_letter_under_its_number_moves_the_letter_to_a_new_stream(
    sides: tuple[Side, Side],
) -> None:
    """Rule 6: the sender opens a new stream."""
    row = held(sides[0])
    heard(sides[0], said(sides[0], streams=has(row, b"x" * 32)))
    now = sides[0].letter(row.id)
    assert (now.state, now.number) == ("queued", 1)
    assert now.stream != row.stream
    assert sides[0].send(b"two").stream == now.stream


def test_a_refusal_wins_over_stored(sides: tuple[Side, Side]) -> None:
    row = held(sides[0])
    refused = (RefusedLetter(row.stream, row.number, row.digest[:SHORT]),)
    heard(sides[0], said(sides[0], streams=has(row), refused=refused))
    assert sides[0].letter(row.id).state == "queued"


def test_refused_letters_go_to_one_new_stream_together(sides: tuple[Side, Side]) -> None:
    laptop = sides[0]
    rows = [laptop.send(b"one"), laptop.send(b"two")]
    refused = tuple(RefusedLetter(row.stream, row.number, row.digest[:SHORT]) for row in rows)
    heard(laptop, said(laptop, refused=refused))
    assert len({row.stream for row in laptop.letters()}) == 1
    assert sorted(row.number for row in laptop.letters()) == [1, 2]


def test_what_could_not_be_opened_is_sealed_anew(sides: tuple[Side, Side]) -> None:
    row = held(sides[0])
    heard(sides[0], said(sides[0], unopened=(row.envelope_digest,)))
    assert sides[0].letter(row.id).state == "queued"
    assert sides[0].letter(row.id).envelope == b""


@pytest.mark.parametrize(("ask_seen", "state"), [(2, "held"), (3, "queued")])
def test_a_letter_is_sealed_anew_for_lack_only_if_the_ask_went_out_after_it(
    sides: tuple[Side, Side], ask_seen: int, state: str
) -> None:
    row = held(sides[0])
    heard(sides[0], said(sides[0], ask_seen=ask_seen))
    assert sides[0].letter(row.id).state == state


def test_a_later_confirmation_corrects_what_was_given_up(sides: tuple[Side, Side]) -> None:
    """Rule 5: exactly one notice, and a later confirmation corrects it."""
    laptop = sides[0]
    row = held(laptop)
    laptop.write(lambda each: each.execute("UPDATE letter SET state = 'not_confirmed'"))
    heard(laptop, said(laptop, streams=has(row)))
    assert (laptop.letter(row.id).state, laptop.letter(row.id).is_void) == ("stored", 0)


def test_a_cancelled_letter_that_arrived_is_corrected(sides: tuple[Side, Side]) -> None:
    laptop, server = sides
    row = laptop.send(b"one")
    assert give_directly(laptop.begin_round(), server)
    laptop.cancel(row.id)
    talk(laptop, server)
    assert laptop.letter(row.id).state == "stored"


def test_a_letter_that_arrives_after_its_void_was_settled_is_corrected(
    sides: tuple[Side, Side],
) -> None:
    laptop, server = sides
    row = laptop.send(b"one")
    lost = laptop.begin_round()
    laptop.cancel(row.id)
    talk(laptop, server)
    assert not laptop.letter(row.id).is_void
    assert give_directly(lost, server)
    heard(server, made(laptop))
    heard(laptop, made(server))
    assert laptop.letter(row.id).state == "stored"


def test_a_void_is_told_until_the_peer_has_seen_it(sides: tuple[Side, Side]) -> None:
    laptop = sides[0]
    row = laptop.send(b"one")
    laptop.cancel(row.id)
    void = (VoidStream(row.stream, (Range(1, 1),)),)
    assert made(laptop).void == void
    assert made(laptop).void == void
    heard(laptop, said(laptop, void_seen=void))
    assert made(laptop).void == ()


def test_a_void_of_the_peers_is_echoed(sides: tuple[Side, Side]) -> None:
    laptop = sides[0]
    void = (VoidStream(b"s" * 16, (Range(2, 4), Range(6, 6))),)
    heard(laptop, said(laptop, void=void))
    assert laptop.peer.is_due
    assert made(laptop).void_seen == void


def test_voids_that_nobody_answers_are_repeated_8_times_at_most(sides: tuple[Side, Side]) -> None:
    """Rule 9: message exchanges end."""
    laptop, relay = sides[0], Relay()
    queue = sides[1].add_queue()
    relay.queues[queue] = {}
    sides[1].change_peer(is_due=True)
    assert give_directly(sides[1].begin_round(), laptop)
    row = laptop.send(b"one")
    laptop.cancel(row.id)
    count = 0
    for _ in range(30):
        laptop.change_peer(direct_retry_age_ms=1 << 50)
        while isinstance(begun := laptop.begin(), Round):
            laptop.relay_done(begun, *give_to_relay(begun, relay))
            count += 1
        laptop.age_ms += 12 * HOUR
    assert laptop.begin() is None
    assert count == 9


def test_rule_9_a_state_that_does_not_ask_is_not_answered(sides: tuple[Side, Side]) -> None:
    """Rule 9."""
    laptop = sides[0]
    laptop.change_peer(is_due=False)
    heard(laptop, said(laptop))
    assert laptop.begin() is None


def test_a_state_that_asks_is_answered_with_its_sequence(sides: tuple[Side, Side]) -> None:
    laptop = sides[0]
    asking = said(laptop, ask=True)
    heard(laptop, asking)
    assert laptop.peer.is_due
    assert made(laptop).ask_seen == asking.sequence


def test_rule_9_two_machines_that_have_told_all_fall_silent(sides: tuple[Side, Side]) -> None:
    """Rule 9, from pairing on: cards are announced, asked for and confirmed, and that is all."""
    laptop, server = sides
    for side in sides:
        side.change_peer(confirmed_card=0)
    laptop.send(b"one")
    assert talk(laptop, server) < 8


def test_rule_9_two_machines_fall_silent_by_relay_too(sides: tuple[Side, Side]) -> None:
    """Rule 9, and receipts get no receipts: a state letter is not confirmed by another one."""
    laptop, server = sides
    relay = Relay()
    for side, far in ((laptop, server), (server, laptop)):
        relay.queues[side.add_queue()] = {}
        far.change_peer(card=side.card, card_sequence=side.card_sequence)
    laptop.send(b"one")
    count = 0
    for _ in range(200):
        for side in sides:
            side.change_peer(direct_retry_age_ms=1 << 50)
            if isinstance(begun := side.begin(), Round):
                side.relay_done(begun, *give_to_relay(begun, relay))
                count += 1
        for side in sides:
            collect(side, relay)
            side.age_ms += 30_000
    assert [row.state for row in laptop.letters()] == ["stored"]
    assert count < 10
    assert laptop.begin() is None
    assert server.begin() is None


def test_an_older_state_than_was_heard_confirms_nothing(sides: tuple[Side, Side]) -> None:
    laptop = sides[0]
    row = held(laptop)
    old = said(laptop, streams=has(row))
    heard(laptop, said(laptop, sequence=9))
    heard(laptop, old)
    assert laptop.letter(row.id).state == "held"


def test_a_newer_state_of_an_older_card_makes_this_card_known_no_more(
    sides: tuple[Side, Side],
) -> None:
    laptop = sides[0]
    heard(laptop, said(laptop))
    assert laptop.peer.confirmed_card == laptop.card_sequence
    heard(laptop, said(laptop, peer_cards=(PeerCard(3, bytes(32)),)))
    assert laptop.peer.confirmed_card == 3
    told = laptop.begin_round().told
    assert told is not None
    assert told.asks


def test_a_machine_that_went_back_is_told_so_and_makes_a_newer_card(
    sides: tuple[Side, Side],
) -> None:
    laptop = sides[0]
    was = laptop.card_sequence
    heard(laptop, said(laptop, peer_cards=(PeerCard(was + 5, bytes(32)),)))
    assert laptop.card == b""
    assert not isinstance(laptop.begin(), Round)
    laptop.renew_card()
    assert laptop.card_sequence > was + 5


def test_a_machine_that_went_back_opens_a_new_stream(sides: tuple[Side, Side]) -> None:
    """Rule 6: the peer has numbers that this store never gave."""
    laptop = sides[0]
    stream = laptop.peer.stream
    heard(laptop, said(laptop, streams=(StoredStream(stream, (Range(1, 4),)),)))
    assert laptop.peer.stream != stream
    assert laptop.send(b"one").number == 1


def test_an_older_copy_of_a_peer_is_shown_what_was_seen_of_it(sides: tuple[Side, Side]) -> None:
    """So it counts on from there, and is heard again."""
    laptop, server = sides
    copy = server.back_up()
    for _ in range(5):
        heard(laptop, made(server))
    server.restore(copy)
    heard(laptop, made(server))
    assert laptop.peer.is_due
    heard(server, made(laptop))
    row = laptop.send(b"one")
    server.receive(laptop.begin_round().parcels, "relay")
    heard(laptop, made(server))
    assert laptop.letter(row.id).state == "stored"


def test_a_peer_cannot_use_up_the_numbers_of_this_machine(sides: tuple[Side, Side]) -> None:
    """Rule 7: nothing moves a counter to where it cannot go on."""
    laptop = sides[0]
    was = laptop.card_sequence
    cards = (PeerCard(BELIEVED_MAX, bytes(32)),)
    heard(laptop, said(laptop, peer_cards=cards, ask_seen=limits.COUNTER_MAX))
    assert laptop.card_sequence == was
    assert laptop.peer.state_sequence < BELIEVED_MAX


def test_digests_are_listed_until_the_sender_knows_them_confirmed(
    sides: tuple[Side, Side],
) -> None:
    laptop, server = sides
    row = laptop.send(b"one")
    server.receive(laptop.begin_round().parcels, "relay")
    assert made(server).streams == has(row)
    heard(server, said(server, sent=(SentStream(row.stream, 1, 1),)))
    assert made(server).streams == ()


def test_a_bye_ends_all_letters_whatever_its_order(sides: tuple[Side, Side]) -> None:
    """Rule 5: a letter ends by a bye inside a letter."""
    laptop = sides[0]
    row = held(laptop)
    heard(laptop, said(laptop, sequence=9))
    heard(laptop, said(laptop, sequence=1, bye=True))
    assert laptop.letter(row.id).state == "not_confirmed"
    assert laptop.peer.state == "left"
    assert laptop.begin() is None


def test_what_does_not_fit_the_limits_is_left_for_a_later_letter(
    sides: tuple[Side, Side],
) -> None:
    laptop, server = sides
    number = server.peer.id
    for stream in range(limits.STATE_STREAMS_MAX + 3):
        name = stream.to_bytes(limits.STREAM_BYTES, "big")
        server.connection.execute(
            "INSERT INTO stored_range (peer, stream, first, last) VALUES (?, ?, 1, 1)",
            (number, name),
        )
        server.connection.execute(
            "INSERT INTO stored_digest VALUES (?, ?, 1, ?, 0)", (number, name, bytes(32))
        )
    assert len(made(server).streams) == limits.STATE_STREAMS_MAX
    assert laptop.begin() is None


def talk(one: Side, other: Side) -> int:
    """Run rounds of both directly until both are silent; how many there were."""
    count = 0
    for _ in range(20):
        for side, far in ((one, other), (other, one)):
            if isinstance(begun := side.begin(), Round):
                side.direct_done(begun, give_directly(begun, far) or frozenset())
                count += 1
            side.age_ms += 2000
    assert one.begin() is None
    assert other.begin() is None
    return count
