"""A state machine of pairing: an initiator, two joiners, and one in the middle with every frame.

Requests and answers are lost, repeated, delayed and replaced; commits fail; each machine is killed
between any two steps, with what it kept in memory; wall clocks say anything. Whatever happens, a
token makes at most one peer, no side is paired with a key that the other did not show, and who has
no token is nobody's peer. When messages get through again, both sides end paired.
"""

from typing import Final

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from agentmbx_node import joining
from agentmbx_node.joining import JOINING
from agentmbx_node.pairing import JOINED, REPEAT_MS
from agentmbx_node.tokens import BAD_PROOFS_MAX, TOKEN_MS, EventKind
from agentmbx_protocol import frame
from agentmbx_protocol import pairing as wire
from agentmbx_protocol.errors import Refusal
from agentmbx_protocol.frame import Kind
from pairing_sides import CommitFailed, Side, crooked, foreign_reply

TOKENS_MAX: Final = 4
JOINERS: Final = ("laptop", "phone")
PASSES_MS: Final = (0, 1000, 60_000, TOKEN_MS - 60_000, TOKEN_MS, REPEAT_MS - TOKEN_MS, REPEAT_MS)
WALLS_MS: Final = (0, 1, 1_700_000_000_000, 2**62)
FATES: Final = (
    *("through", "through", "through", "answer late", "request lost"),
    *("answer lost", "commit fails", "twice", "crooked"),
)

who = st.sampled_from(JOINERS)


class Run(msgspec.Struct):
    """A joiner's run with one token: what it keeps in memory, and so loses when it is killed."""

    token: bytes
    answer: bytes = b""


