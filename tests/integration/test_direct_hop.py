"""The direct way between two machines: a node's listener, and the hop to whatever answers."""

import asyncio
import contextlib
import gzip
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentmbx_node import listener as node_listener
from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.direct import MACHINE, DirectHop
from agentmbx_node.hops.http import HopRefused, open_session
from agentmbx_node.listener import Listener
from agentmbx_protocol import bodies, custody, limits
from agentmbx_protocol.custody import NotBelieved, StoredFact
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.errors import REFUSALS, Malformed, NoSuchQueue, RateLimited, TooLarge
from agentmbx_protocol.keys import SigningKey
from correspondents import Correspondent, Owner
from raw_http import RawConnection, chunked, request

PEER, STRANGER = SigningKey.generate(), SigningKey.generate()
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Stream = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Machine:
    """What a listener hands to: it keeps what came, and answers or raises what it is told."""

    def __init__(self) -> None:
        self.deposits: list[bytes] = []
        self.pairings: list[tuple[bytes, str]] = []
        self.answer: bytes | Exception = b""
        self.ready = True
        self.listener = Listener(self.deposit, self.pair, lambda: self.ready)

    async def deposit(self, body: bytes) -> bytes:
        self.deposits.append(body)
        return self._answer()

    async def pair(self, body: bytes, joiner_ip: str) -> bytes:
        self.pairings.append((body, joiner_ip))
        return self._answer()

    def _answer(self) -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@asynccontextmanager
async def listening(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[tuple[Machine, int]]:
    """A machine whose listener runs, and its port."""
    machine = Machine()
    try:
        yield machine, await machine.listener.start(host, port)
    finally:
        await machine.listener.stop()


@asynccontextmanager
async def hop_to(port: int, host: str = "127.0.0.1") -> AsyncIterator[DirectHop]:
    async with open_session() as session:
        yield DirectHop(session, f"{host}:{port}", PEER.public)


@asynccontextmanager
async def machine_that_answers(handler: Handler) -> AsyncIterator[DirectHop]:
    """A hop to a server that does with each request what `handler` does."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with hop_to(runner.addresses[0][1]) as hop:
            yield hop
    finally:
        await runner.cleanup()


@asynccontextmanager
async def stream_that_answers(talk: Stream) -> AsyncIterator[DirectHop]:
    """A hop to a port where `talk` does as it likes with the bare connection."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                await talk(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        async with hop_to(server.sockets[0].getsockname()[1]) as hop:
            yield hop
    finally:
        server.close()


def answering(body: bytes, status: int = 200, **headers: str) -> Handler:
    """A handler that reads the request and always answers this."""

    async def handle(request: web.BaseRequest) -> web.Response:
        await request.read()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, status=status, headers=named)

    return handle


def stored(facts: Sequence[StoredFact], key: SigningKey = PEER, refused: bytes = b"") -> bytes:
    """The answer to a deposit with these facts."""
    return bodies.make_deposit_answer(custody.make_stored(key, facts), []) + refused


def facts_of(sent: Sequence[Envelope]) -> list[StoredFact]:
    return [StoredFact(envelope.digest, envelope.length) for envelope in sent]


def problem_of(code: str) -> bytes:
    return json.dumps({"code": code, "detail": "EVIL \x1b]0;text\x07", "status": "x"}).encode()


@pytest.fixture
def sender() -> Correspondent:
    return Correspondent(Owner(secrets.token_bytes(32)))


@pytest.fixture
def sent(sender: Correspondent) -> list[Envelope]:
    return [sender.write() for _ in range(3)]


