"""Two machines and a relay, real processes: the ways of a letter, and what ends it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentmbx_node.errors import Failure
from agentmbx_node.keyring import Keyring
from agentmbx_node.machine import KEYRING_NAME
from node_process import NodeProcess, pair, set_relay, wait_until_stored
from relay_process import RelayProcess

CANARY = "canary-of-the-text"


class Scene:
    """A relay, and two paired machines that both collect from it."""

    def __init__(self, folder: Path) -> None:
        self.relay = RelayProcess(folder / "relay").start()
        self.laptop = NodeProcess(folder / "laptop", "canary-laptop").start()
        self.server = NodeProcess(folder / "server", "canary-server").start()
        pair(self.laptop, self.server)

    def set_relays(self) -> None:
        for node in (self.laptop, self.server):
            set_relay(node, self.relay)

    def send(self, subject: str, **more: object) -> dict[str, object]:
        """One letter from the laptop to the server."""
        return self.laptop.send("owner@canary-server", subject, **more)

    def arrived(self) -> list[str]:
        return [message["subject"] for message in self.server.messages()]

    def end(self) -> None:
        for process in (self.laptop, self.server, self.relay):
            if process.running:
                process.kill()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        made.end()


def eventually(holds: Callable[[], bool], patience_s: float = 30.0) -> None:
    ends_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < ends_s, "it did not happen in time"
        time.sleep(0.05)


def test_a_letter_goes_directly_and_is_stored_once(scene: Scene) -> None:
    sent = scene.send("hello", body="text", wait="stored")
    assert sent["state"] == "stored"
    (message,) = scene.server.messages()
    assert (message["from"], message["way"]) == ("owner@canary-laptop", "direct")
    assert not message["read"], "listing marks nothing as read"
    told = scene.server.ask({"do": "read", "id": message["id"]})["message"]
    assert told["body"] == "text"
    assert scene.server.messages()[0]["read"]


def test_while_the_peer_is_down_a_letter_waits_at_its_relay(scene: Scene) -> None:
    scene.set_relays()
    scene.server.stop()
    sent = scene.send("while you sleep", wait="held")
    (letter,) = scene.laptop.ask({"do": "outbox"})["letters"]
    assert (sent["state"], letter["way"]) == ("held", "relay")
    assert "waits for the peer" in letter["next"]
    scene.server.start()
    wait_until_stored(scene.laptop)
    assert scene.arrived() == ["while you sleep"]


def test_two_machines_that_listen_nowhere_meet_at_the_relay(scene: Scene) -> None:
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


def test_without_a_relay_a_letter_waits_in_the_outbox_and_says_why(scene: Scene) -> None:
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
    scene: Scene, tmp_path: Path
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


def test_a_refused_invite_changes_nothing(scene: Scene) -> None:
    scene.set_relays()
    url = scene.relay.url
    before = scene.server.ask({"do": "relay_status"})["relays"]
    with pytest.raises(Failure) as refused:
        scene.server.ask({"do": "relay_set", "line": f"{url}#{'a' * 52}.{'b' * 52}"})
    assert refused.value.exit_code in (2, 3)
    after = scene.server.ask({"do": "relay_status"})["relays"]
    assert [each["queue"] for each in after] == [each["queue"] for each in before]


def test_unpairing_tells_the_peer_also_one_that_sleeps(scene: Scene) -> None:
    scene.set_relays()
    scene.server.stop()
    waiting = scene.send("never mind", wait="held")
    scene.laptop.ask({"do": "unpair", "peer": "canary-server"})
    (letter,) = scene.laptop.ask({"do": "sent", "id": waiting["id"]})["letters"]
    assert letter["state"] == "cancelled"
    scene.server.start()
    eventually(lambda: scene.server.ask({"do": "peers"})["peers"] == [])
    with pytest.raises(Failure) as refused:
        scene.server.send("owner@canary-laptop", "too late")
    assert refused.value.code == "no_such_peer"


def test_they_can_pair_anew_after_an_unpairing(scene: Scene) -> None:
    scene.laptop.ask({"do": "unpair", "peer": "canary-server"})
    eventually(lambda: scene.server.ask({"do": "peers"})["peers"] == [])
    pair(scene.server, scene.laptop)
    assert scene.send("again", wait="stored")["state"] == "stored"


def test_a_cancel_says_whether_the_letter_may_still_arrive(scene: Scene) -> None:
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


def test_the_same_key_twice_is_one_letter_and_with_another_text_a_conflict(scene: Scene) -> None:
    first = scene.send("once", key="k", wait="stored")
    second = scene.send("once", key="k", wait="stored")
    assert first["id"] == second["id"]
    with pytest.raises(Failure) as conflict:
        scene.send("twice", key="k")
    assert conflict.value.code == "key_conflict"
    assert scene.arrived() == ["once"]


def test_a_body_has_a_bound_and_reaches_it(scene: Scene) -> None:
    largest = "é" * 131_072
    assert scene.send("large", body=largest, wait="stored")["state"] == "stored"
    (message,) = scene.server.messages()
    assert scene.server.ask({"do": "read", "id": message["id"]})["message"]["body"] == largest
    with pytest.raises(Failure) as refused:
        scene.send("larger", body=largest + "e")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "subject", ["плюс", "日本語 👩‍👩‍👧", "a\u0301", "\u200fright to left", "tab\tinside"]
)
def test_any_text_arrives_as_it_was_written(scene: Scene, subject: str) -> None:
    scene.send(subject, body=subject * 3, wait="stored")
    assert scene.arrived() == [subject]


def test_mail_to_this_machine_and_to_nobody_is_refused(scene: Scene) -> None:
    for to in ("owner@canary-laptop", "owner@canary-servr", "owner", "@canary-server"):
        with pytest.raises(Failure) as refused:
            scene.laptop.send(to, "hello")
        assert refused.value.exit_code in (2, 3)
    assert scene.laptop.letters() == []


def test_it_stops_in_time_while_it_collects(scene: Scene) -> None:
    scene.set_relays()
    started = time.monotonic()
    assert scene.server.stop() == 0
    assert time.monotonic() - started < 8


def test_a_second_daemon_on_a_folder_is_refused(scene: Scene) -> None:
    second = NodeProcess(scene.laptop.home, "canary-laptop")
    with pytest.raises(RuntimeError, match="Another daemon"):
        # It answers at the first one's socket, so the second ends by itself.
        _start_alone(second)
    assert scene.laptop.ask({"do": "status"})["name"] == "canary-laptop"


def _start_alone(node: NodeProcess) -> None:
    node.start()
    code = node.wait()
    assert code == 3
    raise RuntimeError(node.log())


def test_names_texts_and_keys_stay_out_of_logs_and_of_the_relay(scene: Scene) -> None:
    scene.set_relays()
    scene.server.stop()
    scene.send(f"subject {CANARY}", body=f"body {CANARY}", wait="held")
    scene.server.start()
    wait_until_stored(scene.laptop)
    scene.laptop.send("owner@canary-server", f"direct {CANARY}", body=CANARY, wait="stored")
    os.kill(scene.relay.pid, signal.SIGTERM)
    scene.relay.wait()
    needles = [b"canary-laptop", b"canary-server", CANARY.encode()]
    for node in (scene.laptop, scene.server):
        keyring = Keyring.open(node.home / KEYRING_NAME, may_make=False)
        needles += [keyring.identity.public, keyring.sealing.public]
        needles += [keyring.identity.seed, keyring.sealing.secret]
        assert not any(needle in node.log_path.read_bytes() for needle in needles)
    places = [scene.relay.log_path, *scene.relay.data.glob("relay.db*")]
    assert len(places) > 1
    for place in places:
        content = place.read_bytes()
        assert not any(needle in content for needle in needles), place.name
