"""Nothing that must stay secret shows at the relay: its store, log, metrics, answers (A6)."""

import asyncio
import itertools
import secrets
import socket
import sqlite3
from collections import defaultdict
from pathlib import Path

import aiohttp
import msgspec
import pytest

import process_view
from agentmbx_node.hops.http import HopRefused, open_session
from agentmbx_protocol import bodies
from agentmbx_protocol.envelope import parse_envelope
from agentmbx_protocol.keys import SigningKey, key_text
from correspondents import Correspondent, Owner, Wire
from relay_process import RelayProcess
from scene import Scene, add_queue, refused

CANARIES = [f"canary-{kind}-{secrets.token_hex(8)}" for kind in ("body", "agent", "machine")]
CLIENT_ADDRESS = "127.0.0.77"


class Travelled(msgspec.Struct):
    """What went through the relay, and what it answered."""

    relay: RelayProcess
    metrics: bytes
    answers: list[bytes]
    secret: dict[str, bytes]
    scenes: list[Scene]
    line: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def talk(scene: Scene) -> list[bytes]:
    """Letters, a repeat, acks, and one of each refusal that a client can cause."""
    answers: list[bytes] = []
    parcels = [peer.write(" ".join(CANARIES).encode()) for peer in scene.senders for _ in range(5)]
    for peer in scene.senders:
        own = [parcel for parcel in parcels if parcel.signer == peer.pair.public]
        await scene.wire.deposit(*own)
        await scene.wire.deposit(own[0])
    collected = await scene.wire.collect(scene.owner)
    answers += collected.envelopes
    acks = [parse_envelope(data).digest for data in collected.envelopes[:4]]
    await scene.wire.collect(scene.owner, acks)
    stranger = Correspondent(scene.owner)
    problems = [
        await refused(scene.wire.deposit(stranger.write(CANARIES[0].encode()))),
        await refused(scene.wire.hop.collect(scene.owner.collect_frame(counter=1))),
        await refused(scene.wire.register(Owner(scene.owner.relay_key))),
    ]
    answers += [str(problem).encode() for problem in problems]
    return answers


async def raw_answers(url: str) -> list[bytes]:
    """What a client from another loopback address gets for junk that holds canaries."""
    connector = aiohttp.TCPConnector(local_addr=(CLIENT_ADDRESS, 0))
    junk = bodies.join_frames([CANARIES[0].encode() * 40])
    answers = []
    async with aiohttp.ClientSession(connector=connector) as session:
        for path, headers in itertools.product(
            ("v1/deposit", "v1/collect", "v1/register", "v1/retire", CANARIES[1]),
            ({}, {"X-Canary": CANARIES[2]}, {"Content-Encoding": CANARIES[1]}),
        ):
            async with session.post(url + path, data=junk, headers=headers) as response:
                answers.append(str(response.headers).encode() + await response.read())
    return answers


@pytest.fixture(name="travelled", scope="module")
def make_travelled(tmp_path_factory: pytest.TempPathFactory) -> Travelled:
    return asyncio.run(travel(tmp_path_factory.mktemp("secrets")))


async def travel(folder: Path) -> Travelled:
    """Two queues, each with two senders, at one relay that is killed, restarted and stopped."""
    metrics = f"127.0.0.1:{free_port()}"
    flags = ["--metrics-listen", metrics, "--log-level", "debug"]
    with RelayProcess(folder / "relay", *flags) as relay:
        secret: dict[str, bytes] = {}
        scenes, answers, line = [], [], ""
        async with open_session() as session:
            for number in range(2):
                line = relay.invite()
                wire = Wire(session, line)
                if wire.invite is None:
                    raise AssertionError("the line holds an invite")
                secret[f"the seed of invite {number}"] = wire.invite.seed
                scene = await add_queue(wire, senders=2)
                scenes.append(scene)
                secret[f"the seed of queue {number}"] = scene.owner.queue.seed
                secret[f"the sealing key {number}"] = scene.owner.sealing.secret
                secret[f"the public sealing key {number}"] = scene.owner.sealing.public
                secret[f"the receiver's pair key {number}"] = scene.owner.pair.public
                for at, peer in enumerate(scene.senders):
                    secret[f"the seed of sender {number} {at}"] = peer.pair.seed
                answers += await talk(scene)
            answers += await raw_answers(relay.url)
            async with session.get(f"http://{metrics}/metrics") as page:
                metrics_page = await page.read()
        relay.kill()
        relay.restart()
        relay.stop()
        return Travelled(relay, metrics_page, answers, secret, scenes, line)


