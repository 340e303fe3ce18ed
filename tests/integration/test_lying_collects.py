"""A relay that lies to who collects: nothing is made up or lost, and the node does not spin."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from agentmbx_node.mail import message
from agentmbx_node.store.rows import Peer
from agentmbx_protocol import bodies, limits
from agentmbx_protocol.envelope import parse_envelope
from agentmbx_protocol.keys import SigningKey
from agentmbx_protocol.queue_commands import Flag, make_queue_state, parse_queue_state
from false_hops import FalsePeer, FalseRelay, Machine
from scene import eventually

WATCHED_S = 1.5
POLLS_MAX = 8
Answer = Callable[[], Awaitable[web.StreamResponse]]


class Scene(msgspec.Struct):
    """A machine with a peer and a queue at a relay that can lie."""

    machine: Machine
    peer: FalsePeer
    relay: FalseRelay
    queue: bytes
    receiver: Peer

    def write(self, subject: str) -> bytes:
        """An envelope with a message from the peer."""
        content = message.encode(message.Message(subject=subject))
        return self.peer.write(self.receiver, self.machine, self.queue, content)

    def hand_out(self, *envelopes: bytes, state: bytes = b"") -> None:
        """Answer every poll with these, at once."""
        frames = [state, *envelopes] if state else envelopes
        self.relay.answer = saying(bodies.join_frames(frames))

    async def subjects(self) -> list[str]:
        messages = (await self.machine.ask({"do": "inbox"}))["messages"]
        return [str(each["subject"]) for each in messages]

    async def status(self) -> dict[str, object]:
        (status,) = (await self.machine.ask({"do": "relay_status"}))["relays"]
        return dict(status)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with Machine.run(tmp_path) as machine:
        peer, relay = FalsePeer("peer", "direct"), FalseRelay()
        receiver = await machine.add(peer)
        port = await machine.serve(relay.handle)
        task = asyncio.create_task(machine.ask({"do": "relay_set", "line": relay.line(port)}))
        await eventually(lambda: relay.polls > 0, within_s=10, what="it collects")
        # Nobody answers the peer's part of it, so that would wait for its 5 s.
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        yield Scene(machine, peer, relay, relay.queue, receiver)


def saying(body: bytes, status: int = 200, **headers: str) -> Answer:
    async def answer() -> web.Response:
        return web.Response(body=body, status=status, headers=headers)

    return answer


def refusing(code: str, state: bytes = b"") -> Answer:
    document = {"code": code, "queue_state": base64.b64encode(state).decode() if state else None}
    return saying(json.dumps(document).encode(), 409)


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


async def ring(scene: Scene) -> None:
    """Cut short the poll that is on, and a pause."""
    await scene.machine.running.parts_changed()


async def watch(scene: Scene) -> int:
    """How often it polls within a while, from now on."""
    await ring(scene)
    before = scene.relay.polls
    await asyncio.sleep(WATCHED_S)
    return scene.relay.polls - before


async def assert_collects(scene: Scene, subject: str = "the truth") -> None:
    """The relay is honest again: mail arrives, and nothing is the matter."""
    scene.hand_out(scene.write(subject))
    await ring(scene)

    async def is_there() -> bool:
        await ring(scene)
        return subject in await scene.subjects() and not (await scene.status())["error"]

    await eventually(is_there, within_s=15, what="mail arrives by the relay")


async def test_what_is_no_mail_of_a_peer_is_acked_once_and_shown_nowhere(scene: Scene) -> None:
    stranger = FalsePeer("stranger", "direct")
    true = scene.write("true")
    strange = stranger.write(scene.receiver, scene.machine, scene.queue, b"strange")
    broken = flipped(scene.write("broken"))
    scene.hand_out(strange, broken, true, true)
    await ring(scene)
    wanted = {parse_envelope(each).digest for each in (strange, broken, true)}
    await eventually(lambda: scene.relay.acks >= wanted, within_s=10, what="all are acked")
    assert await scene.subjects() == ["true"]
    assert await watch(scene) <= POLLS_MAX, "what it acked already comes for ever"
    assert await scene.subjects() == ["true"]
    await assert_collects(scene)


ENDLESS: dict[str, Callable[[Scene], Answer]] = {
    "nothing, at once": lambda _: saying(b""),
    "frames that are no envelopes": lambda _: saying(bodies.join_frames([b"garbage"] * 64)),
    "a list that was not registered": lambda scene: saying(
        bodies.join_frames([scene.relay.state(Flag.OK, 2**40, senders_digest=bytes(32))])
    ),
    "a state of another queue": lambda scene: saying(
        bodies.join_frames([scene.relay.state(Flag.OK, 2**40, queue=SigningKey.generate().public)])
    ),
    "stale": lambda scene: refusing("stale", scene.relay.state(Flag.STALE, 2**60)),
    "stale with the last counter": lambda scene: refusing(
        "stale", scene.relay.state(Flag.STALE, limits.COUNTER_MAX)
    ),
}


@pytest.mark.parametrize("lie", ENDLESS)
async def test_an_answer_that_comes_at_once_and_for_ever_is_not_asked_for_without_pause(
    scene: Scene, lie: str
) -> None:
    scene.relay.answer = ENDLESS[lie](scene)
    assert await watch(scene) <= POLLS_MAX
    assert await scene.subjects() == []
    await assert_collects(scene)


FOREIGN: dict[str, Callable[[Scene], Answer]] = {
    "page with 200": lambda _: saying(b"<html>Welcome to nginx!</html>"),
    "a proxy's 404": lambda _: saying(b"<html>404</html>", 404),
    "a proxy's 413": lambda _: saying(b"<html>413</html>", 413),
    "redirect": lambda _: saying(b"", 307, Location="/elsewhere"),
    "no such queue": lambda _: refusing("no_such_queue"),
    "retired, by nobody": lambda _: refusing("retired"),
    "superseded, by nobody": lambda _: refusing("superseded"),
    "retired, by another key": lambda scene: refusing("retired", _by_another(scene, Flag.RETIRED)),
    "superseded, by another key": lambda scene: refusing(
        "superseded", _by_another(scene, Flag.SUPERSEDED)
    ),
    "superseded, of another queue": lambda scene: refusing(
        "superseded",
        scene.relay.state(
            Flag.SUPERSEDED, 2**60, queue=SigningKey.generate().public, instance=b"x" * 16
        ),
    ),
    "superseded, older than was answered": lambda scene: refusing(
        "superseded", scene.relay.state(Flag.SUPERSEDED, 1, instance=b"x" * 16)
    ),
    "retired, with another flag": lambda scene: refusing(
        "retired", scene.relay.state(Flag.OK, 2**60)
    ),
    "superseded, with another flag": lambda scene: refusing(
        "superseded", scene.relay.state(Flag.OK, 2**60, instance=b"x" * 16)
    ),
}


def _by_another(scene: Scene, flag: Flag) -> bytes:
    key = SigningKey.generate()
    told = parse_queue_state(scene.relay.state(flag, 2**60, instance=b"x" * 16))
    return make_queue_state(key, msgspec.structs.replace(told, relay=key.public))


@pytest.mark.parametrize("lie", FOREIGN)
async def test_what_no_relay_says_ends_no_queue_and_mail_comes_when_it_is_a_relay_again(
    scene: Scene, lie: str
) -> None:
    scene.relay.answer = FOREIGN[lie](scene)
    polls = scene.relay.polls
    await ring(scene)
    await eventually(lambda: scene.relay.polls > polls, within_s=10, what="it hears the lie")
    await asyncio.sleep(0.2)
    assert (await scene.status())["state"] == "live"
    await assert_collects(scene)
