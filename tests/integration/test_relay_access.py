"""Who may do what with a queue (case A5): exactly the cells of one table, and rule 8.

Every identity tries every call on one queue, in every way that it can sign it. What is refused
looks the same when the queue is not there at all.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import msgspec
import pytest
import pytest_asyncio

from agentmbx_node.hops.http import open_session
from agentmbx_protocol.bodies import join_frames
from agentmbx_protocol.keys import SigningKey, key_text
from agentmbx_protocol.queue_commands import make_admit
from correspondents import Correspondent, Owner, Wire
from raw_http import Answer, RawConnection, request
from relay_process import RelayProcess
from scene import Scene, add_queue, eventually, refused

CALLS = ("deposit", "collect", "register", "retire")
IDENTITIES = (
    "nobody", "unlisted sender", "listed sender A", "listed sender B", "former sender",
    "owner of another queue", "holder of an invite", "owner",
)  # fmt: skip
ALLOWED = {("listed sender A", "deposit"), ("listed sender B", "deposit")} | {
    ("owner", call) for call in ("collect", "register", "retire")
}
Body = list[bytes]


class Cast(msgspec.Struct):
    """A queue at a closed relay, and everybody who may have an eye on it."""

    relay: RelayProcess
    wire: Wire
    scene: Scene
    keys: Mapping[str, SigningKey]
    invite: SigningKey

    def bodies(self, call: str, identity: str, owner: Owner) -> list[Body]:
        """Each way in which this identity can ask for the call on the queue of `owner`."""
        key = self.keys[identity]
        if call == "deposit":
            return [[Correspondent(owner, key).write().frame.data]]
        own = Owner(self.relay.relay_key, owner.senders)
        own.queue, own.instance, own.counter = key, owner.instance, owner.counter
        frame: Callable[[Owner], bytes] = {
            "collect": Owner.collect_frame,
            "register": Owner.register_frame,
            "retire": Owner.retire_frame,
        }[call]
        forged = _signed_for(frame(own), owner.queue.public)
        bodies = [[forged], [forged, make_admit(key, self.relay.relay_key, owner.queue.public)]]
        return bodies if call == "register" and identity != "owner" else bodies[:1]


def _signed_for(frame: bytes, queue: bytes) -> bytes:
    """The frame with another queue as its signer; its signature fits only if that is its key."""
    return frame[:8] + queue + frame[40:]


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    with RelayProcess(tmp_path_factory.mktemp("access") / "relay") as running:
        yield running


@pytest.fixture(scope="module")
def line(relay: RelayProcess) -> str:
    return relay.invite("--uses", "200")


@pytest_asyncio.fixture
async def cast(relay: RelayProcess, line: str) -> AsyncIterator[Cast]:
    async with open_session() as session:
        wire = Wire(session, line)
        scene = await add_queue(wire, senders=3)
        for sender in scene.senders:
            await wire.deposit(sender.write())
        former = scene.senders.pop()
        scene.owner.senders = tuple(sorted(sender.pair.public for sender in scene.senders))
        await wire.register(scene.owner)
        other = await add_queue(wire)
        assert wire.invite is not None
        keys = {
            "nobody": SigningKey.generate(),
            "unlisted sender": other.sender.pair,
            "listed sender A": scene.senders[0].pair,
            "listed sender B": scene.senders[1].pair,
            "former sender": former.pair,
            "owner of another queue": other.owner.queue,
            "holder of an invite": wire.invite,
            "owner": scene.owner.queue,
        }
        yield Cast(relay, wire, scene, keys, wire.invite)


async def _ask(relay: RelayProcess, call: str, body: Body) -> Answer:
    with await RawConnection.open(relay.url) as connection:
        return await connection.ask(request("/v1/" + call, join_frames(body)))


def _looks(answer: Answer) -> tuple[int, bytes, list[tuple[str, str]]]:
    return answer.status, answer.body, sorted(
        item for item in answer.headers.items() if item[0] != "date"
    )  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("identity", IDENTITIES)
async def test_a5_exactly_the_cells_of_the_table_are_allowed_and_refusals_tell_nothing(
    cast: Cast, identity: str, call: str
) -> None:
    owner = cast.scene.owner
    nowhere = Owner(cast.relay.relay_key, owner.senders)
    nowhere.instance = owner.instance
    for body, body_nowhere in zip(
        cast.bodies(call, identity, owner), cast.bodies(call, identity, nowhere), strict=True
    ):
        answer = await _ask(cast.relay, call, body)
        if (identity, call) in ALLOWED:
            assert answer.status == 200
            continue
        expected = (404, "no_such_queue") if call == "deposit" else (403, "bad_signature")
        assert (answer.status, answer.problem()) == expected
        assert _looks(answer) == _looks(await _ask(cast.relay, call, body_nowhere))
    if identity != "owner":
        await _assert_untouched(cast, deposited=(identity, call) in ALLOWED)


async def _assert_untouched(cast: Cast, *, deposited: bool) -> None:
    """The queue has its three letters, and the list that its owner gave."""
    collected = await cast.wire.collect(cast.scene.owner)
    assert collected.state is None
    assert len(collected.envelopes) == 3 + deposited


@pytest.mark.parametrize("signed", ["well", "badly"])
@pytest.mark.parametrize(
    "identity", [each for each in IDENTITIES if (each, "deposit") not in ALLOWED]
)
async def test_rule_8_unknown_queue_and_unlisted_sender_get_one_answer_before_any_signature_check(
    cast: Cast, identity: str, signed: str
) -> None:
    sender = Correspondent(cast.scene.owner, cast.keys[identity])
    to_nowhere = Correspondent(Owner(cast.relay.relay_key), cast.keys[identity])
    looks = set()
    for envelope in (sender.write().frame.data, to_nowhere.write().frame.data):
        end = envelope[-1:] if signed == "well" else bytes([envelope[-1] ^ 1])
        answer = await _ask(cast.relay, "deposit", [envelope[:-1] + end])
        assert (answer.status, answer.problem()) == (404, "no_such_queue")
        assert b'"retryable": true' in answer.body
        assert int(answer.headers["retry-after"]) > 0
        looks.add(str(_looks(answer)))
    assert len(looks) == 1


async def test_rule_8_a_retired_queue_looks_to_senders_like_one_that_never_was(cast: Cast) -> None:
    listed = cast.scene.sender
    await cast.wire.hop.retire(cast.scene.owner.retire_frame())
    retired = await _ask(cast.relay, "deposit", [listed.write().frame.data])
    never = Correspondent(Owner(cast.relay.relay_key), listed.pair)
    unknown = await _ask(cast.relay, "deposit", [never.write().frame.data])
    assert _looks(retired) == _looks(unknown)
    assert (retired.status, retired.problem()) == (404, "no_such_queue")


async def test_a_command_for_a_queue_that_is_not_there_says_so_only_to_its_owner(
    cast: Cast,
) -> None:
    owner = Owner(cast.relay.relay_key)
    for call, frame in (("collect", owner.collect_frame()), ("retire", owner.retire_frame())):
        answer = await _ask(cast.relay, call, [frame])
        assert (answer.status, answer.problem()) == (404, "no_such_queue")
    answer = await _ask(cast.relay, "register", [owner.register_frame()])
    assert (answer.status, answer.problem()) == (403, "not_admitted")


@pytest.mark.parametrize(
    "identity", ["nobody", "unlisted sender", "listed sender A", "former sender"]
)
async def test_nobody_but_owners_and_holders_of_invites_admits_a_queue(
    cast: Cast, identity: str
) -> None:
    new = Owner(cast.relay.relay_key)
    for lifetime_s in (0, 600):
        proof = new.admit_frame(cast.keys[identity], lifetime_s)
        answer = await refused(cast.wire.hop.register(new.register_frame(), proof))
        assert answer.refusal.code == "not_admitted"


@pytest.mark.parametrize("identity", ["owner", "owner of another queue", "holder of an invite"])
async def test_an_admission_is_for_one_queue_at_one_relay_and_for_no_other(
    cast: Cast, identity: str
) -> None:
    key = cast.keys[identity]
    new, another = Owner(cast.relay.relay_key), Owner(cast.relay.relay_key)
    for proof in (
        another.admit_frame(key),
        make_admit(key, SigningKey.generate().public, new.queue.public),
        new.admit_frame(key)[:-1] + b"\0",
    ):
        answer = await refused(cast.wire.hop.register(new.register_frame(), proof))
        assert answer.refusal.code in ("not_admitted", "bad_signature")
    state = await cast.wire.hop.register(new.register_frame(), new.admit_frame(key))
    assert state.queue == new.queue.public


async def test_an_invite_that_is_used_up_admits_nobody(cast: Cast) -> None:
    async with open_session() as session:
        wire = Wire(session, cast.relay.invite())
        await add_queue(wire)
        answer = await refused(wire.register(Owner(cast.relay.relay_key)))
        assert answer.refusal.code == "not_admitted"


async def test_an_invite_that_is_over_admits_nobody(cast: Cast) -> None:
    async with open_session() as session:
        wire = Wire(session, cast.relay.invite("--ttl", "1s"))
        ends_s = time.monotonic() + 1.1
        await eventually(lambda: time.monotonic() > ends_s, within_s=5, what="the end of a second")
        answer = await refused(wire.register(Owner(cast.relay.relay_key)))
        assert answer.refusal.code == "not_admitted"


async def test_metrics_are_not_on_the_port_of_the_nodes(cast: Cast) -> None:
    with await RawConnection.open(cast.relay.url) as connection:
        for path in ("/metrics", "//metrics", "/metrics/", "/%6detrics", "/v1/../metrics"):
            answer = await connection.ask(request(path))
            assert (answer.status, answer.problem()) == (404, "malformed")
            assert key_text(cast.relay.relay_key).encode() not in answer.body
