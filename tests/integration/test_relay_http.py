"""Any bytes at any endpoint of a real relay: a typed problem, and nothing about the machine."""

import base64
import json
import random
import struct
from collections.abc import Iterator

import pytest

from agentmbx_protocol import limits
from agentmbx_protocol.bodies import (
    FRAMES_MEDIA_TYPE,
    join_frames,
    parse_deposit_answer,
)
from agentmbx_protocol.keys import key_text
from agentmbx_protocol.queue_commands import parse_queue_state
from raw_http import Answer, RawConnection, request
from relay_process import RelayProcess
from scene import Scene, queue_at, seeded
from vector_parts import typical

CALLS = ("/v1/deposit", "/v1/collect", "/v1/register", "/v1/retire")
PAGES = ("/v1/info", "/livez", "/readyz")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW")
TEXTS = [
    b"",
    b"\0",
    b"   ",
    b"null",
    b'{"queue": "\\ud83d"}',
    b"[" * 10_000,
    b"1" * 400,
    b"1e400",
    b"NaN",
    b"\xc0\xaf\xed\xa0\xbd",
    b"a" * 1_000_000,
]
LENGTHS = [
    b"\0\0\0\0",
    b"\0\0\0\1",
    b"\xff\xff\xff\xff",
    b"\0\0\0\1a\0\0",
    b"\0\0\0\1a" * 65,
    struct.pack(">I", limits.FRAME_BYTES_MAX + 1) + bytes(limits.FRAME_BYTES_MAX + 1),
    struct.pack(">I", 2**31) + b"a" * 100,
]
PROBLEMS = {
    (400, "malformed"),
    (400, "unsupported_version"),
    (403, "bad_signature"),
    (404, "no_such_queue"),
    (413, "too_large"),
}
FRAMES = [
    typical.envelope(), typical.held(), typical.stored(), typical.register(), typical.admit(),
    typical.collect(), typical.retire(), typical.queue_state(), typical.card(),
]  # fmt: skip


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    folder = tmp_path_factory.mktemp("http") / "relay"
    with RelayProcess(folder, "--open", "--name", "a relay for tests") as running:
        yield running


def _bodies(dice: random.Random) -> list[bytes]:
    frames = [join_frames([frame.data]) for frame in FRAMES]
    flipped = [_flip(frame, dice) for frame in frames for _ in range(3)]
    cut = [frame[: dice.randrange(len(frame))] for frame in frames]
    noise = [dice.randbytes(dice.randrange(1, 2000)) for _ in range(10)]
    return TEXTS + LENGTHS + frames + flipped + cut + noise


def _flip(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]


def _assert_tells_nothing(answer: Answer, relay: RelayProcess) -> None:
    """No traceback, no version, no path, no address of this machine."""
    assert answer.headers["server"] == "agentmbx"
    assert set(answer.headers) <= {
        "server", "content-type", "content-length", "date", "connection", "retry-after"
    }  # fmt: skip
    for word in (b"Traceback", b"aiohttp", b"Python", b"127.0.0.1", str(relay.data).encode()):
        assert word not in answer.body


@pytest.mark.parametrize("path", CALLS)
async def test_any_bytes_at_a_call_get_a_typed_problem_and_few_lines_in_the_log(
    relay: RelayProcess, path: str
) -> None:
    dice = seeded()
    logged = len(relay.log().splitlines())
    for body in _bodies(dice):
        with await RawConnection.open(relay.url) as connection:
            answer = await connection.ask(request(path, body))
        code = answer.problem()
        assert (answer.status, code) in PROBLEMS, (body[:80], answer)
        assert ("retry-after" in answer.headers) == (code == "no_such_queue")
        _assert_tells_nothing(answer, relay)
    assert len(relay.log().splitlines()) - logged <= 10
    assert "Traceback" not in relay.log()


@pytest.mark.parametrize("path", [*CALLS, *PAGES])
@pytest.mark.parametrize("method", METHODS)
async def test_another_method_than_belongs_to_a_path_is_a_problem(
    relay: RelayProcess, path: str, method: str
) -> None:
    if (method == "POST") == (path in CALLS) and method in ("GET", "HEAD", "POST"):
        return
    with await RawConnection.open(relay.url) as connection:
        await connection.send(request(path, method=method))
        answer = await connection.answer(to_head=method == "HEAD")
        assert answer.status == (400 if method == "BREW" else 405)
        _assert_tells_nothing(answer, relay)
        if method != "HEAD":
            assert answer.problem() == "malformed"


