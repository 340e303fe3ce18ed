from typing import NamedTuple

import pytest

from agentmbx_protocol import card, pairing
from agentmbx_protocol.card import Card
from agentmbx_protocol.errors import BadSignature, CannotOpen, Malformed
from agentmbx_protocol.frame import Kind
from agentmbx_protocol.keys import SealingKey, SigningKey
from agentmbx_protocol.pairing import Hello
from vector_parts import crooked_keys, typical
from vector_parts.content_cases import BAD_NAMES, BAD_SEALING_KEYS
from vector_parts.frame_cases import BAD_SIGNING_KEYS
from vector_parts.raw_forms import filler, sealing_key, signing_key

TOKEN = typical.TOKEN


class Machine(NamedTuple):
    """All keys of one side."""

    name: str

    @property
    def identity(self) -> SigningKey:
        return signing_key(f"identity of {self.name}")

    @property
    def sealing(self) -> SealingKey:
        return sealing_key(f"sealing of {self.name}")

    @property
    def card(self) -> bytes:
        shown = Card(self.identity.public, 1, self.name, self.sealing.public)
        return card.make_card(self.identity, shown)

    def greets(self, kind: Kind, token: bytes = TOKEN) -> Hello:
        data = pairing.make_hello(
            kind,
            self.identity,
            named_token=pairing.token_id(token),
            nonce=filler(f"nonce of {self.name}", 32),
            sealing=self.sealing.public,
            pair=signing_key(f"pair of {self.name}").public,
            name=self.name,
        )
        return pairing.parse_hello(data, kind)

    def proves(
        self,
        kind: Kind,
        hello: Hello,
        reply: Hello,
        token: bytes = TOKEN,
        own_card: bytes | None = None,
    ) -> bytes:
        return pairing.make_proof(
            kind, self.identity, token, hello, reply, own_card=own_card or self.card
        )

    def reads(
        self, data: bytes, kind: Kind, hello: Hello, reply: Hello, token: bytes = TOKEN
    ) -> Card:
        return pairing.open_proof(data, kind, token, hello, reply, sealing_key=self.sealing)


JOINER, INITIATOR, MALLORY = Machine("joiner"), Machine("initiator"), Machine("mallory")
HELLO, REPLY = JOINER.greets(Kind.HELLO), INITIATOR.greets(Kind.REPLY)


def test_a_hello_is_read_as_it_was_made() -> None:
    assert HELLO.identity == JOINER.identity.public
    assert HELLO.token_id == pairing.token_id(TOKEN)
    assert HELLO.nonce == filler("nonce of joiner", 32)
    assert HELLO.sealing == JOINER.sealing.public
    assert HELLO.pair == signing_key("pair of joiner").public
    assert HELLO.name == "joiner"


def test_the_token_itself_is_in_none_of_the_four_frames() -> None:
    proof, result = (
        JOINER.proves(Kind.PROOF, HELLO, REPLY),
        INITIATOR.proves(Kind.RESULT, HELLO, REPLY),
    )
    for data in (HELLO.data, REPLY.data, proof, result):
        assert TOKEN not in data


def test_after_four_frames_each_side_has_the_others_card() -> None:
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    assert INITIATOR.reads(proof, Kind.PROOF, HELLO, REPLY) == card.parse_card(JOINER.card)
    result = INITIATOR.proves(Kind.RESULT, HELLO, REPLY)
    assert JOINER.reads(result, Kind.RESULT, HELLO, REPLY) == card.parse_card(INITIATOR.card)


def test_the_last_step_may_be_repeated_with_the_same_outcome() -> None:
    results = [INITIATOR.proves(Kind.RESULT, HELLO, REPLY) for _ in range(2)]
    assert results[0] != results[1]
    assert len({JOINER.reads(r, Kind.RESULT, HELLO, REPLY).identity for r in results}) == 1


def test_a_hello_is_no_reply_and_a_proof_no_result() -> None:
    with pytest.raises(Malformed):
        pairing.parse_hello(HELLO.data, Kind.REPLY)
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    with pytest.raises(Malformed):
        JOINER.reads(proof, Kind.RESULT, HELLO, REPLY)


@pytest.mark.parametrize("label", BAD_NAMES)
def test_a_hello_with_a_bad_name_is_malformed_and_never_made(label: str) -> None:
    for kind in (Kind.HELLO, Kind.REPLY):
        raw = typical.hello(kind, typical.hello_elements(name=BAD_NAMES[label].encode()))
        with pytest.raises(Malformed):
            pairing.parse_hello(raw.data, kind)
        with pytest.raises(Malformed):
            Machine(BAD_NAMES[label]).greets(kind)


