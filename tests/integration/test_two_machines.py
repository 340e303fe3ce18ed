"""Two machines and a relay, real processes: the ways of a letter, and what ends it."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentmbx_node.errors import Failure
from agentmbx_protocol.keys import SigningKey, key_text
from node_process import pair, set_relay, wait_until_stored
from relay_process import RelayProcess
from two_machines import TwoMachines, eventually


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[TwoMachines]:
    with TwoMachines(tmp_path) as made:
        yield made


def test_while_the_peer_is_down_a_letter_waits_at_its_relay(scene: TwoMachines) -> None:
    scene.set_relays()
    scene.server.stop()
    sent = scene.send("while you sleep", wait="held")
    (letter,) = scene.laptop.ask({"do": "outbox"})["letters"]
    assert (sent["state"], letter["way"]) == ("held", "relay")
    assert "waits for the peer" in letter["next"]
    scene.server.start()
    wait_until_stored(scene.laptop)
    assert scene.arrived() == ["while you sleep"]


def test_a_peer_that_takes_connections_and_says_nothing_is_left_for_its_relay(
    scene: TwoMachines,
) -> None:
    """Case N2: half-open, as after a sleep; the failure is remembered for the letters behind."""
    scene.set_relays()
    os.kill(scene.server.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    assert scene.send("first", wait="held")["letter"]["way"] == "relay"
    assert time.monotonic() - started_s < 20
    started_s = time.monotonic()
    assert scene.send("second", wait="held")["state"] == "held"
    assert time.monotonic() - started_s < 5
    os.kill(scene.server.pid, signal.SIGCONT)
    wait_until_stored(scene.laptop)
    assert sorted(scene.arrived()) == ["first", "second"]


def test_two_machines_that_listen_nowhere_meet_at_the_relay(scene: TwoMachines) -> None:
    scene.set_relays()
    for node in (scene.laptop, scene.server):
        node.stop()
        node.listen = "off"
    scene.laptop.start()
    scene.server.start()
    scene.send("by relay only", wait="held")
    eventually(lambda: scene.arrived() == ["by relay only"])
    (letter,) = scene.laptop.letters()
    assert letter["way"] == "relay"


def test_without_a_relay_a_letter_waits_in_the_outbox_and_says_why(scene: TwoMachines) -> None:
    scene.server.stop()
    scene.send("for later")

    def says_why() -> bool:
        (letter,) = scene.laptop.ask({"do": "outbox"})["letters"]
        return "cannot be reached" in letter["why"] and "tried again" in letter["next"]

    eventually(says_why)
    scene.server.start()
    wait_until_stored(scene.laptop)
    assert scene.arrived() == ["for later"]


def test_a_second_relay_set_empties_the_old_queue_then_retires_it(
    scene: TwoMachines, tmp_path: Path
) -> None:
    scene.set_relays()
    scene.server.stop()
    scene.send("at the old relay", wait="held")
    with RelayProcess(tmp_path / "other").start() as other:
        scene.server.start()
        answer = set_relay(scene.server, other)
        assert answer["url"] == other.url

        def only_the_new_one() -> bool:
            relays = scene.server.ask({"do": "relay_status"})["relays"]
            return [each["url"] for each in relays] == [other.url]

        eventually(only_the_new_one)
        wait_until_stored(scene.laptop)
        assert scene.arrived() == ["at the old relay"]
        scene.server.stop()
        scene.send("at the new relay", wait="held")
        scene.server.start()
        eventually(lambda: "at the new relay" in scene.arrived())


def test_a_refused_invite_changes_nothing(scene: TwoMachines) -> None:
    scene.set_relays()
    url = scene.relay.url
    before = scene.server.ask({"do": "relay_status"})["relays"]
    with pytest.raises(Failure) as refused:
        scene.server.ask({"do": "relay_set", "line": f"{url}#{'a' * 52}.{'b' * 52}"})
    assert refused.value.exit_code in (2, 3)
    after = scene.server.ask({"do": "relay_status"})["relays"]
    assert [each["queue"] for each in after] == [each["queue"] for each in before]


def test_unpairing_tells_the_peer_also_one_that_sleeps(scene: TwoMachines) -> None:
    scene.set_relays()
    scene.server.stop()
    waiting = scene.send("never mind", wait="held")
    scene.laptop.ask({"do": "unpair", "peer": "server"})
    (letter,) = scene.laptop.ask({"do": "sent", "id": waiting["id"]})["letters"]
    assert letter["state"] == "cancelled"
    scene.server.start()
    eventually(lambda: scene.server.ask({"do": "peers"})["peers"] == [])
    with pytest.raises(Failure) as refused:
        scene.server.send("owner@laptop", "too late")
    assert refused.value.code == "no_such_peer"


def test_they_can_pair_anew_after_an_unpairing(scene: TwoMachines) -> None:
    scene.laptop.ask({"do": "unpair", "peer": "server"})
    eventually(lambda: scene.server.ask({"do": "peers"})["peers"] == [])
    pair(scene.server, scene.laptop)
    assert scene.send("again", wait="stored")["state"] == "stored"


def test_a_cancel_says_whether_the_letter_may_still_arrive(scene: TwoMachines) -> None:
    scene.set_relays()
    scene.server.stop()
    tried = scene.send("tried", wait="held")
    answer = scene.laptop.ask({"do": "outbox_cancel", "id": tried["id"]})
    assert answer["may_still_arrive"]
    with pytest.raises(Failure):
        scene.laptop.ask({"do": "outbox_cancel", "id": tried["id"]})
    scene.server.start()
    eventually(lambda: scene.arrived() == ["tried"])
    # It arrived after all, and the sender is told so.
    eventually(lambda: scene.laptop.letters()[0]["state"] == "stored", patience_s=90)


def test_every_signal_stops_it_in_time_while_polls_and_callers_wait(scene: TwoMachines) -> None:
    """Case S1."""
    scene.set_relays()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        caller = scene.server.stream({"do": "pair"})
        next(caller)
        started_s = time.monotonic()
        os.kill(scene.server.pid, number)
        assert scene.server.wait() == 0
        assert time.monotonic() - started_s < 8
        with pytest.raises(Failure) as told:
            next(caller)
        assert told.value.exit_code == 4
        scene.server.start()
        assert scene.send(f"after {number.name}", wait="stored")["state"] == "stored"
    assert "Traceback" not in scene.server.log()


def test_without_its_relay_a_machine_collects_what_is_left_there_and_is_reached_directly(
    scene: TwoMachines,
) -> None:
    scene.set_relays()
    scene.server.stop()
    scene.send("the last by relay", wait="held")
    scene.server.start()
    scene.server.ask({"do": "relay_unset"})
    eventually(lambda: scene.arrived() == ["the last by relay"])
    eventually(lambda: scene.server.ask({"do": "relay_status"})["relays"] == [])
    with pytest.raises(Failure) as refused:
        scene.server.ask({"do": "relay_unset"})
    assert refused.value.code == "no_relay"
    assert scene.send("directly", wait="stored")["letter"]["way"] == "direct"
    scene.server.stop()
    letter = scene.send("nobody holds this")
    time.sleep(1)
    (waiting,) = scene.laptop.ask({"do": "sent", "id": letter["id"]})["letters"]
    assert waiting["state"] == "queued"


def test_a_letter_that_was_never_tried_is_cancelled_for_good(scene: TwoMachines) -> None:
    scene.server.stop()
    tried = scene.send("tried")

    def pauses() -> bool:
        (letter,) = scene.laptop.ask({"do": "outbox"})["letters"]
        pause = re.match(r"tried again in (\d+) s", letter["next"])
        return pause is not None and int(pause[1]) >= 3

    # What is sent while the peer is left alone for some seconds, is not tried before.
    eventually(pauses)
    untried = scene.send("never tried")
    assert not scene.laptop.ask({"do": "outbox_cancel", "id": untried["id"]})["may_still_arrive"]
    assert scene.laptop.ask({"do": "outbox_cancel", "id": tried["id"]})["may_still_arrive"]
    scene.server.start()
    assert scene.send("after them", wait="stored")["state"] == "stored"
    assert "never tried" not in scene.arrived()
    (letter,) = scene.laptop.ask({"do": "sent", "id": untried["id"]})["letters"]
    assert letter["state"] == "cancelled"
    assert letter["events"][-1]["detail"] == "it never left this machine"


def test_a_relay_that_is_not_there_is_unreachable_and_the_one_that_was_set_stays(
    scene: TwoMachines,
) -> None:
    scene.set_relays()
    nobody = f"http://127.0.0.1:1#{key_text(SigningKey.generate().public)}"
    for line in (nobody, nobody.partition("#")[0]):
        with pytest.raises(Failure) as told:
            scene.laptop.ask({"do": "relay_set", "line": line})
        assert (told.value.code, told.value.exit_code) == ("unreachable", 4)
    (kept,) = scene.laptop.ask({"do": "relay_status"})["relays"]
    assert (kept["state"], kept["error"]) == ("live", "")