async def test_what_the_peer_signed_as_stored_is_believed_and_the_rest_is_refused_by_position(
    sent: list[Envelope],
) -> None:
    async with listening() as (machine, port), hop_to(port) as hop:
        refused = [bodies.Refused(1, RateLimited(retry_after_s=9))]
        statement = custody.make_stored(PEER, facts_of([sent[0], sent[2]]))
        machine.answer = bodies.make_deposit_answer(statement, refused)
        deposited = await hop.deposit(sent)
    assert machine.deposits == [bodies.join_frames(each.frame.data for each in sent)]
    assert deposited.stored == {sent[0].digest, sent[2].digest}
    assert [(each.position, each.refusal.code) for each in deposited.refused] == [
        (1, "rate_limited")
    ]


async def test_the_frames_of_a_pairing_go_both_ways_and_the_joiners_ip_is_told() -> None:
    async with listening() as (machine, port), hop_to(port) as hop:
        machine.answer = bodies.join_frames([b"reply"])
        assert await hop.pair([b"hello"]) == [b"reply"]
        machine.answer = bodies.join_frames([b"one", b"two"])
        assert await hop.pair([b"hello", b"proof"]) == [b"one", b"two"]
    assert machine.pairings == [
        (bodies.join_frames([b"hello"]), "127.0.0.1"),
        (bodies.join_frames([b"hello", b"proof"]), "127.0.0.1"),
    ]


def _lies(sent: list[Envelope], own: SigningKey) -> dict[str, bytes]:
    true = facts_of(sent)
    first = true[0]
    statement = custody.make_stored(PEER, true)
    flipped = statement[:-1] + bytes([statement[-1] ^ 1])
    return {
        "signed by another key": stored(true, STRANGER),
        "signed by the sender": stored(true, own),
        "a wrong signature": bodies.make_deposit_answer(flipped, []),
        "a wrong digest": stored([StoredFact(bytes(32), first.length), *true[1:]]),
        "a wrong length": stored([StoredFact(first.digest, first.length + 1), *true[1:]]),
        "one envelope too many": stored([*true, StoredFact(bytes(32), 2000)]),
        "an envelope instead": bodies.make_deposit_answer(sent[0].frame.data[:9000], []),
        "nothing signed": bodies.make_deposit_answer(b"", []),
    }


LIES = [
    "signed by another key",
    "signed by the sender",
    "a wrong signature",
    "a wrong digest",
    "a wrong length",
    "one envelope too many",
    "an envelope instead",
    "nothing signed",
]


@pytest.mark.parametrize("lie", LIES)
async def test_rule_4_a_stored_that_is_false_in_any_part_is_not_believed_in_any_part(
    sender: Correspondent, sent: list[Envelope], lie: str
) -> None:
    lies = _lies(sent, sender.pair)
    assert list(lies) == LIES
    async with machine_that_answers(answering(lies[lie])) as hop:
        with pytest.raises(NotBelieved):
            await hop.deposit(sent)


async def test_rule_4_while_there_is_no_pair_key_nothing_is_believed(sent: list[Envelope]) -> None:
    async with machine_that_answers(answering(stored(facts_of(sent)))) as hop:
        with pytest.raises(NotBelieved):
            await DirectHop(hop._session, hop._url[len("http://") : -1]).deposit(sent)


REDIRECT = "http://127.0.0.1:1/v1/deposit"
FOREIGN = {
    "a proxy's 413": answering(b"<html>413 nginx</html>", 413, content_type="text/html"),
    "a proxy's 404": answering(b'{"message": "nginx"}', 404, content_type="application/json"),
    "a proxy's 502": answering(b"", 502),
    "HTML": answering(b"<html><h1>Welcome to nginx!</h1></html>", content_type="text/html"),
    "nothing": answering(b""),
    "no content": answering(b"", 204),
    "garbage": answering(b"\xff" * 5000),
    "zeros": answering(bytes(4000)),
    "a redirect": answering(b"", 302, location=REDIRECT),
    "a lasting redirect": answering(b"", 308, location=REDIRECT),
    "a code that is none": answering(b'{"code": "nginx"}', 400),
    "a login": answering(b"nginx", 401, www_authenticate="Basic realm=nginx"),
    "too much": answering(bytes(MACHINE.answer_bytes_max + 1)),
    "too many frames": answering(bodies.join_frames([b"nginx"] * 3)),
}


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_what_is_no_node_is_an_operating_error_for_every_call_and_is_never_shown(
    sent: list[Envelope], foreign: str
) -> None:
    async with machine_that_answers(FOREIGN[foreign]) as hop:
        for call in (hop.deposit(sent), hop.pair([b"hello"])):
            # Frames of something else are an answer to a deposit, though one that proves nothing.
            with pytest.raises((OperatingError, NotBelieved)) as raised:
                await call
            assert isinstance(raised.value, OperatingError) or foreign in (
                "too many frames",
                "zeros",
            )
            assert getattr(raised.value, "retry", True)
            assert "nginx" not in str(raised.value)


