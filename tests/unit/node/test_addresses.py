import ipaddress
from collections.abc import Sequence

import ifaddr
import pytest

from agentmbx_node import addresses
from agentmbx_node.addresses import (
    address_text,
    interfaces_fingerprint,
    own_addresses,
    parse_address,
    usable_addresses,
)
from agentmbx_protocol import limits
from agentmbx_protocol.card import Card, make_card
from agentmbx_protocol.keys import SealingKey, SigningKey

LAPTOP = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1", "fe80::42"],
    "eth0": ["192.0.2.7", "2001:db8::7", "fe80::7"],
    "tun0": ["10.8.0.2"],
}


def put_interfaces(monkeypatch: pytest.MonkeyPatch, ips: dict[str, list[str]]) -> None:
    """Let the machine have these."""

    def adapter(name: str, texts: Sequence[str]) -> ifaddr.Adapter:
        found = [ifaddr.IP((t, 0, 0) if ":" in t else t, 24, name) for t in texts]
        return ifaddr.Adapter(name, name, found)

    adapters = [adapter(name, texts) for name, texts in ips.items()]
    monkeypatch.setattr(addresses.ifaddr, "get_adapters", lambda: adapters)


@pytest.fixture
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    put_interfaces(monkeypatch, LAPTOP)


@pytest.mark.usefixtures("_laptop")
@pytest.mark.parametrize(
    ("listen_host", "found"),
    [
        ("", ["192.0.2.7:7420", "[2001:db8::7]:7420", "10.8.0.2:7420", "172.17.0.1:7420"]),
        ("0.0.0.0", ["192.0.2.7:7420", "10.8.0.2:7420", "172.17.0.1:7420"]),
        ("::", ["[2001:db8::7]:7420"]),
        ("127.0.0.1", ["127.0.0.1:7420"]),
        ("127.0.0.9", ["127.0.0.9:7420"]),
        ("::1", ["[::1]:7420"]),
        ("localhost", ["127.0.0.1:7420", "[::1]:7420"]),
        ("192.0.2.7", ["192.0.2.7:7420"]),
        ("2001:DB8::7", ["[2001:db8::7]:7420"]),
        ("fe80::7", []),
        (
            "laptop.example",
            ["192.0.2.7:7420", "[2001:db8::7]:7420", "10.8.0.2:7420", "172.17.0.1:7420"],
        ),
    ],
)
def test_a_card_shows_where_the_machine_listens_and_container_bridges_last(
    listen_host: str, found: list[str]
) -> None:
    assert own_addresses(listen_host, 7420) == found


@pytest.mark.usefixtures("_laptop")
def test_m1_advertised_addresses_replace_what_is_found() -> None:
    advertised = ["198.51.100.1", "198.51.100.2:80", "2001:DB8::0:1", "[2001:db8::2]:81", "[::1]"]
    assert own_addresses("", 7420, [*advertised, "198.51.100.1:7420"]) == [
        "198.51.100.1:7420",
        "198.51.100.2:80",
        "[2001:db8::1]:7420",
        "[2001:db8::2]:81",
        "[::1]:7420",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "laptop.example", "laptop.example:80", "192.0.2.7:0", "192.0.2.7:65536", "192.0.2.7:x",
     "192.0.2.7:\u0661", "192.0.2.7:-1", "192.0.2.7/24", "192.0.2.07", "0.0.0.0", "::", "fe80::1",
     "fe80::1%eth0", "169.254.169.254", "fd00:ec2::254", "224.0.0.1", "ff02::1", "::ffff:192.0.2.7",
     "255.255.255.255", "[192.0.2.7]:80", "http://192.0.2.7"],
)  # fmt: skip
def test_what_no_card_can_hold_is_not_advertised(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        own_addresses("", 7420, ["192.0.2.1", text])


def test_there_are_never_more_than_a_card_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"192.0.2.{last}" for last in range(1, 100)]
    put_interfaces(monkeypatch, {"eth0": many})
    for found in (own_addresses("", 7420), own_addresses("", 7420, many)):
        assert found == [f"{ip}:7420" for ip in many[: limits.ADDRESSES_MAX]]


