"""What one round offers to a peer, and what came of it."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import pytest

from agentmbx_node.rounds import BACKOFF_MS_MAX, LETTERS_MAX, Round
from agentmbx_protocol.errors import Malformed, NoSuchQueue, QueueFull, ShuttingDown, TooLarge
from letter_sides import (
    HOUR,
    Relay,
    S,
    Side,
    collect,
    give_directly,
    give_to_relay,
    pair,
)

MINUTE: Final = 60 * S
DEADLINE: Final = 72 * HOUR


class Scene:
    """A laptop that sends and a server that it knows, with a queue at a relay."""

    def __init__(self) -> None:
        self.laptop, self.server, self.relay = Side("laptop"), Side("server"), Relay()
        for side in (self.laptop, self.server):
            self.relay.queues[side.add_queue()] = {}
        pair(self.laptop, self.server)
        for side in (self.laptop, self.server):
            side.change_peer(confirmed_card=side.card_sequence)

    def pass_ms(self, ms: int) -> None:
        self.relay.pass_ms(ms)
        for side in (self.laptop, self.server):
            side.age_ms += ms
            side.wall_ms += ms

    def fallen(self) -> Round:
        """A round of the laptop's by relay."""
        begun = self.laptop.begin_round()
        if not begun.addresses:
            return begun
        fallen = self.laptop.fall_back(begun)
        assert fallen is not None
        return fallen

    def hold(self) -> None:
        """One round of the laptop's whose letters the relay holds."""
        begun = self.fallen()
        held, refused = give_to_relay(begun, self.relay)
        self.laptop.relay_done(begun, held, refused)

    def fail(self) -> None:
        """One round in which nobody answers."""
        self.laptop.relay_done(self.fallen(), error="no answer")

    def pass_backoff(self) -> None:
        self.pass_ms(max(self.laptop.peer.retry_age_ms - self.laptop.age_ms, 0) + 1)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    for side in (made.laptop, made.server):
        side.close()


def test_a_letter_is_marked_as_tried_in_the_commit_before_its_first_byte_leaves(
    scene: Scene,
) -> None:
    row = scene.laptop.send(b"one")
    assert not row.was_tried
    scene.laptop.begin_round()
    assert scene.laptop.letter(row.id).was_tried


def test_a_round_goes_directly_first(scene: Scene) -> None:
    row = scene.laptop.send(b"one")
    begun = scene.laptop.begin_round()
    assert begun.addresses == [scene.server.address]
    stored = give_directly(begun, scene.server)
    assert stored
    scene.laptop.direct_done(begun, stored)
    assert scene.laptop.letter(row.id).state == "stored"
    assert scene.server.contents() == [b"one"]


def test_one_direct_failure_counts_for_all_letters_for_5_minutes(scene: Scene) -> None:
    scene.laptop.send(b"one")
    scene.hold()
    scene.laptop.send(b"two")
    assert not scene.laptop.begin_round().addresses
    scene.pass_ms(5 * MINUTE)
    assert scene.laptop.begin_round().addresses


def test_contact_makes_the_direct_way_worth_trying_again(scene: Scene) -> None:
    """N3: backoff is cut short by contact."""
    scene.laptop.send(b"one")
    scene.fail()
    assert scene.laptop.peer.retry_age_ms > scene.laptop.age_ms
    scene.server.send(b"hello")
    begun = scene.server.begin_round()
    assert give_directly(begun, scene.laptop)
    peer = scene.laptop.peer
    assert (peer.failures, peer.retry_age_ms, peer.direct_retry_age_ms) == (0, 0, 0)
    assert scene.laptop.begin_round().addresses


def test_contact_by_relay_cuts_backoff_but_proves_no_direct_way(scene: Scene) -> None:
    """N3: backoff is cut short by contact."""
    scene.laptop.send(b"one")
    scene.fail()
    scene.server.send(b"hello")
    begun = scene.server.fall_back(scene.server.begin_round())
    assert begun is not None
    give_to_relay(begun, scene.relay)
    assert collect(scene.laptop, scene.relay)
    assert not scene.laptop.begin_round().addresses


