"""A relay and two nodes, killed at random: every letter arrives once, and both sides agree."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentmbx_node.errors import Failure
from node_process import NodeProcess, pair, set_relay, wait_until_stored
from relay_process import RelayProcess
from scene import seeded

STORM_S = 25.0
SETTLE_S = 120.0


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[RelayProcess, NodeProcess, NodeProcess]]:
    with (
        RelayProcess(tmp_path / "relay").start() as relay,
        NodeProcess(tmp_path / "laptop", "laptop").start() as laptop,
        NodeProcess(tmp_path / "server", "server").start() as server,
    ):
        pair(laptop, server)
        set_relay(laptop, relay)
        set_relay(server, relay)
        yield relay, laptop, server


def test_whoever_is_killed_every_letter_arrives_once_and_both_sides_agree(
    parts: tuple[RelayProcess, NodeProcess, NodeProcess],
) -> None:
    relay, laptop, server = parts
    chance = seeded()
    taken: dict[str, set[str]] = {"laptop": set(), "server": set()}
    ends_s = time.monotonic() + STORM_S
    count = 0
    while time.monotonic() < ends_s:
        for sender, receiver in ((laptop, server), (server, laptop)):
            for _ in range(chance.randrange(4)):
                count += 1
                subject = f"{count} of {sender.name}"
                try:
                    body = "x" * chance.randrange(3000)
                    sender.send(f"owner@{receiver.name}", subject, body=body, key=subject)
                except Failure:
                    continue  # it was killed in the middle, and the letter may be there or not
                taken[sender.name].add(subject)
        if chance.random() < 0.15:
            victim = chance.choice((relay, laptop, server))
            victim.kill()
            time.sleep(chance.random() * 0.4)
            if isinstance(victim, RelayProcess):
                victim.restart()
            else:
                victim.start()
        time.sleep(chance.random() * 0.15)
    for node in (laptop, server):
        node.ask({"do": "outbox_retry"})
    wait_until_stored(laptop, server, patience_s=SETTLE_S)
    for sender, receiver in ((laptop, server), (server, laptop)):
        arrived = [message["subject"] for message in receiver.messages()]
        assert len(arrived) == len(set(arrived)), "a letter arrived twice"
        assert taken[sender.name] <= set(arrived), "a letter that was taken is missing"
    assert count > 100
