import struct

import pytest

from agentmbx_protocol import card, limits
from agentmbx_protocol.card import Card, Rotation, Route
from agentmbx_protocol.errors import BadSignature, Malformed, TooLarge, UnsupportedVersion
from agentmbx_protocol.keys import SigningKey
from vector_parts import typical
from vector_parts.content_cases import (
    BAD_ADDRESSES,
    BAD_NAMES,
    BAD_SEALING_KEYS,
    BAD_URLS,
    GOOD_ADDRESSES,
    GOOD_NAMES,
    GOOD_URLS,
)
from vector_parts.frame_cases import BAD_SIGNING_KEYS, COUNTER_END
from vector_parts.raw_forms import array, signing_key

ROUTE = Route("https://relay.example.com", typical.RELAY.public, typical.QUEUE.public)
PLAIN = Card(typical.IDENTITY.public, 5, "build-box", typical.SEALING.public)
MACHINES = [signing_key(f"identity {number}") for number in range(18)]


def shown(name: str = "n", address: str = "192.0.2.7:7420", url: str = ROUTE.url) -> Card:
    route = Route(url, ROUTE.relay, ROUTE.queue)
    return Card(PLAIN.identity, 5, name, PLAIN.sealing, (address,), (route,))


def parsed(*, url: str | None = None, **elements: object) -> Card:
    if url is not None:
        elements["routes"] = [array(typical.route_elements(url=url.encode()))]
    return card.parse_card(typical.card(typical.card_elements(**elements)).data)


def link(number: int, sequence: int, successor: int | None = None) -> bytes:
    following = MACHINES[number + 1 if successor is None else successor]
    new_card = typical.card(sequence=sequence, signer=following).data
    return card.make_rotation(MACHINES[number], new_card)


def test_a_card_is_read_as_it_was_made() -> None:
    full = Card(PLAIN.identity, 9, "b", PLAIN.sealing, GOOD_ADDRESSES, (ROUTE,) * 4)
    assert card.parse_card(card.make_card(typical.IDENTITY, full)) == full
    assert card.parse_card(card.make_card(typical.IDENTITY, PLAIN)) == PLAIN


def test_the_largest_card_fits_its_frame() -> None:
    url = "https://relay.example.com/".ljust(512, "p")
    route = Route(url, ROUTE.relay, ROUTE.queue)
    address = "[2001:db8:1111:2222:3333:4444:5555:6666]:65535"
    full = Card(PLAIN.identity, 9, "n" * 64, PLAIN.sealing, (address,) * 16, (route,) * 4)
    assert len(card.make_card(typical.IDENTITY, full)) <= limits.CARD_BYTES_MAX


def test_more_addresses_or_routes_than_a_card_holds_are_never_made() -> None:
    for addresses, routes in (((GOOD_ADDRESSES[0],) * 17, ()), ((), (ROUTE,) * 5)):
        with pytest.raises(Malformed):
            card.make_card(
                typical.IDENTITY, Card(PLAIN.identity, 5, "n", PLAIN.sealing, addresses, routes)
            )


def test_a_name_that_no_frame_holds_is_too_large() -> None:
    with pytest.raises(TooLarge):
        card.make_card(typical.IDENTITY, shown(name="n" * 5000))


@pytest.mark.parametrize("sequence", [0, COUNTER_END, 2**64 - 1])
def test_a_sequence_out_of_range_is_malformed(sequence: int) -> None:
    with pytest.raises(Malformed):
        card.parse_card(typical.card(sequence=sequence).data)


@pytest.mark.parametrize("sequence", [-1, 0, COUNTER_END, 2**64, 10**400])
def test_a_sequence_out_of_range_is_never_made(sequence: int) -> None:
    with pytest.raises(Malformed):
        card.make_card(typical.IDENTITY, Card(PLAIN.identity, sequence, "n", PLAIN.sealing))


@pytest.mark.parametrize("label", GOOD_NAMES)
def test_a_name_that_a_person_can_see_is_read_byte_by_byte(label: str) -> None:
    name = GOOD_NAMES[label]
    assert card.parse_card(card.make_card(typical.IDENTITY, shown(name=name))).name == name


@pytest.mark.parametrize("label", BAD_NAMES)
def test_a_name_with_anything_hidden_is_malformed_and_never_made(label: str) -> None:
    name = BAD_NAMES[label]
    with pytest.raises(Malformed):
        card.check_name(name)
    with pytest.raises(Malformed):
        parsed(name=name.encode())
    with pytest.raises(Malformed):
        card.make_card(typical.IDENTITY, shown(name=name))