def test_a_hello_with_a_lone_surrogate_for_a_name_is_never_made() -> None:
    with pytest.raises(Malformed):
        pairing.make_hello(
            Kind.HELLO,
            JOINER.identity,
            named_token=bytes(8),
            nonce=bytes(32),
            sealing=HELLO.sealing,
            pair=HELLO.pair,
            name="\ud83d",
        )


@pytest.mark.parametrize("name", BAD_SIGNING_KEYS)
def test_a_hello_with_a_bad_pair_key_is_malformed(name: str) -> None:
    raw = typical.hello(elements=typical.hello_elements(pair=BAD_SIGNING_KEYS[name]))
    with pytest.raises(Malformed):
        pairing.parse_hello(raw.data, Kind.HELLO)


@pytest.mark.parametrize("name", BAD_SEALING_KEYS)
def test_a_hello_with_a_bad_sealing_key_is_malformed(name: str) -> None:
    raw = typical.hello(elements=typical.hello_elements(sealing=BAD_SEALING_KEYS[name]))
    with pytest.raises(Malformed):
        pairing.parse_hello(raw.data, Kind.HELLO)


def test_the_signature_of_a_hello_is_checked_before_its_keys() -> None:
    raw = typical.hello(elements=typical.hello_elements(pair=crooked_keys.NOT_ON_CURVE))
    with pytest.raises(BadSignature):
        pairing.parse_hello(raw._replace(word="reply").data, Kind.HELLO)


def test_a_proof_by_another_token_is_a_bad_signature() -> None:
    other = filler("another token", 16)
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY, token=other)
    with pytest.raises(BadSignature):
        INITIATOR.reads(proof, Kind.PROOF, HELLO, REPLY)
    result = INITIATOR.proves(Kind.RESULT, HELLO, REPLY, token=other)
    with pytest.raises(BadSignature):
        JOINER.reads(result, Kind.RESULT, HELLO, REPLY)


def test_a_proof_of_the_other_role_is_a_bad_signature() -> None:
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    raw = typical.RawFrame(
        Kind.RESULT,
        INITIATOR.identity,
        proof[40:112],
        INITIATOR.proves(Kind.RESULT, HELLO, REPLY)[116:-64],
    )
    with pytest.raises(BadSignature):
        JOINER.reads(raw.data, Kind.RESULT, HELLO, REPLY)
    raw = raw._replace(fields=REPLY.token_id + REPLY.nonce + proof[80:112])
    with pytest.raises(BadSignature):
        JOINER.reads(raw.data, Kind.RESULT, HELLO, REPLY)


def test_a_joiners_proof_sent_back_as_its_own_result_is_refused() -> None:
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    reflected = proof[:4] + bytes((Kind.RESULT,)) + proof[5:]
    with pytest.raises(BadSignature):
        JOINER.reads(reflected, Kind.RESULT, HELLO, REPLY)


def test_hello_and_reply_in_each_others_place_are_refused() -> None:
    proof = JOINER.proves(Kind.PROOF, REPLY, HELLO)
    with pytest.raises(BadSignature):
        INITIATOR.reads(proof, Kind.PROOF, HELLO, REPLY)


def _changed(greeting: Hello, kind: Kind, **elements: bytes) -> Hello:
    machine = JOINER if kind is Kind.HELLO else INITIATOR
    values = {"sealing": greeting.sealing, "pair": greeting.pair, "name": greeting.name.encode()}
    raw = typical.hello(kind, typical.hello_elements(**(values | elements)))
    fields = greeting.token_id + greeting.nonce
    return pairing.parse_hello(raw._replace(signer=machine.identity, fields=fields).data, kind)


@pytest.mark.parametrize(
    "change",
    [
        {"sealing": MALLORY.sealing.public},
        {"pair": signing_key("pair of mallory").public},
        {"name": b"mallory"},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.REPLY])
def test_each_change_on_the_way_of_what_was_said_first_is_a_bad_signature(
    kind: Kind, change: dict[str, bytes]
) -> None:
    seen = (
        (_changed(HELLO, kind, **change), REPLY)
        if kind is Kind.HELLO
        else (HELLO, _changed(REPLY, kind, **change))
    )
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    with pytest.raises(BadSignature):
        INITIATOR.reads(proof, Kind.PROOF, *seen)
    result = INITIATOR.proves(Kind.RESULT, *seen)
    with pytest.raises(BadSignature):
        JOINER.reads(result, Kind.RESULT, HELLO, REPLY)


