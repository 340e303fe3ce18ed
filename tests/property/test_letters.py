"""Letters come out of any journey byte by byte, or not at all (failure case A4)."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmbx_protocol import bodies, card, envelope, letter, limits
from agentmbx_protocol.errors import Malformed
from agentmbx_protocol.keys import SealingKey, SigningKey
from agentmbx_protocol.letter import Letter
from frame_values import few, letters, names, sealing_keys, signing_keys, some
from vector_parts import typical
from vector_parts.raw_forms import array, longer_forms


@some
@given(
    each=letters,
    keypairs=st.tuples(signing_keys, signing_keys),
    sealing=sealing_keys,
    news=st.tuples(st.binary(max_size=500), st.lists(st.binary(max_size=100), max_size=16)),
)
def test_case_a4_a_letter_travels_byte_by_byte_whatever_is_in_it(
    each: Letter,
    keypairs: tuple[SigningKey, SigningKey],
    sealing: SealingKey,
    news: tuple[bytes, list[bytes]],
) -> None:
    sender, receiver = keypairs
    letter_bytes = letter.encode_letter(each)
    sealed = letter.seal_letter(
        letter_bytes,
        sender=sender.public,
        receiver=receiver.public,
        sealing_public=sealing.public,
        card=news[0],
        rotations=tuple(news[1]),
    )
    sent = envelope.make_envelope(sender, envelope.DIRECT, each.lifetime_s, sealed)
    [arrived] = bodies.split_frames(bodies.join_frames([sent]), 64)
    parcel = envelope.parse_envelope(arrived)
    parcel.frame.verify()
    opened = letter.open_letter(parcel, sealing, receiver=receiver.public)
    assert (opened.letter_bytes, opened.letter) == (letter_bytes, each)
    assert opened.letter.content == each.content
    assert (opened.card, list(opened.rotations)) == news
    assert opened.digest == letter.letter_digest(letter_bytes)


@some
@given(each=letters, data=st.data())
def test_case_a4_a_letter_written_in_any_other_form_is_refused(
    each: Letter, data: st.DataObject
) -> None:
    elements = [
        letter.pack(value)
        for value in (
            each.stream,
            each.number,
            each.sent_ms,
            each.lifetime_s,
            each.content_type,
            each.content,
        )
    ]
    assert array(elements) == letter.encode_letter(each)
    at = data.draw(st.integers(0, 5))
    for form in longer_forms(elements[at]):
        with pytest.raises(Malformed):
            letter.decode_letter(array([*elements[:at], form, *elements[at + 1 :]]))
    for form in longer_forms(array(elements)):
        with pytest.raises(Malformed):
            letter.decode_letter(form)


@few
@given(value=st.recursive(st.none() | st.text() | st.integers() | st.floats(), st.lists))
def test_case_a4_json_in_a_letter_that_is_written_anew_is_another_letter(value: object) -> None:
    first, second = (
        json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")
        for indent, ascii_only in ((None, True), (1, False))
    )
    digests = set()
    for content in (first, second):
        each = Letter(
            stream=bytes(16), number=1, sent_ms=1, lifetime_s=1, content_type="x", content=content
        )
        written = letter.encode_letter(each)
        assert letter.decode_letter(written).content == content
        digests.add(letter.letter_digest(written))
    assert len(digests) == len({first, second})


@some
@given(name=names)
def test_case_a4_a_name_is_never_normalised(name: str) -> None:
    for form in ("NFC", "NFD"):
        spelled = unicodedata.normalize(form, name)
        shown = card.Card(typical.IDENTITY.public, 1, spelled, typical.SEALING.public)
        try:
            made = card.make_card(typical.IDENTITY, shown)
        except Malformed:
            assert len(spelled.encode()) > limits.NAME_BYTES_MAX
        else:
            assert card.parse_card(made).name == spelled
