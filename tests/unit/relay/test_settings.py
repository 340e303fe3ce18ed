"""Settings: whatever is not exactly understood is refused with its name, value and source (F1)."""

from pathlib import Path

import pytest
from msgspec import structs

from agentmbx_relay import settings
from agentmbx_relay.settings import Address, SettingsError, find, resolve

SWITCHES = [row.name for row in settings.TABLE if row.parse is settings._parse_boolean]
SIZES = [row.name for row in settings.TABLE if row.parse is settings.parse_size]
TIMES = [row.name for row in settings.TABLE if row.parse is settings.parse_duration_s]


def resolved(
    folder: Path, flags: dict[str, str] | None = None, environment: dict[str, str] | None = None
) -> settings.Settings:
    return resolve(find({"data": str(folder), **(flags or {})}, environment or {}))


def test_the_defaults_fit_a_small_server(tmp_path: Path) -> None:
    found = resolved(tmp_path)
    assert found.listen == Address("0.0.0.0", 7421)
    assert found.metrics_listen == Address("127.0.0.1", 9464)
    assert found.open is False
    assert found.queue_bytes_max == 256 * 2**20


def test_the_table_names_each_field_of_the_settings_once() -> None:
    assert [row.name for row in settings.TABLE] == list(settings.Settings.__struct_fields__)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(
    "text",
    ["flase", "off", "on", "no", "NO", "yes", "True", "TRUE", "", " true", "true ", "2", "1"],
)
def test_a_switch_is_exactly_true_or_false(tmp_path: Path, name: str, text: str) -> None:
    variable = "MBX_RELAY_" + name.upper()
    with pytest.raises(SettingsError) as refused:
        resolved(tmp_path, environment={variable: text})
    assert name in str(refused.value)
    assert repr(text) in str(refused.value)
    assert variable in str(refused.value)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("text", ["10MB", "10 MiB", "-1", "1e6", "", "ten", "1.5GiB", "10mib"])
def test_a_size_has_a_unit_that_is_known(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=name):
        resolved(tmp_path, {name: text})


@pytest.mark.parametrize(
    ("text", "size"), [("10", 10), ("10B", 10), ("2KiB", 2048), ("1GiB", 2**30), ("0", 0)]
)
def test_a_bare_size_is_bytes(text: str, size: int) -> None:
    assert settings.parse_size(text) == size


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("text", ["72", "0s", "-1s", "1 h", "1w", "", "1.5h", "s"])
def test_a_time_never_goes_without_its_unit(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=name):
        resolved(tmp_path, {name: text})


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("10m", 600), ("12h", 43200), ("7d", 604800)]
)
def test_a_time_is_read_in_its_unit(text: str, seconds: int) -> None:
    assert settings.parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "7421", "localhost", "host:abc", "host:70000", ":7421", "::1:7421", "[::g]:1", "h:"],
)
def test_an_address_has_a_host_and_a_port(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="listen"):
        resolved(tmp_path, {"listen": text})


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:7421", "relay.example.com:80"])
def test_an_address_reads_back_as_it_was_written(text: str) -> None:
    assert str(settings.parse_address(text)) == text


@pytest.mark.parametrize(
    "text", ["relay.example.com", "ftp://r", "https://u:p@r", "https://r/?q", "https://r/#f", "://"]
)
def test_a_public_url_is_http_and_holds_nothing_secret(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="public_url"):
        resolved(tmp_path, {"public_url": text})


def test_a_flag_beats_the_environment_that_beats_the_file_that_beats_the_default(
    tmp_path: Path,
) -> None:
    (tmp_path / "relay.toml").write_text('name = "file"\nqueues_max = 5\nopen = true\n')
    environment = {"MBX_RELAY_NAME": "environment", "MBX_RELAY_QUEUES_MAX": "6"}
    found = find({"data": str(tmp_path), "name": "flag"}, environment)
    assert (found["name"].text, found["name"].source) == ("flag", "flag --name")
    assert found["queues_max"].source == "environment MBX_RELAY_QUEUES_MAX"
    assert (found["open"].text, found["open"].source) == ("true", str(tmp_path / "relay.toml"))
    assert found["listen"].source == "default"


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "relay.toml").write_text("opne = true\n")
    with pytest.raises(SettingsError, match="opne"):
        resolved(tmp_path)


def test_an_unknown_variable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="MBX_RELAY_OPNE"):
        resolved(tmp_path, environment={"MBX_RELAY_OPNE": "true"})


@pytest.mark.parametrize(
    "line", ["open = 1.5", "open = [true]", "open = {a = 1}", "open = 07:00:00"]
)
def test_a_value_of_another_type_in_the_file_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "relay.toml").write_text(line + "\n")
    with pytest.raises(SettingsError, match="open"):
        resolved(tmp_path)


@pytest.mark.parametrize("content", [b"open = tru", b"\xff\xfe", b"open = true\nopen = false\n"])
def test_a_file_that_is_no_toml_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "relay.toml").write_bytes(content)
    with pytest.raises(SettingsError, match=r"relay\.toml"):
        resolved(tmp_path)


def test_without_a_folder_the_text_says_how_to_name_one() -> None:
    with pytest.raises(SettingsError, match="--data DIR or MBX_RELAY_DATA"):
        find({}, {})


def test_the_example_file_is_understood_when_all_of_it_is_switched_on(tmp_path: Path) -> None:
    lines = settings.example_file().splitlines()
    switched_on = [line.removeprefix("# ") for line in lines if " = " in line]
    (tmp_path / "relay.toml").write_text("\n".join(switched_on))
    without = structs.replace(resolved(tmp_path / "without"), data=tmp_path)
    assert resolved(tmp_path) == without
