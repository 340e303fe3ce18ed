"""The node's commands: what they ask the daemon, what they print, and how they fail (L2, W2)."""

import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentmbx_node.cli import mail as mail_commands
from agentmbx_node.errors import Failure
from agentmbx_node.home import LOG_NAME, HomeLock, lock_holder
from agentmbx_protocol import limits
from fake_daemon import Answer, FakeDaemon
from relay_process import AGENTMBX

ENDS_S = 60
NOW_MS = time.time_ns() // 1_000_000
# A subject that would clear the screen, ring, and turn the line around.
EVIL = "a\x1b[2J\x07b\u202ec\nd"
PATHS = [
    {"path": "direct", "ok": True, "last_ms": NOW_MS, "error": ""},
    {"path": "relay http://r/", "ok": False, "last_ms": NOW_MS, "error": EVIL},
]
STATUS = {
    "name": "laptop",
    "version": "1.2.3",
    "home": "/data",
    "listen": "0.0.0.0:7420",
    "fingerprint": "abcd-efgh",
    "peers": [{"name": EVIL, "paths": PATHS, "outbox": {"queued": 2, "held": 1}}],
    "relay": {"url": "https://relay.example.com/", "state": "live"},
    "unread": 3,
}
MESSAGE = {
    "id": "k3j4x7q2",
    "from": "owner@server",
    "to": "owner@laptop",
    "subject": EVIL,
    "kind": "message",
    "sent_ms": NOW_MS - 600_000,
    "arrived_ms": NOW_MS - 300_000,
    "way": "direct",
    "late": True,
    "read": False,
}
LETTER = {
    "id": "m5n6a2b4",
    "to": "owner@server",
    "subject": EVIL,
    "state": "held",
    "way": "relay",
    "events": [
        {"at_ms": NOW_MS - 7_200_000, "state": "queued", "way": "", "detail": ""},
        {"at_ms": NOW_MS - 60_000, "state": "held", "way": "relay", "detail": EVIL},
    ],
    "why": "the peer sleeps",
    "next": "again in 5 min",
}
PEER = {"name": "server", "fingerprint": "ijkl-mnop"}
PAIRED = {"peer": PEER, "own_fingerprint": "abcd-efgh"}
SENT = {"id": LETTER["id"], "state": "stored", "letter": LETTER | {"state": "stored"}}
ANSWERS: Mapping[str, list[Answer]] = {
    "status": [STATUS],
    "inbox": [{"messages": [MESSAGE]}],
    "read": [{"message": MESSAGE | {"body": f"line one\n\tline {EVIL}\n"}}],
    "sent": [{"letters": [LETTER, LETTER]}],
    "outbox": [{"letters": [LETTER]}],
    "outbox_retry": [{"count": 4}],
    "outbox_cancel": [{"id": "m5n6a2b4", "state": "cancelled", "may_still_arrive": True}],
    "send": [{"event": "state", "state": "held"}, SENT],
    "pair": [
        {"event": "line", "line": "192.0.2.7:7420,[2001:db8::7]:7420#TOKEN"},
        {"event": "refused", "reason": "wrong token", "fingerprint": "zzzz"},
        {"event": "of a newer daemon"},
        PAIRED,
    ],
    "join": [PAIRED],
    "peers": [
        {"peers": [PEER | {"state": "paired", "last_contact_ms": NOW_MS - 5000, "paths": PATHS}]}
    ],
    "rename": [{"name": "attic"}],
    "unpair": [{"peer": "server"}],
    "relay_set": [
        {"url": "https://r/", "relay_fingerprint": "rrrr", "pinned": True, "told": ["server"],
         "waiting": [EVIL]}
    ],
    "relay_unset": [{}],
    "relay_status": [
        {"relays": [{"url": "https://r/", "relay_fingerprint": "rrrr", "state": "live",
                     "queue": "qqqq", "last_ms": NOW_MS, "error": EVIL, "next": "in 10 s"}]}
    ],
    "doctor": [{"findings": [{"ok": True, "part": "daemon", "text": "runs", "remedy": ""}]}],
    "ping": [
        {"peer": "server", "paths": [{"path": "direct", "ok": True, "ms": 3.1, "error": ""},
                                     {"path": "relay", "ok": False, "ms": 9.0, "error": EVIL}]}
    ],
}  # fmt: skip
# Each command with what it asks the daemon for.
COMMANDS: list[tuple[list[str], dict[str, Any]]] = [
    (["status"], {"do": "status"}),
    (["inbox"], {"do": "inbox"}),
    (["inbox", "--as", "reviewer"], {"do": "inbox", "as": "reviewer"}),
    (["inbox", "--as=reviewer"], {"do": "inbox", "as": "reviewer"}),
    (["read", "k3j"], {"do": "read", "id": "k3j"}),
    (["sent"], {"do": "sent"}),
    (["sent", "m5n"], {"do": "sent", "id": "m5n"}),
    (["outbox"], {"do": "outbox"}),
    (["outbox", "retry"], {"do": "outbox_retry"}),
    (["outbox", "retry", "m5n"], {"do": "outbox_retry", "id": "m5n"}),
    (["outbox", "cancel", "m5n"], {"do": "outbox_cancel", "id": "m5n"}),
    (
        ["send", "owner@server", " Hi ", "--body", "x", "--wait", "stored", "--key", "k"],
        {"do": "send", "to": "owner@server", "subject": "Hi", "body": "x", "wait": "stored",
         "key": "k", "as": "owner"},
    ),
    (["pair"], {"do": "pair"}),
    (["join", "192.0.2.7:7420#TOKEN"], {"do": "join", "line": "192.0.2.7:7420#TOKEN"}),
    (["peers"], {"do": "peers"}),
    (["peers", "rename", "server", "attic"], {"do": "rename", "old": "server", "new": "attic"}),
    (["unpair", "server"], {"do": "unpair", "peer": "server"}),
    (["relay", "set", "https://r/#K.I"], {"do": "relay_set", "line": "https://r/#K.I"}),
    (["relay", "unset"], {"do": "relay_unset"}),
    (["relay", "status"], {"do": "relay_status"}),
    (["doctor"], {"do": "doctor"}),
    (["ping", "server"], {"do": "ping", "peer": "server"}),
]  # fmt: skip
PATHS_OF_COMMANDS = sorted({" ".join(words[:2] if words[0] == "relay" else words[:1])
                            for words, _ in COMMANDS} | {"up", "down"})  # fmt: skip
