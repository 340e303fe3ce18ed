"""Pairing by token at the initiator: who becomes a peer, who is refused, what is repeated."""

from collections.abc import Callable, Iterator

import pytest

from agentmbx_node import pairing, tokens
from agentmbx_node.errors import Failure
from agentmbx_node.pairing import JOINED, fingerprint
from agentmbx_node.store.rows import PEER
from agentmbx_node.tokens import EventKind
from agentmbx_protocol import frame, keys
from agentmbx_protocol import pairing as wire
from agentmbx_protocol.errors import BadSignature, Malformed, Refusal
from agentmbx_protocol.frame import Kind
from pairing_sides import START_MS, CommitFailed, Side, crooked, pair, proof_for, with_tail

DAY_MS = 24 * 3600 * 1000
TOKEN = bytes(range(16))


@pytest.fixture
def desk() -> Iterator[Side]:
    side = Side("desk")
    yield side
    side.close()


@pytest.fixture
def laptop() -> Iterator[Side]:
    side = Side("laptop")
    yield side
    side.close()


@pytest.fixture
def mallory() -> Iterator[Side]:
    side = Side("mallory")
    yield side
    side.close()


def kinds(side: Side) -> list[EventKind]:
    return [event.kind for event in side.tokens.take_events()]


def test_a_fingerprint_is_the_first_20_characters_in_groups_of_4() -> None:
    key = Side("desk").identity
    text = fingerprint(key)
    assert [len(part) for part in text.split("-")] == [4] * 5
    assert keys.key_text(key).startswith(text.replace("-", ""))


def test_after_four_frames_each_side_has_the_other_with_the_keys_it_showed(
    desk: Side, laptop: Side
) -> None:
    at_desk, at_laptop = pair(desk, laptop)
    assert (at_desk.identity, at_desk.name, at_desk.card) == (
        laptop.identity,
        "laptop",
        laptop.card,
    )
    assert (at_laptop.identity, at_laptop.name, at_laptop.card) == (
        desk.identity,
        "desk",
        desk.card,
    )
    assert at_desk.pair_key == laptop.shows(at_laptop)
    assert at_laptop.pair_key == desk.shows(at_desk)
    assert {at_desk.sealing, at_laptop.sealing} == {
        side.keyring.sealing.public for side in (desk, laptop)
    }
    assert at_desk.stream != at_laptop.stream
    assert (at_desk.paired_ms, at_desk.card_sequence) == (START_MS, 1)
    assert laptop.connection.execute("SELECT count(*) FROM joining").fetchone() == (0,)
    (event,) = desk.tokens.take_events()
    assert (event.kind, event.identity, event.name) == (
        EventKind.PAIRED,
        laptop.identity,
        "laptop",
    )


def test_each_side_keeps_whether_it_was_over_loopback(desk: Side, laptop: Side) -> None:
    token = desk.offer()
    result = desk.answer(proof_for(desk, laptop, token), loopback=True)
    assert laptop.finish(token, result, loopback=True).loopback
    assert desk.peers()[0].loopback


