"""A machine in this process, and far ends of its hops that answer as a test tells them to."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from agentmbx_node import pairing
from agentmbx_node.control.requests import Requests
from agentmbx_node.hops.http import open_session
from agentmbx_node.machine import RunningMachine, open_store
from agentmbx_node.store.rows import Peer
from agentmbx_protocol import bodies, custody, limits
from agentmbx_protocol.card import Card, Route, make_card
from agentmbx_protocol.custody import HeldFact, StoredFact
from agentmbx_protocol.envelope import Envelope, make_envelope, parse_envelope
from agentmbx_protocol.keys import SealingKey, SigningKey, key_text
from agentmbx_protocol.letter import Letter, encode_letter, seal_letter
from agentmbx_protocol.queue_commands import (
    Flag,
    QueueState,
    make_queue_state,
    parse_collect,
    parse_register,
    senders_digest,
)

NOW_MS = 1_800_000_000_000
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
# What it answers to the envelopes of a deposit; None: the truth.
Lie = Callable[["FalsePeer", web.BaseRequest, Sequence[Envelope]], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """A server that does with each request what `handler` does; its port."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


class FalsePeer:
    """A peer that is reached by one way, "direct" or "relay", and the server at the end of it.

    It stores, or holds, all that comes, until it has a `lie`.
    """

    def __init__(self, name: str, way: str, lie: Lie | None = None) -> None:
        self.name = name
        self.way = way
        self.lie = lie
        self.identity, self.sealing = SigningKey.generate(), SealingKey.generate()
        self.pair, self.relay = SigningKey.generate(), SigningKey.generate()
        self.queue = SigningKey.generate().public
        self.stream, self.number = secrets.token_bytes(16), 0
        self.lied = 0

    def card(self, port: int) -> bytes:
        """Its card, which names that port as its one way."""
        is_direct = self.way == "direct"
        route = Route(f"http://127.0.0.1:{port}/", self.relay.public, self.queue)
        shown = Card(
            identity=self.identity.public,
            sequence=1,
            name=self.name,
            sealing=self.sealing.public,
            addresses=(f"127.0.0.1:{port}",) if is_direct else (),
            routes=() if is_direct else (route,),
        )
        return make_card(self.identity, shown)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a deposit; the path "/truth" is where a redirect leads."""
        frames = bodies.split_frames(await request.read(), limits.DEPOSIT_ENVELOPES_MAX)
        sent = [parse_envelope(data) for data in frames]
        if self.lie is None or request.path == "/truth":
            return web.Response(body=self.answer(sent))
        self.lied += 1
        return await self.lie(self, request, sent)

    def answer(self, sent: Sequence[Envelope]) -> bytes:
        """The truth about what was sent."""
        if self.way == "direct":
            return self.stored([StoredFact(each.digest, each.length) for each in sent])
        return self.held([held_fact(each) for each in sent])

    def stored(self, facts: Sequence[StoredFact], key: SigningKey | None = None) -> bytes:
        """A deposit's answer with these facts, by its pair key or another."""
        return bodies.make_deposit_answer(custody.make_stored(key or self.pair, facts), [])

    def held(
        self, facts: Sequence[HeldFact], key: SigningKey | None = None, queue: bytes = b""
    ) -> bytes:
        """A deposit's answer with these facts, by its relay's key or another."""
        statement = custody.make_held(key or self.relay, queue or self.queue, facts)
        return bodies.make_deposit_answer(statement, [])

    def write(self, receiver: Peer, machine: "Machine", queue: bytes, content: bytes) -> bytes:
        """A letter of it to the machine, in an envelope for a queue."""
        self.number += 1
        letter = Letter(
            stream=self.stream,
            number=self.number,
            sent_ms=NOW_MS,
            lifetime_s=259_200,
            content_type="message",
            content=content,
        )
        sealed = seal_letter(
            encode_letter(letter),
            sender=self.pair.public,
            receiver=machine.running.keyring.pair_key(receiver.salt).public,
            sealing_public=machine.running.keyring.sealing.public,
        )
        return make_envelope(self.pair, queue, 3600, sealed)


