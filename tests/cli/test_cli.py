"""The command line: exit codes, one JSON object, help at every level, no traceback (L2)."""

import json
import subprocess
from pathlib import Path

import pytest

from relay_process import AGENTMBX, RelayProcess

COMMANDS = [
    ["relay", "serve"],
    ["relay", "invite"],
    ["relay", "probe"],
    ["relay", "config", "show"],
]
NOBODY = "http://127.0.0.1:9"
KEY = "a" * 52


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*AGENTMBX, *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert "Traceback" not in result.stderr
    return result


def failure(*arguments: str) -> tuple[int, dict[str, object]]:
    result = run(*arguments, "--json")
    document = json.loads(result.stdout)
    assert set(document) == {"ok", "code", "message", "next"}
    assert document["ok"] is False
    assert result.stderr == ""
    return result.returncode, document


def test_the_version_is_one_line() -> None:
    result = run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("agentmbx ")


@pytest.mark.parametrize("path", [[], ["relay"], ["relay", "config"], *COMMANDS], ids=" ".join)
def test_help_is_there_at_every_level(path: list[str]) -> None:
    result = run(*path, "--help")
    assert result.returncode == 0
    assert "Usage: agentmbx" in result.stdout
    assert "\\b" not in result.stdout


@pytest.mark.parametrize("path", [["relay", "serve"], ["relay", "invite"], ["relay", "probe"]])
def test_the_help_of_a_command_shows_an_example(path: list[str]) -> None:
    assert "\n    agentmbx " + " ".join(path) in run(*path, "--help").stdout


def test_a_group_without_a_command_shows_its_help_and_is_a_usage_error() -> None:
    result = run("relay")
    assert result.returncode == 2
    assert "invite" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["relay", "nonsense"],
        ["relay", "serve", "--nonsense"],
        ["relay", "invite"],
        ["relay", "probe"],
        ["relay", "probe", "not a url"],
        ["relay", "probe", "ftp://relay"],
        ["relay", "probe", "http://relay.example.com"],
        ["relay", "probe", f"{NOBODY}#short"],
        ["relay", "probe", f"{NOBODY}#{KEY}.{'?' * 52}"],
        ["relay", "probe", "http://127.0.0.1:99999/"],
        ["relay", "probe", "http://:secret@127.0.0.1:9/"],
    ],
    ids=" ".join,
)
def test_a_usage_error_exits_with_2_in_text_and_in_json(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2
    exit_code, document = failure(*arguments)
    assert (exit_code, document["code"]) == (2, "usage")


def test_an_unknown_setting_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "relay.toml").write_text("opne = true\n")
    for command in (["relay", "serve"], ["relay", "config", "show"]):
        result = run(*command, "--data", str(tmp_path))
        assert result.returncode == 2
        assert "opne" in result.stderr


def test_an_invite_without_a_relay_exits_with_1_and_says_what_to_do(tmp_path: Path) -> None:
    result = run("relay", "invite", "--data", str(tmp_path / "none"))
    assert result.returncode == 1
    assert result.stdout == ""
    assert str(tmp_path / "none") in result.stderr


@pytest.mark.parametrize("flags", [["--uses", "0"], ["--uses", "x"], ["--ttl", "7"], ["--ttl", ""]])
def test_odd_numbers_for_an_invite_exit_with_2(tmp_path: Path, flags: list[str]) -> None:
    exit_code, document = failure("relay", "invite", "--data", str(tmp_path), *flags)
    assert (exit_code, document["code"]) == (2, "usage")


def test_a_relay_that_is_not_there_is_unreachable() -> None:
    exit_code, document = failure("relay", "probe", NOBODY)
    assert (exit_code, document["code"]) == (4, "unreachable")
    assert "relay serve" in str(document["next"])


def test_a_probe_of_a_closed_relay_without_an_invite_is_refused(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay") as relay:
        exit_code, document = failure("relay", "probe", relay.url)
        assert (exit_code, document["code"]) == (3, "refused")
        used_up = f"{relay.invite().rpartition('.')[0]}.{KEY}"
        exit_code, document = failure("relay", "probe", used_up)
        assert (exit_code, document["code"]) == (3, "refused")


def test_a_probe_with_another_relays_key_fails(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "one") as one, RelayProcess(tmp_path / "two") as two:
        line = two.invite().replace(two.url, one.url)
        result = run("relay", "probe", line)
        assert result.returncode not in (0, 2)
        assert "another key" in result.stderr


def test_a_probe_shows_each_step_and_does_not_use_the_invite_up(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay") as relay:
        line = relay.invite()
        for _ in range(2):
            result = run("relay", "probe", line)
            assert result.returncode == 0
            steps = [row.split()[0] for row in result.stdout.splitlines()[:-1]]
            expected = ["reach", "register", "deposit", "collect", "open", "ack", "retire"]
            assert steps == expected
        document = json.loads(run("relay", "probe", line, "--json").stdout)
        assert document["ok"] is True
        assert all(step["ok"] and step["ms"] >= 0 for step in document["steps"])


def test_the_line_of_an_invite_stands_alone_in_one_piece(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "relay", "--public-url", "https://relay.example.com/mbx") as relay:
        result = run("relay", "invite", "--data", str(relay.data), "--uses", "2", "--ttl", "1h")
        assert result.returncode == 0
        words = result.stdout.splitlines()[0].split(" ")
        assert len(result.stdout.splitlines()) == 1
        assert words[:3] == ["agentmbx", "relay", "set"]
        assert words[3].startswith("https://relay.example.com/mbx/#")
        assert len(words) == 4


def test_the_settings_show_where_each_comes_from(tmp_path: Path) -> None:
    (tmp_path / "relay.toml").write_text('name = "mine"\n')
    document = json.loads(run("relay", "config", "show", "--data", str(tmp_path), "--json").stdout)
    rows = {row["name"]: row for row in document["settings"]}
    assert rows["name"] == {
        "name": "name",
        "value": "mine",
        "source": str(tmp_path / "relay.toml"),
    }
    assert rows["open"]["source"] == "default"
