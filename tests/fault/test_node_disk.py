"""A machine whose disk is full takes nothing, loses nothing, and goes on when there is room."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentmbx_node.errors import Failure
from node_process import NodeProcess, pair, set_relay, wait_until_stored
from relay_process import RelayProcess
from small_disk import Ballast, mounted

DISK_BYTES = 8 * 1024 * 1024
BODY = "x" * 100_000


@pytest.fixture
def small_home(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "server", DISK_BYTES) as folder:
        yield folder


def test_mail_for_a_full_disk_waits_where_it_is_and_arrives_when_there_is_room(
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