async def test_no_redirect_is_followed(sent: list[Envelope]) -> None:
    asked: list[str] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/other"})

    async with machine_that_answers(handle) as hop:
        with pytest.raises(OperatingError):
            await hop.deposit(sent)
    assert asked == ["/v1/deposit"]


@pytest.mark.parametrize("code", sorted(REFUSALS))
async def test_every_refusal_is_read_by_its_code_alone_and_its_text_is_never_shown(
    sent: list[Envelope], code: str
) -> None:
    async with machine_that_answers(answering(problem_of(code), 418, retry_after="7")) as hop:
        for call in (hop.deposit(sent), hop.pair([b"hello"])):
            with pytest.raises(HopRefused) as raised:
                await call
            refusal = raised.value.refusal
            assert (refusal.code, refusal.retry_after_s) == (code, 7)
            assert raised.value.state is None
            assert "EVIL" not in str(raised.value)


async def _keep_silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        pass


async def _read_nothing(_reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def _trickle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + bytes(5000):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def _trickle_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
    for _ in range(5000):
        writer.write(b"\0")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("talk", [_keep_silent, _read_nothing, _trickle, _trickle_body])
async def test_m1_a_silent_or_dripping_answerer_costs_no_more_than_the_bound(talk: Stream) -> None:
    sender = Correspondent(Owner(secrets.token_bytes(32)))
    large = [sender.write(bytes(200_000)) for _ in range(20)]
    async with stream_that_answers(talk) as hop:
        for call in (hop.deposit(large, total_s=0.5), hop.pair([b"hello"], total_s=0.5)):
            started = time.monotonic()
            with pytest.raises(OperatingError, match="in time") as raised:
                await call
            assert raised.value.retry
            assert 0.4 < time.monotonic() - started < 1.5


GARBAGE = [
    b"",
    b"SSH-2.0-OpenSSH_9.2 EVIL\r\n",
    b"\xff" * 100_000,
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nEVIL",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nEVIL",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nEVIL\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"X-Evil: EVIL\r\n" * 5000,
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: evil\r\nConnection: upgrade\r\n\r\nEVIL",
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
async def test_what_is_no_http_is_an_operating_error(sent: list[Envelope], data: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()
        writer.write_eof()
        await reader.read()

    async with stream_that_answers(talk) as hop:
        with pytest.raises(OperatingError) as raised:
            await hop.deposit(sent, total_s=5)
        assert raised.value.retry
        assert "EVIL" not in str(raised.value)


async def test_nobody_at_the_address_is_an_operating_error_that_says_so(
    sent: list[Envelope],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    async with hop_to(port) as hop:
        with pytest.raises(OperatingError, match="cannot be reached") as raised:
            await hop.deposit(sent)
    assert raised.value.retry


@pytest.mark.parametrize(
    "address",
    ["", "localhost:7420", "192.0.2.7", "192.0.2.7:0", "192.0.2.7:80/x", "u@192.0.2.7:80",
     "192.0.2.7:80?x", "192.0.2.7#x:80", "[192.0.2.7]:80", "2001:db8::7:80"],
)  # fmt: skip
async def test_only_an_ip_and_a_port_are_an_address(address: str) -> None:
    async with open_session() as session:
        with pytest.raises(ValueError, match="address"):
            DirectHop(session, address, PEER.public)


async def test_ipv6_goes_as_well_as_ipv4_and_one_port_serves_both() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    async with listening("") as (machine, port):
        machine.answer = bodies.join_frames([b"reply"])
        for host in ("127.0.0.1", "[::1]"):
            async with hop_to(port, host) as hop:
                assert await hop.pair([b"hello"]) == [b"reply"]
    assert [ip for _, ip in machine.pairings] == ["127.0.0.1", "::1"]


@pytest.mark.parametrize("path", ["/v1/deposit", "/v1/pair"])
async def test_a_refusal_becomes_a_problem_with_its_status_and_retry_after(path: str) -> None:
    async with listening() as (machine, port):
        for refusal, retry_after in (
            (NoSuchQueue(), str(node_listener.RETRY_S)),
            (RateLimited(retry_after_s=77), "77"),
            (TooLarge(), None),
        ):
            machine.answer = refusal
            with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
                answer = await connection.ask(request(path, b"body"))
            assert answer.problem() == refusal.code
            assert answer.status == refusal.status
            assert answer.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("path", ["/v1/deposit", "/v1/pair"])
async def test_a_bug_becomes_unavailable_and_is_logged_by_its_type_alone(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (KeyError("SECRET"), TimeoutError("SECRET"), ConnectionError("SECRET")):
        async with listening() as (machine, port):
            machine.answer = error
            with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
                answer = await connection.ask(request(path, b"body"))
        assert (answer.status, answer.problem()) == (503, "unavailable")
        shown = "".join(capsys.readouterr())
        assert type(error).__name__ in shown
        assert "SECRET" not in shown + answer.body.decode()


async def test_health_is_told_without_detail() -> None:
    async with listening() as (machine, port):
        with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
            for ready, status in ((True, 200), (False, 503)):
                machine.ready = ready
                answer = await connection.ask(request("/readyz"))
                assert (answer.status, json.loads(answer.body)) == (status, {"ready": ready})
                answer = await connection.ask(request("/livez"))
                assert (answer.status, json.loads(answer.body)) == (200, {"alive": True})
                assert answer.headers["server"] == "agentmbx"
            await connection.send(request("/livez", method="HEAD"))
            assert (await connection.answer(to_head=True)).status == 200


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (request("/"), 404, "malformed"),
        (request("/v1/collect", b"x"), 404, "malformed"),
        (request("/v1/deposit/", b"x"), 404, "malformed"),
        (request("/v1/deposit"), 405, "malformed"),
        (request("/v1/pair", method="HEAD"), 405, None),
        (request("/livez", b"x"), 405, "malformed"),
        (request("/v1/pair", b"x", method="PUT"), 405, "malformed"),
        (b"\xff\xff\xff\r\n\r\n", 400, "malformed"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "malformed"),
        (request("/livez", headers=[("X", "x" * 9000)]), 400, "malformed"),
        (request("/livez", headers=[("X", "x")] * 100), 400, "malformed"),
    ],
)
async def test_other_paths_methods_and_no_http_are_problems(
    data: bytes, status: int, code: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    async with listening() as (_, port):
        with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
            await connection.send(data)
            answer = await connection.answer(to_head=code is None)
    assert answer.status == status
    assert code is None or answer.problem() == code
    assert "Traceback" not in "".join(capsys.readouterr())


BOUNDS = {"/v1/deposit": limits.DEPOSIT_BYTES_MAX, "/v1/pair": limits.COMMAND_BYTES_MAX}


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("path", BOUNDS)
async def test_a_body_up_to_its_bound_is_taken_and_one_byte_more_is_too_large(
    path: str, *, in_chunks: bool
) -> None:
    headers = [("Transfer-Encoding", "chunked")] if in_chunks else []
    async with listening() as (machine, port):
        for length, status in ((BOUNDS[path], 200), (BOUNDS[path] + 1, 413)):
            body = bytes(length)
            with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
                await connection.send(
                    request(path, chunked(body) if in_chunks else body, headers=headers)
                )
                answer = await connection.answer()
            assert answer.status == status
            assert status == 200 or answer.problem() == "too_large"
        taken = machine.deposits + [body for body, _ in machine.pairings]
        assert list(map(len, taken)) == [BOUNDS[path]]
        assert machine.listener._bodies_bytes == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip"])
async def test_a_compressed_body_is_refused(encoding: str) -> None:
    body = gzip.compress(bytes(10_000_000))
    headers = [("Content-Encoding", encoding)]
    async with listening() as (machine, port):
        for path in BOUNDS:
            with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
                answer = await connection.ask(request(path, body, headers=headers))
            assert (answer.status, answer.problem()) == (415, "malformed")
        assert machine.deposits == machine.pairings == []


async def test_a_body_that_is_expected_is_asked_for() -> None:
    async with listening() as (machine, port):
        with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
            head = [("Expect", "100-continue"), ("Content-Length", "4")]
            assert (await connection.ask(request("/v1/deposit", b"", headers=head))).status == 100
            assert (await connection.ask(b"body")).status == 200
        assert machine.deposits == [b"body"]


async def test_an_old_client_gets_no_interim_answer() -> None:
    data = request("/v1/deposit", b"body", headers=[("Expect", "100-continue")], version="1.0")
    async with listening() as (_, port):
        with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
            assert (await connection.ask(data)).status == 200


async def test_chunks_that_break_in_the_middle_are_answered_at_once() -> None:
    head = request("/v1/deposit", b"", headers=[("Transfer-Encoding", "chunked")])
    async with listening() as (machine, port):
        with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
            await connection.send(head + b"3\r\nabc\r\n")
            await asyncio.sleep(0.2)
            async with asyncio.timeout(5):
                answer = await connection.ask(b"zz\r\n")
        assert (answer.status, answer.problem()) == (400, "malformed")
        assert machine.deposits == []


async def test_a_length_of_thousands_of_digits_is_malformed() -> None:
    data = request("/v1/deposit", b"abc", headers=[("Content-Length", "0" * 5000 + "3")])
    async with listening() as (machine, port):
        with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
            answer = await connection.ask(data)
        assert (answer.status, answer.problem()) == (400, "malformed")
        assert machine.deposits == []


async def test_a_body_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_listener, "BODY_S", 0.3)
    head = request("/v1/deposit", b"", headers=[("Content-Length", "1000")])
    async with listening() as (machine, port):
        with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
            answer = await connection.ask(head + b"half")
            assert (answer.status, answer.problem()) == (408, "malformed")
            await connection.ended()
        assert machine.deposits == []
        assert machine.listener._bodies_bytes == 0


@pytest.mark.parametrize("start", [b"", b"GET /livez HTTP/1.1\r\nHo", request("/livez")])
async def test_a_connection_without_a_whole_head_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(node_listener, "HEAD_S", 0.3)
    async with listening() as (_, port):
        with await RawConnection.open(f"http://127.0.0.1:{port}") as connection:
            started = time.monotonic()
            await connection.send(start)

            async def drip() -> None:
                with contextlib.suppress(ConnectionError):
                    for _ in range(100):
                        await connection.send(b"x")
                        await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            await connection.ended()
            assert time.monotonic() - started < 1.5
            dripping.cancel()


async def test_there_are_never_more_connections_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_listener, "CONNECTIONS_MAX", 3)
    async with listening() as (_, port):
        url = f"http://127.0.0.1:{port}"
        first = [await RawConnection.open(url) for _ in range(3)]
        for connection in first:
            assert (await connection.ask(request("/livez"))).status == 200
        with await RawConnection.open(url) as beyond:
            await beyond.ended()
        first.pop().close()
        await asyncio.sleep(0.1)
        with await RawConnection.open(url) as again:
            assert (await again.ask(request("/livez"))).status == 200
        for connection in first:
            assert (await connection.ask(request("/livez"))).status == 200
            connection.close()


async def test_all_bodies_together_stay_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_listener, "BODIES_BYTES_MAX", 100_000)
    head = request("/v1/deposit", b"", headers=[("Content-Length", "90000")])
    async with listening() as (machine, port):
        url = f"http://127.0.0.1:{port}"
        with await RawConnection.open(url) as first, await RawConnection.open(url) as second:
            await first.send(head + bytes(80_000))
            await asyncio.sleep(0.1)
            answer = await second.ask(head + bytes(90_000))
            assert (answer.status, answer.problem()) == (503, "unavailable")
            assert (await first.ask(bytes(10_000))).status == 200
        assert list(map(len, machine.deposits)) == [90_000]


async def test_a_peer_that_goes_away_in_the_middle_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = request("/v1/deposit", b"", headers=[("Content-Length", "1000")])
    async with listening() as (machine, port):
        for _ in range(5):
            connection = await RawConnection.open(f"http://127.0.0.1:{port}")
            await connection.send(head + b"half")
            await asyncio.sleep(0.02)
            connection.reset()
        await asyncio.sleep(0.1)
        assert machine.listener._bodies_bytes == 0
        assert machine.deposits == []
    assert "Traceback" not in "".join(capsys.readouterr())


async def test_a_taken_port_becomes_the_next_free_one() -> None:
    async with listening() as (_, port), listening(port=port) as (other, other_port):
        assert port < other_port <= port + node_listener.OTHER_PORTS_MAX
        other.answer = bodies.join_frames([b"other"])
        async with hop_to(other_port) as hop:
            assert await hop.pair([b"hello"]) == [b"other"]


async def test_no_free_port_and_no_such_address_are_operating_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_listener, "OTHER_PORTS_MAX", 0)
    async with listening() as (_, port):
        for host, wanted in (("127.0.0.1", port), ("192.0.2.254", 0), ("no-such-host.invalid", 0)):
            machine = Machine()
            with pytest.raises(OperatingError):
                await machine.listener.start(host, wanted)
            await machine.listener.stop()


