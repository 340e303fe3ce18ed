"""`./dev demo`: two machines and a relay, with real processes, told as it happens."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentmbx_node.control import client
from agentmbx_node.errors import Failure
from agentmbx_node.home import lock_holder
from agentmbx_node.keyring import Keyring
from agentmbx_node.machine import KEYRING_NAME
from relay_process import AGENTMBX, RelayProcess

BURST = 50
PATIENCE_S = 60.0
SECRET_TEXT = "the-ferry-leaves-at-noon"
NAMES = ("demo-laptop", "demo-server")


class StoryFailed(Exception):
    """Something did not go as the story says."""


class Machine:
    """One machine: its data folder, and `agentmbx` run in it."""

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.name = name
        self.listen = "127.0.0.1:0"

    def run(self, *words: str) -> dict[str, Any]:
        """What `agentmbx WORDS --json` prints."""
        done = subprocess.run(
            [*AGENTMBX, *words, "--json"],
            env=self._environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        try:
            document: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise StoryFailed(f"{self.name}: agentmbx {words[0]} said: {done.stderr}") from None
        if done.returncode or not document["ok"]:
            raise StoryFailed(f"{self.name}: agentmbx {words[0]}: {document.get('message')}")
        return document

    def up(self) -> None:
        """Start the daemon."""
        self.run("up", "--detach", "--name", self.name, "--listen", self.listen)

    def begin_pairing(self) -> tuple[subprocess.Popen[str], str]:
        """`agentmbx pair`, still running, and the line that it printed."""
        process = subprocess.Popen(
            [*AGENTMBX, "pair"], env=self._environment, stdout=subprocess.PIPE, text=True
        )
        for printed in process.stdout or ():
            words = printed.split()
            if words[:2] == ["agentmbx", "join"]:
                return process, words[2]
        raise StoryFailed(f"{self.name}: agentmbx pair printed no line")

    def send(self, other: "Machine", subject: str, wait: str) -> dict[str, Any]:
        """Send one letter and wait for a state; the letter as `sent` shows it."""
        to = f"owner@{other.name}"
        sent = self.run("send", to, subject, "--body", SECRET_TEXT, "--wait", wait)
        if sent["state"] not in (wait, "stored"):
            raise StoryFailed(f"{subject!r} is {sent['state']}")
        (letter,) = self.run("sent", sent["id"])["letters"]
        return dict(letter)

    def ask(self, **request: object) -> dict[str, Any]:
        """Ask the daemon itself, where a command for each letter would take too long."""
        return client.call(self.home, dict(request), PATIENCE_S)

    def letters(self) -> list[dict[str, Any]]:
        """All that was sent from here."""
        return list(self.ask(do="sent")["letters"])

    def subjects(self) -> list[str]:
        """The subjects of all that arrived here."""
        return [each["subject"] for each in self.ask(do="inbox")["messages"]]

    def kill(self) -> None:
        """Leave no daemon behind, whatever happened."""
        holder = lock_holder(self.home)
        if holder:
            os.kill(holder, signal.SIGKILL)

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | {"MBX_HOME": str(self.home)}


class Story:
    """The steps in order; each returns one sentence about what it showed."""

    def __init__(self, folder: Path) -> None:
        self._metrics = f"127.0.0.1:{_free_port()}"
        self._relay = RelayProcess(folder / "relay", "--metrics-listen", self._metrics)
        self._laptop, self._server = (Machine(folder / name, name) for name in NAMES)
        self._letters: list[dict[str, Any]] = []

    @property
    def steps(self) -> Sequence[tuple[str, Callable[[], str]]]:
        """Name and action of each step."""
        return [
            ("a closed relay starts", self._start),
            ("two machines start", self._up),
            ("they pair by a token", self._pair),
            ("both set the relay by the invite's line", self._set_relay),
            ("a letter goes directly", self._direct),
            ("the server is down, the next letter waits at the relay", self._asleep),
            ("the server comes back and collects it", self._awake),
            ("the direct way is cut, the relay killed while it holds mail", self._cut),
            ("the relay comes back, and all is stored exactly once", self._recover),
            ("nothing that travelled can be read at the relay", self._search),
            ("all stop when told", self._stop),
        ]

    @property
    def letters(self) -> list[dict[str, Any]]:
        """What became of each letter: its way, its states with times."""
        return self._letters

    def end(self) -> None:
        """Leave no process behind."""
        for machine in (self._laptop, self._server):
            machine.kill()
        if self._relay.running:
            self._relay.kill()

    def _start(self) -> str:
        self._relay.start()
        return f"{self._relay.url} (process {self._relay.pid})"

    def _up(self) -> str:
        self._laptop.up()
        self._server.up()
        listens = [machine.run("status")["listen"] for machine in (self._laptop, self._server)]
        return f"they listen on {' and '.join(listens)}"

    def _pair(self) -> str:
        waiting, line = self._laptop.begin_pairing()
        joined = self._server.run("join", line)
        if waiting.wait(PATIENCE_S):
            raise StoryFailed("agentmbx pair did not end well")
        (peer,) = self._laptop.run("peers")["peers"]
        if peer["fingerprint"] != joined["own_fingerprint"]:
            raise StoryFailed("the two screens show different fingerprints")
        return f"the laptop shows {peer['name']} as {peer['fingerprint']}, and so does the server"

    def _set_relay(self) -> str:
        told = []
        for machine in (self._laptop, self._server):
            answer = machine.run("relay", "set", self._relay.invite())
            told += answer["told"]
        if sorted(told) != sorted(NAMES):
            raise StoryFailed(f"only {told} were told of the new route")
        return "each invite made one queue, and the peers know the way"

    def _direct(self) -> str:
        letter = self._laptop.send(self._server, "The build is red", "stored")
        if letter["way"] != "direct":
            raise StoryFailed(f"it went by {letter['way']}")
        took_ms = letter["events"][-1]["at_ms"] - letter["events"][0]["at_ms"]
        return f"stored after {took_ms} ms"

    def _asleep(self) -> str:
        self._server.run("down")
        letter = self._laptop.send(self._server, "While you sleep", "held")
        if (letter["way"], letter["state"]) != ("relay", "held"):
            raise StoryFailed(f"it is {letter['state']} by {letter['way']}")
        return f"held, the relay's signature checked; {letter['next']}"

    def _awake(self) -> str:
        self._server.up()
        _wait(lambda: all(letter["state"] == "stored" for letter in self._laptop.letters()))
        return "the laptop sees stored"

    def _cut(self) -> str:
        for machine in (self._laptop, self._server):
            machine.run("down")
            machine.listen = "off"
        for machine in (self._laptop, self._server):
            machine.up()
        self._server.run("down")
        for number in range(BURST):
            self._write(self._laptop, self._server, number)
        _wait(lambda: self._count(self._laptop, "held") >= BURST // 2)
        held = self._count(self._laptop, "held")
        self._relay.kill()
        self._server.up()
        for number in range(BURST):
            self._write(self._server, self._laptop, number)
        return f"SIGKILL while {held} were held; {BURST} more are written meanwhile"

    def _recover(self) -> str:
        self._relay.restart()
        machines = (self._laptop, self._server)
        for machine in machines:
            machine.run("outbox", "retry")
        _wait(
            lambda: all(
                letter["state"] == "stored" for each in machines for letter in each.letters()
            ),
            patience_s=180,
        )
        for sender, receiver in (machines, machines[::-1]):
            written = sorted(letter["subject"] for letter in sender.letters())
            if sorted(receiver.subjects()) != written:
                raise StoryFailed("letters are missing, or came twice")
        self._letters = [
            {"from": each.name, **letter} for each in machines for letter in each.letters()
        ]
        return f"{len(self._letters)} letters, none missing, none twice"

    def _search(self) -> str:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics") as page:
            places: dict[str, bytes] = {"metrics": page.read(), "log": self._relay.log().encode()}
        for path in sorted(self._relay.data.iterdir()):
            if path.name.startswith("relay.db"):
                places[path.name] = path.read_bytes()
        needles = {name: name.encode() for name in NAMES} | {"the text": SECRET_TEXT.encode()}
        for machine in (self._laptop, self._server):
            keyring = Keyring.open(machine.home / KEYRING_NAME, may_make=False)
            needles[f"the identity of {machine.name}"] = keyring.identity.public
            needles[f"the sealing key of {machine.name}"] = keyring.sealing.public
        for where, content in places.items():
            for what, needle in needles.items():
                if needle in content:
                    raise StoryFailed(f"{what} stands in the relay's {where}")
        return f"{len(needles)} things looked for in {', '.join(places)}"

    def _stop(self) -> str:
        started = time.perf_counter()
        self._laptop.run("down")
        self._server.run("down")
        if self._relay.stop() != 0:
            raise StoryFailed("the relay did not end well")
        return f"after {(time.perf_counter() - started) * 1000:.0f} ms"

    def _write(self, sender: Machine, receiver: Machine, number: int) -> None:
        subject = f"Letter {number} of {sender.name}"
        sender.ask(do="send", to=f"owner@{receiver.name}", subject=subject, body=SECRET_TEXT)

    def _count(self, machine: Machine, state: str) -> int:
        return sum(letter["state"] == state for letter in machine.letters())


def _wait(done: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    ends_s = time.monotonic() + patience_s
    while not done():
        if time.monotonic() > ends_s:
            raise StoryFailed(f"it did not happen within {patience_s:.0f} s")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tell(story: Story, say: Callable[[str], None]) -> Mapping[str, object]:
    """Run the steps until one fails; the document that --json prints."""
    steps: list[dict[str, object]] = []
    for name, act in story.steps:
        started = time.perf_counter()
        try:
            shown, ok = act(), True
        except (StoryFailed, Failure, RuntimeError, OSError, subprocess.SubprocessError) as error:
            shown, ok = f"{type(error).__name__}: {error}", False
        duration_ms = round((time.perf_counter() - started) * 1000, 1)
        steps.append({"name": name, "ok": ok, "ms": duration_ms})
        say(f"{'ok ' if ok else 'NOT'} {duration_ms:8.1f} ms  {name}: {shown}")
        if not ok:
            break
    ok = all(step["ok"] for step in steps) and len(steps) == len(story.steps)
    return {"ok": ok, "steps": steps, "letters": story.letters}


def show_letters(letters: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> None:
    """A table: each letter, its way, its states with times; of a burst the first and the last."""
    say(f"\n{'from':13}{'subject':28}{'way':8}states, ms after it was written")
    for letter in _first_and_last(letters):
        start_ms = letter["events"][0]["at_ms"]
        states = [f"{each['state']} {each['at_ms'] - start_ms}" for each in letter["events"]]
        way = letter["way"]
        say(f"{letter['from']:13}{letter['subject']:28}{way:8}{', '.join(states)}")


def _first_and_last(letters: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    shown = tuple(f"Letter {number} " for number in (0, BURST - 1))
    for letter in letters:
        if not letter["subject"].startswith("Letter ") or letter["subject"].startswith(shown):
            yield letter


def main() -> int:
    """Tell the story; the exit code."""
    parser = argparse.ArgumentParser(prog="./dev demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    out = sys.stderr if arguments.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    with tempfile.TemporaryDirectory(prefix="agentmbx-demo-") as folder:
        story = Story(Path(folder))
        try:
            document = tell(story, say)
        finally:
            story.end()
    if arguments.json:
        print(json.dumps(document))
    elif document["ok"]:
        show_letters(story.letters, say)
        say(f"The story is true: {len(story.letters)} letters.")
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