def test_backoff_doubles_up_to_15_minutes(scene: Scene) -> None:
    scene.laptop.send(b"one")
    waits = []
    for _ in range(14):
        scene.fail()
        waits.append(scene.laptop.peer.retry_age_ms - scene.laptop.age_ms)
        scene.pass_backoff()
    assert waits[0] <= S
    assert all(BACKOFF_MS_MAX / 2 <= wait <= BACKOFF_MS_MAX for wait in waits[11:])


def test_while_it_backs_off_a_machine_says_when_it_will_try(scene: Scene) -> None:
    scene.laptop.send(b"one")
    scene.fail()
    assert scene.laptop.begin() == scene.laptop.peer.retry_age_ms


def test_a_relay_that_says_when_to_come_again_is_heeded_for_15_minutes_at_most(
    scene: Scene,
) -> None:
    scene.laptop.send(b"one")
    begun = scene.fallen()
    full = {parcel.digest: QueueFull(retry_after_s=100_000) for parcel in begun.parcels}
    scene.laptop.relay_done(begun, refused=full)
    assert scene.laptop.peer.retry_age_ms == scene.laptop.age_ms + BACKOFF_MS_MAX


def test_rounds_get_smaller_after_failures_until_each_letter_goes_alone(scene: Scene) -> None:
    """O1: a letter that something on the way will not pass holds up no other."""
    for number in range(LETTERS_MAX + 10):
        scene.laptop.send(b"letter %d" % number)
    sizes = []
    for _ in range(8):
        sizes.append(len(scene.fallen().letters))
        scene.laptop.change_peer(retry_age_ms=0)
        scene.fail()
        scene.pass_backoff()
    assert sizes[0] == LETTERS_MAX
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_a_letter_that_breaks_every_request_holds_up_no_other(scene: Scene) -> None:
    """O1, to the end: all but that one are held."""
    poison = scene.laptop.send(b"poison")
    others = [scene.laptop.send(b"letter %d" % number) for number in range(20)]
    for _ in range(60):
        begun = scene.laptop.begin()
        if isinstance(begun, Round):
            fallen = scene.laptop.fall_back(begun) if begun.addresses else begun
            assert fallen is not None
            if poison.id in fallen.letters:
                scene.laptop.relay_done(fallen, error="the connection broke")
            else:
                scene.laptop.relay_done(fallen, *give_to_relay(fallen, scene.relay))
        scene.pass_ms(15 * MINUTE)
    assert {scene.laptop.letter(row.id).state for row in others} == {"held"}
    assert scene.laptop.letter(poison.id).state == "queued"


@pytest.mark.parametrize("refusal", [Malformed(), TooLarge()])
def test_a_refusal_of_one_letter_does_not_block_the_others(
    scene: Scene, refusal: Malformed | TooLarge
) -> None:
    bad, good = scene.laptop.send(b"bad"), scene.laptop.send(b"good")
    begun = scene.fallen()
    held, _ = give_to_relay(begun, scene.relay)
    (digest,) = (each.parcel.digest for each in begun.offers if each.letter == bad.id)
    del held[digest]
    scene.laptop.relay_done(begun, held, {digest: refusal})
    assert scene.laptop.letter(good.id).state == "held"
    assert scene.laptop.letter(bad.id).why == refusal.detail
    assert scene.laptop.peer.retry_age_ms == 0
    later = scene.laptop.send(b"later")
    assert scene.laptop.begin_round().letters == [later.id]


@pytest.mark.parametrize("refusal", [NoSuchQueue(), QueueFull(), ShuttingDown()])
def test_rule_5_a_refusal_that_may_pass_delays_all_and_ends_none(
    scene: Scene, refusal: NoSuchQueue | QueueFull | ShuttingDown
) -> None:
    """Rules 5 and 8: no answer of a hop ends a letter; an unknown queue may come to be."""
    row = scene.laptop.send(b"one")
    begun = scene.fallen()
    scene.laptop.relay_done(begun, refused={each.digest: refusal for each in begun.parcels})
    assert scene.laptop.letter(row.id).state == "queued"
    scene.pass_ms(MINUTE)
    assert row.id in scene.fallen().letters


