"""Two homes behind NAT and a host on the Internet, in network namespaces of this machine:

    laptop, server  --[home-a or home-b]--  router  --[internet]--  vps

Each host and router is a namespace; one more, the switch, holds a bridge for each network. Both
homes have the same addresses, as homes do. Nothing leads out of it, and the machine's own network
stays as it is.
"""

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

HOSTS: Final = ("laptop", "server", "vps")
ROUTERS: Final = {"home-a": "router-a", "home-b": "router-b"}
NETWORKS: Final = ("home-a", "home-b", "internet")
HOME: Final = "192.168.1"
INTERNET: Final = "203.0.113"
VPS_IP: Final = f"{INTERNET}.10"
CABLE: Final = Path(__file__).with_name("cable.py")
END_S: Final = 5.0

ROUTER: Final = """
echo 1 > /proc/sys/net/ipv4/ip_forward
iptables -t nat -A POSTROUTING -o wan -j MASQUERADE
iptables -P FORWARD DROP
iptables -A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
iptables -A FORWARD -i lan -o wan -j ACCEPT
iptables -A INPUT -i wan -m conntrack --ctstate NEW,INVALID -j DROP
"""


class Network:
    """Made when entered, and gone when left, with every process that runs in it."""

    def __init__(self) -> None:
        self._name = f"mbx{secrets.token_hex(3)}"
        self._at: dict[str, str] = {}
        self._cabled: set[str] = set()

    def command_prefix(self, host: str) -> list[str]:
        """What runs a command on that host; the process keeps its id."""
        return ["ip", "netns", "exec", self._space(host)]

    def move(self, host: str, network: str, ip: str) -> None:
        """Carry a host, with its cable, to a network and an address; its link is down meanwhile."""
        self._ip("switch", f"link set {host} down", f"link set {self._plug(host)} nomaster")
        self._ip("switch", f"link set {self._plug(host)} master {network}", f"link set {host} up")
        self._at[host] = network
        self.readdress(host, ip)

    def readdress(self, host: str, ip: str) -> None:
        """Give a host another address where it is."""
        at_home = self._at[host] in ROUTERS
        route = f"default via {HOME}.1" if at_home else f"{INTERNET}.0/24 dev eth0"
        self._ip(
            host, "addr flush dev eth0", f"addr add {ip}/24 dev eth0", f"route replace {route}"
        )
        for other in (*HOSTS, *ROUTERS.values()):
            self._ip(other, "neigh flush all")

    def cut(self, host: str) -> None:
        """Drop all that comes from or goes to a host, without a sign: its link stays up."""
        _run(["bridge", "-n", self._space("switch"), "link", "set", "dev", host, "state", "0"])

    def mend(self, host: str) -> None:
        """End that."""
        _run(["bridge", "-n", self._space("switch"), "link", "set", "dev", host, "state", "3"])

    def readdress_home(self, home: str, ip: str) -> None:
        """Give a home another address on the Internet; its router forgets who was connected."""
        self._ip(ROUTERS[home], "addr flush dev wan", f"addr add {ip}/24 dev wan")

    def spoil(self, host: str, *, delay_ms: float, loss_percent: float) -> None:
        """Delay each frame of a host, both ways, and lose some, for as long as the network is."""
        numbers = (f"{delay_ms}", f"{loss_percent}")
        command = [sys.executable, "-IS", str(CABLE), f"{host}-in", f"{host}-out", *numbers]
        _run([*self.command_prefix("switch"), *command])
        self._ip(
            "switch",
            f"link add {host}-box up type bridge mcast_snooping 0",
            f"link set {host} master {host}-box",
            f"link set {host}-in master {host}-box up",
            f"link set {host}-out master {self._at[host]} up",
        )
        self._cabled.add(host)

    def __enter__(self) -> Self:
        _skip_unless_able()
        try:
            self._make()
        except BaseException:
            self._unmake()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unmake()

    def _make(self) -> None:
        spaces = ("switch", *ROUTERS.values(), *HOSTS)
        _run(["ip", "-batch", "-"], "".join(f"netns add {self._space(each)}\n" for each in spaces))
        self._ip(
            "switch", *(f"link add {each} up type bridge mcast_snooping 0" for each in NETWORKS)
        )
        for number, (home, router) in enumerate(ROUTERS.items(), 1):
            self._link(router, "lan", f"{router}-lan", home)
            self._link(router, "wan", f"{router}-wan", "internet")
            self._ip(router, f"addr add {HOME}.1/24 dev lan")
            self._ip(router, f"addr add {INTERNET}.{number}/24 dev wan")
            _run([*self.command_prefix(router), "sh", "-ec", ROUTER])
        for host in HOSTS:
            self._link(host, "eth0", host, "home-b" if host != "vps" else "internet")
            self._at[host] = "home-b" if host != "vps" else "internet"
        self.readdress("vps", VPS_IP)
        self.readdress("server", f"{HOME}.11")
        self.readdress("laptop", f"{HOME}.12")

    def _link(self, space: str, device: str, port: str, network: str) -> None:
        peer = f"peer name {device} netns {self._space(space)}"
        self._ip(
            "switch", f"link add {port} type veth {peer}", f"link set {port} master {network} up"
        )
        self._ip(space, "link set lo up", f"link set {device} up")

    def _unmake(self) -> None:
        listed = json.loads(_run(["ip", "-j", "netns", "list"]) or "[]")
        there = [each["name"] for each in listed if each["name"].startswith(f"{self._name}-")]
        _end([int(pid) for each in there for pid in _run(["ip", "netns", "pids", each]).split()])
        _run(["ip", "-batch", "-"], "".join(f"netns del {each}\n" for each in there))

    def _space(self, host: str) -> str:
        return f"{self._name}-{host}"

    def _plug(self, host: str) -> str:
        return f"{host}-out" if host in self._cabled else host

    def _ip(self, space: str, *commands: str) -> None:
        _run(["ip", "-n", self._space(space), "-batch", "-"], "\n".join(commands) + "\n")


def _skip_unless_able() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "bridge", "iptables"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no program {tool!r} here")
    if not Path("/dev/net/tun").exists():
        pytest.skip("this kernel has no taps")
    name = f"mbx{secrets.token_hex(3)}"
    try:
        _run(["ip", "netns", "add", name])
        _run(["ip", "netns", "exec", name, "sh", "-ec", ROUTER])
        _run(["ip", "-n", name, "link", "add", "box", "type", "bridge"])
        _run(["ip", "-n", name, "link", "add", "this", "type", "veth", "peer", "name", "that"])
    except RuntimeError as error:
        pytest.skip(f"this machine has no such networks: {error}")
    finally:
        with suppress(RuntimeError):
            _run(["ip", "netns", "del", name])


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{text}")
    return done.stdout


def _end(pids: Sequence[int]) -> None:
    """SIGKILL, and wait until each is gone; none of them is a shell that owns others' work."""
    for pid in pids:
        with suppress(ProcessLookupError):
            gone = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(gone, signal.SIGKILL)
                select.select([gone], [], [], END_S)
            finally:
                os.close(gone)
