"""The wheel, the image and the compose file keep their promises: the same steps without Docker."""

import json
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

from agentmbx_relay import healthcheck
from agentmbx_relay import settings as relay_settings
from image_without_docker import (
    PROJECT,
    STEPS,
    STOP_S_MAX,
    Image,
    container,
    declared_environment,
    find_base,
    free_port,
    steps,
)

# One worker builds the image, also where the tests run in parallel.
pytestmark = pytest.mark.xdist_group("packaging")

PACKAGES = {"agentmbx_protocol", "agentmbx_relay", "agentmbx_node"}
SETTINGS = {row.variable: row for row in relay_settings.TABLE}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image, built once."""
    folder = tmp_path_factory.mktemp("image")
    built = Image(folder / "root", find_base(folder / "base"))
    built.build()
    return built


@pytest.fixture
def volume(image: Image) -> Iterator[Path]:
    """The volume's folder, emptied after each test."""
    path = Path(image.environment["MBX_RELAY_DATA"])
    yield path
    for left in path.iterdir():
        left.unlink()


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_the_wheel_holds_our_three_packages_and_the_schema_and_nothing_else(image: Image) -> None:
    (wheel,) = image.wheels.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert len(tops) == len(PACKAGES) + 1
    schema = {path.name for path in (PROJECT / "relay/agentmbx_relay/schema").glob("*.sql")}
    assert schema
    assert schema == {Path(name).name for name in names if name.endswith(".sql")}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_the_image_holds_the_constrained_versions_and_no_pip(image: Image) -> None:
    code = (
        "import json, importlib.metadata as m; "
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    )
    found = json.loads(image.run("python", "-I", "-c", code).stdout)
    assert found.pop("agentmbx")
    installed = {f"{name}=={version}".lower().replace("_", "-") for name, version in found.items()}
    pins = (PROJECT / "constraints.txt").read_text().lower().replace("_", "-").split("\n")
    assert installed
    assert installed <= set(pins)
    assert any(
        "install" in step.text and "-c constraints.txt" in step.text for step in steps("RUN")
    )
    assert not {"pip", "setuptools", "hatchling", "pytest", "ruff"} & set(found)


def test_the_image_runs_the_installed_packages_not_the_sources(image: Image) -> None:
    for package in PACKAGES:
        result = image.run("python", "-I", "-c", f"import {package} as p; print(p.__file__)")
        assert result.stdout.startswith(str(image.root / "opt"))


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["relay"], ["relay", "serve"]])
def test_the_command_is_installed_and_tells_what_it_does(image: Image, words: list[str]) -> None:
    if words != ["--version"]:
        words = [*words, "--help"]
    result = image.run("agentmbx", *words)
    assert (result.returncode, result.stderr) == (0, "")
    assert "agentmbx" in result.stdout


def test_f3_a_relay_keeps_all_it_has_in_the_volume_and_outlives_its_container(
    image: Image, volume: Path, tmp_path: Path
) -> None:
    before = image.files()
    assert volume.stat().st_mode & 0o777 == 0o700
    lines = []
    for _ in range(2):
        port = free_port()
        with container(
            image,
            tmp_path,
            f"0.0.0.0:{port}",
            MBX_RELAY_PUBLIC_URL="https://relay.example.com/mail",
        ) as relay:
            url = f"http://127.0.0.1:{port}"
            assert [status(f"{url}/{path}") for path in ("livez", "readyz")] == [200, 200]
            assert status(f"{url}/metrics") == status(f"{url}//%6detrics") == 404
            assert status(f"http://127.0.0.1:{relay.metrics_port}/metrics") == 200
            lines.append(image.run("agentmbx", "relay", "invite").stdout)
            assert relay.stop() == 0
    matches = [
        re.fullmatch(r"agentmbx relay set https://relay\.example\.com/mail/#(\w+)\.\w+\n", line)
        for line in lines
    ]
    assert len({match and match[1] for match in matches}) == 1
    assert all(matches)
    assert image.files() == before


def listen_hosts() -> list[str]:
    hosts = ["0.0.0.0", "127.0.0.2", "localhost"]
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return hosts  # This machine has no IPv6, so no relay can listen on it.
    return [*hosts, "[::]", "[::1]"]


@pytest.mark.usefixtures("volume")
@pytest.mark.parametrize("host", listen_hosts())
def test_p3_the_health_check_finds_the_relay_wherever_it_listens(
    image: Image, tmp_path: Path, host: str
) -> None:
    with container(image, tmp_path, f"{host}:{free_port()}") as relay:
        assert relay.stop() == 0
        assert not relay.healthy()


def test_p3_the_health_check_reads_the_address_from_the_relays_file(
    image: Image, volume: Path, tmp_path: Path
) -> None:
    (volume / "relay.toml").write_text(f'listen = "127.0.0.1:{free_port()}"\n')
    with container(image, tmp_path) as relay:
        assert "MBX_RELAY_LISTEN" not in relay.settings