class Pairing(RuleBasedStateMachine):
    frames = Bundle("frames")

    def __init__(self) -> None:
        super().__init__()
        self.desk = Side("desk")
        self.joiners = {name: Side(name) for name in JOINERS}
        self.mallory = Side("mallory")
        self.tokens: list[bytes] = []
        self.runs: dict[str, Run] = {}
        self.made: dict[bytes, int] = {}
        # The pair keys in each frame that a machine made itself: these it has shown.
        self.shown: dict[bytes, set[bytes]] = {}

    def teardown(self) -> None:
        try:
            for name in JOINERS:
                self.pair_in_peace(name)
                self.nothing_is_wrong()
        finally:
            for side in self.sides():
                side.close()

    def sides(self) -> list[Side]:
        return [self.desk, self.mallory, *self.joiners.values()]

    # What happens at the machines

    @initialize(pasted=st.lists(who, unique=True))
    def begin(self, pasted: list[str]) -> None:
        self.offer()
        for name in pasted:
            self.paste(name, 0)

    @precondition(lambda self: len(self.tokens) < TOKENS_MAX)
    @rule()
    def offer(self) -> None:
        self.tokens.append(self.desk.offer())

    @rule(name=who, back=st.integers(0, TOKENS_MAX - 1))
    def paste(self, name: str, back: int) -> None:
        token = self.tokens[-1 - back % len(self.tokens)]
        self.joiners[name].begin(token)
        self.runs[name] = Run(token)

    @rule(target=frames, name=who, fate=st.sampled_from(FATES))
    def ask(self, name: str, fate: str) -> object:
        """Send the next frame of a run, as `join` does, and let the network do its worst."""
        run = self.runs.get(name)
        if run is None:
            return multiple()
        data = self.next_frame(name, run)
        if fate == "request lost":
            return data
        answer = self.deliver(
            crooked(data) if fate == "crooked" else data, fails=fate == "commit fails"
        )
        if fate == "twice":
            again = self.deliver(data)
            assert not answer or answer == again
        if not answer:
            return data
        if fate == "answer late":
            run.answer = answer
        elif fate != "answer lost":
            self.take(name, run, answer)
        return multiple(data, answer)

    @rule(name=who, fails=st.booleans())
    def take_answer(self, name: str, fails: bool) -> None:  # noqa: FBT001 - drawn
        run = self.runs.get(name)
        if run is not None and run.answer:
            answer, run.answer = run.answer, b""
            self.take(name, run, answer, fails=fails)

    @rule(name=who)
    def ask_for_another_reply(self, name: str) -> None:
        """What the driver does when its proof was refused."""
        run = self.runs.get(name)
        if run is not None:
            run.answer = self.deliver(self.joiners[name].begin(run.token))

    @rule()
    def restart_desk(self) -> None:
        self.desk.restart()

    @rule(name=who)
    def kill_joiner(self, name: str) -> None:
        self.runs.pop(name, None)

    @rule(
        passed_ms=st.sampled_from(PASSES_MS),
        wall_ms=st.sampled_from(WALLS_MS),
        at=st.integers(0, 3),
    )
    def let_time_pass(self, passed_ms: int, wall_ms: int, at: int) -> None:
        for side in self.sides():
            side.age_ms += passed_ms
        self.sides()[at].wall_ms = wall_ms

    @rule(name=who)
    def unpair(self, name: str) -> None:
        self.desk.connection.execute(
            "UPDATE peer SET state = 'leaving' WHERE state = 'paired' AND identity = ?",
            (self.joiners[name].identity,),
        )

    # What the one in the middle does

    @rule(target=frames, data=frames)
    def replay_to_desk(self, data: bytes) -> object:
        return self.deliver(data) or multiple()

    @rule(name=who, data=frames)
    def replay_to_joiner(self, name: str, data: bytes) -> None:
        run = self.runs.get(name)
        if run is not None:
            run.answer = data

    @rule(target=frames, at=st.integers(0, TOKENS_MAX - 1), copies=st.booleans())
    def make_hello(self, at: int, copies: bool) -> bytes:  # noqa: FBT001 - drawn
        """A hello of Mallory's for an overheard token id, perhaps with a pair key of another."""
        token = self.tokens[at % len(self.tokens)]
        keys = sorted(key for keys in self.shown.values() for key in keys)
        own = self.mallory.keyring.pair_key(b"s" * 16).public
        return wire.make_hello(
            Kind.HELLO,
            self.mallory.keyring.identity,
            named_token=wire.token_id(token),
            nonce=b"n" * 32,
            sealing=self.mallory.keyring.sealing.public,
            pair=keys[at % len(keys)] if copies and keys else own,
            name="desk",
        )

    @rule(target=frames, at=st.integers(0, TOKENS_MAX - 1))
    def make_reply(self, at: int) -> bytes:
        token = self.tokens[at % len(self.tokens)]
        return foreign_reply(self.mallory, wire.token_id(token))

    @rule(
        target=frames, kind=st.sampled_from([Kind.PROOF, Kind.RESULT]), hello=frames, reply=frames
    )
    def make_proof(self, kind: Kind, hello: bytes, reply: bytes) -> object:
        """A proof or result over overheard frames with a guessed token."""
        try:
            return wire.make_proof(
                kind,
                self.mallory.keyring.identity,
                b"guessed guessed!",
                wire.parse_hello(hello, Kind.HELLO),
                wire.parse_hello(reply, Kind.REPLY),
                own_card=self.mallory.card,
            )
        except Refusal:
            return multiple()

    @rule(target=frames, data=frames)
    def sign_anew(self, data: bytes) -> bytes:
        """The fields and tail of an overheard frame as Mallory's own."""
        parsed = frame.parse(data)
        return frame.sign(parsed.kind, self.mallory.keyring.identity, parsed.fields, parsed.tail)

    # What must hold

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert all(count == 1 for count in self.made.values())
        spent = {row.token_id for row in JOINED.find(self.desk.connection)}
        assert spent <= set(self.made)
        assert len(self.desk.peers("")) == len(self.made)
        known = {side.identity for side in self.joiners.values()}
        assert {peer.identity for peer in self.desk.peers("")} <= known
        for peer in self.desk.peers(""):
            assert peer.pair_key in self.shown[peer.identity]
        for side in self.joiners.values():
            mine = [each for each in self.desk.peers() if each.identity == side.identity]
            assert len(mine) <= 1
            assert len(side.peers()) <= 1
            for peer in side.peers(""):
                assert peer.identity == self.desk.identity
                assert peer.pair_key in self.shown[self.desk.identity]
                # The desk stores first, so each pairing here has its other half there.
                halves = [each for each in self.desk.peers("") if each.pair_key == side.shows(peer)]
                assert [self.desk.shows(each) for each in halves] == [peer.pair_key]
                if peer.state == "paired" and mine:
                    assert peer.pair_key == self.desk.shows(mine[0]) or self.is_behind(side)
        assert self.mallory.peers("") == []

    def is_behind(self, side: Side) -> bool:
        """Whether the joiner has still to take the result of a newer pairing."""
        return bool(JOINING.find(side.connection))

    # How frames go

    def deliver(self, data: bytes, *, fails: bool = False) -> bytes:
        """The answer of the desk, empty for a refusal and for a commit that failed."""
        before = len(self.desk.peers(""))
        try:
            answer = self.desk.answer(data, fails=fails)
        except (Refusal, CommitFailed):
            assert len(self.desk.peers("")) == before
            return b""
        finally:
            events = self.desk.tokens.take_events()
        grown = len(self.desk.peers("")) - before
        assert grown == sum(event.kind is EventKind.PAIRED for event in events)
        if grown:
            named = frame.parse(data).fields[:8]
            self.made[named] = self.made.get(named, 0) + grown
        self.note(answer)
        return answer

    def next_frame(self, name: str, run: Run) -> bytes:
        side = self.joiners[name]
        hello = side.begin(run.token)
        self.note(hello)
        return side.write(lambda each: joining.pending_proof(each, run.token)) or hello

    def take(self, name: str, run: Run, answer: bytes, *, fails: bool = False) -> bool:
        """Whether the joiner is paired by this answer, which may be anything."""
        side = self.joiners[name]
        side.begin(run.token)
        before = side.peers("")
        is_result = frame.parse(answer).kind is Kind.RESULT
        try:
            if not is_result:
                side.prove(run.token, answer, fails=fails)
                return False
            side.finish(run.token, answer, fails=fails)
        except (Refusal, CommitFailed):
            assert side.peers("") == before
            return False
        del self.runs[name]
        return True

    def note(self, data: bytes) -> None:
        parsed = frame.parse(data)
        if parsed.kind in (Kind.HELLO, Kind.REPLY):
            self.shown.setdefault(parsed.signer, set()).add(
                wire.parse_hello(data, parsed.kind).pair
            )

    # The end: the network is good again

    def pair_in_peace(self, name: str) -> None:
        run = self.runs.get(name)
        if run is not None:
            must = self.must_pair(name, run)
            assert self.drive(name, run) or not must
        if name not in self.runs and self.is_paired(name):
            return
        token = self.desk.offer()
        self.joiners[name].begin(token)
        self.runs[name] = Run(token)
        assert self.drive(name, self.runs[name])
        assert self.is_paired(name)

    def must_pair(self, name: str, run: Run) -> bool:
        """Whether this token is open yet, or was spent by this joiner for a pairing that stands."""
        desk, named = self.desk, wire.token_id(run.token)
        joined = JOINED.get(desk.connection, named)
        if joined is None:
            offer = desk.tokens._offers.get(named)
            return (
                offer is not None
                and desk.age_ms - offer.age_ms < TOKEN_MS
                and offer.bad_proofs < BAD_PROOFS_MAX - 1
            )
        hello = self.joiners[name].begin(run.token)
        live = {desk.shows(peer) for peer in desk.peers()}
        return (
            joined.hello == frame.parse(hello).digest
            and desk.age_ms - joined.age_ms < REPEAT_MS
            and wire.parse_hello(joined.reply, Kind.REPLY).pair in live
        )

    def drive(self, name: str, run: Run) -> bool:
        """The steps of `join` over a network without faults; whether it pairs."""
        for _ in range(2):
            data = self.next_frame(name, run)
            answer = self.deliver(data)
            if not answer:
                # Refused: another reply may be there by now.
                answer = self.deliver(self.joiners[name].begin(run.token))
            if not answer:
                return False
            if self.take(name, run, answer):
                return True
            answer = self.deliver(self.next_frame(name, run))
            if answer and self.take(name, run, answer):
                return True
        return False

    def is_paired(self, name: str) -> bool:
        side = self.joiners[name]
        halves = [each for each in self.desk.peers() if each.identity == side.identity]
        return (
            [(self.desk.shows(each), each.pair_key) for each in halves]
            == [(peer.pair_key, side.shows(peer)) for peer in side.peers()]
            != []
        )


TestPairing = Pairing.TestCase
TestPairing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
