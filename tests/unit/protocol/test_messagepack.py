from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from agentmbx_protocol import card, letter, messagepack, pairing
from agentmbx_protocol.errors import Malformed
from agentmbx_protocol.frame import Kind
from vector_parts import typical
from vector_parts.raw_forms import BAD_UTF8, array, longer_forms, pack_faults, text

ANY = msgspec.msgpack.Decoder(list[Any])


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ([], "90"),
        ([0, 127], "92007f"),
        ([128], "91cc80"),
        ([255, 256], "92ccffcd0100"),
        ([65_535, 65_536], "92cdffffce00010000"),
        ([2**32 - 1, 2**32], "92ceffffffffcf0000000100000000"),
        ([2**64 - 1], "91cfffffffffffffffff"),
        ([b""], "91c400"),
        ([b"\xff"], "91c401ff"),
        (["", "a"], "92a0a161"),
        (["\U0001f4ec"], "91a4f09f93ac"),
        ([[], [1]], "92909101"),
    ],
)
def test_values_are_written_in_the_shortest_form_and_read_back(value: list[int], data: str) -> None:
    assert messagepack.pack(value).hex() == data
    assert messagepack.unpack(bytes.fromhex(data), ANY) == value


@pytest.mark.parametrize(
    ("length", "heads"),
    [(15, "9f"), (16, "dc0010"), (65_535, "dcffff")],
)
def test_arrays_have_the_shortest_head(length: int, heads: str) -> None:
    assert messagepack.pack([0] * length).startswith(bytes.fromhex(heads))


@pytest.mark.parametrize(
    ("length", "text_head", "bin_head"),
    [
        (31, "bf", "c41f"),
        (32, "d920", "c420"),
        (255, "d9ff", "c4ff"),
        (256, "da0100", "c50100"),
        (65_535, "daffff", "c5ffff"),
        (65_536, "db00010000", "c600010000"),
    ],
)
def test_texts_and_bytes_have_the_shortest_head(length: int, text_head: str, bin_head: str) -> None:
    assert messagepack.pack("a" * length).startswith(bytes.fromhex(text_head))
    assert messagepack.pack(b"a" * length).startswith(bytes.fromhex(bin_head))


@pytest.mark.parametrize("value", [0, 127, 128, 255, 256, 65_536, 2**32, b"b", b"b" * 300, "s"])
def test_every_longer_form_of_a_value_is_malformed(value: bytes | str | int) -> None:
    forms = list(longer_forms(messagepack.pack(value)))
    assert forms
    for form in forms:
        with pytest.raises(Malformed):
            messagepack.unpack(array([form]), ANY)


@pytest.mark.parametrize("name", BAD_UTF8)
def test_invalid_utf_8_is_malformed(name: str) -> None:
    with pytest.raises(Malformed):
        messagepack.unpack(array([text(BAD_UTF8[name])]), ANY)


@pytest.mark.parametrize("value", ["\ud83d", "a\udc00b", ["\ud800"]])
def test_a_lone_surrogate_is_never_written(value: object) -> None:
    with pytest.raises(Malformed):
        messagepack.pack(value)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**400])
def test_a_number_beyond_64_bits_is_never_written(value: int) -> None:
    with pytest.raises(Malformed):
        messagepack.pack([value])


READERS: dict[str, tuple[list[bytes], Callable[[bytes], object]]] = {
    "letter": (typical.letter_elements(), letter.decode_letter),
    "plaintext": (
        typical.inside_elements(),
        lambda data: letter.parse_plaintext(typical.padded(data)),
    ),
    "card": (
        typical.card_elements(),
        lambda data: card.parse_card(typical.card()._replace(tail=data).data),
    ),
    "route": (
        typical.route_elements(),
        lambda data: card.parse_card(typical.card(typical.card_elements(routes=[data])).data),
    ),
    "hello": (
        typical.hello_elements(),
        lambda data: pairing.parse_hello(typical.hello()._replace(tail=data).data, Kind.HELLO),
    ),
}
FAULTS = [
    (reader, name, data)
    for reader, (elements, _) in READERS.items()
    for name, data in pack_faults(elements)
]


@pytest.mark.parametrize("reader", READERS)
def test_what_holds_messagepack_is_read_in_its_one_form(reader: str) -> None:
    elements, read = READERS[reader]
    read(array(elements))


@pytest.mark.parametrize(
    ("reader", "data"),
    [(reader, data) for reader, _, data in FAULTS],
    ids=[f"{reader}: {name}" for reader, name, _ in FAULTS],
)
def test_what_holds_messagepack_in_another_form_is_malformed(reader: str, data: bytes) -> None:
    with pytest.raises(Malformed):
        READERS[reader][1](data)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01"])
def test_deep_nesting_is_malformed_and_nothing_worse(reader: str, head: bytes) -> None:
    for data in (head * 1000, b"\x96" + head * 1000, b"\x94\xa1n" + head * 1000):
        with pytest.raises(Malformed):
            READERS[reader][1](data[:4096] if reader in ("card", "route") else data[:140])