@pytest.mark.usefixtures("volume")
def test_p3_a_frozen_relay_is_unhealthy_until_it_goes_on(image: Image, tmp_path: Path) -> None:
    with container(image, tmp_path, f"0.0.0.0:{free_port()}") as relay:
        relay.process.send_signal(signal.SIGSTOP)
        assert not relay.healthy()
        relay.process.send_signal(signal.SIGCONT)
        assert relay.healthy()
        assert relay.stop() == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"SSH-2.0-other\r\n",
        b"\xff" * 100,
        b"",
    ],
)
def test_p3_whatever_is_no_ready_relay_is_unhealthy(image: Image, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert not image.healthy(MBX_RELAY_LISTEN=f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("listen", ["", "7421", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000"])
def test_p3_an_address_that_no_relay_takes_is_unhealthy(image: Image, listen: str) -> None:
    assert not image.healthy(MBX_RELAY_LISTEN=listen)


def test_the_health_check_and_the_relay_have_one_default() -> None:
    listen = healthcheck.find_listen({})
    assert listen == SETTINGS["MBX_RELAY_LISTEN"].default
    assert healthcheck.probe_address(listen) == ("127.0.0.1", 7421)


def test_the_image_is_not_root_and_starts_without_a_shell() -> None:
    (user,) = steps("USER")
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user.text)
    for word in ("ENTRYPOINT", "CMD"):
        assert [step.text[0] for step in steps(word)] == ["["]
    last = max(at for at, step in enumerate(STEPS) if step.word == "FROM")
    assert [step.flags for step in STEPS[last:] if step.word == "COPY"] == [{"from": "build"}]


def test_the_image_sets_only_the_path_and_settings_that_the_relay_has() -> None:
    environment = declared_environment()
    assert environment.pop("PATH").endswith(":$PATH")
    assert set(environment) <= set(SETTINGS)
    for name, value in environment.items():
        SETTINGS[name].parse(value)


def test_the_image_exposes_the_ports_that_it_listens_on() -> None:
    ports = [
        SETTINGS["MBX_RELAY_LISTEN"].default,
        declared_environment()["MBX_RELAY_METRICS_LISTEN"],
    ]
    (expose,) = steps("EXPOSE")
    assert expose.words == [port.rpartition(":")[2] for port in ports]


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    lines = (PROJECT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    copied = [word for step in steps("COPY") if not step.flags for word in step.words[:-1]]
    assert rules[0] == "*"
    assert [rule[1:] for rule in rules if rule.startswith("!")] == copied


def compose(**environment: str) -> dict[str, Any]:
    """The compose file with its variables filled in."""
    text = (PROJECT / "compose.yaml").read_text()
    filled = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: environment.get(m[1]) or m[2], text)
    assert "$" not in filled
    document: dict[str, Any] = yaml.safe_load(filled)
    return document


def test_f3_the_compose_file_mounts_a_named_volume_where_the_relay_keeps_its_data() -> None:
    document = compose()
    (mount,) = document["services"]["relay"]["volumes"]
    name, target = mount.split(":")
    assert name in document["volumes"]
    (volume,) = steps("VOLUME")
    assert target == volume.text == declared_environment()["MBX_RELAY_DATA"]


def test_v2_the_compose_file_publishes_on_loopback_and_never_the_metrics() -> None:
    for bind, environment in (("127.0.0.1", {}), ("0.0.0.0", {"BIND": "0.0.0.0"})):
        services = compose(**environment)["services"]
        assert services["relay"]["ports"] == [f"{bind}:7421:7421"]
        assert services["prometheus"]["ports"] == [f"{bind}:9090:9090"]
        assert all("network_mode" not in service for service in services.values())


def test_the_compose_file_takes_from_the_relay_what_it_does_not_need() -> None:
    for service in compose()["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges"]
        assert {"privileged", "cap_add", "user", "devices"}.isdisjoint(service)
        assert re.fullmatch(r"\d+m", service["mem_limit"])


def test_the_compose_file_starts_stops_and_logs_the_relay_with_bounds() -> None:
    relay = compose()["services"]["relay"]
    assert relay["build"] == "."
    assert "image" not in relay, "it would be looked for in a registry"
    assert relay["tmpfs"] == ["/tmp"]
    assert relay["restart"] == "unless-stopped"
    assert float(relay["stop_grace_period"].removesuffix("s")) > STOP_S_MAX
    assert {"max-size", "max-file"} <= set(relay["logging"]["options"])


def test_the_compose_file_passes_settings_that_the_relay_takes() -> None:
    for given in ({}, {"PUBLIC_URL": "https://relay.example.com"}):
        environment = compose(**given)["services"]["relay"]["environment"]
        assert environment == {"MBX_RELAY_PUBLIC_URL": given.get("PUBLIC_URL", "")}
        for name, value in environment.items():
            SETTINGS[name].parse(value)


def test_the_profile_metrics_scrapes_the_relay() -> None:
    services = compose()["services"]
    assert [name for name, service in services.items() if "profiles" in service] == ["prometheus"]
    assert services["prometheus"]["profiles"] == ["metrics"]
    source = services["prometheus"]["volumes"][0].split(":")[0]
    (job,) = yaml.safe_load((PROJECT / source).read_text())["scrape_configs"]
    _, port = declared_environment()["MBX_RELAY_METRICS_LISTEN"].split(":")
    assert job["static_configs"] == [{"targets": [f"relay:{port}"]}]
    assert job.get("metrics_path", "/metrics") == "/metrics"
