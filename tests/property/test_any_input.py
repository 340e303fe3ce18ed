"""Whatever arrives, there is a value or a typed error (failure case T1)."""

import json
import re
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmbx_protocol import (
    bodies,
    card,
    custody,
    envelope,
    frame,
    keys,
    letter,
    padding,
    pairing,
    state,
)
from agentmbx_protocol import queue_commands as commands
from agentmbx_protocol.errors import REFUSALS, CannotOpen, Malformed, ProtocolError, Refusal
from agentmbx_protocol.frame import Kind
from agentmbx_protocol.keys import SigningKey
from agentmbx_protocol.letter import Letter
from frame_values import few, many, numbers, signing_keys, some, texts
from mutations import mutated
from vector_parts import typical
from vector_parts.fields import expected
from vector_parts.raw_forms import RawFrame, array, mapping

garbage = st.one_of(
    st.binary(max_size=600),
    st.binary(max_size=300).map(lambda data: b"MBX1" + data),
    st.builds(
        lambda kind, rest: b"MBX1" + bytes((kind, 0, 0, 0)) + rest,
        st.integers(0, 15),
        st.binary(max_size=600),
    ),
    mutated([raw.data for raw in typical.FRAMES.values()]),
    mutated([bodies.join_frames([typical.retire().data, b"f"])]),
    mutated([bodies.make_deposit_answer(typical.held().data, [])]),
    mutated([bodies.problem(Malformed(), typical.queue_state().data)]),
    mutated([array(typical.letter_elements()), array(typical.inside_elements())]),
    mutated([mapping(typical.state_entries())]),
)
SENT = [envelope.parse_envelope(typical.envelope().data)]
GREETING = pairing.parse_hello(typical.hello().data, Kind.HELLO)
# Every function of the package that takes bytes or text from outside, by module and name.
PARSERS: dict[str, Callable[[bytes], object]] = {
    "frame.parse": frame.parse,
    "envelope.parse_envelope": envelope.parse_envelope,
    "custody.parse_held": custody.parse_held,
    "custody.parse_stored": custody.parse_stored,
    "custody.believe_held": lambda d: custody.believe_held(d, typical.RELAY.public, SENT),
    "custody.believe_stored": lambda d: custody.believe_stored(d, typical.PAIR.public, SENT),
    "queue_commands.parse_register": commands.parse_register,
    "queue_commands.parse_collect": commands.parse_collect,
    "queue_commands.parse_retire": commands.parse_retire,
    "queue_commands.parse_admit": commands.parse_admit,
    "queue_commands.parse_queue_state": commands.parse_queue_state,
    "card.parse_card": card.parse_card,
    "card.parse_rotation": card.parse_rotation,
    "card.follow_rotations": lambda d: card.follow_rotations(bytes(32), [d]),
    "card.check_name": lambda d: card.check_name(d.decode("latin-1")),
    "pairing.parse_hello": lambda d: pairing.parse_hello(d, Kind.HELLO),
    "pairing.parse_hello: reply": lambda d: pairing.parse_hello(d, Kind.REPLY),
    "pairing.open_proof": lambda d: open_proof(d, Kind.PROOF),
    "pairing.open_proof: result": lambda d: open_proof(d, Kind.RESULT),
    "letter.decode_letter": letter.decode_letter,
    "letter.parse_plaintext": letter.parse_plaintext,
    "letter.open_letter": lambda d: letter.open_letter(
        envelope.parse_envelope(d), typical.SEALING, receiver=bytes(32)
    ),
    "padding.check_padding": lambda d: padding.check_padding(d, len(d) // 2),
    "state.parse_state": state.parse_state,
    "bodies.split_frames": lambda d: bodies.split_frames(d, 64),
    "bodies.parse_deposit_answer": lambda d: bodies.parse_deposit_answer(d, 64),
    "bodies.parse_problem": bodies.parse_problem,
    "keys.key_from_text": lambda d: keys.key_from_text(d.decode("latin-1")),
    "keys.check_signing_public": keys.check_signing_public,
    "keys.check_sealing_public": keys.check_sealing_public,
    "keys.verify": lambda d: keys.verify(d[:32], d, d[-64:]),
    "SealingKey.open": typical.SEALING.open,
}


def open_proof(data: bytes, kind: Kind) -> card.Card:
    return pairing.open_proof(
        data, kind, bytes(16), GREETING, GREETING, sealing_key=typical.SEALING
    )


@many
@given(data=garbage)
def test_any_bytes_give_a_value_or_a_typed_error_in_every_parser(data: bytes) -> None:
    for parse in PARSERS.values():
        try:
            parse(data)
        except ProtocolError:
            continue


def test_every_parser_has_its_place_in_the_test_above() -> None:
    verbs = ("parse", "decode", "split", "open", "believe", "follow", "check", "verify")
    modules = (
        frame,
        envelope,
        custody,
        commands,
        card,
        pairing,
        letter,
        state,
        bodies,
        keys,
        padding,
    )
    doors = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if name.startswith(verbs) and getattr(value, "__module__", "") == module.__name__
    }
    assert doors <= {name.partition(":")[0] for name in PARSERS}


