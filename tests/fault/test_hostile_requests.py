"""Requests that are too large, oddly framed or no HTTP at all (case R2).

Each gets a typed problem that a plain client can read, in bounded memory, and others do not notice.
"""

import asyncio
import http.client
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from agentmbx_protocol import limits
from agentmbx_protocol.bodies import FRAMES_MEDIA_TYPE, join_frames
from process_view import forget_peak, memory_bytes, peak_memory_bytes
from raw_http import Answer, RawConnection, chunked, deposit_request, request
from relay_process import RelayProcess
from scene import queue_at, seeded

GROWTH_BYTES_MAX = 50 * 1024 * 1024
SENT_BYTES_MAX = 400 * 1024 * 1024
MIB = 1024 * 1024
PATHS = ("/v1/deposit", "/v1/collect", "/v1/register", "/v1/retire")
BOMB = zlib.compress(bytes(64 * MIB), 9)
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(32)) + bytes(160)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    folder = tmp_path_factory.mktemp("hostile") / "relay"
    with RelayProcess(folder, "--open", "--head-timeout", "3s") as running:
        yield running


@asynccontextmanager
async def nobody_notices(relay: RelayProcess) -> AsyncIterator[None]:
    """While the block runs another client deposits and collects, and memory stays bounded."""
    async with queue_at(relay) as scene:
        await scene.wire.deposit(scene.sender.write())
        before = memory_bytes(relay.pid)
        forget_peak(relay.pid)
        stop = asyncio.Event()

        async def honest() -> int:
            while not stop.is_set():
                async with asyncio.timeout(5):
                    await scene.wire.deposit(scene.sender.write())
                await asyncio.sleep(0.005)
            return len(await scene.wire.drain(scene.owner))

        other = asyncio.create_task(honest())
        try:
            yield
        finally:
            stop.set()
        assert await other == scene.sender.number
        assert peak_memory_bytes(relay.pid) - before < GROWTH_BYTES_MAX
        assert "Traceback" not in relay.log()


def ask_plainly(relay: RelayProcess, data: bytes) -> Answer:
    """The answer as a plain client meets it: it sends all that it has, then it reads."""
    host, _, port = relay.url.removeprefix("http://").rstrip("/").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=15)
    try:
        connection.connect()
        connection.sock.sendall(data)
        response = http.client.HTTPResponse(connection.sock)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())
    finally:
        connection.close()


async def _assert_problem(relay: RelayProcess, data: bytes, *expected: tuple[int, str]) -> None:
    async with nobody_notices(relay):
        answer = await asyncio.to_thread(ask_plainly, relay, data)
        assert (answer.status, answer.problem()) in expected


def _with_body(path: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    return request(path, body, headers=headers)


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_in_chunks_beyond_the_bound_is_too_large(
    relay: RelayProcess, path: str
) -> None:
    data = _with_body(path, chunked(bytes(12 * MIB)), ("Transfer-Encoding", "chunked"))
    await _assert_problem(relay, data, (413, "too_large"))


@pytest.mark.parametrize("path", PATHS)
async def test_a_length_beyond_the_bound_is_too_large(relay: RelayProcess, path: str) -> None:
    await _assert_problem(relay, _with_body(path, bytes(12 * MIB)), (413, "too_large"))


@pytest.mark.parametrize("path", PATHS)
async def test_an_endless_body_in_chunks_is_answered_and_cut_off(
    relay: RelayProcess, path: str
) -> None:
    async with nobody_notices(relay):
        with await RawConnection.open(relay.url) as connection:
            head = request(path, b"", headers=[("Transfer-Encoding", "chunked")])
            sending = asyncio.create_task(_send_without_end(connection, head))
            answer = await connection.answer()
            assert (answer.status, answer.problem()) == (413, "too_large")
            await connection.ended()
            async with asyncio.timeout(10):
                assert await sending < SENT_BYTES_MAX


async def _send_without_end(connection: RawConnection, head: bytes) -> int:
    chunk = b"%x\r\n%s\r\n" % (MIB, bytes(MIB))
    sent = 0
    try:
        await connection.send(head)
        while sent < SENT_BYTES_MAX:
            await connection.send(chunk)
            sent += len(chunk)
    except ConnectionError:
        pass
    return sent


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ("99999999999999999999", (413, "too_large")),
        ("9" * 200, (413, "too_large")),
        ("-1", (400, "malformed")),
        ("+5", (400, "malformed")),
        ("0x10", (400, "malformed")),
        ("5, 5", (400, "malformed")),
        ("", (400, "malformed")),
        ("five", (400, "malformed")),
        ("5", (400, "malformed")),
    ],
)
async def test_a_length_that_is_no_number_or_not_true_is_a_problem(
    relay: RelayProcess, length: str, expected: tuple[int, str]
) -> None:
    data = _with_body("/v1/deposit", bytes(3000), ("Content-Length", length))
    await _assert_problem(relay, data, expected, (400, "malformed"))