def test_an_answer_that_says_nothing_is_a_failure(scene: Scene) -> None:
    scene.laptop.send(b"one")
    scene.laptop.relay_done(scene.fallen())
    assert scene.laptop.peer.failures == 1


def test_a_letter_asks_to_be_held_for_what_is_left_of_it_and_an_hour(scene: Scene) -> None:
    """Rule 7: a ttl is asked for, no time is named."""
    scene.laptop.send(b"one")
    scene.pass_ms(10 * HOUR)
    (offer,) = (each for each in scene.fallen().offers if each.letter)
    assert offer.parcel.ttl_s == 63 * 3600


def test_what_is_held_is_deposited_again_with_the_same_bytes(scene: Scene) -> None:
    row = scene.laptop.send(b"one")
    scene.hold()
    first = scene.laptop.letter(row.id).envelope_digest
    times = []
    for _ in range(4):
        due = scene.laptop.letter(row.id).next_age_ms
        times.append((due - scene.laptop.age_ms) // HOUR)
        scene.pass_ms(due - scene.laptop.age_ms)
        scene.laptop.change_peer(direct_retry_age_ms=1 << 50, asked_age_ms=1 << 50, is_due=False)
        begun = scene.laptop.begin_round()
        assert [each.parcel.digest for each in begun.offers if each.letter] == [first]
        scene.laptop.relay_done(begun, *give_to_relay(begun, scene.relay))
    assert times == [1, 6, 12, 12]


def test_what_is_held_is_sealed_anew_when_the_peer_has_another_route(scene: Scene) -> None:
    row = scene.laptop.send(b"one")
    scene.hold()
    queue = scene.server.add_queue()
    scene.server.change_peer(is_due=True)
    assert give_directly(scene.server.begin_round(), scene.laptop)
    begun = scene.fallen()
    (offer,) = (each for each in begun.offers if each.letter)
    assert (offer.letter, offer.parcel.queue) == (row.id, queue)


def test_what_is_held_is_offered_directly_once_the_peer_is_reached(scene: Scene) -> None:
    row = scene.laptop.send(b"held")
    scene.hold()
    scene.pass_ms(5 * MINUTE)
    scene.laptop.send(b"new")
    for _ in range(2):
        begun = scene.laptop.begin_round()
        scene.laptop.direct_done(begun, give_directly(begun, scene.server) or frozenset())
    assert scene.laptop.letter(row.id).state == "stored"


def test_what_the_peer_itself_does_not_take_is_not_offered_in_a_loop(scene: Scene) -> None:
    for number in range(2):
        scene.laptop.send(b"letter %d" % number)
    scene.hold()
    scene.pass_ms(6 * MINUTE)
    count = 0
    while isinstance(begun := scene.laptop.begin(), Round):
        state = frozenset(each.parcel.digest for each in begun.offers if not each.letter)
        scene.laptop.direct_done(begun, state)
        count += 1
        assert count < 5
    assert begun is not None
    assert begun > scene.laptop.age_ms + S


def test_rule_5_a_letter_is_given_up_after_its_deadline_and_one_answered_round_with_one_notice(
    scene: Scene,
) -> None:
    """Rule 5: a deadline counts after a full round that began after it."""
    row = scene.laptop.send(b"one")
    begun = scene.fallen()
    scene.pass_ms(DEADLINE)
    scene.laptop.relay_done(begun, *give_to_relay(begun, scene.relay))
    assert scene.laptop.letter(row.id).state == "held"
    for _ in range(3):
        scene.laptop.send(b"another")
        scene.hold()
        scene.pass_ms(20 * MINUTE)
    assert scene.laptop.letter(row.id).state == "not_confirmed"
    assert notices(scene.laptop, row.id) == 1


def test_rule_5_nobody_answering_gives_up_after_8_rounds_over_more_than_an_hour(
    scene: Scene,
) -> None:
    """Rule 5: a laptop may have slept for 72 hours; a relay may be gone for good."""
    row = scene.laptop.send(b"one")
    scene.pass_ms(DEADLINE)
    started_ms, count = scene.laptop.age_ms, 0
    while scene.laptop.letter(row.id).state == "queued":
        scene.fail()
        count += 1
        scene.pass_backoff()
        assert count < 40
    assert count >= 8
    assert HOUR < scene.laptop.age_ms - started_ms < 2 * HOUR
    assert notices(scene.laptop, row.id) == 1


def test_letters_that_a_late_round_does_not_fit_end_too(scene: Scene) -> None:
    """Rule 5, for many letters: after failures a round holds only one of them."""
    for number in range(30):
        scene.laptop.send(b"letter %d" % number)
    scene.laptop.change_peer(failures=10)
    scene.pass_ms(DEADLINE)
    for _ in range(12):
        if isinstance(begun := scene.laptop.begin(), Round):
            scene.laptop.relay_done(begun, error="no answer")
        scene.pass_ms(15 * MINUTE)
    assert {row.state for row in scene.laptop.letters()} == {"not_confirmed"}


def test_a_round_that_never_ended_is_told_again(scene: Scene) -> None:
    """What is due survives a crash."""
    scene.laptop.change_peer(is_due=True, has_news=True)
    told = scene.laptop.begin_round().told
    assert told is not None
    scene.pass_ms(MINUTE)
    again = scene.laptop.begin_round().told
    assert again is not None
    assert again.has_news


def test_news_that_comes_during_a_round_is_told_by_the_next(scene: Scene) -> None:
    scene.laptop.change_peer(is_due=True)
    begun = scene.laptop.begin_round()
    scene.laptop.change_peer(is_due=True, has_news=True)
    scene.laptop.direct_done(begun, frozenset(each.digest for each in begun.parcels))
    scene.pass_ms(S)
    told = scene.laptop.begin_round().told
    assert told is not None
    assert told.has_news


def test_a_question_that_did_not_go_out_is_asked_by_the_next_round(scene: Scene) -> None:
    scene.laptop.send(b"one")
    scene.hold()
    scene.pass_ms(6 * MINUTE)
    begun = scene.fallen()
    assert begun.told is not None
    assert begun.told.asks
    scene.laptop.relay_done(begun, error="lost")
    scene.pass_backoff()
    told = scene.fallen().told
    assert told is not None
    assert told.asks


def test_an_unanswered_question_is_asked_every_15_minutes_at_most(scene: Scene) -> None:
    """Rule 9."""
    scene.laptop.send(b"one")
    scene.hold()
    asked = []
    for _ in range(4 * 60):
        scene.pass_ms(MINUTE)
        scene.laptop.change_peer(direct_retry_age_ms=1 << 50)
        if isinstance(begun := scene.laptop.begin(), Round):
            scene.laptop.relay_done(begun, *give_to_relay(begun, scene.relay))
            if begun.told is not None:
                asked.append(scene.laptop.age_ms)
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps
    assert min(gaps) >= 15 * MINUTE


def test_a_machine_says_a_time_that_is_worth_waiting_for(scene: Scene) -> None:
    """A question that is due too early after the last state letter does not make rounds spin."""
    scene.laptop.send(b"one")
    scene.hold()
    scene.pass_ms(6 * MINUTE)
    scene.laptop.change_peer(state_age_ms=scene.laptop.age_ms, direct_retry_age_ms=1 << 50)
    assert scene.laptop.begin() == scene.laptop.age_ms + MINUTE


def notices(side: Side, letter: str) -> int:
    (count,) = side.connection.execute(
        "SELECT COUNT(*) FROM letter_event WHERE letter = ? AND state = 'not_confirmed'", (letter,)
    ).fetchone()
    return int(count)