@some
@given(kind=st.sampled_from(Kind), key=signing_keys, data=st.data())
def test_any_fields_and_tail_that_are_signed_give_a_value_or_a_refusal(
    kind: Kind, key: SigningKey, data: st.DataObject
) -> None:
    layout = frame.LAYOUTS[kind]
    typical_raw = typical.FRAMES[kind]
    steps = st.integers(layout.tail_min // layout.tail_step, 20 + layout.tail_min)
    length = min(layout.tail_step * data.draw(steps), layout.tail_max)
    tails = [st.binary(min_size=length, max_size=length)]
    if typical_raw.tail:
        tails.append(mutated([typical_raw.tail]))
    fields = st.binary(min_size=layout.fields, max_size=layout.fields)
    raw = RawFrame(kind, key, data.draw(fields), data.draw(st.one_of(tails)))
    expected(kind.name.lower(), raw.data)


@some
@given(data=st.one_of(st.binary(max_size=900), mutated([array(typical.inside_elements())])))
def test_any_plaintext_under_a_good_seal_opens_or_fails_with_the_one_error(data: bytes) -> None:
    padded = typical.padded(data)
    for plaintext in (padded, data.ljust(1024, b"\0")):
        sealed = keys.seal(plaintext, typical.SEALING.public)
        parcel = envelope.parse_envelope(envelope.make_envelope(typical.PAIR, bytes(32), 1, sealed))
        try:
            letter.open_letter(parcel, typical.SEALING, receiver=typical.OTHER.public)
        except CannotOpen as failure:
            assert str(failure) == str(CannotOpen())  # noqa: PT017


@many
@given(text=texts)
def test_case_t1_any_text_is_refused_or_travels_byte_by_byte(text: str) -> None:
    shown = (
        card.Card(typical.IDENTITY.public, 1, text, typical.SEALING.public),
        card.Card(typical.IDENTITY.public, 1, "n", typical.SEALING.public, (text,)),
        card.Card(
            typical.IDENTITY.public,
            1,
            "n",
            typical.SEALING.public,
            (),
            (card.Route("https://r/" + text, typical.RELAY.public, typical.QUEUE.public),),
        ),
    )
    for each in shown:
        try:
            made = card.make_card(typical.IDENTITY, each)
        except Refusal:
            continue
        assert card.parse_card(made) == each
    written = Letter(
        stream=bytes(16), number=1, sent_ms=1, lifetime_s=1, content_type=text, content=b""
    )
    right = re.fullmatch(r"[a-z0-9][a-z0-9./-]{0,63}", text) and text != letter.STATE
    try:
        assert letter.decode_letter(letter.encode_letter(written)) == written
        assert right
    except Malformed:
        assert not right
    with suppress(Malformed):
        assert keys.key_text(keys.key_from_text(text)) == text.lower()


@some
@given(name=texts)
def test_case_t1_any_name_in_a_hello_is_refused_or_travels_byte_by_byte(name: str) -> None:
    try:
        made = pairing.make_hello(
            Kind.HELLO,
            typical.IDENTITY,
            named_token=bytes(8),
            nonce=bytes(32),
            sealing=typical.SEALING.public,
            pair=typical.PAIR.public,
            name=name,
        )
    except Malformed:
        return
    assert pairing.parse_hello(made, Kind.HELLO).name == name


@some
@given(number=numbers, sent_ms=numbers, lifetime_s=numbers)
def test_case_t1_any_number_in_a_letter_is_refused_or_comes_back(
    number: int, sent_ms: int, lifetime_s: int
) -> None:
    each = Letter(
        stream=bytes(16),
        number=number,
        sent_ms=sent_ms,
        lifetime_s=lifetime_s,
        content_type="text",
        content=b"",
    )
    try:
        assert letter.decode_letter(letter.encode_letter(each)) == each
    except Malformed:
        assert not (1 <= number < 2**63 and 0 <= sent_ms < 2**63 and 1 <= lifetime_s <= 259_200)


@few
@given(
    depth=st.integers(1, 3000), head=st.sampled_from([b"\x91", b"\x81\xa1a", b"\x96", b"\xdc\0\1"])
)
def test_case_t1_deep_nesting_is_refused_in_all_that_holds_messagepack(
    depth: int, head: bytes
) -> None:
    nested = head * depth
    with pytest.raises(Malformed):
        letter.decode_letter(nested)
    with pytest.raises(Malformed):
        letter.parse_plaintext(typical.padded(nested))
    with pytest.raises(Malformed):
        card.parse_card(typical.card()._replace(tail=nested[:4096]).data)
    with pytest.raises(Malformed):
        pairing.parse_hello(typical.hello()._replace(tail=nested[:144]).data, Kind.HELLO)


@some
@given(
    document=st.recursive(
        st.none() | st.booleans() | st.floats() | numbers.filter(lambda n: abs(n) < 2**70) | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    ),
    code=st.one_of(texts, st.none(), st.sampled_from(["stale", "malformed"])),
    state=st.one_of(texts, st.none(), st.booleans()),
)
def test_case_t1_any_json_is_a_problem_of_ours_or_none(
    document: object, code: object, state: object
) -> None:
    for wrapped in (document, {"code": code, "queue_state": state, "detail": document}):
        problem = bodies.parse_problem(json.dumps(wrapped).encode())
        if problem is not None:
            assert REFUSALS[str(code)] is type(problem[0])
            assert problem[0].detail == problem[0].title
