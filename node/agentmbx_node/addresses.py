"""Which addresses this machine shows in its card, and which of a peer's it may dial.

A card is written by another machine, so what stands in it is a wish: an address there must never
lead this machine to itself, to its neighbours by chance, or to the metadata service of a cloud.
"""

import hashlib
import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final

import ifaddr
import structlog

from agentmbx_protocol import limits

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

# Services that give credentials to whoever asks from the machine: of EC2, Alibaba Cloud, Oracle
# Cloud and Azure, and those of EC2 and Google by IPv6. The usual 169.254.169.254 is link-local.
_METADATA: Final = frozenset(
    map(
        ipaddress.ip_address,
        (
            "169.254.169.254",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
            "fd00:ec2::254",
            "fd20:ce::254",
        ),
    )
)
_THIS_NETWORK: Final = ipaddress.IPv4Network("0.0.0.0/8")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# The bridges of containers and virtual machines have the same addresses on many machines, where
# they lead a peer to itself; so they are tried last.
_BRIDGES: Final = ("docker", "br-", "veth", "virbr", "lxdbr", "podman", "cni")
_PORT_MAX: Final = 65535
_ANY_HOSTS: Final = {"": (4, 6), "0.0.0.0": (4,), "::": (6,)}  # noqa: S104 - compared, not bound

log = structlog.get_logger("agentmbx.node")


def own_addresses(listen_host: str, port: int, advertise: Sequence[str] = ()) -> list[str]:
    """The addresses for this machine's card, at most 16, in the order in which to try them.

    `advertise` replaces what is found here: IP literals, with a port where it is not `port`; raises
    `ValueError` with a text for a person for what a card cannot hold. Else they are those of the
    interfaces that `listen_host` reaches (as `Listener.start` takes it).
    """
    if advertise:
        found = [_read_advertised(text, port) for text in advertise]
    else:
        found = [address_text(ip, port) for ip in _listening_ips(listen_host)]
    return list(dict.fromkeys(found))[: limits.ADDRESSES_MAX]


def usable_addresses(card_addresses: Iterable[str], *, paired_over_loopback: bool) -> list[str]:
    """Those of a peer's card that this machine may dial, in the card's order."""
    usable = []
    for text in card_addresses:
        try:
            ip, _ = parse_address(text)
        except ValueError:
            continue
        if _is_dialable(ip) and (paired_over_loopback or not ip.is_loopback):
            usable.append(text)
    return list(dict.fromkeys(usable))


def interfaces_fingerprint() -> str:
    """A text that is another one when this machine's addresses have changed."""
    seen = sorted(f"{name} {ip}" for name, ip in _read_interfaces() if _is_dialable(ip))
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()


def parse_address(text: str) -> tuple[_Ip, int]:
    """The IP and port of `IPV4:PORT` or `[IPV6]:PORT`; raises `ValueError` for another text."""
    host, _, port_text = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
    port = int(port_text) if port_text.isascii() and port_text.isdecimal() else 0
    if bracketed != (ip.version == 6) or not 0 < port <= _PORT_MAX:  # noqa: PLR2004 - IPv6
        raise ValueError("not an address of the form IPV4:PORT or [IPV6]:PORT")
    return ip, port


def address_text(ip: _Ip, port: int) -> str:
    """The one form of an address in a card."""
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"  # noqa: PLR2004 - IPv6


def _read_advertised(text: str, port: int) -> str:
    try:
        try:
            ip: _Ip = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
        except ValueError:
            ip, port = parse_address(text)
    except ValueError as error:
        raise ValueError("An address is an IP, perhaps with a port: 192.0.2.7:7420.") from error
    if not _is_dialable(ip):
        raise ValueError(f"No peer can use the address {ip}.")
    return address_text(ip, port)


def _listening_ips(listen_host: str) -> list[_Ip]:
    interfaces = sorted(_read_interfaces(), key=lambda each: each[0].startswith(_BRIDGES))
    here = [ip for _, ip in interfaces if _is_dialable(ip)]
    if listen_host == "localhost":
        return [ip for ip in here if str(ip) in ("127.0.0.1", "::1")]
    versions = _ANY_HOSTS.get(listen_host)
    if versions is None:
        try:
            ip = ipaddress.ip_address(listen_host)
        except ValueError:
            versions = _ANY_HOSTS[""]  # a name: which of these it means is the resolver's to say
        else:
            return [ip] if _is_dialable(ip) else []
    return [ip for ip in here if ip.version in versions and not ip.is_loopback]


def _is_dialable(ip: _Ip) -> bool:
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is not None or ip.ipv4_mapped is not None:
            return False
        inner = ip.sixtofour or (ipaddress.IPv4Address(ip.packed[-4:]) if ip in _NAT64 else None)
        if inner is not None and (inner.is_loopback or not _is_dialable(inner)):
            return False
    elif ip.is_reserved or ip in _THIS_NETWORK:
        return False
    return not (ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip in _METADATA)


def _read_interfaces() -> list[tuple[str, _Ip]]:
    """Interface and IP, in the system's order; nothing where the system does not tell."""
    try:
        return [
            (
                adapter.name,
                ipaddress.ip_address(each.ip if isinstance(each.ip, str) else each.ip[0]),
            )
            for adapter in ifaddr.get_adapters()
            for each in adapter.ips
        ]
    except (OSError, AssertionError, ValueError) as error:
        # ifaddr asserts that each address has a netmask. Without these the mail goes by relay.
        log.warning("interfaces_unreadable", error=type(error).__name__)
        return []
