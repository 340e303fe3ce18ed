"""A relay behind any proxy (case P1): prefixes, hosts and spellings of a path change nothing."""

from collections.abc import Iterator

import pytest

from agentmbx_node.hops.http import open_session
from agentmbx_node.hops.relay import parse_relay_line
from agentmbx_node.probe import probe_relay
from agentmbx_protocol.bodies import join_frames
from agentmbx_protocol.keys import key_text
from correspondents import Owner, Wire
from raw_http import RawConnection, request
from relay_process import RelayProcess
from scene import add_queue, queue_at


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    with RelayProcess(tmp_path_factory.mktemp("paths") / "relay", "--open") as running:
        yield running


@pytest.mark.parametrize(
    "prefix",
    ["", "mbx", "mbx/", "mbx/deep/er", "v1", "v1/v1", "caf%C3%A9", "a%20b", "%2e%2e/x", "livez"],
)
async def test_every_call_works_below_any_prefix(relay: RelayProcess, prefix: str) -> None:
    line = f"{relay.url}{prefix}#{key_text(relay.relay_key)}"
    async with open_session() as session:
        scene = await add_queue(Wire(session, line))
        letter = scene.sender.write()
        await scene.wire.deposit(letter)
        assert await scene.wire.drain(scene.owner) == [letter.frame.data]
        await scene.wire.hop.retire(scene.owner.retire_frame())
        steps = [step.name async for step in probe_relay(session, parse_relay_line(line))]
        assert steps[-1] == "retire"


@pytest.mark.parametrize(
    "path",
    ["/v1/info/", "/v1/info//", "//v1/info", "/v1/info?x=y", "/v1/info?", "/v%31/inf%6F",
     "/v1/%69nfo", "http://other.example:99/mbx/v1/info", "HTTPS://RELAY.EXAMPLE/v1/info"],
)  # fmt: skip
async def test_a_path_is_the_same_however_it_is_spelt(relay: RelayProcess, path: str) -> None:
    with await RawConnection.open(relay.url) as connection:
        plain = await connection.ask(request("/v1/info"))
        answer = await connection.ask(request(path))
    assert (answer.status, answer.body) == (200, plain.body)


@pytest.mark.parametrize(
    "host",
    [
        "RELAY.EXAMPLE",
        "relay.example:3443",
        "[::1]:7421",
        "127.0.0.1",
        "xn--caf-dma.example",
        "a b",
        "",
    ],
)
async def test_signed_calls_work_whatever_host_a_proxy_passes_on(
    relay: RelayProcess, host: str
) -> None:
    owner = Owner(relay.relay_key)
    forwarded = [("X-Forwarded-Host", "Other.Example"), ("X-Forwarded-Proto", "https"),
                 ("Forwarded", "for=192.0.2.1;host=x"), ("X-Forwarded-Prefix", "/mbx")]  # fmt: skip
    with await RawConnection.open(relay.url) as connection:
        for path, frame in (
            ("register", owner.register_frame()),
            ("collect", owner.collect_frame()),
        ):
            data = request(f"/v1/{path}/", join_frames([frame]), host=host, headers=forwarded)
            assert (await connection.ask(data)).status == 200


async def test_a_relay_on_an_ipv6_address_is_reached_by_its_line_in_brackets(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    relay = RelayProcess(tmp_path_factory.mktemp("v6") / "relay")
    with relay.start(listen="[::1]:0"):
        assert relay.url.startswith("http://[::1]:")
        line = relay.invite("--uses", "2")
        assert line.startswith(relay.url + "#")
        async with queue_at(relay, line=line) as scene:
            letter = scene.sender.write()
            await scene.wire.deposit(letter)
            assert await scene.wire.drain(scene.owner) == [letter.frame.data]


@pytest.mark.parametrize(
    ("public_url", "shown"),
    [
        ("https://Relay.Example:3443/mbx", "https://Relay.Example:3443/mbx/"),
        ("https://[2001:db8::1]/", "https://[2001:db8::1]/"),
    ],
)
async def test_an_invite_shows_the_url_that_the_operator_gave(
    tmp_path_factory: pytest.TempPathFactory, public_url: str, shown: str
) -> None:
    folder = tmp_path_factory.mktemp("public") / "relay"
    with RelayProcess(folder, "--public-url", public_url) as relay:
        assert relay.invite().startswith(f"{shown}#{key_text(relay.relay_key)}.")


async def test_a_line_with_any_case_in_scheme_host_and_key_reaches_the_same_relay(
    relay: RelayProcess,
) -> None:
    port = relay.url.rstrip("/").rpartition(":")[2]
    line = f"HTTP://LocalHost:{port}/Mbx#{key_text(relay.relay_key).upper()}"
    async with open_session() as session:
        scene = await add_queue(Wire(session, line))
        await scene.wire.deposit(scene.sender.write())
        assert len(await scene.wire.drain(scene.owner)) == 1