NODE_START_RATIO_MAX = 6

Ended = subprocess.CompletedProcess[str]


class Caller:
    """Runs `agentmbx` with a data folder of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MBX_")
        } | {"MBX_HOME": str(home)}

    def run(self, *words: str | bytes, input_: bytes = b"", **environment: str) -> Ended:
        ended = subprocess.run(
            [*AGENTMBX, *words],
            input=input_,
            capture_output=True,
            timeout=ENDS_S,
            check=False,
            env=self.environment | environment,
        )
        out, error = ended.stdout.decode(), ended.stderr.decode()
        assert "Traceback" not in error, error
        return Ended(ended.args, ended.returncode, out, error)

    def fails(self, *words: str | bytes, input_: bytes = b"") -> tuple[int, dict[str, Any]]:
        """The exit code and the failure object, which is all that is printed."""
        ended = self.run(*words, "--json", input_=input_)
        document = json.loads(ended.stdout)
        assert document["ok"] is False
        assert {"ok", "code", "message", "next"} <= set(document)
        assert ended.stderr == ""
        return ended.returncode, document


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    return Caller(tmp_path / "home")


@pytest.fixture
def daemon(caller: Caller) -> Iterator[FakeDaemon]:
    with FakeDaemon(caller.home, dict(ANSWERS)) as fake:
        yield fake


@contextmanager
def answering(caller: Caller, **answers: list[Answer]) -> Iterator[FakeDaemon]:
    with FakeDaemon(caller.home, answers) as fake:
        yield fake


def asked(request: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: request.get(name) for name in expected} == expected
    assert all(
        value is None or name in expected or (name, value) == ("kind", "message")
        for name, value in request.items()
    )


@pytest.mark.parametrize(("words", "request_"), COMMANDS, ids=lambda each: " ".join(map(str, each)))
def test_a_command_asks_once_and_prints_text_or_one_json_object(
    caller: Caller, daemon: FakeDaemon, words: list[str], request_: dict[str, Any]
) -> None:
    ended = caller.run(*words)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    # Only a body may have lines of its own.
    for odd in ("\x1b", "\x07", "\u202e", "c\nd")[: 3 if words[0] == "read" else 4]:
        assert odd not in ended.stdout + ended.stderr
    as_json = caller.run(*words, "--json")
    assert as_json.returncode == 0
    (answer,) = [step for step in ANSWERS[request_["do"]] if "event" not in dict(step)]  # type: ignore[call-overload]
    document = json.loads(as_json.stdout)
    assert document == {"ok": True} | answer  # type: ignore[operator]
    assert len(daemon.requests) == 2
    for request in daemon.requests:
        asked(request, request_)


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS], ids=" ".join)
def test_without_a_daemon_a_command_exits_with_4_and_says_what_starts_it(
    caller: Caller, words: list[str]
) -> None:
    ended = caller.run(*words)
    assert ended.returncode == 4
    assert "agentmbx: No daemon runs" in ended.stderr
    assert "\n  `agentmbx up --detach` starts it.\n" in ended.stderr
    exit_code, document = caller.fails(*words)
    assert (exit_code, document["code"]) == (4, "unreachable")
    assert not caller.home.exists()


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS], ids=" ".join)
def test_a_failure_of_the_daemon_keeps_code_and_exit_code(caller: Caller, words: list[str]) -> None:
    failure = Failure("no_such_thing", f"There is no {EVIL}.", "Look at `peers`.", 3)
    do = next(request["do"] for each, request in COMMANDS if each == words)
    with answering(caller, **{do: [failure]}):
        ended = caller.run(*words)
        assert (ended.returncode, ended.stdout) == (3, "")
        lines = ended.stderr.splitlines()
        assert lines[0].startswith("agentmbx: There is no a\\x1b[2J")
        assert lines[1:] == ["  Look at `peers`."]
        exit_code, document = caller.fails(*words)
        assert (exit_code, document["code"]) == (3, "no_such_thing")
        assert EVIL in document["message"]


@pytest.mark.parametrize("path", PATHS_OF_COMMANDS)
def test_help_names_usage_and_options(caller: Caller, path: str) -> None:
    ended = caller.run(*path.split(), "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"Usage: agentmbx {path}")
    assert "--json" in ended.stdout
    assert "\\b" not in ended.stdout


def test_the_list_of_commands_has_all_of_them(caller: Caller) -> None:
    for group, names in (
        ([], {path.split()[0] for path in PATHS_OF_COMMANDS}),
        (["relay"], {"set", "unset", "status", "probe", "serve", "invite"}),
    ):
        rows = caller.run(*group, "--help").stdout.partition("Commands:")[2].splitlines()
        assert names <= {row.split()[0] for row in rows if row}


@pytest.mark.parametrize(
    "words",
    [
        ["status", "--nonsense"], ["status", "more"], ["inbox", "--as"], ["inbox", "more"],
        ["read"], ["send"], ["send", "owner@server"], ["join"], ["peers", "nonsense"],
        ["peers", "rename", "x"], ["unpair"], ["outbox", "cancel"], ["ping"], ["relay", "set"],
        ["send", "owner@server", "x", "--wait", "read"],
        ["send", "owner@server", ""], ["send", "owner@server", " \t "],
        ["send", "owner@server", "two\nlines"], ["send", "owner@server", "two\u2028lines"],
        ["send", "owner@server", "x" * 201],
        ["up", "--nonsense"], ["up", "--listen", "nonsense"], ["up", "--detach", "--name", "a@b"],
    ],
    ids=lambda words: " ".join(words)[:40].encode("unicode_escape").decode(),
)  # fmt: skip
def test_a_usage_error_exits_with_2_in_text_and_in_json(caller: Caller, words: list[str]) -> None:
    ended = caller.run(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert caller.fails(*words)[0] == 2


@pytest.mark.parametrize(
    "words",
    [
        [b"send", b"owner@server", b"\xff"], [b"send", b"\xff@server", b"x"],
        [b"send", b"owner@server", b"x", b"--body", b"\xed\xa0\x80"],
        [b"send", b"owner@server", b"x", b"--key", b"\xff"],
        [b"send", b"owner@server", b"x", b"--kind", b"\xff"],
        [b"send", b"owner@server", b"x", b"--as", b"\xff"],
        [b"inbox", b"--as", b"\xff"], [b"read", b"\xff"], [b"join", b"\xff"], [b"ping", b"\xff"],
        [b"relay", b"set", b"\xff"], [b"peers", b"rename", b"\xff", b"x"], [b"unpair", b"\xff"],
        [b"outbox", b"cancel", b"\xff"], [b"sent", b"\xff"], [b"up", b"--name", b"\xff"],
        [b"up", b"--detach", b"--name", b"\xff"],
    ],
    ids=lambda words: b" ".join(words).decode("ascii", "backslashreplace"),
)  # fmt: skip
def test_arguments_that_are_no_text_are_a_usage_error(caller: Caller, words: list[bytes]) -> None:
    exit_code, document = caller.fails(*words)
    assert (exit_code, document["code"]) == (2, "usage")
    assert caller.run(*words).returncode == 2


def test_the_body_comes_from_standard_input_exactly(caller: Caller, daemon: FakeDaemon) -> None:
    for body in ("", "x", "two\r\nlines\n", "\u00fc" * (limits.BODY_BYTES_MAX // 2)):
        words = ("send", "owner@server", "Hi", "--body", "-")
        assert caller.run(*words, input_=body.encode()).returncode == 0
        assert daemon.requests[-1]["body"] == body


@pytest.mark.parametrize(
    "body",
    [b"x" * (limits.BODY_BYTES_MAX + 1), "\u00fc".encode() * (limits.BODY_BYTES_MAX // 2) + b"x",
     b"x" + "\u00fc".encode() * (limits.BODY_BYTES_MAX // 2), b"\xff", b"\xed\xa0\x80"],
    ids=["one byte more", "not one character", "in a character", "no text", "surrogate"],
)  # fmt: skip
def test_a_body_that_is_too_long_or_no_text_is_a_usage_error(
    caller: Caller, daemon: FakeDaemon, body: bytes
) -> None:
    words = ("send", "owner@server", "Hi", "--body", "-")
    exit_code, document = caller.fails(*words, input_=body)
    assert (exit_code, document["code"]) == (2, "usage")
    assert daemon.requests == []


def test_the_limit_of_a_body_is_the_protocols() -> None:
    assert mail_commands.BODY_BYTES_MAX == limits.BODY_BYTES_MAX


def test_the_speaker_is_as_else_mbx_agent_else_the_owner_or_all(
    caller: Caller, daemon: FakeDaemon
) -> None:
    send = ("send", "owner@server", "Hi")
    for words, agent, speaker in (
        ((*send, "--as", "x"), "y", "x"),
        (send, "y", "y"),
        (send, "", "owner"),
        (("inbox", "--as", "x"), "y", "x"),
        (("inbox",), "y", "y"),
        (("inbox",), "", None),
    ):
        assert caller.run(*words, MBX_AGENT=agent).returncode == 0
        assert daemon.requests[-1].get("as") == speaker


def test_send_prints_the_id_alone(caller: Caller, daemon: FakeDaemon) -> None:
    assert caller.run("send", "owner@server", "Hi", "--wait", "held").stdout == f"{SENT['id']}\n"
    assert len(daemon.requests) == 1


@pytest.mark.parametrize("state", ["not_confirmed", "cancelled", "queued"])
def test_a_letter_that_does_not_get_where_it_was_waited_for_exits_with_1(
    caller: Caller, state: str
) -> None:
    ends = {"id": "m5n6", "state": state, "letter": LETTER | {"state": state}}
    with answering(caller, send=[ends]):
        exit_code, document = caller.fails("send", "o@server", "Hi", "--wait", "stored")
        assert (exit_code, document["id"], document["state"]) == (1, "m5n6", state)
        assert caller.run("send", "o@server", "Hi").returncode == 0


def test_the_line_to_paste_stands_alone_and_comes_at_once(caller: Caller) -> None:
    line = "agentmbx join 192.0.2.7:7420,[2001:db8::7]:7420#TOKEN\n"
    failure = Failure("worn_out", "Nobody came.", "", 1)
    for flags, pipe in (([], "stdout"), (["--json"], "stderr")):
        with answering(caller, pair=[*ANSWERS["pair"][:2], failure]):
            ended = caller.run("pair", *flags)
            assert ended.returncode == 1
            assert line in getattr(ended, pipe).splitlines(keepends=True)
            assert "wrong token" in ended.stderr
    with FakeDaemon(caller.home, ANSWERS):
        ended = caller.run("pair")
        lines = ended.stdout.splitlines()
        assert lines[0] + "\n" == line
        assert {"ijkl-mnop", "abcd-efgh"} <= set(ended.stdout.split())


@pytest.mark.parametrize(
    "pasted", [b"192.0.2.7:7420#TOKEN\n", b"  agentmbx join 192.0.2.7:7420#TOKEN"]
)
def test_join_reads_the_line_from_standard_input(
    caller: Caller, daemon: FakeDaemon, pasted: bytes
) -> None:
    assert caller.run("join", "-", input_=pasted).returncode == 0
    assert daemon.requests[-1]["line"] == "192.0.2.7:7420#TOKEN"


@pytest.mark.parametrize("pasted", [b"", b"\n", b"\xff\n"])
def test_join_without_a_line_on_standard_input_is_a_usage_error(
    caller: Caller, pasted: bytes
) -> None:
    exit_code, document = caller.fails("join", "-", input_=pasted)
    assert (exit_code, document["code"]) == (2, "usage")


@pytest.mark.parametrize("words", [["peers", "--json", "rename", "a", "b"],
                                   ["outbox", "--json", "retry"],
                                   ["outbox", "--json", "cancel", "x"]])  # fmt: skip
def test_json_may_stand_before_a_subcommand(
    caller: Caller, daemon: FakeDaemon, words: list[str]
) -> None:
    assert json.loads(caller.run(*words).stdout)["ok"] is True
    assert len(daemon.requests) == 1


def test_what_a_body_holds_is_shown_in_lines_and_escaped(
    caller: Caller, daemon: FakeDaemon
) -> None:
    shown = caller.run("read", "k3j").stdout
    assert "\n\nline one\n\tline a\\x1b[2J\\x07b\\u202ec\nd\n" in shown
    assert re.search(r"^Arrived: \d+ min ago", shown, re.MULTILINE)
    assert "line one" in json.loads(caller.run("read", "k3j", "--json").stdout)["message"]["body"]
    assert len(daemon.requests) == 2


def test_a_table_is_aligned_also_where_characters_are_wide(caller: Caller) -> None:
    rows = [MESSAGE | {"from": name, "subject": "here"} for name in ("x@y", "\u6f22\u5b57@y")]
    with answering(caller, inbox=[{"messages": rows}]):
        lines = caller.run("inbox").stdout.splitlines()
    assert lines[1].index("owner@laptop") == lines[2].index("owner@laptop") + 2


def test_a_terminal_without_unicode_still_shows_everything(caller: Caller) -> None:
    with answering(caller, inbox=[{"messages": [MESSAGE | {"subject": "\u6f22"}]}]):
        for words in (["inbox"], ["inbox", "--json"]):
            ended = caller.run(*words, PYTHONIOENCODING="ascii")
            assert ended.returncode == 0
            assert "\\u6f22" in ended.stdout


def test_findings_that_need_somebody_exit_with_1(caller: Caller) -> None:
    bad = {"ok": False, "part": "relay", "text": EVIL, "remedy": "Set one."}
    with answering(caller, doctor=[{"findings": [bad]}]):
        ended = caller.run("doctor")
        assert ended.returncode == 1
        assert "Set one." in ended.stdout
        exit_code, document = caller.fails("doctor")
        assert (exit_code, document["findings"]) == (1, [bad])


def test_doctor_without_a_daemon_looks_at_the_folder(caller: Caller) -> None:
    exit_code, document = caller.fails("doctor")
    assert exit_code == 4
    assert [each["ok"] for each in document["findings"]] == [True, False]
    caller.home.touch()
    exit_code, document = caller.fails("doctor")
    assert [each["ok"] for each in document["findings"]] == [False, False]


def test_a_reader_that_goes_away_early_is_no_fault(caller: Caller, daemon: FakeDaemon) -> None:
    for words in (["status"], ["inbox", "--json"], ["peers"], ["peers", "--json"]):
        read_end, write_end = os.pipe()
        os.close(read_end)
        ended = subprocess.run(
            [*AGENTMBX, *words], stdout=write_end, stderr=subprocess.PIPE, check=False,
            timeout=ENDS_S, env=caller.environment,
        )  # fmt: skip
        os.close(write_end)
        assert (ended.returncode, ended.stderr) == (1, b"")
    assert len(daemon.requests) == 4


def test_ctrl_c_ends_a_waiting_pair_with_130(caller: Caller) -> None:
    with FakeDaemon(caller.home, {"pair": [ANSWERS["pair"][0]]}, hangs=True):
        process = subprocess.Popen(
            [*AGENTMBX, "pair"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=caller.environment,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().startswith("agentmbx join ")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=ENDS_S)
    assert process.returncode == 130
    assert error.endswith("Stopped.\n")
    assert "Traceback" not in error


def test_up_detach_status_and_down_are_a_whole_life(caller: Caller) -> None:
    up = ("up", "--detach", "--name", "laptop", "--listen", "127.0.0.1:0")
    document = json.loads(caller.run(*up, "--json").stdout)
    process = lock_holder(caller.home)
    try:
        assert (document["ok"], document["name"]) == (True, "laptop")
        assert json.loads(caller.run("status", "--json").stdout)["name"] == "laptop"
        assert os.getsid(process or 0) == process
        for flags in (["--detach"], []):
            exit_code, document = caller.fails("up", *flags)
            assert exit_code == 3
            assert str(process) in document["message"]
        assert caller.run("doctor").returncode == 1  # no relay is set
        assert (caller.home / LOG_NAME).stat().st_mode & 0o777 == 0o600
        assert caller.run("down").returncode == 0
        assert lock_holder(caller.home) is None
        assert caller.fails("down")[0] == 4
    finally:
        if (left := lock_holder(caller.home)) is not None:
            os.kill(left, signal.SIGKILL)


def test_up_detach_says_why_it_did_not_start(caller: Caller) -> None:
    exit_code, document = caller.fails("up", "--detach", "--listen", "203.0.113.7:7420")
    assert exit_code == 1
    assert "203.0.113.7" in document["message"]
    assert lock_holder(caller.home) is None
    with HomeLock.take(caller.home):
        exit_code, document = caller.fails("up", "--detach")
        assert exit_code == 3
        assert "agentmbx down" in document["next"]


def test_up_detach_takes_a_folder_that_is_named_from_here(caller: Caller, tmp_path: Path) -> None:
    process = None
    try:
        ended = subprocess.run(
            [*AGENTMBX, "up", "--detach", "--listen", "off"], cwd=tmp_path, check=True,
            env=caller.environment | {"MBX_HOME": "home"}, capture_output=True, timeout=ENDS_S,
        )  # fmt: skip
        process = lock_holder(caller.home)
        assert process is not None
        assert b"is up" in ended.stdout
        assert caller.run("down").returncode == 0
        process = None
    finally:
        if process:
            os.kill(process, signal.SIGKILL)


def test_a_long_log_is_set_aside(caller: Caller) -> None:
    caller.home.mkdir(mode=0o700)
    (caller.home / LOG_NAME).write_bytes(b"x" * (9 * 1024 * 1024))
    assert caller.run("up", "--detach", "--listen", "off").returncode == 0
    assert caller.run("down").returncode == 0
    assert (caller.home / LOG_NAME).stat().st_size < 100_000
    assert (caller.home / f"{LOG_NAME}.1").exists()


def test_status_and_inbox_start_fast(
    caller: Caller, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {
        "pass": [sys.executable, "-c", "pass"],
        "status": [*AGENTMBX, "status"],
        "inbox": [*AGENTMBX, "inbox"],
    }
    took: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(12):
        for name, words in commands.items():
            began = time.perf_counter()
            subprocess.run(words, check=True, capture_output=True, env=caller.environment)
            took[name].append(time.perf_counter() - began)
    yardstick_s = statistics.median(took.pop("pass"))
    assert daemon.requests
    for name, times in took.items():
        ratio = statistics.median(times) / yardstick_s
        with capsys.disabled():
            print(f" {name} {ratio:.1f}x python -c pass;", end="")  # noqa: T201 - it is looked at
        assert ratio <= NODE_START_RATIO_MAX


@pytest.mark.parametrize("command", ["status", "inbox"])
def test_status_and_inbox_import_nothing_but_the_standard_library(
    caller: Caller, daemon: FakeDaemon, command: str
) -> None:
    code = (
        "import sys; from agentmbx_node.cli import main\n"
        "try: main()\n"
        "finally: print([m for m in ('click', 'msgspec', 'asyncio', 'typing', 'pathlib', 'nacl')"
        " if m in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, command], capture_output=True, text=True, check=True,
        env=caller.environment, timeout=ENDS_S,
    )  # fmt: skip
    assert ended.stderr == "[]\n"
    assert daemon.requests


def test_a_person_at_a_terminal_sees_the_table(caller: Caller, daemon: FakeDaemon) -> None:
    ours, theirs = pty.openpty()
    try:
        subprocess.run(
            [*AGENTMBX, "peers"], stdout=theirs, check=True, env=caller.environment, timeout=ENDS_S
        )
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "server" in shown
    assert "\x1b" not in shown
    assert daemon.requests
