"""The life of a letter, as the outbox writes it."""

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from agentmbx_node import outbox
from agentmbx_node.errors import Failure
from agentmbx_node.outbox import MOVES, OPEN, IllegalMove, KeyConflict, Move
from agentmbx_protocol import limits
from agentmbx_protocol.letter import decode_letter
from letter_sides import HOUR, Side, pair

STATES = ("queued", "held", "stored", "not_confirmed", "cancelled")


@pytest.fixture
def side() -> Iterator[Side]:
    with closing(Side("laptop")) as laptop, closing(Side("server")) as server:
        pair(laptop, server)
        yield laptop


@pytest.mark.parametrize(("state", "what"), list(itertools.product(STATES, Move)))
def test_a_letter_makes_only_the_moves_of_the_table(side: Side, state: str, what: Move) -> None:
    row = side.send(b"one")
    row.state = state
    if (state, what) in MOVES:
        outbox.move(side.connection, row, what, side.now)
        assert side.letter(row.id).state == MOVES[state, what]
    else:
        with pytest.raises(IllegalMove):
            outbox.move(side.connection, row, what, side.now)
        assert row.state == state


def test_what_the_peer_has_stays_stored() -> None:
    assert not [state for state, _ in MOVES if state == "stored"]


def test_a_letter_that_ended_without_the_peer_is_only_ever_corrected() -> None:
    ended = {state: [what for at, what in MOVES if at == state] for state in STATES}
    assert ended["not_confirmed"] == ended["cancelled"] == [Move.STORED]


def test_numbers_count_up_within_a_stream(side: Side) -> None:
    rows = [side.send(b"letter %d" % number) for number in range(3)]
    assert [row.number for row in rows] == [1, 2, 3]
    assert len({row.stream for row in rows}) == 1


def test_a_number_is_not_given_when_its_commit_does_not_happen(side: Side) -> None:
    def work(connection: sqlite3.Connection) -> None:
        outbox.submit(connection, side.peer, content_type="x", content=b"x", now=side.now)

    side.write(work, fails=True)
    assert side.send(b"one").number == 1


def test_rule_7_the_deadline_is_72_hours_of_age_whatever_the_wall_says(side: Side) -> None:
    """Rule 7: no clock can lose mail."""
    side.wall_ms = 0
    row = side.send(b"one")
    assert row.deadline_age_ms == side.age_ms + 72 * HOUR
    side.wall_ms = -5
    assert decode_letter(side.send(b"two").data).sent_ms == 0


def test_the_same_key_again_is_the_same_letter(side: Side) -> None:
    first = side.send(b"one", key="k")
    assert side.send(b"one", key="k") == first
    assert len(side.letters()) == 1


def test_the_same_key_with_another_content_is_a_conflict_that_names_the_letter(side: Side) -> None:
    first = side.send(b"one", key="k")
    with pytest.raises(KeyConflict, match=first.id):
        side.send(b"two", key="k")
    assert len(side.letters()) == 1


def test_the_same_key_for_another_peer_is_a_conflict(side: Side) -> None:
    side.send(b"one", key="k")
    with closing(Side("phone")) as phone:
        pair(side, phone)
    with pytest.raises(KeyConflict):
        side.send(b"one", key="k")


def test_a_key_is_remembered_after_its_letter_ended(side: Side) -> None:
    row = side.send(b"one", key="k")
    side.cancel(row.id)
    assert side.send(b"one", key="k").state == "cancelled"


def test_letters_without_a_key_are_never_the_same(side: Side) -> None:
    assert side.send(b"one").id != side.send(b"one").id


def test_the_cancel_of_a_letter_that_was_never_tried_says_so(side: Side) -> None:
    row = side.send(b"one")
    assert side.cancel(row.id) is False
    assert side.letter(row.id).state == "cancelled"
    assert side.letter(row.id).is_void


def test_the_cancel_of_a_letter_that_was_tried_says_that_it_may_arrive(side: Side) -> None:
    row = side.send(b"one")
    side.begin_round()
    assert side.cancel(row.id) is True


def test_what_has_ended_is_not_cancelled_again(side: Side) -> None:
    row = side.send(b"one")
    side.cancel(row.id)
    with pytest.raises(Failure, match="ended already"):
        side.cancel(row.id)


def test_a_cancel_is_told_to_the_peer(side: Side) -> None:
    row = side.send(b"one")
    side.change_peer(is_due=False, has_news=False, void_tries=5)
    side.cancel(row.id)
    peer = side.peer
    assert (peer.is_due, peer.has_news, peer.void_tries) == (1, 1, 0)


def test_retry_makes_all_that_waits_due_by_every_way(side: Side) -> None:
    row = side.send(b"one")
    side.write(lambda each: each.execute("UPDATE letter SET next_age_ms = 1 << 50"))
    side.change_peer(failures=9, retry_age_ms=1 << 50, direct_retry_age_ms=1 << 50)
    side.write(lambda each: outbox.retry(each, side.peer, side.now))
    begun = side.begin_round()
    assert row.id in begun.letters
    assert begun.addresses


def test_a_letter_with_a_new_number_has_the_same_content_and_id(side: Side) -> None:
    row = side.send(b"one")
    peer = side.peer
    outbox.number_anew(side.connection, peer, row, side.now, stream=b"n" * limits.STREAM_BYTES)
    known = side.letter(row.id)
    letter = decode_letter(known.data)
    assert (known.stream, known.number, known.state) == (b"n" * 16, 1, "queued")
    assert (letter.stream, letter.number, letter.content) == (b"n" * 16, 1, b"one")
    assert (peer.stream, peer.last_number) == (b"n" * 16, 1)


def test_the_end_of_a_pairing_ends_every_open_letter_and_no_other(side: Side) -> None:
    rows = [side.send(b"letter %d" % number) for number in range(3)]
    side.cancel(rows[0].id)
    side.write(lambda each: outbox.end_all(each, side.peer, Move.GIVE_UP, side.now, "over"))
    assert [row.state for row in side.letters()] == ["cancelled", "not_confirmed", "not_confirmed"]
    assert not [row for row in side.letters() if row.state in OPEN]
