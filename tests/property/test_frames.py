"""Frames come back as they were made, or are refused (failure case A2)."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentmbx_protocol import bodies, card, custody, envelope, frame, letter, padding, pairing
from agentmbx_protocol import queue_commands as commands
from agentmbx_protocol.errors import CannotOpen, Refusal
from agentmbx_protocol.frame import Kind
from agentmbx_protocol.keys import SealingKey, SigningKey
from frame_values import (
    counters,
    digests,
    few,
    instances,
    letters,
    names,
    sealing_keys,
    signed_cards,
    signing_keys,
    some,
    words32,
    words64,
)
from mutations import mutated
from vector_parts import typical
from vector_parts.fields import expected


@some
@given(key=signing_keys, queue=digests, ttl_s=st.integers(1, 604_800), length=st.integers(0, 9000))
def test_an_envelope_comes_back(key: SigningKey, queue: bytes, ttl_s: int, length: int) -> None:
    sealed = bytes(padding.padded_length(length)) + b"s" * 48
    data = envelope.make_envelope(key, queue, ttl_s, sealed)
    parcel = envelope.parse_envelope(data)
    parcel.frame.verify()
    assert (parcel.signer, parcel.queue, parcel.ttl_s) == (key.public, queue, ttl_s)
    assert (parcel.sealed, parcel.length) == (sealed, len(data))


@some
@given(
    key=signing_keys,
    queue=digests,
    facts=st.lists(
        st.builds(custody.HeldFact, digests, words32, words64, words64), min_size=1, max_size=64
    ),
)
def test_a_held_comes_back(
    key: SigningKey, queue: bytes, facts: Sequence[custody.HeldFact]
) -> None:
    held = custody.parse_held(custody.make_held(key, queue, facts))
    assert held == custody.Held(key.public, queue, tuple(facts))


@some
@given(
    key=signing_keys,
    facts=st.lists(st.builds(custody.StoredFact, digests, words32), min_size=1, max_size=64),
)
def test_a_stored_comes_back(key: SigningKey, facts: Sequence[custody.StoredFact]) -> None:
    stored = custody.parse_stored(custody.make_stored(key, facts))
    assert stored == custody.Stored(key.public, tuple(facts))


@some
@given(data=st.data(), key=signing_keys, relay=digests, counter=counters, instance=instances)
def test_every_command_comes_back(
    data: st.DataObject, key: SigningKey, relay: bytes, counter: int, instance: bytes
) -> None:
    common = {"queue": key.public, "relay": relay, "counter": counter, "instance": instance}
    senders = data.draw(st.sets(signing_keys.map(lambda each: each.public), max_size=4))
    register = commands.Register(
        **common, takeover=data.draw(st.integers(0, 2**63 - 1)), senders=tuple(sorted(senders))
    )
    assert commands.parse_register(commands.make_register(key, register)) == register
    collect = commands.Collect(
        **common,
        senders_digest=data.draw(digests),
        bytes_max=data.draw(words32),
        wait_s=data.draw(st.integers(0, 50)),
        acks=tuple(data.draw(st.lists(digests, max_size=20))),
    )
    assert commands.parse_collect(commands.make_collect(key, collect)) == collect
    retire = commands.Retire(**common)
    assert commands.parse_retire(commands.make_retire(key, retire)) == retire
    lifetime_s = data.draw(st.integers(0, 604_800))
    admit = commands.parse_admit(commands.make_admit(key, relay, instance * 2, lifetime_s))
    assert admit == commands.Admit(key.public, relay, instance * 2, lifetime_s)
    flag = data.draw(st.sampled_from(commands.Flag))
    state = commands.QueueState(key.public, relay, counter, instance, data.draw(digests), flag)
    assert commands.parse_queue_state(commands.make_queue_state(key, state)) == state


@few
@given(made=signed_cards())
def test_a_card_comes_back(made: tuple[SigningKey, card.Card]) -> None:
    identity, shown = made
    assert card.parse_card(card.make_card(identity, shown)) == shown


@few
@given(old=signing_keys, made=signed_cards())
def test_a_rotation_comes_back_and_is_followed(
    old: SigningKey, made: tuple[SigningKey, card.Card]
) -> None:
    identity, shown = made
    assume(old.public != identity.public)
    new_card = card.make_card(identity, shown)
    data = card.make_rotation(old, new_card)
    assert card.parse_rotation(data) == card.Rotation(old.public, shown.sequence, shown)
    assert card.follow_rotations(old.public, [data]) == identity.public


@few
@given(data=st.data(), token=instances, nonces=st.tuples(digests, digests))
def test_a_pairing_of_any_two_machines_ends_with_each_others_card(
    data: st.DataObject, token: bytes, nonces: tuple[bytes, bytes]
) -> None:
    hellos, sides = [], []
    for kind, nonce in zip((Kind.HELLO, Kind.REPLY), nonces, strict=True):
        sealing, name = data.draw(sealing_keys), data.draw(names)
        identity = data.draw(signing_keys)
        shown = card.Card(identity.public, 1, name, sealing.public)
        sides.append((identity, sealing, shown, card.make_card(identity, shown)))
        made = pairing.make_hello(
            kind,
            identity,
            named_token=pairing.token_id(token),
            nonce=nonce,
            sealing=sealing.public,
            pair=data.draw(signing_keys).public,
            name=name,
        )
        hellos.append(pairing.parse_hello(made, kind))
        assert (hellos[-1].nonce, hellos[-1].name) == (nonce, name)
    for kind, own, other in ((Kind.PROOF, *sides), (Kind.RESULT, *sides[::-1])):
        proof = pairing.make_proof(kind, own[0], token, *hellos, own_card=own[3])
        read = pairing.open_proof(proof, kind, token, *hellos, sealing_key=other[1])
        assert read == own[2]
        wrong = data.draw(mutated([proof]))
        with pytest.raises((Refusal, CannotOpen)):
            pairing.open_proof(wrong, kind, token, *hellos, sealing_key=other[1])


@some
@given(frames=st.lists(st.binary(min_size=1, max_size=200), max_size=64))
def test_a_body_comes_back(frames: list[bytes]) -> None:
    assert bodies.split_frames(bodies.join_frames(frames), 64) == frames


def refused(kind: Kind, data: bytes) -> bool:
    """Whether the package refuses; any exception but a refusal passes through."""
    return isinstance(expected(kind.name.lower(), data), str)


@pytest.mark.parametrize("kind", Kind)
@some
@given(data=st.data())
def test_a_good_frame_with_any_change_is_refused(kind: Kind, data: st.DataObject) -> None:
    good = typical.FRAMES[kind]._replace(signer=data.draw(signing_keys)).data
    assert not refused(kind, good)
    assert refused(kind, data.draw(mutated([good], at_most=2)))


@pytest.mark.parametrize("kind", Kind)
def test_a_good_frame_with_any_one_bit_flipped_is_refused(kind: Kind) -> None:
    good = typical.FRAMES[kind].data
    for bit in range(0, 8 * len(good), 5 if len(good) > 1000 else 1):
        wrong = bytearray(good)
        wrong[bit // 8] ^= 1 << bit % 8
        assert refused(kind, bytes(wrong)), bit


def parts_of(data: bytes) -> list[bytes]:
    """Head, signer, fields, tail with its length, signature."""
    fields_end = frame.FIELDS_AT + len(frame.parse(data).fields)
    ends = (0, 8, frame.FIELDS_AT, fields_end, len(data) - 64, len(data))
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def second_good(kind: Kind) -> bytes:
    """Another good frame of the kind, with another signer and other content."""
    others = {
        Kind.ENVELOPE: typical.envelope(ttl_s=1, plain_length=1088),
        Kind.HELD: typical.held(3, 1, 2),
        Kind.STORED: typical.stored(3),
        Kind.REGISTER: typical.register(8, 7, [typical.IDENTITY.public]),
        Kind.ADMIT: typical.admit(0),
        Kind.COLLECT: typical.collect(8, 1, 1),
        Kind.RETIRE: typical.retire(8),
        Kind.QUEUE_STATE: typical.queue_state(8),
        Kind.CARD: typical.card(sequence=6),
        Kind.ROTATION: typical.rotation(sequence=7),
        Kind.HELLO: typical.hello(elements=typical.hello_elements(name=b"other")),
        Kind.REPLY: typical.hello(Kind.REPLY, typical.hello_elements(name=b"other")),
        Kind.PROOF: typical.proof(sealed_length=90),
        Kind.RESULT: typical.proof(Kind.RESULT, 90),
    }
    fields = others[kind].fields
    changed = fields[:-1] + bytes((fields[-1] ^ 1,)) if kind >= Kind.HELLO else fields
    return others[kind]._replace(signer=typical.signing_key("second"), fields=changed).data


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("same_signer", [True, False])
def test_case_a2_no_mixture_of_the_parts_of_two_good_frames_is_read(
    kind: Kind, *, same_signer: bool
) -> None:
    key = typical.signing_key("second")
    first = typical.FRAMES[kind]
    goods = [(first._replace(signer=key) if same_signer else first).data, second_good(kind)]
    assert not any(refused(kind, good) for good in goods)
    for mixture in itertools.product(*zip(*map(parts_of, goods), strict=True)):
        data = b"".join(mixture)
        assert refused(kind, data) is (data not in goods)


@pytest.mark.parametrize(("one", "other"), [(Kind.HELLO, Kind.REPLY), (Kind.PROOF, Kind.RESULT)])
def test_case_a2_no_mixture_of_two_kinds_of_one_layout_is_read(one: Kind, other: Kind) -> None:
    key = typical.signing_key("second")
    goods = [typical.FRAMES[kind]._replace(signer=key).data for kind in (one, other)]
    for mixture in itertools.product(*zip(*map(parts_of, goods), strict=True)):
        data = b"".join(mixture)
        for kind in (one, other):
            assert refused(kind, data) is (data != goods[(one, other).index(kind)])


@few
@given(data=st.data(), sealing=sealing_keys, keypairs=st.tuples(signing_keys, signing_keys))
def test_case_a2_sealed_bytes_changed_and_signed_anew_by_the_same_key_do_not_open(
    data: st.DataObject, sealing: SealingKey, keypairs: tuple[SigningKey, SigningKey]
) -> None:
    sender, receiver = keypairs
    sealed = [
        letter.seal_letter(
            letter.encode_letter(data.draw(letters)),
            sender=sender.public,
            receiver=receiver.public,
            sealing_public=sealing.public,
        )
        for _ in range(2)
    ]
    at = data.draw(st.integers(1, 1071))
    wrong = bytearray(sealed[0])
    wrong[at] ^= data.draw(st.integers(1, 255))
    for changed in (bytes(wrong), sealed[0][:at] + sealed[1][at:]):
        if changed not in sealed and len(changed) == len(sealed[0]):
            parcel = envelope.parse_envelope(envelope.make_envelope(sender, bytes(32), 1, changed))
            with pytest.raises(CannotOpen):
                letter.open_letter(parcel, sealing, receiver=receiver.public)
