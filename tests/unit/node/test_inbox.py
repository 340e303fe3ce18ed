"""What arrives: once, durable before it is answered, and from peers only."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import pytest

from agentmbx_node import ranges
from agentmbx_node.arrivals import Arrivals
from agentmbx_node.clock import Clock
from agentmbx_node.inbox import Fate, Receipt
from agentmbx_node.parcels import Sealer
from agentmbx_node.store.database import Database
from agentmbx_protocol import bodies, limits
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.errors import NoSuchQueue, Unavailable
from agentmbx_protocol.letter import Letter, encode_letter
from letter_sides import DAY, HOUR, TEXT, Side, give_directly, pair, with_byte_changed

STREAM: Final = b"s" * limits.STREAM_BYTES


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with closing(Side("laptop")) as laptop, closing(Side("server")) as server:
        pair(laptop, server)
        yield laptop, server


def sealed(sender: Side, number: int, content: bytes, *, stream: bytes = STREAM) -> Envelope:
    """A letter of any number, in an envelope for the peer."""
    letter = Letter(
        stream=stream,
        number=number,
        sent_ms=sender.wall_ms,
        lifetime_s=limits.LETTER_LIFETIME_S_MAX,
        content_type=TEXT,
        content=content,
    )
    return Sealer.of(sender.connection, sender.keyring).seal(sender.peer, encode_letter(letter))


def fates(receiver: Side, *parcels: Envelope, way: str = "relay") -> list[Fate]:
    return [receipt.fate for receipt in receiver.receive(parcels, way)]


def test_rule_6_a_letter_is_stored_once_however_often_and_by_whichever_way_it_comes(
    sides: tuple[Side, Side],
) -> None:
    """Rule 6: (pairing, stream, number) is stored at most once, ever."""
    laptop, server = sides
    parcel, anew = sealed(laptop, 1, b"one"), sealed(laptop, 1, b"one")
    assert fates(server, parcel, parcel, anew) == [Fate.STORED] * 3
    assert fates(server, anew, way="direct") == [Fate.STORED]
    assert server.contents() == [b"one"]


def test_only_the_first_copy_is_news(sides: tuple[Side, Side]) -> None:
    laptop, server = sides
    receipts = server.receive([sealed(laptop, 1, b"one")] * 2, "relay")
    assert [receipt.is_new for receipt in receipts] == [True, False]


def test_rule_6_a_late_retry_long_after_is_still_a_duplicate(sides: tuple[Side, Side]) -> None:
    """X4: also when the sender has long called the number confirmed."""
    laptop, server = sides
    row = laptop.send(b"one")
    begun = laptop.begin_round()
    laptop.direct_done(begun, give_directly(begun, server) or frozenset())
    for side in sides:
        side.age_ms += 400 * DAY
        side.wall_ms += 400 * DAY
    laptop.send(b"two")
    begun = laptop.begin_round()
    laptop.direct_done(begun, give_directly(begun, server) or frozenset())
    assert not server.connection.execute(
        "SELECT 1 FROM stored_digest WHERE number = ?", (row.number,)
    ).fetchall()
    again = Sealer.of(laptop.connection, laptop.keyring).seal(laptop.peer, row.data)
    assert fates(server, again) == [Fate.STORED]
    assert server.contents() == [b"one", b"two"]


def test_rule_6_the_same_number_with_other_bytes_is_refused_and_stored_nowhere(
    sides: tuple[Side, Side],
) -> None:
    """Rule 6: the refusal stands in a state letter, and the sender opens a new stream."""
    laptop, server = sides
    assert fates(server, sealed(laptop, 1, b"one"), sealed(laptop, 1, b"two")) == [
        Fate.STORED,
        Fate.DONE,
    ]
    assert server.contents() == [b"one"]
    assert server.connection.execute("SELECT number FROM refused_number").fetchall() == [(1,)]
    assert server.peer.is_due


def test_two_peers_may_send_the_same_bytes(sides: tuple[Side, Side]) -> None:
    """A peer cannot stop another's mail by sending it too."""
    laptop, server = sides
    with closing(Side("phone")) as phone:
        pair(phone, server)
        assert fates(server, sealed(laptop, 1, b"one"), sealed(phone, 1, b"one")) == [
            Fate.STORED,
            Fate.STORED,
        ]
    assert server.contents() == [b"one", b"one"]