@pytest.mark.parametrize("text", ["\ud83d", "a\udfff", "\udc80.example"])
def test_a_lone_surrogate_is_refused_in_every_text_of_a_card(text: str) -> None:
    with pytest.raises(Malformed):
        card.check_name(text)
    for wrong in (shown(name=text), shown(address=text), shown(url=text)):
        with pytest.raises(Malformed):
            card.make_card(typical.IDENTITY, wrong)


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_an_ip_literal_with_a_port_is_an_address(address: str) -> None:
    made = card.make_card(typical.IDENTITY, shown(address=address))
    assert card.parse_card(made).addresses == (address,)


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_anything_else_is_no_address(address: str) -> None:
    with pytest.raises(Malformed):
        parsed(addresses=[address.encode()])


@pytest.mark.parametrize(
    "address",
    [
        "[::ffff:192.0.2.7]:7420",
        "[::ffff:c000:207]:7420",
        "[::ffff:169.254.169.254]:80",
        "[::ffff:a9fe:a9fe]:80",
        "[::ffff:0:0]:80",
    ],
)
def test_an_ipv4_address_in_ipv6_form_is_no_address_however_it_is_written(address: str) -> None:
    with pytest.raises(Malformed):
        parsed(addresses=[address.encode()])


@pytest.mark.parametrize("zone", ["eth0", "1", " ", "\u202e", "\x1b[31m", "]:1"])
def test_a_zone_is_never_part_of_an_address(zone: str) -> None:
    for host in ("2001:db8::7", "fe80::1"):
        with pytest.raises(Malformed):
            parsed(addresses=[f"[{host}%{zone}]:7420".encode()])


@pytest.mark.parametrize("port", ["1" * 400, "9" * 5000, "1e3", "\u0661", "0x50", "-1"])
def test_a_port_is_a_plain_number(port: str) -> None:
    address = f"192.0.2.7:{port}"[:3000]
    with pytest.raises(Malformed):
        parsed(addresses=[address.encode()])


@pytest.mark.parametrize("url", GOOD_URLS)
def test_a_url_of_a_relay_is_read_as_it_was_made(url: str) -> None:
    made = card.make_card(typical.IDENTITY, shown(url=url))
    assert card.parse_card(made).routes[0].url == url


@pytest.mark.parametrize("url", BAD_URLS)
def test_any_other_url_is_malformed_and_never_made(url: str) -> None:
    with pytest.raises(Malformed):
        parsed(url=url)
    with pytest.raises(Malformed):
        card.make_card(typical.IDENTITY, shown(url=url))


def test_a_url_of_512_bytes_is_read_and_one_of_513_is_not() -> None:
    url = "https://relay.example.com/".ljust(512, "p")
    assert parsed(url=url).routes[0].url == url
    with pytest.raises(Malformed):
        parsed(url=url + "p")


@pytest.mark.parametrize("name", BAD_SEALING_KEYS)
def test_a_card_with_a_bad_sealing_key_is_malformed(name: str) -> None:
    with pytest.raises(Malformed):
        parsed(sealing=BAD_SEALING_KEYS[name])


@pytest.mark.parametrize("name", BAD_SIGNING_KEYS)
@pytest.mark.parametrize("place", ["relay", "queue"])
def test_a_route_with_a_bad_key_is_malformed(name: str, place: str) -> None:
    route = array(typical.route_elements(**{place: BAD_SIGNING_KEYS[name]}))
    with pytest.raises(Malformed):
        parsed(routes=[route])


def test_the_form_of_a_card_is_checked_first_then_its_signature_then_its_keys() -> None:
    bad_name = typical.card(typical.card_elements(name=b" "))
    bad_key = typical.card(typical.card_elements(sealing=bytes(32)))
    with pytest.raises(Malformed):
        card.parse_card(bad_name._replace(word="hello").data)
    with pytest.raises(BadSignature):
        card.parse_card(bad_key._replace(word="hello").data)
    with pytest.raises(Malformed):
        card.parse_card(bad_key.data)


def test_a_rotation_is_read_as_it_was_made() -> None:
    new_card = typical.card(sequence=6, signer=typical.SUCCESSOR).data
    data = card.make_rotation(typical.IDENTITY, new_card)
    expected = Rotation(typical.IDENTITY.public, 6, card.parse_card(new_card))
    assert card.parse_rotation(data) == expected


def test_a_rotation_to_a_card_that_is_none_is_never_made() -> None:
    with pytest.raises(Malformed):
        card.make_rotation(typical.IDENTITY, typical.hello().data)
    with pytest.raises(UnsupportedVersion):
        card.make_rotation(typical.IDENTITY, typical.card()._replace(magic=b"MBX2").data)


def test_a_rotation_to_its_own_key_is_malformed() -> None:
    with pytest.raises(Malformed):
        card.parse_rotation(typical.rotation(typical.card(sequence=6)).data)


@pytest.mark.parametrize("sequence", [0, 5, 7, COUNTER_END])
def test_a_rotation_with_another_sequence_than_its_card_is_malformed(sequence: int) -> None:
    raw = typical.rotation()._replace(fields=struct.pack(">Q", sequence))
    with pytest.raises(Malformed):
        card.parse_rotation(raw.data)


