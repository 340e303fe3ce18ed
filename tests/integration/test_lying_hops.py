"""A node whose hops lie (rule 5): no letter ends, and none of the others is held up by it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from agentmbx_protocol import bodies
from agentmbx_protocol.custody import StoredFact
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.keys import SigningKey
from false_hops import FalsePeer, Lie, Machine, held_fact
from scene import eventually

STRANGER = SigningKey.generate()
EVIL = "EVIL \x1b]0;text\x07"
PAGE = f"<html><h1>Welcome to nginx!</h1>{EVIL}</html>".encode()
TURN_S = 15.0
WAYS = ("direct", "relay")
NOT_SIGNED = "not a valid signed frame"
ANOTHER_KEY = "signed by another key"
OTHER_BYTES = "about other bytes than were sent"
NOT_OURS = "is no AgentMBX"


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    async with Machine.run(tmp_path) as running:
        yield running


def saying(make: Callable[[FalsePeer, Sequence[Envelope]], bytes]) -> Lie:
    """A lie in the form of an answer."""

    async def lie(
        peer: FalsePeer, _request: web.BaseRequest, sent: Sequence[Envelope]
    ) -> web.Response:
        return web.Response(body=make(peer, sent))

    return lie


def foreign(status: int, body: bytes = PAGE, **headers: str) -> Lie:
    """What something on the way answers."""

    async def lie(
        _peer: FalsePeer, _request: web.BaseRequest, _sent: Sequence[Envelope]
    ) -> web.Response:
        return web.Response(body=body, status=status, headers=headers, content_type="text/html")

    return lie


def refusing(code: str, status: int) -> Lie:
    """A refusal of the protocol, which nobody signs."""
    return foreign(status, json.dumps({"code": code, "detail": EVIL, "title": EVIL}).encode())


def flipped(answer: bytes, at: int) -> bytes:
    """The answer with another byte there."""
    at %= len(answer)
    return answer[:at] + bytes([answer[at] ^ 1]) + answer[at + 1 :]


def with_first(peer: FalsePeer, sent: Sequence[Envelope], **changes: object) -> bytes:
    """The truth, but of the first envelope."""
    if peer.way == "direct":
        stored = [StoredFact(each.digest, each.length) for each in sent]
        return peer.stored([msgspec.structs.replace(stored[0], **changes), *stored[1:]])
    held = [held_fact(each) for each in sent]
    return peer.held([msgspec.structs.replace(held[0], **changes), *held[1:]])


def by(peer: FalsePeer, sent: Sequence[Envelope], key: SigningKey) -> bytes:
    """The truth, signed by another key."""
    if peer.way == "direct":
        return peer.stored([StoredFact(each.digest, each.length) for each in sent], key)
    return peer.held([held_fact(each) for each in sent], key)


def of_the_other_kind(peer: FalsePeer, sent: Sequence[Envelope]) -> bytes:
    """A `stored` signed by a relay, a `held` signed by a peer."""
    if peer.way == "relay":
        return peer.stored([StoredFact(each.digest, each.length) for each in sent], peer.relay)
    return peer.held([held_fact(each) for each in sent], peer.pair)


def until_shortened(peer: FalsePeer, sent: Sequence[Envelope]) -> bytes:
    """Held for a millisecond less than was asked."""
    facts = [held_fact(each) for each in sent]
    return peer.held([msgspec.structs.replace(f, until_ms=f.until_ms - 1) for f in facts])


async def keep_silent(
    _peer: FalsePeer, _request: web.BaseRequest, _sent: Sequence[Envelope]
) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def drip(
    peer: FalsePeer, request: web.BaseRequest, sent: Sequence[Envelope]
) -> web.StreamResponse:
    """The truth, one byte a second."""
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        for byte in peer.answer(sent):
            await response.write(bytes([byte]))
            await asyncio.sleep(1)
    return response


LIES: dict[str, tuple[Lie, str]] = {
    "another key": (saying(lambda peer, sent: by(peer, sent, STRANGER)), ANOTHER_KEY),
    "flipped signature": (saying(lambda peer, sent: flipped(peer.answer(sent), -1)), NOT_SIGNED),
    "flipped fact": (saying(lambda peer, sent: flipped(peer.answer(sent), 90)), NOT_SIGNED),
    "another digest": (
        saying(lambda peer, sent: with_first(peer, sent, digest=bytes(32))),
        OTHER_BYTES,
    ),
    "another length": (
        saying(lambda peer, sent: with_first(peer, sent, length=sent[0].length + 1)),
        OTHER_BYTES,
    ),
    "stored by a relay, held by a peer": (saying(of_the_other_kind), NOT_SIGNED),
    "the letter itself": (
        saying(lambda _, sent: bodies.make_deposit_answer(sent[0].frame.data, [])),
        NOT_SIGNED,
    ),
    "cut": (saying(lambda peer, sent: peer.answer(sent)[:-9]), NOT_OURS),
    "empty": (foreign(200, b""), NOT_OURS),
    "garbage": (foreign(200, b"\xff" * 5000), NOT_OURS),
    "page with 200": (foreign(200), NOT_OURS),
    "a proxy's 404": (foreign(404), NOT_OURS),
    "a proxy's 502": (foreign(502), NOT_OURS),
    "redirect": (foreign(307, b"", Location="/truth"), NOT_OURS),
    "not well formed": (refusing("malformed", 400), "not well formed"),
    "no such queue": (refusing("no_such_queue", 404), "No queue here"),
    "retired": (refusing("retired", 410), "was retired"),
    "not admitted": (refusing("not_admitted", 403), "only for a valid invite"),
}
OF_RELAYS: dict[str, tuple[Lie, str]] = {
    "until shortened": (saying(until_shortened), "for less time than was asked"),
    "for another queue": (
        saying(lambda peer, sent: peer.held([held_fact(e) for e in sent], queue=STRANGER.public)),
        OTHER_BYTES,
    ),
    "a proxy's 413": (foreign(413), "no request so large"),
}
CASES = [(way, lie) for way in WAYS for lie in LIES] + [("relay", lie) for lie in OF_RELAYS]


async def assert_waits(machine: Machine, letter_id: str, why: str) -> None:
    """The letter is where it was, and says why."""
    letter = await machine.letter(letter_id)
    assert (letter["state"], letter["way"]) == ("queued", "")
    assert [event["state"] for event in letter["events"]] == ["queued"]
    assert why in letter["why"]
    assert "EVIL" not in letter["why"]
    assert letter["next"].startswith("tried again")


async def wait_for(machine: Machine, letter_id: str, *states: str) -> None:
    async def is_there() -> bool:
        return (await machine.letter(letter_id))["state"] in states

    await eventually(is_there, within_s=TURN_S, what=f"the letter is {' or '.join(states)}")


async def wait_for_reason(machine: Machine, letter_id: str, why: str) -> None:
    async def is_there() -> bool:
        return why in (await machine.letter(letter_id))["why"]

    await eventually(is_there, within_s=TURN_S, what=f"the outbox says: {why}")


@pytest.mark.parametrize(("way", "lie"), CASES)
async def test_rule_5_a_lie_ends_no_letter_and_moves_no_state_and_the_truth_is_heard_later(
    machine: Machine, way: str, lie: str
) -> None:
    told, why = (LIES | OF_RELAYS)[lie]
    liar, friend = FalsePeer("liar", way, told), FalsePeer("friend", way)
    for peer in (liar, friend):
        await machine.add(peer)
    lied_to = await machine.send(liar, "believe me")
    other = await machine.send(friend, "to another peer")
    # The round with its card may have failed before, so that the liar would be left alone a while.
    await machine.ask({"do": "outbox_retry"})
    await wait_for(machine, other, "stored" if way == "direct" else "held")
    await wait_for_reason(machine, lied_to, why)
    lied = liar.lied
    await machine.ask({"do": "outbox_retry"})
    await eventually(lambda: liar.lied > lied, within_s=TURN_S, what="it is tried again")
    await assert_waits(machine, lied_to, why)
    liar.lie = None
    await machine.ask({"do": "outbox_retry"})
    await wait_for(machine, lied_to, "stored" if way == "direct" else "held")


async def test_who_keeps_silent_or_gives_one_byte_a_second_is_left_in_time_and_holds_up_nobody(
    machine: Machine,
) -> None:
    # The first round, with the card alone, fails at once; the next one is slow and has the letter.
    slow = [FalsePeer(f"{way}-{number}", way, foreign(502)) for way in WAYS for number in range(2)]
    friends = [FalsePeer(f"friend-{way}", way) for way in WAYS]
    for peer in (*slow, *friends):
        await machine.add(peer)
    await eventually(lambda: all(peer.lied for peer in slow), within_s=5, what="cards are refused")
    for peer, lie in zip(slow, (keep_silent, drip) * 2, strict=True):
        peer.lie = lie
    waiting = [await machine.send(peer, "are you there") for peer in slow]
    started_s = time.monotonic()
    for friend in friends:
        letter_id = await machine.send(friend, "to another peer")
        await wait_for(machine, letter_id, "stored", "held")
    assert time.monotonic() - started_s < 5
    for letter_id in waiting:
        await assert_waits(machine, letter_id, "")

    async def all_say_why() -> bool:
        letters = [await machine.letter(letter_id) for letter_id in waiting]
        return all("does not answer in time" in letter["why"] for letter in letters)

    await eventually(all_say_why, within_s=40, what="all four were left")
    for letter_id in waiting:
        await assert_waits(machine, letter_id, "does not answer in time")
    for peer in slow:
        peer.lie = None
    await machine.ask({"do": "outbox_retry"})
    for letter_id in waiting:
        await wait_for(machine, letter_id, "stored", "held")


async def test_one_letter_that_is_too_large_for_a_proxy_does_not_hold_up_those_behind_it(
    machine: Machine,
) -> None:
    async def proxy(
        peer: FalsePeer, _request: web.BaseRequest, sent: Sequence[Envelope]
    ) -> web.Response:
        if sum(each.length for each in sent) > 100_000:
            return web.Response(body=PAGE, status=413, content_type="text/html")
        return web.Response(body=peer.answer(sent))

    peer = FalsePeer("behind-a-proxy", "relay", proxy)
    await machine.add(peer)
    large = await machine.send(peer, "large", body="x" * 200_000)
    started_s = time.monotonic()
    for number in range(3):
        small = await machine.send(peer, f"small {number}")
        await wait_for(machine, small, "held")
    assert time.monotonic() - started_s < 10
    await wait_for_reason(machine, large, "no request so large")
    await assert_waits(machine, large, "no request so large")