def test_the_highest_number_is_a_number_like_any_other(sides: tuple[Side, Side]) -> None:
    laptop, server = sides
    last = limits.COUNTER_MAX
    parcels = [sealed(laptop, number, b"%d" % number) for number in (last, last - 1, last)]
    assert fates(server, *parcels) == [Fate.STORED] * 3
    assert len(server.mail()) == 2


def test_nothing_that_is_stored_is_held_back_by_a_gap(sides: tuple[Side, Side]) -> None:
    laptop, server = sides
    fates(server, sealed(laptop, 7, b"seven"), sealed(laptop, 3, b"three"))
    assert sorted(server.contents()) == [b"seven", b"three"]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3)])
def test_numbers_in_any_order_become_one_range(
    sides: tuple[Side, Side], order: tuple[int, ...]
) -> None:
    laptop, server = sides
    fates(server, *(sealed(laptop, number, b"%d" % number) for number in order))
    assert server.connection.execute("SELECT first, last FROM stored_range").fetchall() == [(1, 3)]
    assert ranges.is_stored(server.connection, 1, STREAM, 2)
    assert not ranges.is_stored(server.connection, 1, STREAM, 4)


def test_rule_7_a_letter_that_arrives_past_its_lifetime_is_stored_and_marked_late(
    sides: tuple[Side, Side],
) -> None:
    """Rule 7: no clock can lose mail."""
    laptop, server = sides
    parcels = [sealed(laptop, 1, b"one"), sealed(laptop, 2, b"two")]
    assert fates(server, parcels[0]) == [Fate.STORED]
    server.wall_ms += 72 * HOUR + 1
    assert fates(server, parcels[1]) == [Fate.STORED]
    assert [mail.is_late for mail in server.mail()] == [0, 1]


def test_lateness_is_counted_by_the_peers_clock_as_it_was_last_heard(
    sides: tuple[Side, Side],
) -> None:
    """Rule 7: a wall clock that is years off here makes nothing late."""
    laptop, server = sides
    server.wall_ms += 3650 * DAY
    laptop.change_peer(is_due=True)
    assert give_directly(laptop.begin_round(), server)
    assert fates(server, sealed(laptop, 1, b"one")) == [Fate.STORED]
    assert [mail.is_late for mail in server.mail()] == [0]


def test_what_a_stranger_signs_is_nobodys(sides: tuple[Side, Side]) -> None:
    laptop, server = sides
    with closing(Side("phone")) as phone:
        pair(phone, laptop)
        receipts = server.receive([sealed(phone, 1, b"one")], "relay")
    assert receipts == [Receipt(Fate.UNKNOWN)]


def test_sealed_bytes_cannot_be_passed_on_to_a_third_machine(sides: tuple[Side, Side]) -> None:
    laptop, server = sides
    parcel = sealed(laptop, 1, b"one")
    with closing(Side("phone")) as phone:
        pair(laptop, phone)
        phone.change_peer(pair_key=parcel.signer)
        assert fates(phone, parcel) == [Fate.DONE]
        assert not phone.mail()
    assert not server.mail()


def test_what_was_changed_on_the_way_is_answered_like_what_a_stranger_signs(
    sides: tuple[Side, Side],
) -> None:
    """Rule 8: who has no key does not learn whose key it is."""
    laptop, server = sides
    assert fates(server, with_byte_changed(sealed(laptop, 1, b"one"))) == [Fate.UNKNOWN]
    assert not server.mail()


def test_what_does_not_open_is_done_with_and_told_at_most_hourly(sides: tuple[Side, Side]) -> None:
    laptop, server = sides
    parcels = [sealed(laptop, number, b"one") for number in (1, 2)]
    server.change_sealing()
    assert fates(server, parcels[0]) == [Fate.DONE]
    assert server.peer.is_due
    server.change_peer(is_due=False)
    assert fates(server, parcels[1]) == [Fate.DONE]
    assert not server.peer.is_due
    server.age_ms += HOUR
    assert fates(server, parcels[1]) == [Fate.DONE]
    assert server.peer.is_due


def test_a_commit_that_does_not_happen_leaves_nothing_behind(sides: tuple[Side, Side]) -> None:
    laptop, server = sides
    parcel = sealed(laptop, 1, b"one")
    server.receive([parcel], "relay", fails=True)
    assert not server.mail()
    assert server.receive([parcel], "relay")[0].is_new


