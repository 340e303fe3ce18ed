"""Machines that pair in tests: keys from a name, a database in memory, and clocks one can turn."""

import hashlib
import itertools
import sqlite3
from collections.abc import Callable
from typing import Final, TypeVar

from agentmbx_node import joining, pairing
from agentmbx_node.clock import Now
from agentmbx_node.keyring import Keyring
from agentmbx_node.pairing import Answered
from agentmbx_node.store import database
from agentmbx_node.store.rows import MACHINE, PEER, Machine, Peer
from agentmbx_node.tokens import Tokens
from agentmbx_protocol import frame
from agentmbx_protocol import pairing as wire
from agentmbx_protocol.card import Card, make_card
from agentmbx_protocol.frame import Kind

T = TypeVar("T")

START_MS: Final = 1_700_000_000_000


class CommitFailed(Exception):
    """What a full disk comes to."""


class Side:
    """One machine. What is kept in memory is `tokens`; `restart` loses it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keyring = Keyring(*(_bytes(name, part) for part in ("identity", "sealing", "root")))
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        for number in range(1, database.SCHEMA_VERSION + 1):
            database._migrate(self.connection, number)
        MACHINE.add(self.connection, Machine(1, name, b"i" * 16, 1, b"", 0, 0))
        self.wall_ms = START_MS
        self.age_ms = 1_000_000
        self._drawn = itertools.count()
        self.tokens = Tokens(self.draw)
        self.replaced: list[Peer] = []

    def draw(self, length: int) -> bytes:
        return _bytes(self.name, str(next(self._drawn)))[:length]

    @property
    def now(self) -> Now:
        return Now(self.wall_ms, self.age_ms)

    @property
    def identity(self) -> bytes:
        return self.keyring.identity.public

    @property
    def card(self) -> bytes:
        shown = Card(self.identity, 1, self.name, self.keyring.sealing.public)
        return make_card(self.keyring.identity, shown)

    def restart(self) -> None:
        self.tokens = Tokens(self.draw)

    def close(self) -> None:
        self.connection.close()

    def write(self, work: Callable[[sqlite3.Connection], T], *, fails: bool = False) -> T:
        """What `work` returns, committed; with `fails` the commit does not happen."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            value = work(self.connection)
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("ROLLBACK" if fails else "COMMIT")
        if fails:
            raise CommitFailed
        return value

    def offer(self) -> bytes:
        return self.tokens.offer(self.now)

    def answer(self, data: bytes, *, fails: bool = False, loopback: bool = False) -> bytes:
        """What this machine answers as the initiator."""

        def work(connection: sqlite3.Connection) -> Answered:
            return pairing.answer_pair(
                connection,
                self.tokens,
                self.keyring,
                self.now,
                self.card,
                [data],
                loopback=loopback,
                on_replaced=self.keep_replaced,
            )

        answered = self.write(work, fails=fails)
        pairing.settle(self.tokens, answered)
        return answered.frame

    def begin(self, token: bytes, name: str = "") -> bytes:
        return self.write(
            lambda each: joining.begin_join(
                each, self.keyring, self.now, token, name or self.name, self.draw
            )
        )

    def prove(self, token: bytes, reply: bytes, *, fails: bool = False) -> bytes:
        return self.write(
            lambda each: joining.take_reply(each, self.keyring, token, self.card, reply),
            fails=fails,
        )

    def finish(
        self, token: bytes, result: bytes, *, fails: bool = False, loopback: bool = False
    ) -> Peer:
        return self.write(
            lambda each: joining.take_result(
                each,
                self.keyring,
                self.now,
                token,
                result,
                loopback=loopback,
                on_replaced=self.keep_replaced,
                draw=self.draw,
            ),
            fails=fails,
        )

    def keep_replaced(self, _connection: sqlite3.Connection, old_peer: Peer) -> None:
        self.replaced.append(old_peer)

    def peers(self, where: str = "WHERE state = 'paired'") -> list[Peer]:
        return PEER.find(self.connection, f"{where} ORDER BY id")

    def shows(self, peer: Peer) -> bytes:
        """The pair key that this machine uses with the peer."""
        return self.keyring.pair_key(peer.salt).public


def pair(initiator: Side, joiner: Side) -> tuple[Peer, Peer]:
    """The peer at the initiator and the one at the joiner, when nothing goes wrong."""
    token = initiator.offer()
    proof = joiner.prove(token, initiator.answer(joiner.begin(token)))
    joined = joiner.finish(token, initiator.answer(proof))
    (peer,) = (each for each in initiator.peers() if each.identity == joiner.identity)
    return peer, joined


def proof_for(desk: Side, joiner: Side, token: bytes) -> bytes:
    return joiner.prove(token, desk.answer(joiner.begin(token)))


def foreign_reply(side: Side, named: bytes) -> bytes:
    """A reply by one who sees the hello and does not know the token."""
    return wire.make_hello(
        Kind.REPLY,
        side.keyring.identity,
        named_token=named,
        nonce=b"n" * 32,
        sealing=side.keyring.sealing.public,
        pair=side.keyring.pair_key(b"s" * 16).public,
        name="desk",
    )


def crooked(data: bytes) -> bytes:
    """The frame with another last byte of its signature."""
    return data[:-1] + bytes([data[-1] ^ 1])


def with_tail(data: bytes, tail: bytes, side: Side) -> bytes:
    """The frame with another tail, signed by `side`."""
    parsed = frame.parse(data)
    return frame.sign(parsed.kind, side.keyring.identity, parsed.fields, tail)


def _bytes(name: str, part: str) -> bytes:
    return hashlib.sha256(f"{part} of {name}".encode()).digest()
