"""A relay and two nodes, killed at random: every letter arrives once, and both sides agree."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agentmbx_node.errors import Failure
from node_process import NodeProcess, wait_until_stored
from relay_process import RelayProcess
from scene import seeded
from two_machines import TwoMachines, eventually
from views import assert_views_agree, held_count

STORM_S = 120.0
SETTLE_S = 60.0
LETTERS_MIN = 200
KILLS_MIN = 40


class Story(msgspec.Struct):
    """What was sent from each machine: what it said it took, and what it was asked to."""

    asked: dict[str, set[str]]
    taken: dict[str, set[str]]
    kills: Counter[str]

    @property
    def count(self) -> int:
        """How many letters were sent."""
        return sum(map(len, self.asked.values()))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    with TwoMachines(tmp_path) as made:
        made.set_relays()
        yield made


def ways(machines: TwoMachines) -> tuple[tuple[NodeProcess, NodeProcess], ...]:
    return (machines.laptop, machines.server), (machines.server, machines.laptop)


def send_some(sender: NodeProcess, receiver: NodeProcess, dice: random.Random, told: Story) -> None:
    for _ in range(dice.randrange(7)):
        subject = f"{told.count} of {sender.name}"
        told.asked[sender.name].add(subject)
        size = dice.choice((0, dice.randrange(3000), dice.randrange(100_000)))
        try:
            sender.send(f"owner@{receiver.name}", subject, body="x" * size, key=subject)
        except Failure:
            return  # it was killed in the middle, and the letter may be there or not
        told.taken[sender.name].add(subject)


def kill_one(machines: TwoMachines, dice: random.Random, told: Story) -> None:
    victim = dice.choice((machines.relay, machines.laptop, machines.server))
    told.kills[type(victim).__name__] += 1
    victim.kill()
    time.sleep(dice.random() * 0.5)
    if isinstance(victim, RelayProcess):
        victim.restart()
    else:
        victim.start()


def test_whoever_is_killed_every_letter_arrives_once_and_both_sides_agree(
    machines: TwoMachines,
) -> None:
    dice = seeded()
    names = [sender.name for sender, _ in ways(machines)]
    told = Story({name: set() for name in names}, {name: set() for name in names}, Counter())
    ends_s = time.monotonic() + STORM_S
    while time.monotonic() < ends_s:
        for sender, receiver in ways(machines):
            send_some(sender, receiver, dice, told)
        if dice.random() < 0.3:
            kill_one(machines, dice, told)
        time.sleep(dice.random() * 0.15)
    for sender, _ in ways(machines):
        sender.ask({"do": "outbox_retry"})
    wait_until_stored(machines.laptop, machines.server, patience_s=SETTLE_S)
    for sender, receiver in ways(machines):
        arrived = Counter(message["subject"] for message in receiver.messages())
        assert max(arrived.values()) == 1, "a letter arrived twice"
        assert told.taken[sender.name] <= set(arrived), "a letter that was taken is missing"
        assert set(arrived) <= told.asked[sender.name]
    print(f"{told.count=} {told.kills=}")  # noqa: T201 - shown when it fails
    # What a relay was given beside the direct way is collected too, and acked.
    eventually(lambda: held_count(machines.relay) == 0, SETTLE_S)
    assert [machines.laptop.stop(), machines.server.stop(), machines.relay.stop()] == [0, 0, 0]
    for sender, receiver in ways(machines):
        assert_views_agree(sender, receiver)
    assert told.count >= LETTERS_MIN
    assert told.kills.total() >= KILLS_MIN