def test_an_unknown_token_a_late_one_a_spent_one_and_a_bad_proof_are_refused_alike(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    refusals = []

    def refused(act: Callable[[], bytes]) -> None:
        with pytest.raises(Refusal) as caught:
            act()
        refusals.append((type(caught.value), str(caught.value)))

    refused(lambda: desk.answer(mallory.begin(TOKEN)))
    token = desk.offer()
    proof = proof_for(desk, laptop, token)
    refused(lambda: desk.answer(crooked(proof)))
    refused(lambda: desk.answer(with_tail(proof, frame.parse(proof).tail, mallory)))
    refused(lambda: desk.answer(with_tail(proof, b"t" * 60, laptop)))
    desk.answer(proof)
    refused(lambda: desk.answer(mallory.begin(token)))
    refused(lambda: desk.answer(with_tail(proof, frame.parse(proof).tail, mallory)))
    late = desk.offer()
    desk.age_ms += tokens.TOKEN_MS
    refused(lambda: desk.answer(mallory.begin(late)))
    assert set(refusals) == {(BadSignature, "No token that is open here fits this.")}


def test_a_token_ends_after_ten_minutes_of_the_age_whatever_the_wall_clock_says(
    desk: Side, laptop: Side
) -> None:
    token = desk.offer()
    desk.wall_ms = 1
    desk.age_ms += tokens.TOKEN_MS - 1
    proof = proof_for(desk, laptop, token)
    desk.age_ms += 1
    with pytest.raises(BadSignature):
        desk.answer(proof)
    assert kinds(desk) == [EventKind.LATE]
    assert desk.peers() == []


def test_20_bad_proofs_end_a_token_and_19_do_not(desk: Side, laptop: Side) -> None:
    for tries in (tokens.BAD_PROOFS_MAX - 1, tokens.BAD_PROOFS_MAX):
        token = desk.offer()
        proof = proof_for(desk, laptop, token)
        for _ in range(tries):
            with pytest.raises(BadSignature):
                desk.answer(crooked(proof))
        if tries < tokens.BAD_PROOFS_MAX:
            desk.answer(proof)
    with pytest.raises(BadSignature):
        desk.answer(proof)
    assert kinds(desk)[-2:] == [EventKind.BAD_PROOF, EventKind.WORN_OUT]


def test_a_proof_with_another_token_is_refused(desk: Side, mallory: Side) -> None:
    token = desk.offer()
    hello = wire.make_hello(
        Kind.HELLO,
        mallory.keyring.identity,
        named_token=wire.token_id(token),
        nonce=b"n" * 32,
        sealing=mallory.keyring.sealing.public,
        pair=mallory.keyring.pair_key(b"s" * 16).public,
        name="desk",
    )
    reply = wire.parse_hello(desk.answer(hello), Kind.REPLY)
    proof = wire.make_proof(
        Kind.PROOF,
        mallory.keyring.identity,
        TOKEN,
        wire.parse_hello(hello, Kind.HELLO),
        reply,
        own_card=mallory.card,
    )
    with pytest.raises(BadSignature):
        desk.answer(proof)
    assert desk.peers("") == []
    assert kinds(desk) == [EventKind.BAD_PROOF]


@pytest.mark.parametrize("count", [0, 2])
def test_a_step_is_one_frame(desk: Side, laptop: Side, count: int) -> None:
    frames = [laptop.begin(desk.offer())] * count
    with pytest.raises(Malformed):
        desk.write(
            lambda each: pairing.answer_pair(
                each, desk.tokens, desk.keyring, desk.now, desk.card, frames, loopback=False
            )
        )


def test_a_reply_or_a_result_is_no_request(desk: Side, laptop: Side) -> None:
    token = desk.offer()
    reply = desk.answer(laptop.begin(token))
    result = desk.answer(laptop.prove(token, reply))
    for data in (reply, result, b"", b"MBX1"):
        with pytest.raises(Malformed):
            desk.answer(data)


def test_the_same_hello_gets_the_same_reply_and_two_joiners_may_try(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    token = desk.offer()
    first = desk.answer(laptop.begin(token))
    other = desk.answer(mallory.begin(token))
    assert desk.answer(laptop.begin(token)) == first != other
    desk.answer(laptop.prove(token, first))
    assert [peer.name for peer in desk.peers()] == ["laptop"]


def test_replies_are_forgotten_beyond_their_bound_and_the_joiner_begins_again(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    token = desk.offer()
    proof = proof_for(desk, laptop, token)
    for number in range(tokens.EXCHANGES_MAX):
        mallory.connection.execute("DELETE FROM joining")
        desk.answer(mallory.begin(token, f"mallory {number}"))
    with pytest.raises(BadSignature):
        desk.answer(proof)
    laptop.finish(token, desk.answer(proof_for(desk, laptop, token)))


def test_of_too_many_tokens_the_oldest_ends(desk: Side, laptop: Side) -> None:
    offered = [desk.offer() for _ in range(tokens.TOKENS_MAX + 1)]
    with pytest.raises(BadSignature):
        desk.answer(laptop.begin(offered[0]))
    desk.answer(laptop.begin(offered[1]))


def test_a_token_that_was_taken_back_is_unknown(desk: Side, laptop: Side) -> None:
    token = desk.offer()
    desk.tokens.end(wire.token_id(token))
    with pytest.raises(BadSignature):
        desk.answer(laptop.begin(token))


def test_a_commit_that_fails_leaves_the_token_open(desk: Side, laptop: Side) -> None:
    token = desk.offer()
    proof = proof_for(desk, laptop, token)
    with pytest.raises(CommitFailed):
        desk.answer(proof, fails=True)
    assert desk.peers() == []
    assert kinds(desk) == []
    laptop.finish(token, desk.answer(proof))
    assert kinds(desk) == [EventKind.PAIRED]


def test_the_same_proof_gets_the_same_result_for_24_hours_also_after_a_restart(
    desk: Side, laptop: Side
) -> None:
    token = desk.offer()
    hello = laptop.begin(token)
    reply = desk.answer(hello)
    proof = laptop.prove(token, reply)
    result = desk.answer(proof)
    desk.restart()
    desk.wall_ms = 1
    desk.age_ms += DAY_MS - 1
    assert desk.answer(hello) == reply
    assert desk.answer(proof) == result
    assert len(desk.peers("")) == 1
    desk.age_ms += 1
    for data in (hello, proof):
        with pytest.raises(BadSignature):
            desk.answer(data)


def test_a_proof_that_was_sealed_anew_gets_the_same_result(desk: Side, laptop: Side) -> None:
    token = desk.offer()
    reply = desk.answer(laptop.begin(token))
    result = desk.answer(laptop.prove(token, reply))
    laptop.connection.execute("UPDATE joining SET reply = x'', proof = x''")
    assert desk.answer(laptop.prove(token, reply)) == result


def test_another_joiner_with_a_spent_token_is_refused_and_reported(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    token = desk.offer()
    early = proof_for(desk, mallory, token)
    desk.answer(proof_for(desk, laptop, token))
    desk.restart()
    for data in (mallory.begin(token), early):
        with pytest.raises(BadSignature):
            desk.answer(data)
    events = desk.tokens.take_events()
    assert [event.kind for event in events] == [EventKind.REUSED] * 2
    assert {event.identity for event in events} == {mallory.identity}
    with pytest.raises(BadSignature):
        desk.answer(crooked(early))
    assert kinds(desk) == []  # nobody is accused by a frame that is not theirs
    assert [peer.name for peer in desk.peers("")] == ["laptop"]


def test_old_results_are_cleared_when_a_new_one_comes(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    pair(desk, laptop)
    desk.age_ms += DAY_MS
    pair(desk, mallory)
    assert len(JOINED.find(desk.connection)) == 1


def test_a_name_in_use_gets_a_number_and_the_own_name_is_in_use(desk: Side) -> None:
    sides = [Side("desk"), Side("x"), Side("y"), Side("z")]
    sides[0].keyring = Side("other desk").keyring
    names = ["desk", "DESK", "é" * 32, "É" * 32]
    for side, name in zip(sides, names, strict=True):
        side.name = name
        peer, _ = pair(desk, side)
        assert len(peer.name.encode()) <= 64
    assert [peer.name for peer in desk.peers()] == [
        "desk-2",
        "DESK-3",
        "é" * 32,
        "É" * 31 + "-2",
    ]
    for side in sides:
        side.close()


def test_the_same_machine_again_replaces_its_pairing_and_keeps_its_local_name(
    desk: Side, laptop: Side
) -> None:
    old, _ = pair(desk, laptop)
    old.name, old.name_key = "my laptop", "my laptop"
    PEER.save(desk.connection, old)
    new, at_laptop = pair(desk, laptop)
    assert [peer.id for peer in desk.peers("WHERE state = 'left'")] == [old.id]
    assert new.name == "my laptop"
    assert [peer.id for peer in desk.replaced] == [old.id]
    assert len(laptop.replaced) == 1
    assert new.pair_key == laptop.shows(at_laptop) != old.pair_key


def test_case_i4_a_machine_that_lost_its_keys_is_another_peer_and_takes_no_name(
    desk: Side, laptop: Side
) -> None:
    pair(desk, laptop)
    reinstalled = Side("laptop")
    reinstalled.keyring = Side("laptop with new keys").keyring
    new, _ = pair(desk, reinstalled)
    assert new.name == "laptop-2"
    assert desk.replaced == []
    assert [peer.name for peer in desk.peers()] == ["laptop", "laptop-2"]
    reinstalled.close()


def test_case_i5_a_pairing_that_ended_is_not_given_again_and_can_be_made_anew(
    desk: Side, laptop: Side
) -> None:
    token = desk.offer()
    proof = proof_for(desk, laptop, token)
    desk.answer(proof)
    desk.connection.execute("UPDATE peer SET state = 'leaving'")
    with pytest.raises(BadSignature):
        desk.answer(proof)
    pair(desk, laptop)
    assert [peer.state for peer in desk.peers("")] == ["leaving", "paired"]


def test_the_result_of_a_pairing_that_was_replaced_is_not_given_again(
    desk: Side, laptop: Side
) -> None:
    token = desk.offer()
    proof = proof_for(desk, laptop, token)
    desk.answer(proof)
    pair(desk, laptop)
    with pytest.raises(BadSignature):
        desk.answer(proof)


def test_a_proof_that_was_kept_back_does_not_undo_a_later_pairing(desk: Side, laptop: Side) -> None:
    kept_back = proof_for(desk, laptop, desk.offer())
    pair(desk, laptop)
    with pytest.raises(BadSignature):
        desk.answer(kept_back)
    assert [peer.state for peer in desk.peers("")] == ["paired"]


@pytest.mark.parametrize("state", ["paired", "left"])
def test_nobody_pairs_with_the_pair_key_of_another_peer(
    desk: Side, laptop: Side, mallory: Side, state: str
) -> None:
    at_desk, at_laptop = pair(desk, laptop)
    desk.connection.execute("UPDATE peer SET state = ?", (state,))
    token = desk.offer()
    mallory.keyring._root = laptop.keyring._root
    salts = [at_laptop.salt, b"n" * 32]
    mallory.draw = lambda length: salts.pop(0)[:length]  # type: ignore[method-assign]
    with pytest.raises(BadSignature):
        desk.answer(mallory.begin(token))
    assert len(desk.peers("")) == 1
    assert at_desk.pair_key == laptop.shows(at_laptop)


def test_a_pair_key_that_became_a_peers_between_hello_and_proof_is_refused(
    desk: Side, laptop: Side
) -> None:
    first, second = desk.offer(), desk.offer()
    twin = Side("twin")
    twin.keyring._root = laptop.keyring._root
    drawn = [b"s" * 16, b"n" * 32, b"s" * 16, b"m" * 32]
    laptop.draw = twin.draw = lambda length: drawn.pop(0)[:length]  # type: ignore[method-assign]
    proofs = [proof_for(desk, laptop, first), proof_for(desk, twin, second)]
    desk.answer(proofs[0])
    with pytest.raises(BadSignature):
        desk.answer(proofs[1])
    assert [peer.name for peer in desk.peers("")] == ["laptop"]
    twin.close()


def test_a_card_of_another_machine_in_a_proof_is_refused(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    token = desk.offer()
    hello = mallory.begin(token)
    reply = wire.parse_hello(desk.answer(hello), Kind.REPLY)
    proof = wire.make_proof(
        Kind.PROOF,
        mallory.keyring.identity,
        token,
        wire.parse_hello(hello, Kind.HELLO),
        reply,
        own_card=laptop.card,
    )
    with pytest.raises(BadSignature):
        desk.answer(proof)
    assert desk.peers("") == []


def test_a_machine_does_not_pair_with_itself_and_both_screens_say_so(desk: Side) -> None:
    token = desk.offer()
    hello = desk.begin(token)
    reply = desk.answer(hello)
    assert kinds(desk) == [EventKind.OWN]
    with pytest.raises(Failure, match="this very machine") as caught:
        desk.prove(token, reply)
    assert (caught.value.code, caught.value.exit_code) == ("own_line", 3)
    proof = wire.make_proof(
        Kind.PROOF,
        desk.keyring.identity,
        token,
        wire.parse_hello(hello, Kind.HELLO),
        wire.parse_hello(reply, Kind.REPLY),
        own_card=desk.card,
    )
    with pytest.raises(Malformed, match="itself"):
        desk.answer(proof)
    assert desk.peers("") == []


def test_keys_that_changed_meanwhile_make_a_new_reply(desk: Side, laptop: Side) -> None:
    token = desk.offer()
    hello = laptop.begin(token)
    old = desk.answer(hello)
    desk.keyring = Side("desk after a rotation").keyring
    new = desk.answer(hello)
    assert new != old
    laptop.prove(token, old)
    laptop.finish(token, desk.answer(laptop.prove(token, new)))