@pytest.mark.parametrize(
    "headers",
    [
        [("Content-Length", "5"), ("Content-Length", "6")],
        [("Content-Length", "5"), ("Transfer-Encoding", "chunked")],
        [("Transfer-Encoding", "gzip, chunked")],
        [("Transfer-Encoding", "chunked, identity")],
        [("Transfer-Encoding", "xchunked")],
    ],
)
async def test_two_ways_to_say_where_a_body_ends_are_malformed(
    relay: RelayProcess, headers: list[tuple[str, str]]
) -> None:
    await _assert_problem(relay, _with_body("/v1/deposit", b"5\r\nhello\r\n0\r\n\r\n", *headers),
                          (400, "malformed"))  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "encoding",
    ["gzip", "GZIP", "deflate", "br", "zstd", "x-gzip", "gzip, gzip", "identity, gzip", "", "*"],
)
async def test_a_body_with_a_content_encoding_is_refused_unopened(
    relay: RelayProcess, path: str, encoding: str
) -> None:
    with await RawConnection.open(relay.url) as connection:
        answer = await connection.ask(_with_body(path, b"body", ("Content-Encoding", encoding)))
    assert (answer.status, answer.problem()) == (415, "malformed")


async def test_a_compressed_bomb_is_refused_unopened(relay: RelayProcess) -> None:
    data = _with_body("/v1/deposit", BOMB, ("Content-Encoding", "deflate"))
    await _assert_problem(relay, data, (415, "malformed"))


@pytest.mark.parametrize("name", ["Content-Type", "X-Thing"])
async def test_a_multipart_body_is_only_bytes_that_are_no_frames(
    relay: RelayProcess, name: str
) -> None:
    body = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n" + b"a" * MIB
    data = request("/v1/deposit", body, headers=[(name, "multipart/form-data")])
    await _assert_problem(relay, data, (400, "malformed"))


@pytest.mark.parametrize(
    "data",
    [
        request("/v1/info", headers=[(f"X-{n}", "v") for n in range(10_000)]),
        request("/v1/info", headers=[("X-Long", "v" * MIB)]),
        request("/v1/info", headers=[("X" * MIB, "v")]),
        request("/v1/" + "a" * MIB),
        request("/v1/info?" + "a" * MIB),
        request("/v1/info", method="G" * MIB),
        request("/v1/deposit", b"x", headers=[(f"Cookie-{n}", "c" * 7000) for n in range(200)]),
    ],
    ids=["10k-headers", "long-value", "long-name", "long-path", "long-query", "long-method", "sum"],
)
async def test_a_head_that_is_too_large_is_a_problem_that_a_plain_client_reads(
    relay: RelayProcess, data: bytes
) -> None:
    await _assert_problem(
        relay, data, (400, "malformed"), (431, "malformed"), (431, "too_large")
    )  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        CLIENT_HELLO,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0" * 5000,
        b"\r\n" * 5000,
        b"GET\r\n\r\n",
        b"GET /v1/info HTTP/9.9\r\n\r\n",
        b"GET /v1/info HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /v1/info HTTP/1.1\r\nHost: a\r\n folded: b\r\n\r\n",
        b"GET /v1/info HTTP/1.1\r\nHost: a\r\nX\x00Y: b\r\n\r\n",
        b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"EHLO mail.example\r\n",
    ],
)
async def test_bytes_that_are_no_http_get_a_problem_or_an_end_and_no_more(
    relay: RelayProcess, data: bytes
) -> None:
    async with nobody_notices(relay):
        with await RawConnection.open(relay.url) as connection:
            await connection.send(data)
            try:
                answer = await connection.answer()
            except ConnectionError:
                return
            if data != b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n":
                assert (answer.status, answer.problem()) == (400, "malformed")
                await connection.ended()
            else:
                assert answer.status in (400, 404)
                assert answer.problem() == "malformed"


