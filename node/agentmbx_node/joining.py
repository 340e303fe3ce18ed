"""Pairing by token, at the machine where the line is pasted; a join that was cut off goes on.

Each step is in the database before its frame leaves, so what is lost on the way, or a stop in
between, costs a repeat and nothing else.
"""

import asyncio
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from agentmbx_node.addresses import parse_address
from agentmbx_node.clock import Clock, Now
from agentmbx_node.errors import Failure, OperatingError
from agentmbx_node.keyring import Keyring
from agentmbx_node.pairing import (
    SALT_BYTES,
    OnReplaced,
    add_peer,
    check_unused,
    is_own,
    leave_as_it_was,
    read_card,
)
from agentmbx_node.store.database import Database
from agentmbx_node.store.rows import Peer
from agentmbx_node.store.table import Table
from agentmbx_node.tokens import Draw, parse_line, refusal
from agentmbx_protocol import limits
from agentmbx_protocol.errors import Refusal, UnsupportedVersion
from agentmbx_protocol.frame import Kind
from agentmbx_protocol.pairing import Hello, make_hello, make_proof, parse_hello, token_id

TOTAL_S: Final = 30.0
CALL_S: Final = 10.0
PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0)
JOINING_MS: Final = 48 * 3600 * 1000

Call = Callable[[str, Sequence[bytes]], Awaitable[Sequence[bytes]]]


class Joining(msgspec.Struct):
    """An attempt to join, until its result is here; `reply` and `proof` are empty before."""

    token_id: bytes
    salt: bytes
    hello: bytes
    reply: bytes
    proof: bytes
    age_ms: int


JOINING: Final = Table("joining", Joining)


def begin_join(
    connection: sqlite3.Connection,
    keyring: Keyring,
    now: Now,
    token: bytes,
    name: str,
    draw: Draw = secrets.token_bytes,
) -> bytes:
    """The hello for this token, the same one each time (unless this machine's keys changed)."""
    connection.execute("DELETE FROM joining WHERE age_ms <= ?", (now.age_ms - JOINING_MS,))
    named = token_id(token)
    row = JOINING.get(connection, named)
    if row is not None and is_own(_hello_of(row), keyring):
        return row.hello
    salt = draw(SALT_BYTES)
    hello = make_hello(
        Kind.HELLO,
        keyring.identity,
        named_token=named,
        nonce=draw(limits.NONCE_BYTES),
        sealing=keyring.sealing.public,
        pair=keyring.pair_key(salt).public,
        name=name,
    )
    connection.execute("DELETE FROM joining WHERE token_id = ?", (named,))
    JOINING.add(connection, Joining(named, salt, hello, b"", b"", now.age_ms))
    return hello


def pending_proof(connection: sqlite3.Connection, token: bytes) -> bytes:
    """The proof that was made and has no result yet; empty when there is none."""
    return _row_of(connection, token).proof


def take_reply(
    connection: sqlite3.Connection, keyring: Keyring, token: bytes, own_card: bytes, data: bytes
) -> bytes:
    """The proof for a reply, the same one for the same reply.

    Another reply takes the place of the first: that one was forgotten, or was somebody else's. The
    proofs stay good, since an initiator that has paired gives its one reply. Raises a `Refusal`
    for a reply that does not fit, and `Failure` when it is this machine's own.
    """
    row = _row_of(connection, token)
    if row.reply == data:
        return row.proof
    reply = parse_hello(data, Kind.REPLY)
    if reply.token_id != row.token_id:
        raise refusal()
    if reply.identity == keyring.identity.public:
        raise Failure(
            "own_line",
            "This line was made on this very machine, which does not pair with itself.",
            "Paste it on the other machine.",
            3,
        )
    check_unused(connection, reply.pair)
    row.reply = data
    row.proof = make_proof(
        Kind.PROOF, keyring.identity, token, _hello_of(row), reply, own_card=own_card
    )
    JOINING.save(connection, row)
    return row.proof


def take_result(
    connection: sqlite3.Connection,
    keyring: Keyring,
    now: Now,
    token: bytes,
    data: bytes,
    *,
    loopback: bool,
    on_replaced: OnReplaced = leave_as_it_was,
    draw: Draw = secrets.token_bytes,
) -> Peer:
    """The peer, stored, when the result shows that the other side knows the token.

    Raises a `Refusal` when it does not; then nothing is stored.
    """
    row = _row_of(connection, token)
    if not row.reply:
        raise refusal()
    reply = parse_hello(row.reply, Kind.REPLY)
    card = read_card(data, Kind.RESULT, token, _hello_of(row), reply, keyring)
    check_unused(connection, reply.pair)
    connection.execute("DELETE FROM joining WHERE token_id = ?", (row.token_id,))
    return add_peer(
        connection,
        now,
        card,
        reply.pair,
        row.salt,
        draw(limits.STREAM_BYTES),
        loopback=loopback,
        on_replaced=on_replaced,
    )


