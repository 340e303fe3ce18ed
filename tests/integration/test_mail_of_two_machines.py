"""What may be sent from one machine to another, real processes: any text, once, within bounds."""

import json
import secrets
import socket
import time
from collections.abc import Iterator

import pytest

from agentmbx_node.errors import Failure
from agentmbx_node.home import socket_path
from node_process import NodeProcess
from two_machines import TwoMachines

# Names that a person takes for different ones, though a machine might not.
NAMES = ("Ноутбук 💻", "サーバー é")
TEXTS = (
    "плюс",
    "日本語 👩‍👩‍👧",
    "a\u0301",
    "\u200fright to left\u202e",
    "tab\tinside",
    "\U0010ffff",
    "\ufeffbegins with a mark",
    "z" + "\u0300" * 150,
    "{}' OR 1=1; -- \\ \" <b>",
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    with TwoMachines(tmp_path_factory.mktemp("mail"), names=NAMES) as made:
        yield made


def test_a_letter_goes_directly_and_is_stored_once(scene: TwoMachines) -> None:
    sent = scene.send("hello", body="text", wait="stored")
    assert sent["state"] == "stored"
    (message,) = (each for each in scene.server.messages() if each["subject"] == "hello")
    assert message["id"] == sent["id"]
    assert (message["from"], message["way"]) == (f"owner@{NAMES[0]}", "direct")
    assert not message["read"], "listing marks nothing as read"
    told = scene.server.ask({"do": "read", "id": message["id"]})["message"]
    assert told["body"] == "text"
    (again,) = (each for each in scene.server.messages() if each["id"] == sent["id"])
    assert again["read"]


def test_the_same_key_twice_is_one_letter_and_with_another_text_a_conflict(
    scene: TwoMachines,
) -> None:
    first = scene.send("once", key="k", wait="stored")
    second = scene.send("once", key="k", wait="stored")
    assert first["id"] == second["id"]
    for changed in ({"subject": "twice"}, {"subject": "once", "body": "more"}):
        with pytest.raises(Failure) as conflict:
            scene.send(**changed, key="k")
        assert conflict.value.code == "key_conflict"
    assert scene.arrived().count("once") == 1
    assert "twice" not in scene.arrived()


@pytest.mark.parametrize("character", ["x", "é", "👩", "\0"])
def test_a_body_has_a_bound_in_bytes_and_reaches_it(scene: TwoMachines, character: str) -> None:
    largest = character * (262_144 // len(character.encode()))
    sent = scene.send("large", body=largest, wait="stored")
    assert sent["state"] == "stored"
    assert scene.server.ask({"do": "read", "id": sent["id"]})["message"]["body"] == largest
    with pytest.raises(Failure) as refused:
        scene.send("larger", body=largest + "e")
    assert refused.value.exit_code == 2
    assert "262,144" in str(refused.value)
    assert "larger" not in scene.arrived()


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_arrives_as_it_was_written(scene: TwoMachines, text: str) -> None:
    sent = scene.send(text, body=text * 3, wait="stored")
    told = scene.server.ask({"do": "read", "id": sent["id"]})["message"]
    assert (told["subject"], told["body"]) == (text.strip(), text * 3)
    (letter,) = scene.laptop.ask({"do": "sent", "id": sent["id"]})["letters"]
    assert letter["subject"] == text.strip()
    assert letter["to"] == f"owner@{NAMES[1]}"


@pytest.mark.parametrize("name", ["плюс", "日本語 👩", "a\u0301", "owner 2", "<b>'\"\\"])
def test_mail_is_for_any_visible_name_and_from_any(scene: TwoMachines, name: str) -> None:
    answer = scene.laptop.send(f"{name}@{NAMES[1]}", "for a name", **{"as": name, "wait": "stored"})
    told = scene.server.ask({"do": "read", "id": answer["id"]})["message"]
    assert told["from"] == f"{name}@{NAMES[0]}"
    assert told["to"] == f"{name}@{NAMES[1]}"
    listed = scene.server.ask({"do": "inbox", "as": name})["messages"]
    assert answer["id"] in [each["id"] for each in listed]


@pytest.mark.parametrize(
    "changes",
    [
        {"subject": ""},
        {"subject": "   "},
        {"subject": "x" * 201},
        {"subject": "two\nlines"},
        {"subject": "two\u2028lines"},
        {"as": "with@sign"},
        {"as": "bell\a"},
        {"as": "x" * 65},
        {"kind": "no such kind"},
    ],
    ids=str,
)
def test_what_no_reader_takes_is_refused_before_it_is_in_the_outbox(
    scene: TwoMachines, changes: dict[str, str]
) -> None:
    before = len(scene.laptop.letters())
    with pytest.raises(Failure) as refused:
        scene.laptop.ask({"do": "send", "to": f"owner@{NAMES[1]}", "subject": "s"} | changes)
    assert refused.value.exit_code == 2
    assert len(scene.laptop.letters()) == before


@pytest.mark.parametrize("at", ["to", "subject", "body", "as", "key", "kind", "do"])
def test_half_a_character_is_refused_and_harms_nothing(scene: TwoMachines, at: str) -> None:
    """Case T1, by the client, and by who speaks to the socket himself."""
    request = {"do": "send", "to": f"owner@{NAMES[1]}", "subject": "half", "body": "b"}
    request[at] = request.get(at, "") + "\ud83d"
    with pytest.raises(Failure) as refused:
        scene.laptop.ask(request)
    assert refused.value.exit_code == 2
    with socket.socket(socket.AF_UNIX) as plug:
        plug.settimeout(10)
        plug.connect(socket_path(scene.laptop.home))
        plug.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(plug.makefile().readline())
    assert (answer["ok"], answer["code"]) == (False, "usage")
    assert "half" not in [letter["subject"] for letter in scene.laptop.letters()]
    assert scene.send("whole", wait="stored")["state"] == "stored"


def test_mail_to_this_machine_and_to_nobody_is_refused(scene: TwoMachines) -> None:
    """Case W2: nobody answers his own mail for ever."""
    before = len(scene.laptop.letters())
    own = (f"owner@{NAMES[0]}", f"owner@{NAMES[0].upper()}", f"other@{NAMES[0]}")
    for to in (*own, "owner@サーバー", "owner", f"@{NAMES[1]}", "", "owner@"):
        with pytest.raises(Failure) as refused:
            scene.laptop.send(to, "hello")
        assert refused.value.exit_code in (2, 3)
        assert to not in own or "this machine" in str(refused.value)
    assert len(scene.laptop.letters()) == before


def test_a_second_daemon_on_a_folder_is_refused_and_the_first_goes_on(scene: TwoMachines) -> None:
    """Case S2, also with another name and at another port."""
    second = NodeProcess(scene.laptop.home, "another name")
    second.log_path = scene.laptop.home.with_name("second.log")
    started_s = time.monotonic()
    # It answers at the first one's socket, so the second is seen to end by itself.
    second.start()
    assert second.wait() == 3
    assert time.monotonic() - started_s < 10
    assert "Another daemon" in second.log()
    assert scene.laptop.ask({"do": "status"})["name"] == NAMES[0]
    subject = secrets.token_hex(8)
    assert scene.send(subject, wait="stored")["state"] == "stored"
    assert scene.arrived().count(subject) == 1
