import hashlib
from collections.abc import Callable

import pytest

from agentmbx_protocol import envelope, letter, limits, padding, pairing
from agentmbx_protocol.envelope import Envelope, parse_envelope
from agentmbx_protocol.errors import BadSignature, CannotOpen, Malformed, TooLarge
from agentmbx_protocol.frame import Kind
from agentmbx_protocol.keys import SealingKey, SigningKey, seal
from agentmbx_protocol.letter import Letter, Opened
from agentmbx_protocol.messagepack import pack
from vector_parts import typical
from vector_parts.frame_cases import COUNTER_END
from vector_parts.raw_forms import array, filler, sealing_key, signing_key

# A writes to B; C is a third machine. Each pair of machines has a key of its own at each end.
A_FOR_B, A_FOR_C = signing_key("A for B"), signing_key("A for C")
B_FOR_A, B_FOR_C = signing_key("B for A"), signing_key("B for C")
C_FOR_A, C_FOR_B = signing_key("C for A"), signing_key("C for B")
B_SEALING, C_SEALING = sealing_key("B"), sealing_key("C")
STREAM = filler("stream", 16)


def words(**changes: object) -> Letter:
    values = {
        "stream": STREAM,
        "number": 1,
        "sent_ms": 1,
        "lifetime_s": 1,
        "content_type": "text",
        "content": b"c",
    }
    return Letter(**(values | changes))


LETTER_BYTES = letter.encode_letter(words(content=b"Good morning."))


def sealed_by(
    sender: SigningKey = A_FOR_B,
    receiver: SigningKey = B_FOR_A,
    to: SealingKey = B_SEALING,
    letter_bytes: bytes = LETTER_BYTES,
    **news: object,
) -> bytes:
    return letter.seal_letter(
        letter_bytes,
        sender=sender.public,
        receiver=receiver.public,
        sealing_public=to.public,
        **news,
    )


def carried(sealed: bytes, signer: SigningKey = A_FOR_B) -> Envelope:
    return parse_envelope(envelope.make_envelope(signer, typical.QUEUE.public, 3600, sealed))


def carried_plaintext(plaintext: bytes, signer: SigningKey = A_FOR_B) -> Envelope:
    return carried(seal(plaintext, B_SEALING.public), signer)


def opened_by_b(parcel: Envelope) -> Opened:
    return letter.open_letter(parcel, B_SEALING, receiver=B_FOR_A.public)


def test_a_letter_is_read_as_it_was_written() -> None:
    for each in (
        words(),
        words(number=COUNTER_END - 1, sent_ms=COUNTER_END - 1, lifetime_s=259_200),
        words(number=0, content_type="state", content=b""),
        words(content=b"c" * limits.BODY_BYTES_MAX),
    ):
        assert letter.decode_letter(letter.encode_letter(each)) == each


@pytest.mark.parametrize(
    "changes",
    [
        {"number": -1},
        {"number": 0},
        {"number": COUNTER_END},
        {"number": 2**64},
        {"number": 10**400},
        {"number": 1, "content_type": "state"},
        {"sent_ms": -1},
        {"sent_ms": COUNTER_END},
        {"sent_ms": 2**70},
        {"lifetime_s": 0},
        {"lifetime_s": 259_201},
        {"stream": b""},
        {"stream": bytes(15)},
        {"stream": bytes(17)},
        {"content_type": ""},
        {"content_type": "a" * 65},
        {"content_type": "Text"},
        {"content_type": "text plain"},
        {"content_type": "text\n"},
        {"content_type": "\ntext"},
        {"content_type": "-text"},
        {"content_type": "t\u00e9xt"},
        {"content_type": "\ud83d"},
        {"content_type": "text\0"},
    ],
    ids=str,
)
def test_a_letter_with_a_value_out_of_range_is_never_written(changes: dict[str, object]) -> None:
    with pytest.raises(Malformed):
        letter.encode_letter(words(**changes))


def test_a_letter_of_327680_bytes_is_written_and_read_and_one_byte_more_is_not() -> None:
    around = len(letter.encode_letter(words(content=b"c" * 100_000))) - 100_000
    content = b"c" * (limits.LETTER_BYTES_MAX - around)
    largest = letter.encode_letter(words(content=content))
    assert len(largest) == 327_680
    assert letter.decode_letter(largest).content == content
    with pytest.raises(TooLarge):
        letter.encode_letter(words(content=content + b"c"))
    with pytest.raises(Malformed):
        letter.decode_letter(pack(words(content=content + b"c")))


