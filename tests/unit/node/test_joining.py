"""Pairing by token at the joiner: its rules, and the driver over a network with faults."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from agentmbx_node import joining
from agentmbx_node.clock import Clock
from agentmbx_node.errors import Failure, OperatingError
from agentmbx_node.store.database import Database, open_database
from agentmbx_node.store.rows import MACHINE, PEER, Machine
from agentmbx_node.tokens import line
from agentmbx_protocol import frame
from agentmbx_protocol import pairing as wire
from agentmbx_protocol.errors import BadSignature, Malformed, Unavailable, UnsupportedVersion
from agentmbx_protocol.frame import Kind
from pairing_sides import CommitFailed, Side, crooked, foreign_reply, proof_for, with_tail

TOKEN = bytes(range(16))
HERE, THERE, LOOPBACK = "192.0.2.7:7420", "[2001:db8::7]:7420", "127.0.0.1:7420"


@pytest.fixture
def desk() -> Iterator[Side]:
    side = Side("desk")
    yield side
    side.close()


@pytest.fixture
def laptop() -> Iterator[Side]:
    side = Side("laptop")
    yield side
    side.close()


@pytest.fixture
def mallory() -> Iterator[Side]:
    side = Side("mallory")
    yield side
    side.close()


def test_the_same_token_has_the_same_hello_and_another_token_another_key(laptop: Side) -> None:
    hello = laptop.begin(TOKEN)
    assert laptop.begin(TOKEN, "another name") == hello
    other = laptop.begin(TOKEN[::-1])
    assert wire.parse_hello(other, Kind.HELLO).pair != wire.parse_hello(hello, Kind.HELLO).pair


def test_a_join_that_is_two_days_old_or_of_older_keys_begins_anew(laptop: Side) -> None:
    first = laptop.begin(TOKEN)
    laptop.age_ms += joining.JOINING_MS
    second = laptop.begin(TOKEN)
    laptop.keyring = Side("laptop after a rotation").keyring
    third = laptop.begin(TOKEN)
    assert len({first, second, third}) == 3


def test_the_same_reply_has_the_same_proof_and_another_reply_takes_its_place(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    token = desk.offer()
    laptop.begin(token)
    astray = laptop.prove(token, foreign_reply(mallory, wire.token_id(token)))
    assert laptop.write(lambda each: joining.pending_proof(each, token)) == astray
    with pytest.raises(BadSignature):
        desk.answer(astray)
    reply = desk.answer(laptop.begin(token))
    proof = laptop.prove(token, reply)
    assert laptop.prove(token, reply) == proof != astray
    laptop.finish(token, desk.answer(proof))


def test_a_joiner_that_was_led_astray_after_its_proof_ends_paired_all_the_same(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    token = desk.offer()
    desk.answer(proof_for(desk, laptop, token))  # the result is lost
    laptop.prove(token, foreign_reply(mallory, wire.token_id(token)))
    desk.restart()
    result = desk.answer(proof_for(desk, laptop, token))
    peer = laptop.finish(token, result)
    assert peer.pair_key == desk.shows(desk.peers()[0])


def test_a_reply_for_another_token_or_with_a_peers_pair_key_is_refused(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    token = desk.offer()
    laptop.begin(token)
    with pytest.raises(BadSignature):
        laptop.prove(token, foreign_reply(mallory, wire.token_id(TOKEN)))
    reply = desk.answer(laptop.begin(token))
    elements = wire.parse_hello(reply, Kind.REPLY)
    laptop.finish(token, desk.answer(laptop.prove(token, reply)))
    other = desk.offer()
    hello = wire.parse_hello(laptop.begin(other), Kind.HELLO)
    copied = wire.make_hello(
        Kind.REPLY,
        mallory.keyring.identity,
        named_token=hello.token_id,
        nonce=b"n" * 32,
        sealing=mallory.keyring.sealing.public,
        pair=elements.pair,
        name="desk",
    )
    with pytest.raises(BadSignature):
        laptop.prove(other, copied)
    assert laptop.write(lambda each: joining.pending_proof(each, other)) == b""


def test_a_result_that_does_not_verify_stores_nothing(
    desk: Side, laptop: Side, mallory: Side
) -> None:
    token = desk.offer()
    laptop.begin(token)
    with pytest.raises(BadSignature):
        laptop.finish(token, _result(mallory, token))
    result = desk.answer(proof_for(desk, laptop, token))
    for bad in (
        crooked(result),
        with_tail(result, frame.parse(result).tail, mallory),
        with_tail(result, b"t" * 60, desk),
        _result(mallory, token),
    ):
        with pytest.raises(BadSignature):
            laptop.finish(token, bad)
    with pytest.raises(Malformed):
        laptop.finish(token, result[:-1])
    assert laptop.peers("") == []
    with pytest.raises(CommitFailed):
        laptop.finish(token, result, fails=True)
    laptop.finish(token, result)


def _result(side: Side, token: bytes) -> bytes:
    fields = wire.token_id(token) + b"n" * 32 + b"h" * 32
    return frame.sign(Kind.RESULT, side.keyring.identity, fields, b"t" * 60)


def test_a_step_of_a_join_that_never_began_is_a_bug(laptop: Side) -> None:
    with pytest.raises(LookupError):
        laptop.prove(TOKEN, b"")


def test_a_machine_without_a_name_is_a_bug(desk: Side, laptop: Side) -> None:
    token = desk.offer()
    desk.connection.execute("DELETE FROM machine")
    with pytest.raises(LookupError):
        desk.answer(laptop.begin(token))


class Wire:
    """A network to `desk`; `faults` are what befalls the next calls at an address."""

    def __init__(self, desk: Side) -> None:
        self.desk = desk
        self.calls: list[tuple[str, Kind]] = []
        self.faults: dict[str, list[str]] = {}

    async def call(self, address: str, frames: Sequence[bytes]) -> Sequence[bytes]:
        (data,) = frames
        self.calls.append((address, frame.parse(data).kind))
        faults = self.faults.get(address, [])
        fault = (faults.pop(0) if len(faults) > 1 else faults[0]) if faults else "none"
        if fault == "lost":
            raise OperatingError("The machine cannot be reached: no route.", retry=True)
        if fault == "impossible":
            raise OperatingError("What answers there is no AgentMBX node.", retry=False)
        if fault == "silent":
            await asyncio.Event().wait()
        if fault == "busy":
            raise Unavailable
        if fault == "refused":
            raise BadSignature
        if fault == "newer":
            raise UnsupportedVersion
        answer = self.desk.answer(data)
        if fault == "answer lost":
            raise OperatingError("The connection to the machine broke.", retry=True)
        if fault == "garbled":
            return [crooked(answer)]
        return [answer] * (2 if fault == "twice" else 1)


class Joiner:
    """A machine with a database on the disk, which `join` writes."""

    def __init__(self, path: Path, wire: Wire) -> None:
        self.side = Side("laptop")
        connection = open_database(path)
        MACHINE.add(connection, Machine(1, "laptop", b"i" * 16, 1, b"", 0, 0))
        self.database = Database(connection)
        self.clock = Clock(0, 0, ticks_ms=lambda: 0, wall_ms=lambda: 1)
        self.wire = wire

    async def join(self, text: str) -> str:
        peer = await joining.join(
            self.database,
            self.side.keyring,
            self.clock,
            self.wire.call,
            text,
            self.side.card,
            "laptop",
        )
        return peer.name

    async def peers(self) -> list[tuple[bytes, bool]]:
        found = await self.database.read(PEER.find)
        return [(peer.pair_key, peer.loopback) for peer in found]


@pytest.fixture
def net(desk: Side) -> Wire:
    return Wire(desk)


@pytest.fixture
async def joiner(
    tmp_path: Path, net: Wire, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Joiner]:
    monkeypatch.setattr(joining, "PAUSES_S", (0.0,) * 5)
    made = Joiner(tmp_path / "node.sqlite", net)
    yield made
    await made.database.close()
    made.side.close()


async def test_a_line_pairs_and_the_loopback_is_kept(desk: Side, joiner: Joiner) -> None:
    assert await joiner.join("agentmbx join " + line([LOOPBACK], desk.offer())) == "desk"
    (peer,) = desk.peers()
    assert await joiner.peers() == [(desk.shows(peer), True)]
    assert [kind for _, kind in joiner.wire.calls] == [Kind.HELLO, Kind.PROOF]


async def test_the_next_address_is_tried_and_one_that_refused_is_left_alone(
    desk: Side, net: Wire, joiner: Joiner
) -> None:
    net.faults = {HERE: ["refused"], THERE: ["lost", "busy", "none"]}
    await joiner.join(line([HERE, THERE], desk.offer()))
    assert [address for address, _ in net.calls] == [HERE, THERE, THERE, THERE, THERE]
    assert [loopback for _, loopback in await joiner.peers()] == [False]


@pytest.mark.parametrize("fault", ["lost", "answer lost", "garbled", "twice", "busy"])
@pytest.mark.parametrize("step", [0, 1])
async def test_each_step_is_repeated_when_its_answer_is_lost(
    desk: Side, net: Wire, joiner: Joiner, fault: str, step: int
) -> None:
    net.faults = {HERE: ["none"] * step + [fault, "none"]}
    await joiner.join(line([HERE], desk.offer()))
    (peer,) = desk.peers("")
    assert await joiner.peers() == [(desk.shows(peer), False)]
    steps = [kind for _, kind in net.calls]
    assert steps.count(Kind.HELLO) == (1 if step else 2)


async def test_case_i2_a_join_that_was_cut_off_goes_on_with_its_proof(
    desk: Side, net: Wire, joiner: Joiner
) -> None:
    text = line([HERE], desk.offer())
    net.faults = {HERE: ["none", "answer lost", "lost"]}
    with pytest.raises(Failure) as caught:
        await joiner.join(text)
    assert (caught.value.code, caught.value.exit_code) == ("unreachable", 4)
    assert "no route" in str(caught.value)
    assert "goes on where it stopped" in caught.value.next_step
    net.faults, net.calls = {}, []
    desk.restart()
    await joiner.join(text)
    assert [kind for _, kind in net.calls] == [Kind.PROOF]
    assert len(desk.peers("")) == len(await joiner.peers()) == 1


async def test_a_reply_by_somebody_else_does_not_keep_it_from_pairing(
    desk: Side, net: Wire, joiner: Joiner
) -> None:
    token = desk.offer()
    mallory = Side("mallory")
    mallory.tokens._offers = desk.tokens._offers

    async def call(address: str, frames: Sequence[bytes]) -> Sequence[bytes]:
        if address == HERE and frame.parse(frames[0]).kind is Kind.HELLO:
            named = wire.parse_hello(frames[0], Kind.HELLO).token_id
            return [foreign_reply(mallory, named)]
        if address == HERE:
            raise BadSignature
        return await Wire.call(net, address, frames)

    net.call = call  # type: ignore[method-assign]
    await joiner.join(line([HERE, THERE], token))
    assert [peer.name for peer in desk.peers()] == ["laptop"]
    assert len(await joiner.peers()) == 1
    mallory.close()


async def test_case_c4_a_refusal_says_what_to_do_and_that_no_clock_is_to_blame(
    net: Wire, joiner: Joiner
) -> None:
    with pytest.raises(Failure) as caught:
        await joiner.join(line([HERE, THERE], TOKEN))
    assert (caught.value.code, caught.value.exit_code) == ("refused", 3)
    assert f"{HERE}: The machine refuses this line.; {THERE}:" in str(caught.value)
    assert "clocks of the two machines do not matter" in caught.value.next_step
    assert len(net.calls) == 2
    assert await joiner.peers() == []


@pytest.mark.parametrize(
    ("fault", "code", "exit_code", "calls"),
    [
        ("garbled", "refused", 3, 5),
        ("newer", "unsupported_version", 3, 1),
        ("busy", "unreachable", 4, 5),
        ("impossible", "unreachable", 4, 1),
        ("lost", "unreachable", 4, 5),
    ],
)
async def test_a_join_ends_after_finite_tries(
    desk: Side, net: Wire, joiner: Joiner, fault: str, code: str, exit_code: int, calls: int
) -> None:
    net.faults = {HERE: [fault]}
    with pytest.raises(Failure) as caught:
        await joiner.join(line([HERE], desk.offer()))
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)
    assert len(net.calls) == calls
    assert await joiner.peers() == []


async def test_a_join_ends_in_time_when_nobody_answers(
    desk: Side, net: Wire, joiner: Joiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "TOTAL_S", 0.2)
    monkeypatch.setattr(joining, "CALL_S", 0.05)
    net.faults = {HERE: ["silent"], THERE: ["silent"]}
    with pytest.raises(Failure, match="does not answer in time") as caught:
        await joiner.join(line([HERE, THERE], desk.offer()))
    assert caught.value.exit_code == 4
    assert {address for address, _ in net.calls} == {HERE, THERE}


async def test_the_own_line_is_refused_at_once(desk: Side, net: Wire, joiner: Joiner) -> None:
    joiner.side.keyring = desk.keyring
    with pytest.raises(Failure) as caught:
        await joiner.join(line([HERE], desk.offer()))
    assert caught.value.code == "own_line"
    assert len(net.calls) == 1


async def test_a_bad_line_asks_nobody(net: Wire, joiner: Joiner) -> None:
    with pytest.raises(Failure) as caught:
        await joiner.join(HERE)
    assert caught.value.exit_code == 2
    assert net.calls == []
