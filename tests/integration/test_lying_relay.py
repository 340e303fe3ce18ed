"""A relay that lies (rule 4): the node believes nothing, and says what went wrong by type."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.http import HopRefused, open_session
from agentmbx_node.hops.relay import RELAY as RELAY_FAR_END
from agentmbx_node.hops.relay import RelayHop, fetch_info
from agentmbx_protocol import bodies, custody
from agentmbx_protocol.custody import HeldFact, NotBelieved
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.errors import REFUSALS, Stale
from agentmbx_protocol.keys import SigningKey, key_text
from agentmbx_protocol.queue_commands import Flag, QueueState, make_queue_state
from correspondents import Correspondent, Owner

RELAY, STRANGER = SigningKey.generate(), SigningKey.generate()
NOW_MS = 1_800_000_000_000
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def relay_that_answers(handler: Handler) -> AsyncIterator[RelayHop]:
    """A hop to a server that does with each request what `handler` does."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with open_session() as session:
            yield RelayHop(session, f"http://127.0.0.1:{port}/", RELAY.public)
    finally:
        await runner.cleanup()


def answering(body: bytes, status: int = 200, **headers: str) -> Handler:
    """A handler that reads the request and always answers this."""

    async def handle(request: web.BaseRequest) -> web.Response:
        await request.read()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, status=status, headers=named)

    return handle


def fact_of(envelope: Envelope, **changes: object) -> HeldFact:
    """A true fact about an envelope, with some of it changed."""
    until_ms = NOW_MS + envelope.ttl_s * 1000
    fact = HeldFact(envelope.digest, envelope.length, NOW_MS, until_ms)
    return msgspec.structs.replace(fact, **changes)


def held(
    facts: Sequence[HeldFact], queue: bytes, key: SigningKey = RELAY, refused: bytes = b""
) -> bytes:
    """The answer to a deposit with these facts."""
    return bodies.make_deposit_answer(custody.make_held(key, queue, facts), []) + refused


@pytest.fixture
def sender() -> Correspondent:
    return Correspondent(Owner(RELAY.public))


@pytest.fixture
def sent(sender: Correspondent) -> list[Envelope]:
    return [sender.write() for _ in range(3)]


async def test_an_honest_answer_is_believed(sender: Correspondent, sent: list[Envelope]) -> None:
    facts = [fact_of(envelope) for envelope in sent]
    answer = held(facts, sender.owner.queue.public)
    async with relay_that_answers(answering(answer)) as hop:
        deposited = await hop.deposit(sent)
    assert deposited.held == {fact.digest: fact for fact in facts}
    assert deposited.refused == []


def _state(owner: Owner, **changes: object) -> QueueState:
    state = QueueState(
        relay=RELAY.public,
        queue=owner.queue.public,
        counter=7,
        instance=owner.instance,
        senders_digest=bytes(32),
        flag=Flag.OK,
    )
    return msgspec.structs.replace(state, **changes)


def _lies(sender: Correspondent, sent: list[Envelope]) -> dict[str, bytes]:
    queue = sender.owner.queue.public
    true = [fact_of(envelope) for envelope in sent]
    other = sender.write()
    answer = held(true, queue)

    def with_first(**changes: object) -> bytes:
        return held([fact_of(sent[0], **changes), *true[1:]], queue)

    return {
        "signed by another key": held(true, queue, STRANGER),
        "signature flipped": answer[:-1] + bytes([answer[-1] ^ 1]),
        "fact flipped": answer[:90] + bytes([answer[90] ^ 1]) + answer[91:],
        "for another queue": held(true, STRANGER.public),
        "of another envelope": held([*true, fact_of(other)], queue),
        "another digest": with_first(digest=bytes(32)),
        "another length": with_first(length=sent[0].length - 1),
        "until shortened": with_first(until_ms=true[0].until_ms - 1),
        "until before accepted": with_first(until_ms=NOW_MS - 1),
        "accepted later than until allows": with_first(accepted_ms=NOW_MS + 1),
        "times of zero": with_first(accepted_ms=0, until_ms=0),
        "the senders own signature": held(true, queue, sender.pair),
        "cut": answer[:4] + answer[4:-10],
        "no held but a queue state": bodies.make_deposit_answer(
            make_queue_state(RELAY, _state(sender.owner)), []
        ),
    }


LIES = list(_lies(Correspondent(Owner(RELAY.public)), [
    Correspondent(Owner(RELAY.public)).write() for _ in range(3)
]))  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
async def test_rule_4_a_held_that_is_false_in_any_part_is_not_believed_in_any_part(
    sender: Correspondent, sent: list[Envelope], lie: str
) -> None:
    async with relay_that_answers(answering(_lies(sender, sent)[lie])) as hop:
        with pytest.raises(OperatingError if lie == "cut" else NotBelieved):
            await hop.deposit(sent)