def test_the_digest_of_a_letter_is_the_labelled_hash_of_its_bytes() -> None:
    expected = hashlib.sha256(b"agentmbx/1 letter\0" + LETTER_BYTES).digest()
    assert letter.letter_digest(LETTER_BYTES) == expected


def test_a_letter_comes_out_of_its_seal_byte_by_byte_with_the_senders_news() -> None:
    news = {"card": typical.card().data, "rotations": (typical.rotation().data,)}
    opened = opened_by_b(carried(sealed_by(**news)))
    assert opened.letter_bytes == LETTER_BYTES
    assert opened.letter == letter.decode_letter(LETTER_BYTES)
    assert opened.digest == letter.letter_digest(LETTER_BYTES)
    assert (opened.card, opened.rotations) == (news["card"], news["rotations"])


def test_a_letter_sealed_anew_is_the_same_letter_in_another_envelope() -> None:
    parcels = [carried(sealed_by()), carried(sealed_by()), carried(sealed_by(card=b"\0"))]
    assert len({parcel.digest for parcel in parcels}) == 3
    assert {opened_by_b(parcel).digest for parcel in parcels} == {
        letter.letter_digest(LETTER_BYTES)
    }


def test_the_largest_letter_with_the_largest_news_is_sealed_and_opened() -> None:
    letter_bytes = filler("letter", 100)
    around = letter.encode_letter(words(content=b"c" * 100_000))
    largest = letter.encode_letter(
        words(content=b"c" * (limits.LETTER_BYTES_MAX - len(around) + 100_000))
    )
    card = bytes(limits.CARD_BYTES_MAX)
    rotations = (bytes(limits.ROTATION_BYTES_MAX),) * 16
    opened = opened_by_b(carried(sealed_by(letter_bytes=largest, card=card, rotations=rotations)))
    assert (opened.letter_bytes, opened.card, opened.rotations) == (largest, card, rotations)
    with pytest.raises(CannotOpen):
        opened_by_b(carried(sealed_by(letter_bytes=letter_bytes)))


def test_news_that_cannot_be_read_does_no_harm_to_the_letter() -> None:
    opened = opened_by_b(carried(sealed_by(card=b"junk", rotations=(b"", b"junk"))))
    assert opened.letter_bytes == LETTER_BYTES


def test_what_no_envelope_holds_is_not_sealed() -> None:
    with pytest.raises(TooLarge):
        sealed_by(letter_bytes=bytes(600_000))


def test_sealed_bytes_have_a_padded_length_whatever_is_in_them() -> None:
    for length in (0, 1, 500, 900, 1100, 5000, 100_001):
        sealed = sealed_by(letter_bytes=letter.encode_letter(words(content=bytes(length))))
        plain_length = len(sealed) - 48
        assert padding.padded_length(plain_length) == plain_length


def test_two_short_letters_cannot_be_told_apart_by_length() -> None:
    lengths = {
        len(sealed_by(letter_bytes=letter.encode_letter(words(content=bytes(length)))))
        for length in range(0, 800, 50)
    }
    assert lengths == {1072}


def test_case_a1_sealed_bytes_passed_on_to_a_third_machine_do_not_open_there() -> None:
    with pytest.raises(CannotOpen):
        letter.open_letter(carried(sealed_by(), B_FOR_C), C_SEALING, receiver=C_FOR_B.public)


def test_case_a1_an_opened_letter_sealed_again_to_a_third_machine_does_not_open_there() -> None:
    inside = B_SEALING.open(carried(sealed_by()).sealed)
    for signer, receiver in ((A_FOR_B, C_FOR_A), (B_FOR_C, C_FOR_B), (A_FOR_C, C_FOR_A)):
        parcel = carried(seal(inside, C_SEALING.public), signer)
        with pytest.raises(CannotOpen):
            letter.open_letter(parcel, C_SEALING, receiver=receiver.public)


def test_case_a1_sealed_bytes_signed_again_by_another_sender_do_not_open() -> None:
    for thief in (C_FOR_B, A_FOR_C, B_FOR_A):
        with pytest.raises(CannotOpen):
            opened_by_b(carried(sealed_by(), thief))


def test_case_a1_sealed_bytes_for_another_pairing_of_this_machine_do_not_open() -> None:
    parcel = carried(sealed_by(receiver=B_FOR_C))
    with pytest.raises(CannotOpen):
        opened_by_b(parcel)