def test_both_signatures_of_a_rotation_are_checked_after_all_that_is_form() -> None:
    raw = typical.rotation()
    forged = raw.tail[:-1] + bytes((raw.tail[-1] ^ 1,))
    for crooked in (raw._replace(word="card"), raw._replace(tail=forged)):
        with pytest.raises(BadSignature):
            card.parse_rotation(crooked.data)
        with pytest.raises(Malformed):
            card.parse_rotation(crooked._replace(fields=struct.pack(">Q", 5)).data)
    inner = typical.card(typical.card_elements(name=b" "), sequence=6, signer=typical.SUCCESSOR)
    with pytest.raises(Malformed):
        card.parse_rotation(typical.rotation(inner)._replace(word="card").data)


def test_a_rotation_to_a_card_of_the_next_version_is_malformed() -> None:
    inner = typical.card(sequence=6, signer=typical.SUCCESSOR)._replace(magic=b"MBX2")
    with pytest.raises(Malformed):
        card.parse_rotation(typical.rotation(inner).data)


def test_the_longest_rotation_is_read() -> None:
    url = "https://relay.example.com/".ljust(512, "p")
    route = Route(url, ROUTE.relay, ROUTE.queue)
    address = "[2001:db8:1111:2222:3333:4444:5555:6666]:65535"
    key = typical.SUCCESSOR
    full = Card(key.public, 9, "n" * 64, PLAIN.sealing, (address,) * 16, (route,) * 4)
    data = card.make_rotation(typical.IDENTITY, card.make_card(key, full))
    assert len(data) <= limits.ROTATION_BYTES_MAX
    assert card.parse_rotation(data).card == full


def test_a_chain_leads_to_the_newest_identity() -> None:
    chain = [link(number, 10 + number) for number in range(16)]
    assert card.follow_rotations(MACHINES[0].public, chain) == MACHINES[16].public


def test_a_chain_is_followed_from_the_identity_that_is_known() -> None:
    chain = [link(number, 10 + number) for number in range(4)]
    for known in MACHINES[:5]:
        assert card.follow_rotations(known.public, chain) == MACHINES[4].public


def test_a_chain_of_another_machine_leads_nowhere() -> None:
    stranger = signing_key("stranger").public
    assert card.follow_rotations(stranger, [link(0, 1), link(1, 2)]) == stranger
    assert card.follow_rotations(stranger, []) == stranger


def test_a_chain_of_17_links_is_malformed() -> None:
    chain = [link(number, 10 + number) for number in range(17)]
    with pytest.raises(Malformed):
        card.follow_rotations(MACHINES[0].public, chain)


@pytest.mark.parametrize("sequences", [(2, 1), (1, 1), (1, 2, 2), (3, 1, 2), (1, 3, 2)])
def test_a_chain_whose_sequences_do_not_rise_is_malformed(sequences: tuple[int, ...]) -> None:
    chain = [link(number, sequence) for number, sequence in enumerate(sequences)]
    with pytest.raises(Malformed):
        card.follow_rotations(MACHINES[0].public, chain)


@pytest.mark.parametrize("numbers", [(0, 2), (1, 0), (0, 0), (0, 1, 3), (2, 1, 0)])
def test_a_chain_with_a_gap_or_out_of_order_is_malformed(numbers: tuple[int, ...]) -> None:
    chain = [link(number, 10 + place) for place, number in enumerate(numbers)]
    for known in (MACHINES[0], signing_key("stranger")):
        with pytest.raises(Malformed):
            card.follow_rotations(known.public, chain)


def test_two_successors_of_one_key_are_no_chain() -> None:
    with pytest.raises(Malformed):
        card.follow_rotations(MACHINES[0].public, [link(0, 1, 1), link(0, 2, 2)])


def test_a_chain_with_one_forged_link_is_refused_also_before_the_known_identity() -> None:
    good, forged = link(0, 10), link(1, 11)
    forged = forged[:-1] + bytes((forged[-1] ^ 1,))
    with pytest.raises(BadSignature):
        card.follow_rotations(MACHINES[0].public, [good, forged])
    good, forged = link(1, 11), link(0, 10)
    forged = forged[:-1] + bytes((forged[-1] ^ 1,))
    with pytest.raises(BadSignature):
        card.follow_rotations(MACHINES[1].public, [forged, good])


def test_a_link_by_the_new_key_alone_proves_nothing() -> None:
    thief: SigningKey = signing_key("thief")
    claim = typical.rotation(typical.card(sequence=6, signer=thief), signer=thief)
    with pytest.raises(Malformed):
        card.follow_rotations(typical.IDENTITY.public, [claim.data])


def test_a_card_is_no_link_of_a_chain() -> None:
    with pytest.raises(Malformed):
        card.follow_rotations(typical.IDENTITY.public, [typical.card().data])