async def test_random_bytes_never_bring_more_than_a_problem(relay: RelayProcess) -> None:
    dice = seeded()
    async with nobody_notices(relay):
        for _ in range(150):
            data = dice.randbytes(dice.randrange(1, 4000)) + b"\r\n\r\n"
            with await RawConnection.open(relay.url) as connection:
                await connection.send(data)
                try:
                    answer = await connection.answer()
                except ConnectionError:
                    continue
                assert (answer.status, answer.problem()) == (400, "malformed")


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on(relay: RelayProcess) -> None:
    async with queue_at(relay) as scene:
        data = deposit_request(
            scene.sender.write().frame.data, headers=[("Expect", "100-continue")]
        )
        head, _, body = data.partition(b"\r\n\r\n")
        with await RawConnection.open(relay.url) as connection:
            assert (await connection.ask(head + b"\r\n\r\n")).status == 100
            assert (await connection.ask(body)).status == 200


async def test_a_client_that_asks_before_it_sends_too_much_is_told_so_at_once(
    relay: RelayProcess,
) -> None:
    headers = [("Expect", "100-continue"), ("Content-Length", str(limits.DEPOSIT_BYTES_MAX + 1))]
    with await RawConnection.open(relay.url) as connection:
        answer = await connection.ask(request("/v1/deposit", b"", headers=headers))
    assert (answer.status, answer.problem()) == (413, "too_large")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_both_versions_of_http_1_are_served(relay: RelayProcess, version: str) -> None:
    async with queue_at(relay) as scene:
        letter = scene.sender.write()
        data = request("/v1/deposit", join_frames([letter.frame.data]), version=version)
        with await RawConnection.open(relay.url) as connection:
            answer = await connection.ask(data)
            assert (answer.status, answer.headers["content-type"]) == (200, FRAMES_MEDIA_TYPE)
            if version == "1.0":
                await connection.ended()
        assert await scene.wire.drain(scene.owner) == [letter.frame.data]


async def test_pipelined_requests_are_answered_in_their_order(relay: RelayProcess) -> None:
    async with queue_at(relay) as scene:
        letters = [scene.sender.write() for _ in range(40)]
        data = b"".join(deposit_request(letter.frame.data) for letter in letters)
        with await RawConnection.open(relay.url) as connection:
            await connection.send(data + request("/v1/nothing") + request("/livez"))
            answers = [await connection.answer() for _ in range(42)]
        assert [answer.status for answer in answers] == [200] * 40 + [404, 200]
        assert await scene.wire.drain(scene.owner) == [each.frame.data for each in letters]


async def test_requests_that_pile_up_behind_a_long_poll_take_no_memory(
    relay: RelayProcess,
) -> None:
    async with queue_at(relay) as scene, nobody_notices(relay):
        poll = join_frames([scene.owner.collect_frame(wait_s=4)])
        with await RawConnection.open(relay.url) as connection:
            await connection.send(request("/v1/collect", poll))
            more = request("/v1/info") * 2000
            piling = asyncio.create_task(_send_many(connection, more, 300))
            answer = await connection.answer()
            assert answer.status == 200
            piling.cancel()


async def _send_many(connection: RawConnection, data: bytes, times: int) -> None:
    for _ in range(times):
        await connection.send(data)


async def test_chunks_that_break_in_the_middle_are_answered_at_once(relay: RelayProcess) -> None:
    head = request("/v1/collect", b"", headers=[("Transfer-Encoding", "chunked")])
    with await RawConnection.open(relay.url) as connection:
        await connection.send(head + b"3\r\nabc\r\n")
        await asyncio.sleep(0.2)
        async with asyncio.timeout(5):
            answer = await connection.ask(b"zz\r\n")
    assert (answer.status, answer.problem()) == (400, "malformed")


async def test_a_length_of_thousands_of_digits_is_malformed(relay: RelayProcess) -> None:
    data = request("/v1/collect", b"abc", headers=[("Content-Length", "0" * 5000 + "3")])
    with await RawConnection.open(relay.url) as connection:
        answer = await connection.ask(data)
    assert (answer.status, answer.problem()) == (400, "malformed")
    assert "request_failed" not in relay.log()


async def test_an_old_client_gets_no_interim_answer(relay: RelayProcess) -> None:
    data = request("/v1/collect", b"abc", headers=[("Expect", "100-continue")], version="1.0")
    with await RawConnection.open(relay.url) as connection:
        assert (await connection.ask(data)).status == 400