@pytest.mark.parametrize(
    "path",
    ["/", "//", "/v1", "/v1/", "/v1/nothing", "/v2/info", "/metrics", "/v1/metrics", "/v1/info/x",
     "/v1/info;a", "/%76%31", "/..", "/.env", "/v1/deposit.php", "/%00", "/%ff%fe", "*"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_path_is_a_problem(relay: RelayProcess, path: str, method: str) -> None:
    with await RawConnection.open(relay.url) as connection:
        answer = await connection.ask(request(path, b"x" if method == "POST" else None))
    assert answer.status in (400, 404)
    assert answer.problem() == "malformed"
    _assert_tells_nothing(answer, relay)


async def test_the_pages_answer_what_spec_says_and_no_more(relay: RelayProcess) -> None:
    with await RawConnection.open(relay.url) as connection:
        info = await connection.ask(request("/v1/info"))
        pages = [await connection.ask(request(path)) for path in ("/livez", "/readyz")]
        await connection.send(request("/v1/info", method="HEAD"))
        head = await connection.answer(to_head=True)
    document = json.loads(info.body)
    assert set(document) == {"versions", "relay_key", "name", "admission", "limits"}
    assert (document["versions"], document["admission"]) == ([1], "open")
    assert document["relay_key"] == key_text(relay.relay_key)
    assert document["name"] == "a relay for tests"
    assert document["limits"] == {
        "envelope_bytes_max": 524_288,
        "deposit_envelopes_max": 64,
        "deposit_bytes_max": 4_194_304,
        "collect_bytes_max": 4_194_304,
        "collect_wait_s_max": 50,
        "senders_max": 256,
        "ttl_s_max": 604_800,
        "queue_bytes_max": 256 * 1024 * 1024,
    }
    assert [(page.status, json.loads(page.body)) for page in pages] == [
        (200, {"alive": True}),
        (200, {"ready": True}),
    ]
    assert (head.status, head.headers["content-length"]) == (200, str(len(info.body)))
    for answer in (info, *pages, head):
        _assert_tells_nothing(answer, relay)


async def test_what_is_no_envelope_in_a_deposit_does_not_harm_its_neighbours(
    relay: RelayProcess,
) -> None:
    dice = seeded()
    async with queue_at(relay, senders=2) as scene:
        good = [scene.senders[0].write() for _ in range(4)]
        frames = [
            good[0].frame.data,
            dice.randbytes(2000),
            good[1].frame.data,
            scene.senders[1].write().frame.data,
            scene.owner.collect_frame(),
            good[2].frame.data[:-1] + bytes([good[2].frame.data[-1] ^ 1]),
            good[0].frame.data,
            good[3].frame.data,
            b"MBX2" + good[3].frame.data[4:],
        ]
        with await RawConnection.open(relay.url) as connection:
            answer = await connection.ask(request("/v1/deposit", join_frames(frames)))
        assert (answer.status, answer.headers["content-type"]) == (200, FRAMES_MEDIA_TYPE)
        _, others = parse_deposit_answer(answer.body, len(frames))
        assert [(each.position, each.refusal.code) for each in others] == [
            (1, "malformed"),
            (3, "malformed"),
            (4, "malformed"),
            (5, "bad_signature"),
            (8, "unsupported_version"),
        ]
        drained = await scene.wire.drain(scene.owner)
        assert drained == [good[0].frame.data, good[1].frame.data, good[3].frame.data]


@pytest.mark.parametrize("count", [0, 65])
async def test_a_deposit_of_none_or_too_many_is_a_problem(relay: RelayProcess, count: int) -> None:
    async with queue_at(relay) as scene:
        body = join_frames(scene.sender.write().frame.data for _ in range(count))
        with await RawConnection.open(relay.url) as connection:
            answer = await connection.ask(request("/v1/deposit", body))
        expected = (413, "too_large") if count else (400, "malformed")
        assert (answer.status, answer.problem()) == expected


async def test_a_command_for_another_relay_or_with_a_frame_too_many_is_a_problem(
    relay: RelayProcess,
) -> None:
    async with queue_at(relay) as scene:
        owner = scene.owner
        owner.relay_key = typical.RELAY.public
        stray = {
            "/v1/collect": owner.collect_frame(),
            "/v1/register": owner.register_frame(),
            "/v1/retire": owner.retire_frame(),
        }
        owner.relay_key = relay.relay_key
        twice = {
            "/v1/collect": [owner.collect_frame(), owner.collect_frame()],
            "/v1/register": [owner.register_frame()] * 3,
            "/v1/retire": [owner.retire_frame()] * 2,
        }
        with await RawConnection.open(relay.url) as connection:
            for path, frame in stray.items():
                answer = await connection.ask(request(path, join_frames([frame])))
                assert (answer.status, answer.problem()) == (400, "malformed")
            for path, frames in twice.items():
                answer = await connection.ask(request(path, join_frames(frames)))
                assert (answer.status, answer.problem()) == (413, "too_large")
        assert (await scene.wire.collect(scene.owner)).envelopes == []


async def test_a_stale_command_brings_the_signed_state_that_mends_it(relay: RelayProcess) -> None:
    async with queue_at(relay) as scene:
        old = scene.owner.collect_frame()
        await scene.wire.collect(scene.owner)
        await _assert_proven(relay, scene, old, "stale", 409)
        stranger_instance = scene.owner.instance
        scene.owner.instance = bytes(16)
        await _assert_proven(relay, scene, scene.owner.collect_frame(), "superseded", 409)
        scene.owner.instance = stranger_instance
        await scene.wire.hop.retire(scene.owner.retire_frame())
        await _assert_proven(relay, scene, scene.owner.collect_frame(), "retired", 410)


async def _assert_proven(
    relay: RelayProcess, scene: Scene, frame: bytes, code: str, status: int
) -> None:
    with await RawConnection.open(relay.url) as connection:
        answer = await connection.ask(request("/v1/collect", join_frames([frame])))
    assert (answer.status, answer.problem()) == (status, code)
    state = parse_queue_state(base64.b64decode(json.loads(answer.body)["queue_state"]))
    assert (state.relay, state.queue) == (relay.relay_key, scene.owner.queue.public)
    assert state.flag.name.lower() == code
    assert 0 < state.counter <= scene.owner.counter
