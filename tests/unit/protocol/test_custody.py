from collections.abc import Sequence

import pytest

from agentmbx_protocol import custody
from agentmbx_protocol.custody import HeldFact, NotBelieved, StoredFact
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.errors import BadSignature, Malformed
from agentmbx_protocol.keys import SigningKey
from vector_parts import typical
from vector_parts.raw_forms import filler

RELAY, QUEUE, PEER = typical.RELAY, typical.QUEUE.public, typical.OTHER
SENT = [parse_envelope(typical.envelope(ttl_s=ttl_s).data) for ttl_s in (1, 3600, 604_800)]


def fact(parcel: Envelope, *, accepted_ms: int = 5, more_ms: int = 0) -> HeldFact:
    until_ms = accepted_ms + parcel.ttl_s * 1000 + more_ms
    return HeldFact(parcel.digest, parcel.length, accepted_ms, until_ms)


def held(facts: Sequence[HeldFact], key: SigningKey = RELAY, queue: bytes = QUEUE) -> bytes:
    return custody.make_held(key, queue, facts)


def test_a_held_is_read_as_it_was_made() -> None:
    facts = (fact(SENT[0]), HeldFact(bytes(32), 2**32 - 1, 2**64 - 1, 0))
    assert custody.parse_held(held(facts)) == custody.Held(RELAY.public, QUEUE, facts)


def test_a_stored_is_read_as_it_was_made() -> None:
    facts = (StoredFact(SENT[0].digest, SENT[0].length), StoredFact(bytes(32), 2**32 - 1))
    data = custody.make_stored(PEER, facts)
    assert custody.parse_stored(data) == custody.Stored(PEER.public, facts)


@pytest.mark.parametrize("count", [0, 65])
def test_a_statement_about_no_envelope_or_more_than_64_is_malformed(count: int) -> None:
    with pytest.raises(Malformed):
        custody.parse_held(typical.held(count).data)
    with pytest.raises(Malformed):
        custody.parse_stored(typical.stored(count).data)


def test_a_statement_about_64_envelopes_is_read() -> None:
    assert len(custody.parse_held(typical.held(64).data).facts) == 64
    assert len(custody.parse_stored(typical.stored(64).data).facts) == 64


def test_a_held_is_no_stored_and_a_stored_no_held() -> None:
    with pytest.raises(Malformed):
        custody.parse_stored(typical.held().data)
    with pytest.raises(Malformed):
        custody.parse_held(typical.stored().data)


def test_a_statement_with_a_bad_signature_is_refused() -> None:
    for raw, parse in (
        (typical.held(), custody.parse_held),
        (typical.stored(), custody.parse_stored),
    ):
        with pytest.raises(BadSignature):
            parse(raw._replace(word="envelope").data)


def test_rule_4_a_held_with_every_part_right_is_believed() -> None:
    facts = [fact(parcel, more_ms=at) for at, parcel in enumerate(SENT)]
    believed = custody.believe_held(held(facts), RELAY.public, SENT)
    assert believed == {each.digest: each for each in facts}


def test_rule_4_a_held_for_some_of_the_envelopes_is_believed_for_these() -> None:
    believed = custody.believe_held(held([fact(SENT[1])]), RELAY.public, SENT)
    assert list(believed) == [SENT[1].digest]


def test_rule_4_a_relay_may_have_accepted_the_envelope_long_ago_by_its_own_clock() -> None:
    for accepted_ms in (0, 2**62):
        one = fact(SENT[0], accepted_ms=accepted_ms)
        assert custody.believe_held(held([one]), RELAY.public, SENT)