def test_case_a1_a_letter_turned_back_to_its_sender_does_not_open() -> None:
    a_sealing = sealing_key("A")
    inside = B_SEALING.open(carried(sealed_by()).sealed)
    parcel = carried(seal(inside, a_sealing.public), B_FOR_A)
    with pytest.raises(CannotOpen):
        letter.open_letter(parcel, a_sealing, receiver=A_FOR_B.public)


def test_case_a1_a_pairing_signature_does_not_serve_as_that_of_a_message() -> None:
    raw = typical.envelope()
    for kind in (Kind.HELLO, Kind.REPLY, Kind.PROOF, Kind.RESULT, Kind.CARD, Kind.ROTATION):
        parcel = parse_envelope(raw._replace(word=kind.name.lower()).data)
        with pytest.raises(BadSignature):
            parcel.frame.verify()
        with pytest.raises(Malformed):
            parse_envelope(typical.FRAMES[kind].data)
    with pytest.raises(Malformed):
        pairing.parse_hello(raw.data, Kind.HELLO)


def test_a_letter_opens_only_with_the_key_that_it_was_sealed_to() -> None:
    with pytest.raises(CannotOpen):
        letter.open_letter(carried(sealed_by()), C_SEALING, receiver=B_FOR_A.public)


def plaintext(change: Callable[[list[bytes]], object] = lambda _: None) -> bytes:
    elements = [
        pack(A_FOR_B.public),
        pack(B_FOR_A.public),
        pack(LETTER_BYTES),
        pack(b""),
        pack([]),
    ]
    change(elements)
    return typical.padded(array(elements))


def _set(at: int, value: object) -> Callable[[list[bytes]], object]:
    return lambda elements: elements.__setitem__(at, pack(value))


def _wrong_plaintexts() -> dict[str, bytes]:
    good = plaintext()
    long_form = pack(LETTER_BYTES).replace(b"\xc4", b"\xc5\0", 1)
    return {
        "zeros": bytes(1024),
        "text": b"Good morning.".ljust(1024),
        "last byte set": good[:-1] + b"\1",
        "length too long": b"\0\0\4\0" + good[4:],
        "length of all bits": b"\xff" * 4 + good[4:],
        "length too short": (int.from_bytes(good[:4], "big") - 1).to_bytes(4, "big") + good[4:],
        "padded once too often": good + bytes(64),
        "no letter": plaintext(_set(2, b"")),
        "a letter that is none": plaintext(_set(2, b"\xc0")),
        "a letter in a longer form": plaintext(lambda e: e.__setitem__(2, long_form)),
        "a letter with bytes behind": plaintext(_set(2, LETTER_BYTES + b"\0")),
        "a letter too long": plaintext(_set(2, bytes(327_681))),
        "a letter out of range": plaintext(_set(2, pack(words(number=0)))),
        "17 rotations": plaintext(_set(4, [b"\0"] * 17)),
        "a sender of 31 bytes": plaintext(_set(0, bytes(31))),
        "a receiver of 33 bytes": plaintext(_set(1, bytes(33))),
        "a sender that is text": plaintext(_set(0, "k" * 32)),
        "another sender": plaintext(_set(0, C_FOR_B.public)),
        "another receiver": plaintext(_set(1, C_FOR_A.public)),
        "sender and receiver swapped": plaintext(lambda e: e.__setitem__(slice(2), [e[1], e[0]])),
        "an element more": plaintext(lambda e: e.append(b"\xc0")),
        "an element less": plaintext(lambda e: e.pop()),
    }


def test_a_plaintext_made_by_hand_opens() -> None:
    assert opened_by_b(carried_plaintext(plaintext())).letter_bytes == LETTER_BYTES


@pytest.mark.parametrize("name", _wrong_plaintexts())
def test_every_wrong_plaintext_fails_to_open_with_one_error_and_one_text(name: str) -> None:
    with pytest.raises(CannotOpen) as failure:
        opened_by_b(carried_plaintext(_wrong_plaintexts()[name]))
    assert str(failure.value) == str(CannotOpen())


def test_bytes_that_are_no_seal_fail_to_open_with_the_same_error() -> None:
    with pytest.raises(CannotOpen):
        opened_by_b(carried(filler("noise", 1072)))


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_plaintext_shorter_than_its_length_is_malformed(length: int) -> None:
    with pytest.raises(Malformed):
        letter.parse_plaintext(bytes(length))


def test_a_plaintext_larger_than_any_envelope_is_too_large() -> None:
    with pytest.raises(TooLarge):
        letter.parse_plaintext(bytes(507_905))