async def test_rule_4_an_answer_for_fewer_envelopes_than_were_sent_proves_no_more_than_it_says(
    sender: Correspondent, sent: list[Envelope]
) -> None:
    answer = held([fact_of(sent[1])], sender.owner.queue.public)
    async with relay_that_answers(answering(answer)) as hop:
        deposited = await hop.deposit(sent)
    assert set(deposited.held) == {sent[1].digest}


async def test_rule_4_an_old_answer_proves_nothing_of_a_new_envelope(
    sender: Correspondent, sent: list[Envelope]
) -> None:
    answer = held([fact_of(envelope) for envelope in sent], sender.owner.queue.public)
    async with relay_that_answers(answering(answer)) as hop:
        with pytest.raises(NotBelieved):
            await hop.deposit([sender.write()])


@pytest.mark.parametrize(
    "refused",
    [
        b"\0",
        b"\0\0\x05\0\0\0",
        b"\0\3\x05\0\0\0\0",
        b"\0\0\x63\0\0\0\0",
        b"\0\0\0\0\0\0\0",
        b"\0\1\x05\0\0\0\0\0\1\x05\0\0\0\0",
        b"\0\1\x05\0\0\0\0\0\0\x05\0\0\0\0",
        b"\0\0\x05\0\0\0\0" * 65,
    ],
)
async def test_refused_positions_that_make_no_sense_are_refused_with_the_answer(
    sender: Correspondent, sent: list[Envelope], refused: bytes
) -> None:
    answer = held([fact_of(sent[1])], sender.owner.queue.public, refused=refused)
    async with relay_that_answers(answering(answer)) as hop:
        with pytest.raises(OperatingError):
            await hop.deposit(sent)


FOREIGN = [
    answering(b"<html><h1>Welcome to nginx!</h1></html>", content_type="text/html"),
    answering(b""),
    answering(b"\xff" * 5000),
    answering(b"\0\0\0\0"),
    answering(b"{}", 404),
    answering(b"[" * 5000, 500),
    answering(b'{"code": "no_such_code"}', 400),
    answering(b'{"code": ["malformed"]}', 400),
    answering(b'{"code": "malformed"' + b" " * 70_000 + b"}", 400),
    answering(b"null", 502),
    answering(b"", 204),
    answering(b"", 302, location="http://127.0.0.1:1/v1/deposit"),
    answering(b"", 308, location="/v1/deposit"),
    answering(b"\x1f\x8b" + bytes(100), content_encoding="gzip"),
    answering(b"", 401, www_authenticate="Basic"),
]


@pytest.mark.parametrize("handler", FOREIGN, ids=range(len(FOREIGN)))
async def test_what_is_no_relay_is_an_operating_error_for_every_call_and_may_mend(
    sender: Correspondent, sent: list[Envelope], handler: Handler
) -> None:
    owner = sender.owner
    async with relay_that_answers(handler) as hop:
        for call in (
            hop.deposit(sent),
            hop.register(owner.register_frame()),
            hop.retire(owner.retire_frame()),
        ):
            with pytest.raises((OperatingError, NotBelieved)) as raised:
                await call
            assert getattr(raised.value, "retry", True)
            assert "nginx" not in str(raised.value)


async def test_no_redirect_is_followed_and_no_cookie_is_kept(sent: list[Envelope]) -> None:
    asked: list[tuple[str, str | None]] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        asked.append((request.path, request.headers.get("Cookie")))
        return web.Response(status=307, headers={"Location": "/other", "Set-Cookie": "a=b"})

    async with relay_that_answers(handle) as hop:
        for _ in range(2):
            with pytest.raises(OperatingError):
                await hop.deposit(sent)
    assert asked == [("/v1/deposit", None)] * 2