async def join(
    database: Database,
    keyring: Keyring,
    clock: Clock,
    call: Call,
    line: str,
    own_card: bytes,
    name: str,
    on_replaced: OnReplaced = leave_as_it_was,
) -> Peer:
    """Pair with the machine that made `line`, within 30 s; raises `Failure`.

    `call` sends frames to an address and gives those of the answer; it raises `OperatingError`
    when there is none and a `Refusal` when that is the answer. A join that failed or was killed
    goes on where it was when it is called again with the same line.
    """
    addresses, token = parse_line(line)
    steps = _Steps(database, keyring, clock, call, token, own_card, on_replaced)
    await database.write(lambda each: begin_join(each, keyring, clock.now(), token, name))
    errors: dict[str, Exception] = {}
    for pause_s in PAUSES_S:
        if steps.left_s() <= pause_s or all(_is_final(each) for each in map(errors.get, addresses)):
            break
        await asyncio.sleep(pause_s)
        for address in addresses:
            if _is_final(errors.get(address)) or steps.left_s() <= 0:
                continue
            try:
                return await steps.run(address)
            except (OperatingError, Refusal, _Unproven) as error:
                errors[address] = error
    raise _failure(errors)


class _Unproven(Exception):
    """The answer is not of the machine that knows the token, or was damaged on the way."""


class _Steps:
    """One run of `join`: the steps that are still to be taken, at one address after another."""

    def __init__(
        self,
        database: Database,
        keyring: Keyring,
        clock: Clock,
        call: Call,
        token: bytes,
        own_card: bytes,
        on_replaced: OnReplaced,
    ) -> None:
        self._database = database
        self._keyring = keyring
        self._clock = clock
        self._call = call
        self._token = token
        self._own_card = own_card
        self._on_replaced = on_replaced
        self._deadline_s = asyncio.get_running_loop().time() + TOTAL_S

    def left_s(self) -> float:
        """What is left of the time for the whole."""
        return self._deadline_s - asyncio.get_running_loop().time()

    async def run(self, address: str) -> Peer:
        """Pair by way of `address`, from the last step that was taken."""
        proof = await self._database.read(lambda each: pending_proof(each, self._token))
        if not proof:
            proof = await self._prove(address)
        try:
            result = await self._ask(address, proof)
        except Refusal as refused:
            if refused.retryable:
                raise
            # The reply that this proof is for was forgotten there, or was never from there.
            again = await self._prove(address)
            if again == proof:
                raise
            result = await self._ask(address, again)
        loopback = parse_address(address)[0].is_loopback

        def store(connection: sqlite3.Connection) -> Peer:
            return take_result(
                connection,
                self._keyring,
                self._clock.now(),
                self._token,
                result,
                loopback=loopback,
                on_replaced=self._on_replaced,
            )

        try:
            return await self._database.write(store)
        except Refusal as error:
            raise _Unproven from error

    async def _prove(self, address: str) -> bytes:
        hello = await self._database.read(lambda each: _row_of(each, self._token).hello)
        reply = await self._ask(address, hello)
        try:
            return await self._database.write(
                lambda each: take_reply(each, self._keyring, self._token, self._own_card, reply)
            )
        except Refusal as error:
            raise _Unproven from error

    async def _ask(self, address: str, data: bytes) -> bytes:
        try:
            async with asyncio.timeout(min(CALL_S, self.left_s())):
                answer = await self._call(address, [data])
        except TimeoutError as error:
            raise OperatingError("The machine does not answer in time.", retry=True) from error
        if len(answer) != 1:
            raise _Unproven
        return answer[0]


def _is_final(error: Exception | None) -> bool:
    if isinstance(error, OperatingError):
        return not error.retry
    return isinstance(error, Refusal) and not error.retryable


def _failure(errors: dict[str, Exception]) -> Failure:
    said = "; ".join(f"{address}: {_say(error)}" for address, error in errors.items())
    kept = list(errors.values())
    if any(isinstance(each, UnsupportedVersion) for each in kept):
        return Failure(
            "unsupported_version",
            f"Not paired. {said}",
            "Bring both machines to the same version of agentmbx, then paste the line again.",
            3,
        )
    if any(
        isinstance(each, _Unproven) or (isinstance(each, Refusal) and not each.retryable)
        for each in kept
    ):
        return Failure(
            "refused",
            f"Not paired. {said}",
            "Look whether the two are peers already. If not, make a new line with "
            "`agentmbx pair` on the other machine: one pairs once, within ten minutes, and ends "
            "when agentmbx restarts there. The clocks of the two machines do not matter.",
            3,
        )
    return Failure(
        "unreachable",
        f"Not paired. {said}",
        "See that agentmbx runs on the other machine and that this one can reach it, then paste "
        "the same line again: it goes on where it stopped. The clocks do not matter.",
        4,
    )


def _say(error: Exception) -> str:
    if isinstance(error, OperatingError):
        return str(error)
    if isinstance(error, UnsupportedVersion):
        return "The machine speaks another version."
    if isinstance(error, Refusal):
        return "The machine is busy." if error.retryable else "The machine refuses this line."
    return "What answers does not know the token, or somebody changes the answers on the way."


def _hello_of(row: Joining) -> Hello:
    return parse_hello(row.hello, Kind.HELLO)


def _row_of(connection: sqlite3.Connection, token: bytes) -> Joining:
    row = JOINING.get(connection, token_id(token))
    if row is None:
        raise LookupError("no join with this token has begun")
    return row