def _held_lies() -> dict[str, bytes]:
    right, parcel = fact(SENT[1]), SENT[1]
    good = held([fact(SENT[0]), right])
    short = HeldFact(parcel.digest, parcel.length, 5, 5 + parcel.ttl_s * 1000 - 1)
    return {
        "no bytes": b"",
        "a bad signature": good[:-1] + bytes((good[-1] ^ 1,)),
        "a byte behind": good + b"\0",
        "another key than the pinned one": held([right], key=typical.IDENTITY),
        "the queue's own key": held([right], key=typical.QUEUE),
        "another queue": held([right], queue=typical.OTHER.public),
        "no queue": held([right], queue=bytes(32)),
        "an envelope that was not sent": held([right, HeldFact(bytes(32), 1216, 5, 10**9)]),
        "another length": held([HeldFact(parcel.digest, 1215, 5, 10**9)]),
        "a millisecond too short": held([short]),
        "one of two too short": held([fact(SENT[0]), short]),
        "no time at all": held([HeldFact(parcel.digest, parcel.length, 5, 5)]),
        "a time that runs backwards": held([HeldFact(parcel.digest, parcel.length, 10**9, 5)]),
        "a time that wraps around": held([HeldFact(parcel.digest, parcel.length, 2**64 - 1, 5)]),
        "a time that no store keeps": held([HeldFact(parcel.digest, parcel.length, 5, 2**63)]),
        "the last of all times": held([HeldFact(parcel.digest, parcel.length, 5, 2**64 - 1)]),
        "a stored instead": custody.make_stored(RELAY, [StoredFact(parcel.digest, parcel.length)]),
        "the envelope itself": parcel.frame.data,
    }


@pytest.mark.parametrize("lie", _held_lies())
def test_rule_4_a_held_with_one_part_wrong_is_not_believed_at_all(lie: str) -> None:
    with pytest.raises(NotBelieved):
        custody.believe_held(_held_lies()[lie], RELAY.public, SENT)


def test_rule_4_a_held_for_another_queues_envelope_is_not_believed() -> None:
    direct = parse_envelope(typical.envelope(queue=bytes(32)).data)
    with pytest.raises(NotBelieved):
        custody.believe_held(held([fact(direct)]), RELAY.public, [*SENT, direct])


def test_rule_4_a_held_to_the_last_time_that_a_store_keeps_is_believed() -> None:
    one = HeldFact(SENT[0].digest, SENT[0].length, 5, 2**63 - 1)
    assert custody.believe_held(held([one]), RELAY.public, SENT) == {one.digest: one}


def test_rule_4_a_held_of_another_request_is_not_believed() -> None:
    with pytest.raises(NotBelieved):
        custody.believe_held(held([fact(SENT[0])]), RELAY.public, SENT[1:])
    with pytest.raises(NotBelieved):
        custody.believe_held(held([fact(SENT[0])]), RELAY.public, [])


def stored(parcels: Sequence[Envelope], key: SigningKey = PEER) -> bytes:
    return custody.make_stored(key, [StoredFact(each.digest, each.length) for each in parcels])


def test_rule_4_a_stored_by_the_peer_is_believed_for_what_it_names() -> None:
    assert custody.believe_stored(stored(SENT), PEER.public, SENT) == {p.digest for p in SENT}
    assert custody.believe_stored(stored(SENT[:1]), PEER.public, SENT) == {SENT[0].digest}


def _stored_lies() -> dict[str, bytes]:
    good, one = stored(SENT), SENT[0]
    return {
        "no bytes": b"",
        "a bad signature": good[:-1] + bytes((good[-1] ^ 1,)),
        "another peer's key": stored(SENT, typical.IDENTITY),
        "the sender's own key": stored(SENT, typical.PAIR),
        "the relay's key": stored(SENT, RELAY),
        "an envelope that was not sent": custody.make_stored(
            PEER, [StoredFact(one.digest, one.length), StoredFact(filler("none", 32), 1216)]
        ),
        "another length": custody.make_stored(PEER, [StoredFact(one.digest, one.length + 1)]),
        "a held instead": held([fact(one)], PEER),
    }


@pytest.mark.parametrize("lie", _stored_lies())
def test_rule_4_a_stored_with_one_part_wrong_is_not_believed_at_all(lie: str) -> None:
    with pytest.raises(NotBelieved):
        custody.believe_stored(_stored_lies()[lie], PEER.public, SENT)


def test_rule_4_a_receipt_for_other_bytes_says_nothing_about_these() -> None:
    with pytest.raises(NotBelieved):
        custody.believe_stored(stored(SENT[:1]), PEER.public, SENT[1:])