def test_a_machine_in_the_middle_with_keys_of_its_own_is_refused_by_both() -> None:
    to_initiator, to_joiner = MALLORY.greets(Kind.HELLO), MALLORY.greets(Kind.REPLY)
    proof = JOINER.proves(Kind.PROOF, HELLO, to_joiner)
    with pytest.raises(BadSignature):
        INITIATOR.reads(proof, Kind.PROOF, to_initiator, REPLY)
    sealed_anew = MALLORY.proves(Kind.PROOF, to_initiator, REPLY, token=bytes(16))
    with pytest.raises(BadSignature):
        INITIATOR.reads(sealed_anew, Kind.PROOF, to_initiator, REPLY)
    result = INITIATOR.proves(Kind.RESULT, to_initiator, REPLY)
    with pytest.raises(BadSignature):
        JOINER.reads(result, Kind.RESULT, HELLO, to_joiner)


def test_a_right_proof_signed_by_another_identity_is_a_bad_signature() -> None:
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    raw = typical.RawFrame(Kind.PROOF, MALLORY.identity, proof[40:112], proof[116:-64])
    with pytest.raises(BadSignature):
        INITIATOR.reads(raw.data, Kind.PROOF, HELLO, REPLY)


@pytest.mark.parametrize("at", [0, 7, 8, 39, 40, 71])
def test_a_changed_field_of_a_proof_is_a_bad_signature_even_if_signed_anew(at: int) -> None:
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    fields = bytearray(proof[40:112])
    fields[at] ^= 1
    raw = typical.RawFrame(Kind.PROOF, JOINER.identity, bytes(fields), proof[116:-64])
    with pytest.raises(BadSignature):
        INITIATOR.reads(raw.data, Kind.PROOF, HELLO, REPLY)


def test_a_proof_with_a_bad_signature_is_refused_before_its_card_is_opened() -> None:
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    raw = typical.RawFrame(Kind.PROOF, JOINER.identity, proof[40:112], bytes(200), word="card")
    with pytest.raises(BadSignature):
        INITIATOR.reads(raw.data, Kind.PROOF, HELLO, REPLY)
    with pytest.raises(CannotOpen):
        INITIATOR.reads(raw._replace(word="").data, Kind.PROOF, HELLO, REPLY)


def test_a_card_sealed_to_somebody_else_does_not_open() -> None:
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    with pytest.raises(CannotOpen):
        MALLORY.reads(proof, Kind.PROOF, HELLO, REPLY)


def test_a_card_of_another_machine_in_a_right_proof_is_malformed() -> None:
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY, own_card=MALLORY.card)
    with pytest.raises(Malformed):
        INITIATOR.reads(proof, Kind.PROOF, HELLO, REPLY)


def test_a_card_with_another_sealing_key_in_a_right_proof_is_malformed() -> None:
    shown = Card(JOINER.identity.public, 1, "joiner", MALLORY.sealing.public)
    own_card = card.make_card(JOINER.identity, shown)
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY, own_card=own_card)
    with pytest.raises(Malformed):
        INITIATOR.reads(proof, Kind.PROOF, HELLO, REPLY)


def test_sealed_bytes_that_are_no_card_in_a_right_proof_are_malformed() -> None:
    for junk in (b"junk", typical.hello().data, typical.rotation().data):
        proof = JOINER.proves(Kind.PROOF, HELLO, REPLY, own_card=junk)
        with pytest.raises(Malformed):
            INITIATOR.reads(proof, Kind.PROOF, HELLO, REPLY)


def test_a_proof_of_another_pairing_with_the_same_token_is_refused() -> None:
    other = Machine("joiner two").greets(Kind.HELLO)
    proof = JOINER.proves(Kind.PROOF, HELLO, REPLY)
    with pytest.raises(BadSignature):
        INITIATOR.reads(proof, Kind.PROOF, other, REPLY)


def test_the_hello_carries_the_id_of_its_token_and_no_more() -> None:
    assert len(pairing.token_id(TOKEN)) == 8
    assert pairing.token_id(TOKEN) != pairing.token_id(filler("another token", 16))