def held_fact(envelope: Envelope) -> HeldFact:
    """A true fact about an envelope."""
    until_ms = NOW_MS + envelope.ttl_s * 1000
    return HeldFact(envelope.digest, envelope.length, NOW_MS, until_ms)


class Machine:
    """A node that runs in this process and listens nowhere; asked as by its control socket."""

    def __init__(self, running: RunningMachine, requests: Requests, stack: AsyncExitStack) -> None:
        self.running = running
        self._requests = requests
        self._stack = stack

    @classmethod
    @asynccontextmanager
    async def run(cls, home: Path) -> AsyncIterator[Self]:
        """It runs, and so do the peers and servers that are added to it."""
        keyring, connection = open_store(home, "here")
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            running = RunningMachine(keyring, connection, session)
            stack.push_async_callback(running.database.close)
            await running.renew_card()
            task = asyncio.create_task(running.run())
            try:
                yield cls(running, Requests(running, home), stack)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def serve(self, handler: Handler) -> int:
        """A server that ends after the machine; its port."""
        return await self._stack.enter_async_context(serving(handler))

    async def add(self, peer: FalsePeer) -> Peer:
        """Pair with the peer, whose server runs from now on."""
        card = peer.card(await self.serve(peer.handle))
        added = await self.running.write(
            lambda connection: pairing.add_peer(
                connection,
                self.running.clock.now(),
                card,
                peer.pair.public,
                secrets.token_bytes(16),
                secrets.token_bytes(16),
                loopback=True,
                on_replaced=pairing.leave_as_it_was,
            )
        )
        await self.running.parts_changed()
        return added

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The last that is answered; raises `Failure`."""
        answer: dict[str, Any] = {}
        async for step in self._requests.handle(request):
            answer = dict(step)
        return answer

    async def send(self, peer: FalsePeer, subject: str, body: str = "") -> str:
        """The id of a new letter to the peer."""
        to = f"owner@{peer.name}"
        answer = await self.ask({"do": "send", "to": to, "subject": subject, "body": body})
        return str(answer["id"])

    async def letter(self, letter_id: str) -> dict[str, Any]:
        """One letter as `sent` shows it."""
        (letter,) = (await self.ask({"do": "sent", "id": letter_id}))["letters"]
        return dict(letter)


class FalseRelay:
    """A relay that makes every queue, and hands out what it is told to, whether acked or not."""

    def __init__(self) -> None:
        self.key = SigningKey.generate()
        self.queue = b""
        self.instance = bytes(16)
        self.senders = b""
        self.polls = 0
        self.acks: set[bytes] = set()
        self.answer: Callable[[], Awaitable[web.StreamResponse]] | None = None

    def line(self, port: int) -> str:
        """What a person pastes."""
        return f"http://127.0.0.1:{port}/#{key_text(self.key.public)}.{key_text(bytes(32))}"

    def state(self, flag: Flag, counter: int, **changes: object) -> bytes:
        """Its signed word about the queue."""
        values: dict[str, Any] = {
            "relay": self.key.public,
            "queue": self.queue,
            "counter": counter,
            "instance": self.instance,
            "senders_digest": self.senders,
            "flag": flag,
        }
        return make_queue_state(self.key, QueueState(**values | changes))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a register truly and a collect with `answer`; without one it keeps silent."""
        frames = bodies.split_frames(await request.read(), 2)
        if request.path == "/v1/register":
            command = parse_register(frames[0])
            self.queue, self.instance = command.queue, command.instance
            self.senders = senders_digest(command.senders)
            state = self.state(Flag.OK, command.counter)
            return web.Response(body=bodies.join_frames([state]))
        self.polls += 1
        self.acks.update(parse_collect(frames[0]).acks)
        if self.answer is None:
            await asyncio.sleep(60)
            return web.Response()
        return await self.answer()
