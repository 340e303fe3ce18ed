"""What travelled between two machines stands neither at the relay nor in the nodes' logs."""

import secrets
import socket
import sqlite3
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from agentmbx_node.errors import Failure
from agentmbx_node.keyring import Keyring
from agentmbx_node.machine import DATABASE_NAME, KEYRING_NAME
from agentmbx_node.store.rows import PEER, QUEUE
from agentmbx_protocol.keys import key_text
from node_process import NodeProcess, pair, wait_until_stored
from relay_process import RelayProcess
from two_machines import TwoMachines, eventually

TEXTS = {
    kind: f"canary-{kind}-{secrets.token_hex(8)}" for kind in ("body", "subject", "agent", "key")
}
NAMES = ("canary-laptop", "canary-server")


class Travelled(msgspec.Struct):
    """What must not be seen, by what it is, and where it might."""

    secret: dict[str, bytes]
    logs: dict[str, bytes]
    at_relay: dict[str, bytes]
    queue: bytes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def forms(value: bytes) -> list[bytes]:
    """How a value may be written: as it is, in hex, or as the text of a key."""
    written = [value, value.hex().encode()]
    return [*written, key_text(value).encode()] if len(value) == 32 else written


def secrets_of(node: NodeProcess) -> dict[str, bytes]:
    """The keys of a machine that neither a relay nor a log may hold."""
    keyring = Keyring.open(node.home / KEYRING_NAME, may_make=False)
    found = {
        "identity": keyring.identity.public,
        "identity's seed": keyring.identity.seed,
        "sealing key": keyring.sealing.public,
        "secret sealing key": keyring.sealing.secret,
    }
    with closing(sqlite3.connect(node.home / DATABASE_NAME)) as connection:
        for peer in PEER.find(connection):
            found[f"pair key's seed {peer.id}"] = keyring.pair_key(peer.salt).seed
            found[f"stream {peer.id}"] = peer.stream
        for queue in QUEUE.find(connection):
            found[f"queue's seed {queue.id}"] = keyring.queue_key(queue.salt).seed
    return {f"{node.name}'s {what}": value for what, value in found.items()}


def provoke(machines: TwoMachines, lines: list[str]) -> None:
    """What a machine might complain of in its log, with a canary in it."""
    token = lines[0].partition("#")[2]
    for request in (
        {"do": TEXTS["body"]},
        {"do": "send", "to": f"{TEXTS['agent']}@{TEXTS['agent']}", "subject": TEXTS["subject"]},
        {"do": "send", "to": f"owner@{NAMES[1]}", "subject": "x" * 300 + TEXTS["subject"]},
        {"do": "join", "line": f"{lines[0].partition('#')[0]}#{token}"},
        {"do": "join", "line": f"{TEXTS['body']}#{token}"},
        {"do": "relay_set", "line": lines[1]},
        {"do": "rename", "old": TEXTS["agent"], "new": TEXTS["agent"]},
        {"do": "read", "id": TEXTS["key"]},
    ):
        with pytest.raises(Failure):
            machines.laptop.ask(request)


def spent_line(machines: TwoMachines) -> str:
    """The line of a `pair` that its caller has left."""
    steps = machines.server.stream({"do": "pair"})
    return str(next(steps)["line"])


@pytest.fixture(name="travelled", scope="module")
def make_travelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Travelled]:
    folder = tmp_path_factory.mktemp("secrets")
    metrics = f"127.0.0.1:{free_port()}"
    flags = ["--metrics-listen", metrics, "--log-level", "debug"]
    with TwoMachines(folder, *flags, names=NAMES) as machines:
        relay, laptop, server = machines.relay, machines.laptop, machines.server
        lines = [spent_line(machines)]
        for node in (laptop, server):
            lines.append(relay.invite())
            node.ask({"do": "relay_set", "line": lines[-1]})
        told = {"subject": TEXTS["subject"], "body": TEXTS["body"], "as": TEXTS["agent"]}
        server.stop()
        laptop.send(f"{TEXTS['agent']}@{NAMES[1]}", **told, key=TEXTS["key"], wait="held")
        server.start()
        wait_until_stored(laptop)
        laptop.send(f"owner@{NAMES[1]}", **told, wait="stored")
        server.send(f"owner@{NAMES[0]}", **told, wait="stored")
        provoke(machines, lines)
        server.ask({"do": "unpair", "peer": NAMES[0]})
        eventually(lambda: laptop.ask({"do": "peers"})["peers"] == [])
        pair(laptop, server)
        with urllib.request.urlopen(f"http://{metrics}/metrics") as page:
            at_relay = {"metrics": page.read()}
        for process in (laptop, server, relay):
            assert process.stop() == 0
        yield gather(relay, [laptop, server], lines, at_relay)


def gather(
    relay: RelayProcess, nodes: list[NodeProcess], lines: list[str], at_relay: dict[str, bytes]
) -> Travelled:
    secret = {what: text.encode() for what, text in TEXTS.items()}
    secret |= {f"the name {name}": name.encode() for name in NAMES}
    secret["the token of a line"] = lines[0].partition("#")[2].encode()
    secret |= {
        f"invite {at}": line.rpartition(".")[2].encode() for at, line in enumerate(lines[1:])
    }
    for node in nodes:
        secret |= secrets_of(node)
    logs = {node.name: node.log_path.read_bytes() for node in nodes}
    at_relay["log"] = relay.log().encode()
    at_relay |= {path.name: path.read_bytes() for path in relay.data.glob("relay.db*")}
    with closing(sqlite3.connect(nodes[0].home / DATABASE_NAME)) as connection:
        keyring = Keyring.open(nodes[0].home / KEYRING_NAME, may_make=False)
        queue = keyring.queue_key(QUEUE.find(connection)[0].salt).public
    return Travelled(secret, logs, at_relay, queue)


def found_in(places: dict[str, bytes], secret: dict[str, bytes]) -> list[tuple[str, str]]:
    return [
        (what, where)
        for where, content in places.items()
        for what, value in secret.items()
        if any(form in content for form in forms(value))
    ]


def test_the_relay_holds_no_text_no_name_and_no_key_of_a_machine(travelled: Travelled) -> None:
    assert len(travelled.at_relay) >= 3
    assert found_in(travelled.at_relay, travelled.secret) == []


def test_a_nodes_log_holds_no_text_name_token_or_key(travelled: Travelled) -> None:
    assert all(content for content in travelled.logs.values()), "something is logged"
    assert found_in(travelled.logs, travelled.secret) == []


def test_the_search_finds_what_is_there(travelled: Travelled) -> None:
    assert found_in(travelled.at_relay, {"the queue": travelled.queue}) != []
    assert found_in(travelled.logs, {"the event": b"node_ready"}) != []


def test_what_a_machine_keeps_is_its_owners_alone(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "home", "here") as node:
        modes = {path.name: path.stat().st_mode & 0o077 for path in node.home.iterdir()}
        modes["."] = node.home.stat().st_mode & 0o077
    assert {DATABASE_NAME, KEYRING_NAME} <= set(modes)
    assert set(modes.values()) == {0}, modes
