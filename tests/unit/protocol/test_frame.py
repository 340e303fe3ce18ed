import hashlib

import pytest

from agentmbx_protocol import frame, limits
from agentmbx_protocol.errors import (
    BadSignature,
    Malformed,
    Refusal,
    TooLarge,
    UnsupportedVersion,
)
from agentmbx_protocol.frame import Kind
from vector_parts import typical
from vector_parts.frame_cases import frame_faults
from vector_parts.raw_forms import RawFrame

each_kind = pytest.mark.parametrize("kind", Kind)


@each_kind
def test_a_frame_is_read_into_its_parts(kind: Kind) -> None:
    raw = typical.FRAMES[kind]
    parsed = frame.parse(raw.data)
    assert (parsed.kind, parsed.signer) == (kind, raw.signer.public)
    assert (parsed.fields, parsed.tail) == (raw.fields, raw.tail)
    assert parsed.signature == raw.data[-64:]
    assert parsed.digest == hashlib.sha256(raw.data).digest()
    assert parsed.data == raw.data
    parsed.verify()


@each_kind
def test_a_frame_is_made_as_the_page_says_byte_by_byte(kind: Kind) -> None:
    raw = typical.FRAMES[kind]
    key = typical.signing_key("maker")
    made = frame.sign(kind, key, raw.fields, raw.tail)
    assert made == raw._replace(signer=key).data


@each_kind
def test_the_signed_message_is_the_label_and_the_hash_of_what_stands_before(kind: Kind) -> None:
    data = typical.FRAMES[kind].data
    label = b"agentmbx/1 " + kind.name.lower().encode() + b"\0"
    assert frame.parse(data).message == label + hashlib.sha256(data[:-64]).digest()


@each_kind
def test_what_is_wrong_with_any_frame_is_refused_with_its_code(kind: Kind) -> None:
    for name, data, code in frame_faults(typical.FRAMES[kind]):
        with pytest.raises(Refusal) as refused:
            frame.parse(data, kind).verify()
        assert refused.value.code == code, name


@each_kind
def test_a_frame_is_read_only_where_its_kind_belongs(kind: Kind) -> None:
    data = typical.FRAMES[kind].data
    assert frame.parse(data, *Kind).kind is kind
    with pytest.raises(Malformed):
        frame.parse(data, *(other for other in Kind if other is not kind))


@each_kind
def test_a_signature_for_one_kind_is_bad_for_every_other(kind: Kind) -> None:
    raw = typical.FRAMES[kind]
    for other in Kind:
        if other is not kind:
            with pytest.raises(BadSignature):
                frame.parse(raw._replace(word=other.name.lower()).data).verify()


@each_kind
def test_every_cut_of_a_frame_is_malformed(kind: Kind) -> None:
    data = typical.FRAMES[kind].data
    for length in range(len(data)):
        with pytest.raises(Malformed):
            frame.parse(data[:length])


@each_kind
def test_the_lengths_at_both_ends_of_a_layout_are_read_and_those_beyond_are_not(kind: Kind) -> None:
    layout = frame.LAYOUTS[kind]

    def made(length: int) -> bytes:
        return RawFrame(kind, typical.OTHER, bytes(layout.fields), bytes(length)).data

    for length in (layout.tail_min, layout.tail_max):
        assert len(frame.parse(made(length)).tail) == length
    for length in (layout.tail_min - layout.tail_step, layout.tail_max + layout.tail_step):
        if length >= 0:
            with pytest.raises((Malformed, TooLarge)):
                frame.parse(made(length))
    if layout.tail_step > 1:
        with pytest.raises(Malformed):
            frame.parse(made(layout.tail_max - 1))


def test_the_largest_frame_is_read_and_one_byte_more_is_too_large() -> None:
    largest = typical.envelope(plain_length=limits.SEALED_BYTES_MAX - 48).data
    assert len(largest) == 524_288
    frame.parse(largest)
    with pytest.raises(TooLarge):
        frame.parse(largest + b"\0")
    with pytest.raises(TooLarge):
        frame.parse(bytes(524_289))


@pytest.mark.parametrize("last", [b"0", b"2", b"\0", b"\xff"])
def test_another_version_is_named_as_such_once_a_frame_could_be_there(last: bytes) -> None:
    with pytest.raises(UnsupportedVersion):
        frame.parse(b"MBX" + last + bytes(37))
    with pytest.raises(Malformed):
        frame.parse(b"MBX" + last + bytes(36))


@pytest.mark.parametrize("data", [b"", b"M", b"MBX", b"MBX1", b"mbx1" + bytes(200), b"\0" * 200])
def test_bytes_that_begin_in_another_way_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        frame.parse(data)


@pytest.mark.parametrize("number", [0, *range(15, 256)])
def test_an_unknown_kind_is_malformed(number: int) -> None:
    with pytest.raises(Malformed):
        frame.parse(typical.retire()._replace(kind=number).data)


def test_a_maker_that_has_too_much_to_say_is_told_so() -> None:
    with pytest.raises(TooLarge):
        frame.sign(Kind.CARD, typical.IDENTITY, bytes(8), bytes(4097))


@pytest.mark.parametrize(
    ("kind", "fields", "tail"),
    [
        (Kind.CARD, bytes(7), b"t"),
        (Kind.CARD, bytes(9), b"t"),
        (Kind.CARD, bytes(8), b""),
        (Kind.STORED, b"", bytes(37)),
        (Kind.STORED, b"", b""),
    ],
)
def test_a_maker_with_wrong_lengths_is_a_bug(kind: Kind, fields: bytes, tail: bytes) -> None:
    with pytest.raises(ValueError, match="wrong lengths"):
        frame.sign(kind, typical.IDENTITY, fields, tail)


def test_the_same_content_gives_the_same_bytes_at_every_signing() -> None:
    made = [frame.sign(Kind.RETIRE, typical.QUEUE, typical.command_fields()) for _ in range(2)]
    assert made[0] == made[1]