async def test_after_a_stop_nobody_listens_and_what_hung_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_listener, "STOP_S", 0.2)
    head = request("/v1/deposit", b"", headers=[("Content-Length", "1000")])
    async with listening() as (machine, port):
        url = f"http://127.0.0.1:{port}"
        with await RawConnection.open(url) as hanging, await RawConnection.open(url) as idle:
            await hanging.send(head)
            await asyncio.sleep(0.05)
            async with asyncio.timeout(3):
                await machine.listener.stop()
                await hanging.ended()
                await idle.ended()
        with pytest.raises(ConnectionError):
            await RawConnection.open(url)
        await machine.listener.stop()


async def test_a_deposit_under_way_is_answered_before_the_stop(sent: list[Envelope]) -> None:
    async with listening() as (machine, port), hop_to(port) as hop:
        began = asyncio.Event()

        async def slow(_body: bytes) -> bytes:
            began.set()
            await asyncio.sleep(0.3)
            return stored(facts_of(sent))

        machine.listener._deposit = slow
        deposit = asyncio.create_task(hop.deposit(sent))
        await began.wait()
        await machine.listener.stop()
        assert len((await deposit).stored) == 3


async def test_a_refused_refusal_is_what_the_sender_sees(sent: list[Envelope]) -> None:
    async with listening() as (machine, port), hop_to(port) as hop:
        machine.answer = Malformed("not yours")
        with pytest.raises(HopRefused) as raised:
            await hop.deposit(sent)
        assert isinstance(raised.value.refusal, Malformed)
        assert "not yours" not in str(raised.value)
