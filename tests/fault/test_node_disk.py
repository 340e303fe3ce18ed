"""A machine whose disk is full takes nothing, loses nothing, and goes on when there is room."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentmbx_node.errors import Failure
from node_process import NodeProcess, pair, set_relay, wait_until_stored
from relay_process import RelayProcess
from small_disk import Ballast, mounted
from tracing import traced

DISK_BYTES = 8 * 1024 * 1024
BODY = "x" * 100_000


@pytest.fixture
def small_home(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "server", DISK_BYTES) as folder:
        yield folder


def test_rule_3_mail_for_a_full_disk_waits_where_it_is_and_arrives_when_there_is_room(
    small_home: Path, tmp_path: Path
) -> None:
    with (
        RelayProcess(tmp_path / "relay").start() as relay,
        NodeProcess(tmp_path / "laptop", "laptop").start() as laptop,
        NodeProcess(small_home, "server").start() as server,
    ):
        pair(laptop, server)
        set_relay(laptop, relay)
        set_relay(server, relay)
        ballast = Ballast(small_home)
        ballast.leave(0)
        sent = laptop.send("owner@server", "large", body=BODY, wait="held")
        assert sent["state"] == "held"
        with pytest.raises(Failure) as refused:
            server.send("owner@laptop", "from a full disk", body=BODY)
        assert "disk is full" in str(refused.value)
        assert server.ask({"do": "status"})["unread"] == 0
        ballast.drop()
        began_s = time.monotonic()
        laptop.ask({"do": "outbox_retry"})
        wait_until_stored(laptop, patience_s=60)
        assert time.monotonic() - began_s < 60
        assert [message["subject"] for message in server.messages()] == ["large"]
        answer = server.send("owner@laptop", "there is room", wait="stored")
        assert answer["state"] == "stored"


def test_doctor_finds_a_full_disk_and_a_start_on_one_says_what_to_do(small_home: Path) -> None:
    ballast = Ballast(small_home)
    node = NodeProcess(small_home, "server")
    with node.start():
        ballast.leave(0)
        found = {each["part"]: each for each in node.ask({"do": "doctor"})["findings"]}
        assert not found["disk"]["ok"]
        assert "Make room" in found["disk"]["remedy"]
        assert node.stop() == 0
        ballast.leave(0)
        with pytest.raises(RuntimeError, match="the disk is full"):
            node.start()
        assert "Traceback" not in node.log()
        ballast.drop()
        node.start()
        assert node.ask({"do": "status"})["name"] == "server"


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_rule_1_a_failed_fsync_stores_nothing_and_stops_the_daemon(
    error: str, tmp_path: Path
) -> None:
    with (
        NodeProcess(tmp_path / "laptop", "laptop").start() as laptop,
        NodeProcess(tmp_path / "server", "server").start() as server,
    ):
        pair(laptop, server)
        laptop.send("owner@server", "before", wait="stored")
        injection = f"inject=fdatasync,fsync:error={error}"
        with traced(server.pid, tmp_path / "trace", "-e", injection):
            laptop.send("owner@server", "in the middle")
            assert server.wait() == 1
        assert "The disk failed under the machine's database" in server.log()
        assert "Traceback" not in server.log()
        assert [each["state"] for each in laptop.letters()] == ["queued", "stored"]
        server.start()
        laptop.ask({"do": "outbox_retry"})
        wait_until_stored(laptop, patience_s=60)
        subjects = [message["subject"] for message in server.messages()]
        assert subjects == ["in the middle", "before"]


def test_rule_1_a_send_whose_fsync_fails_says_so_and_a_repeat_is_one_letter(tmp_path: Path) -> None:
    with (
        NodeProcess(tmp_path / "laptop", "laptop").start() as laptop,
        NodeProcess(tmp_path / "server", "server").start() as server,
    ):
        pair(laptop, server)
        with traced(laptop.pid, tmp_path / "trace", "-e", "inject=fdatasync,fsync:error=EIO"):
            with pytest.raises(Failure) as refused:
                laptop.send("owner@server", "once", key="k")
            # Another commit may have met the fault before, and stopped the daemon.
            assert refused.value.code in ("store_failed", "unreachable")
            assert laptop.wait() == 1
        laptop.start()
        laptop.send("owner@server", "once", key="k", wait="stored")
        assert [message["subject"] for message in server.messages()] == ["once"]