@pytest.mark.parametrize("with_length", [True, False])
async def test_an_endless_answer_is_given_up_after_a_bounded_part(
    sender: Correspondent, sent: list[Envelope], *, with_length: bool
) -> None:
    poured = 0

    async def pour(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal poured
        response = web.StreamResponse()
        if with_length:
            response.content_length = 2**40
        await response.prepare(request)
        while True:
            await response.write(bytes(2**16))
            poured += 2**16

    async with relay_that_answers(pour) as hop, asyncio.timeout(20):
        for call in (hop.deposit(sent), hop.collect(sender.owner.collect_frame())):
            with pytest.raises(OperatingError):
                await call
        with pytest.raises(OperatingError):
            await fetch_info(hop._session, hop._url)
    assert poured < 3 * (RELAY_FAR_END.answer_bytes_max + 16 * 2**20)


async def test_an_answer_that_breaks_off_or_never_comes_is_an_operating_error() -> None:
    async def break_off(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def keep_silent(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        await asyncio.sleep(60)
        return web.Response()

    for handler in (break_off, keep_silent):
        async with relay_that_answers(handler) as hop:
            with pytest.raises(OperatingError) as raised:
                await hop._post("v1/deposit", b"", patience_s=0.3)
            assert raised.value.retry


@pytest.mark.parametrize("code", sorted(REFUSALS))
async def test_every_refusal_is_read_by_its_code_alone_and_its_text_is_never_shown(
    sent: list[Envelope], code: str
) -> None:
    document = {"code": code, "detail": "EVIL \x1b]0;text\x07", "retryable": None, "status": "x"}
    handler = answering(json.dumps(document).encode(), 418, retry_after="7")
    async with relay_that_answers(handler) as hop:
        with pytest.raises(HopRefused) as raised:
            await hop.deposit(sent)
    refusal = raised.value.refusal
    assert (refusal.code, refusal.retry_after_s) == (code, 7)
    assert "EVIL" not in str(raised.value)
    assert raised.value.state is None


@pytest.mark.parametrize("retry_after", ["-1", "1e3", "99999999", "Wed, 21 Oct 2026", "\u0663", ""])
async def test_a_strange_retry_after_is_none(sent: list[Envelope], retry_after: str) -> None:
    handler = answering(b'{"code": "rate_limited"}', 429, retry_after=retry_after)
    async with relay_that_answers(handler) as hop:
        with pytest.raises(HopRefused) as raised:
            await hop.deposit(sent)
    assert raised.value.refusal.retry_after_s is None


@pytest.mark.parametrize("signed_by", [RELAY, STRANGER], ids=["the-relay", "another"])
async def test_a_state_in_a_refusal_counts_only_when_the_relay_signed_it(
    sender: Correspondent, signed_by: SigningKey
) -> None:
    owner = sender.owner
    state = _state(owner, relay=signed_by.public, flag=Flag.STALE)
    frame = make_queue_state(signed_by, state)
    document = {"code": "stale", "queue_state": base64.b64encode(frame).decode()}
    async with relay_that_answers(answering(json.dumps(document).encode(), 409)) as hop:
        if signed_by is RELAY:
            with pytest.raises(HopRefused) as raised:
                await hop.collect(owner.collect_frame())
            assert isinstance(raised.value.refusal, Stale)
            assert raised.value.state == state
        else:
            with pytest.raises(OperatingError):
                await hop.collect(owner.collect_frame())


@pytest.mark.parametrize("queue_state", ["", "!", "AAAA", 7, [], {"a": 1}, "A" * 400], ids=repr)
async def test_a_state_in_a_refusal_that_is_none_is_never_taken_for_one(
    sender: Correspondent, queue_state: object
) -> None:
    document = json.dumps({"code": "superseded", "queue_state": queue_state}).encode()
    async with relay_that_answers(answering(document, 409)) as hop:
        with pytest.raises((HopRefused, OperatingError)) as raised:
            await hop.collect(sender.owner.collect_frame())
    assert getattr(raised.value, "state", None) is None


async def test_a_state_of_another_relay_or_queue_is_no_answer_to_a_register(
    sender: Correspondent,
) -> None:
    owner = sender.owner
    foreign = make_queue_state(STRANGER, _state(owner, relay=STRANGER.public))
    flipped = make_queue_state(RELAY, _state(owner))
    for frames in ([foreign], [flipped[:-1] + bytes([flipped[-1] ^ 1])], [], [flipped, flipped]):
        async with relay_that_answers(answering(bodies.join_frames(frames))) as hop:
            with pytest.raises(OperatingError):
                await hop.register(owner.register_frame())


@pytest.mark.parametrize(
    "document",
    [b"", b"[]", b"{}", b"null", b'{"relay_key": 5}', b'{"relay_key": "short"}',
     json.dumps({"relay_key": key_text(bytes(32))}).encode(), b"[" * 10_000],
)  # fmt: skip
async def test_an_info_page_without_a_valid_key_is_no_relays(document: bytes) -> None:
    async with relay_that_answers(answering(document)) as hop:
        with pytest.raises(OperatingError):
            await fetch_info(hop._session, hop._url)


async def test_nobody_at_the_address_is_an_operating_error_that_says_so(
    sent: list[Envelope],
) -> None:
    async with relay_that_answers(answering(b"")) as hop:
        url = hop._url
    async with open_session() as session:
        with pytest.raises(OperatingError, match="cannot be reached"):
            await RelayHop(session, url, RELAY.public).deposit(sent)