def test_what_this_machine_shows_is_a_valid_card_and_usable_to_a_peer() -> None:
    found = own_addresses("", 7420)
    card = Card(
        identity=b"",
        sequence=1,
        name="laptop",
        sealing=SealingKey.generate().public,
        addresses=tuple(found),
    )
    make_card(SigningKey.generate(), card)
    assert usable_addresses(found, paired_over_loopback=False) == found


GOOD = ["192.0.2.7:7420", "10.0.0.1:1", "[2001:db8::7]:65535", "[fd00::1]:7420", "100.64.0.1:80"]
LOOPBACK = ["127.0.0.1:7420", "127.9.9.9:7420", "[::1]:7420"]
NEVER = [
    "169.254.169.254:80", "169.254.1.1:7420", "[fe80::1]:7420", "[fe80::1%eth0]:7420",
    "[fd00:ec2::254]:80", "[fd20:ce::254]:80", "100.100.100.200:80", "0.0.0.0:7420", "0.1.2.3:7420",
    "[::]:7420", "224.0.0.1:7420", "[ff02::1]:7420", "255.255.255.255:7420", "240.0.0.1:7420",
    "[::ffff:127.0.0.1]:7420", "[::ffff:192.0.2.7]:7420", "[64:ff9b::a9fe:a9fe]:80",
    "[64:ff9b::7f00:1]:7420", "[2002:7f00:1::]:7420", "[2002:a9fe:a9fe::]:80",
    "localhost:7420", "192.0.2.7", "192.0.2.7:", "192.0.2.7:0", ":7420", "2001:db8::7:7420", "",
]  # fmt: skip


@pytest.mark.parametrize("paired_over_loopback", [False, True])
def test_m2_a_peers_card_leads_to_no_loopback_metadata_or_neighbour(
    *, paired_over_loopback: bool
) -> None:
    mixed = [text for group in zip(NEVER, (GOOD + LOOPBACK) * 9, strict=False) for text in group]
    expected = GOOD + LOOPBACK if paired_over_loopback else GOOD
    assert usable_addresses(mixed, paired_over_loopback=paired_over_loopback) == expected


@pytest.mark.parametrize("text", GOOD + LOOPBACK)
def test_an_address_is_read_and_written_the_same(text: str) -> None:
    assert address_text(*parse_address(text)) == text


def test_the_fingerprint_changes_with_the_addresses_and_only_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_interfaces(monkeypatch, LAPTOP)
    at_home = interfaces_fingerprint()
    put_interfaces(monkeypatch, dict(reversed(LAPTOP.items())) | {"veth1": ["fe80::99"]})
    assert interfaces_fingerprint() == at_home
    seen = {at_home}
    for other in (
        {"lo": ["127.0.0.1"]},
        LAPTOP | {"eth0": ["192.0.2.8", "2001:db8::7"]},
        LAPTOP | {"tun0": []},
        LAPTOP | {"wlan0": ["192.0.2.7"], "eth0": ["2001:db8::7"]},
    ):
        put_interfaces(monkeypatch, other)
        seen.add(interfaces_fingerprint())
    assert len(seen) == 5


@pytest.mark.parametrize("error", [OSError(12, "no"), AssertionError("no netmask"), ValueError()])
def test_m2_a_system_that_does_not_tell_its_interfaces_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(addresses.ifaddr, "get_adapters", fail)
    assert own_addresses("", 7420) == []
    assert own_addresses("192.0.2.7", 7420) == ["192.0.2.7:7420"]
    assert own_addresses("", 7420, ["192.0.2.9"]) == ["192.0.2.9:7420"]
    assert interfaces_fingerprint() == interfaces_fingerprint()


def test_the_real_interfaces_are_read() -> None:
    names = [ip for _, ip in addresses._read_interfaces()]
    assert ipaddress.ip_address("127.0.0.1") in names