def places(travelled: Travelled) -> dict[str, bytes]:
    found = {
        "log": travelled.relay.log().encode(),
        "metrics": travelled.metrics,
        "answers": b"\n".join(travelled.answers),
    }
    for path in travelled.relay.data.iterdir():
        if path.name.startswith("relay.db"):
            found[path.name] = path.read_bytes()
    return found


def forms(value: bytes) -> list[bytes]:
    """How a value may be written: as it is, in hex, or as the text of a key."""
    written = [value, value.hex().encode()]
    return [*written, key_text(value).encode()] if len(value) == 32 else written


def test_no_text_or_name_that_travelled_stands_anywhere(travelled: Travelled) -> None:
    for where, content in places(travelled).items():
        for canary in CANARIES:
            for form in forms(canary.encode()):
                assert form not in content, (canary, where)


def test_no_secret_key_stands_anywhere(travelled: Travelled) -> None:
    for where, content in places(travelled).items():
        for what, value in travelled.secret.items():
            for form in forms(value):
                assert form not in content, (what, where)


def test_the_search_finds_what_is_there(travelled: Travelled) -> None:
    queue = travelled.scenes[0].owner.queue.public
    assert any(queue in content for content in places(travelled).values())


def test_no_client_address_is_kept_or_logged(travelled: Travelled) -> None:
    packed = socket.inet_aton(CLIENT_ADDRESS)
    for where, content in places(travelled).items():
        assert CLIENT_ADDRESS.encode() not in content, where
        assert packed not in content, where


def test_no_row_of_the_store_holds_a_value_common_to_two_queues(travelled: Travelled) -> None:
    connection = sqlite3.connect(travelled.relay.data / "relay.db")
    seen: dict[bytes, set[object]] = defaultdict(set)
    rows_of = {
        "queue": "SELECT id, key, instance FROM queue",
        "sender": "SELECT queue, key FROM sender",
        "envelope": "SELECT queue, digest FROM envelope",
        "voucher": "SELECT 'voucher', key FROM voucher",
        "invite": "SELECT 'invite', key FROM invite",
    }
    try:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema")}
        for table, query in rows_of.items():
            assert table in tables
            for owner, *values in connection.execute(query):
                for value in values:
                    seen[value].add(owner)
        shared = connection.execute(
            "SELECT COUNT(*) FROM envelope_bytes AS a JOIN envelope_bytes AS b"
            " ON a.data = b.data AND a.seq < b.seq"
        ).fetchone()[0]
    finally:
        connection.close()
    assert len(seen) > 20
    assert {value: owners for value, owners in seen.items() if len(owners) > 1} == {}
    assert shared == 0


def test_no_metric_has_a_label_that_names_somebody(travelled: Travelled) -> None:
    labels = {
        part.split("=")[0]
        for row in travelled.metrics.decode().splitlines()
        if "{" in row and not row.startswith("#")
        for part in row[row.index("{") + 1 : row.index("}")].split(",")
    }
    assert labels == {"version", "code", "le"}


def test_no_command_line_holds_a_secret(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay") as relay:
        seed = (relay.data / "relay.key").read_bytes().strip()
        for pid in (relay.pid, *process_view.children(relay.pid)):
            assert seed not in process_view.command_line(pid)


async def test_an_invite_never_travels(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay") as relay:
        line = relay.invite()
        async with open_session() as session:
            wire = Wire(session, line)
            if wire.invite is None:
                raise AssertionError("the line holds an invite")
            owner = Owner(relay.relay_key)
            frames = [owner.register_frame(), owner.admit_frame(wire.invite)]
            for data in frames:
                for form in forms(wire.invite.seed):
                    assert form not in data
            await wire.hop.register(*frames)
            # The admit that went over the wire is of no use to who heard it.
            thief = Owner(relay.relay_key)
            with pytest.raises(HopRefused) as stolen:
                await wire.hop.register(thief.register_frame(), frames[1])
            assert stolen.value.refusal.code == "not_admitted"
            forged = thief.admit_frame(SigningKey.generate())
            assert (await refused(wire.hop.register(thief.register_frame(), forged))).refusal