def test_a_peer_whose_pairing_is_over_is_told_bye_and_its_letter_is_not_taken(
    sides: tuple[Side, Side],
) -> None:
    laptop, server = sides
    server.change_peer(state="left", leave_age_ms=server.age_ms + DAY)
    assert fates(server, sealed(laptop, 1, b"one")) == [Fate.UNKNOWN]
    assert (server.peer.state, server.peer.is_due) == ("leaving", 1)
    assert not server.mail()


def test_rule_9_a_bye_is_not_answered_with_a_bye(sides: tuple[Side, Side]) -> None:
    """Rule 9: message exchanges end."""
    laptop, server = sides
    server.change_peer(state="left", leave_age_ms=server.age_ms + DAY)
    laptop.unpair()
    laptop.change_peer(confirmed_card=laptop.card_sequence)
    begun = laptop.begin_round()
    stored = give_directly(begun, server)
    assert stored
    laptop.direct_done(begun, stored)
    assert server.peer.state == "left"
    assert laptop.begin() is None
    assert server.begin() is None


def test_a_pairing_that_is_over_for_90_days_is_over(sides: tuple[Side, Side]) -> None:
    laptop, server = sides
    server.change_peer(state="left", leave_age_ms=server.age_ms)
    fates(server, sealed(laptop, 1, b"one"))
    assert server.peer.state == "left"


def deposit(server: Side, parcel: Envelope, *, disk: bool = True) -> bytes:
    """What the machine's door answers, over its real database."""
    (answer,) = deposit_each(server, parcel, disk=disk)
    return answer


def deposit_each(server: Side, *parcels: Envelope, disk: bool = True) -> list[bytes]:
    """The answers to one envelope after the other."""

    async def run() -> list[bytes]:
        database = Database(server.connection)
        if not disk:
            server.connection.execute("PRAGMA query_only = ON")
        arrivals = Arrivals(
            database, server.keyring, Clock(server.age_ms, 0), lambda _: None, lambda _: None
        )
        try:
            return [
                await arrivals.answer_deposit(bodies.join_frames([parcel.frame.data]))
                for parcel in parcels
            ]
        finally:
            await database.close()

    return asyncio.run(run())


def use_in_threads(side: Side) -> None:
    """Let the store's own thread use the side's database."""
    data = side.connection.serialize()
    side.connection.close()
    side.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    side.connection.deserialize(data)


@pytest.fixture
def threaded(sides: tuple[Side, Side]) -> tuple[Side, Side]:
    use_in_threads(sides[1])
    return sides


def test_rule_1_nothing_is_signed_when_the_commit_failed(threaded: tuple[Side, Side]) -> None:
    """Rule 1: `stored` is signed only after the commit is on the disk."""
    laptop, server = threaded
    with pytest.raises(Unavailable):
        deposit(server, sealed(laptop, 1, b"one"), disk=False)


def test_rule_1_what_is_answered_stored_is_in_the_store(threaded: tuple[Side, Side]) -> None:
    """Rule 4 too: the answer is by the pair key, about these very bytes."""
    laptop, server = threaded
    key = server.keyring.pair_key(server.peer.salt).public
    parcel = sealed(laptop, 1, b"one")
    assert key in (answer := deposit(server, parcel))
    assert parcel.digest in answer


def test_rule_2_the_same_envelope_again_gets_the_same_fact(threaded: tuple[Side, Side]) -> None:
    laptop, server = threaded
    one, two = sealed(laptop, 1, b"one"), sealed(laptop, 2, b"two")
    first, again, _, once_more = deposit_each(server, one, one, two, one)
    assert first == again == once_more


def test_rule_8_nobody_known_and_a_changed_envelope_get_the_same_answer(
    threaded: tuple[Side, Side],
) -> None:
    """A stranger and a changed envelope are answered alike, and may try again."""
    laptop, server = threaded
    with pytest.raises(NoSuchQueue) as changed:
        deposit(server, with_byte_changed(sealed(laptop, 1, b"one")))
    with closing(Side("phone")) as phone, closing(Side("tablet")) as tablet:
        pair(phone, tablet)
        use_in_threads(laptop)
        with pytest.raises(NoSuchQueue) as strange:
            deposit(laptop, sealed(phone, 1, b"one"))
    assert changed.value.detail == strange.value.detail
    assert changed.value.retryable
