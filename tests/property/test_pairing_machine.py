"""A state machine of pairing: an initiator, two joiners, and one in the middle with every frame.

Requests and answers are lost, repeated, delayed and replaced; commits fail; each machine is killed
between any two steps, with what it kept in memory; wall clocks say anything. Whatever happens, a
token makes at most one peer, no side is paired with a key that the other did not show, and who has
no token is nobody's peer. When messages get through again, both sides end paired.
"""

from collections import Counter
from typing import Final

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
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

TOKENS_MAX: Final = 6
JOINERS: Final = ("laptop", "phone")
PASSES_MS: Final = (
    *(0, 1, 1000, 5000, 60_000, 100_000),
    *(TOKEN_MS - 60_000, TOKEN_MS, REPEAT_MS - TOKEN_MS, REPEAT_MS),
)
WALLS_MS: Final = (0, 1, 1_700_000_000_000, 2**62)
FATES: Final = (
    *("through", "through", "through", "answer late", "request lost"),
    *("answer lost", "commit fails", "twice", "crooked"),
)

who = st.sampled_from(JOINERS)
backs = st.integers(0, TOKENS_MAX - 1)


class Run(msgspec.Struct):
    """A joiner's run with one token: what it keeps in memory, and so loses when it is killed."""

    token: bytes
    answer: bytes = b""


class Spent(msgspec.Struct):
    """A spent token as the model has it: by whom, when, for which peer, and with what result."""

    identity: bytes
    age_ms: int
    peer: int
    result: bytes


class Pairing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.desk = Side("desk")
        self.joiners = {name: Side(name) for name in JOINERS}
        self.mallory = Side("mallory")
        self.tokens: list[bytes] = []
        self.runs: dict[str, Run] = {}
        # Joiners that sent something since they last paired.
        self.busy: set[str] = set()
        self.frames: list[bytes] = []
        # The pair keys in each frame that a machine made itself: these it has shown.
        self.shown: dict[bytes, set[bytes]] = {}
        self.open_since_ms: dict[bytes, int] = {}
        self.bad_proofs: Counter[bytes] = Counter()
        self.spent: dict[bytes, Spent] = {}

    def teardown(self) -> None:
        try:
            if self.tokens:
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
        token = self.desk.offer()
        self.tokens.append(token)
        self.open_since_ms[wire.token_id(token)] = self.desk.age_ms

    @rule(name=who, back=backs)
    def paste(self, name: str, back: int) -> None:
        self.runs[name] = Run(self.tokens[-1 - back % len(self.tokens)])

    @rule(name=who, fate=st.sampled_from(FATES))
    def ask(self, name: str, fate: str) -> None:
        """Send the next frame of a run, as `join` does, and let the network do its worst."""
        run = self.runs.get(name)
        if run is None:
            return
        data = self.next_frame(name, run)
        if fate == "request lost":
            return
        answer = self.deliver(
            crooked(data) if fate == "crooked" else data, fails=fate == "commit fails"
        )
        if fate == "twice":
            again = self.deliver(data)
            assert not answer or answer == again
        if not answer:
            # What the driver does when its proof was refused.
            answer = self.deliver(self.joiners[name].begin(run.token))
        if fate == "answer late":
            run.answer = answer
        elif answer and fate != "answer lost":
            self.take(name, run, answer)

    @rule(name=who, fails=st.booleans())
    def take_answer(self, name: str, fails: bool) -> None:  # noqa: FBT001 - drawn
        run = self.runs.get(name)
        if run is not None and run.answer:
            answer, run.answer = run.answer, b""
            self.take(name, run, answer, fails=fails)

    @rule(name=who)
    def go_on(self, name: str) -> None:
        """Some steps in a row without faults."""
        run = self.runs.get(name)
        if run is not None:
            self.drive(name, run)

    @precondition(lambda self: len(self.tokens) < TOKENS_MAX)
    @rule(name=who)
    def pair_with_a_new_line(self, name: str) -> None:
        """Pair again, or while an older line is only half done."""
        self.offer()
        self.paste(name, 0)
        assert self.drive(name, self.runs[name])

    @rule(name=who, back=backs)
    def go_back_to_an_old_line(self, name: str, back: int) -> None:
        self.paste(name, back)
        self.drive(name, self.runs[name])

    @rule(name=st.sampled_from(("desk", *JOINERS)))
    def kill(self, name: str) -> None:
        self.runs.pop(name, None)
        if name == "desk":
            self.desk.restart()
            self.open_since_ms.clear()

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

    @precondition(lambda self: self.frames)
    @rule(back=backs, at=backs, as_own=st.booleans())
    def replay_to_desk(self, back: int, at: int, as_own: bool) -> None:  # noqa: FBT001 - drawn
        """An old frame, perhaps signed anew as Mallory's; it undoes no pairing."""
        paired = [name for name in JOINERS if self.is_paired(name) and name not in self.busy]
        data = self.frames[-1 - (TOKENS_MAX * back + at) % len(self.frames)]
        if as_own:
            parsed = frame.parse(data)
            key = self.mallory.keyring.identity
            data = frame.sign(parsed.kind, key, parsed.fields, parsed.tail)
        self.deliver(data)
        assert all(self.is_paired(name) for name in paired)

    @precondition(lambda self: self.frames)
    @rule(name=who, back=backs, at=backs)
    def replay_to_joiner(self, name: str, back: int, at: int) -> None:
        run = self.runs.get(name)
        if run is not None:
            run.answer = self.frames[-1 - (TOKENS_MAX * back + at) % len(self.frames)]

    @rule(back=backs, with_anothers_key=st.booleans())
    def come_as_joiner(self, back: int, with_anothers_key: bool) -> None:  # noqa: FBT001 - drawn
        """Mallory with an overheard token id and a guessed token, perhaps with another's key."""
        token = self.tokens[-1 - back % len(self.tokens)]
        keys = sorted(key for keys in self.shown.values() for key in keys)
        own = self.mallory.keyring.pair_key(b"s" * 16).public
        hello = wire.make_hello(
            Kind.HELLO,
            self.mallory.keyring.identity,
            named_token=wire.token_id(token),
            nonce=b"n" * 32,
            sealing=self.mallory.keyring.sealing.public,
            pair=keys[back % len(keys)] if with_anothers_key and keys else own,
            name="desk",
        )
        reply = self.deliver(hello)
        if reply:
            assert not self.deliver(self.guess(Kind.PROOF, hello, reply))

    @rule(name=who, guesses=st.booleans())
    def stand_between(self, name: str, guesses: bool) -> None:  # noqa: FBT001 - drawn
        """Mallory answers a joiner instead of the desk."""
        run = self.runs.get(name)
        if run is None:
            return
        hello = self.joiners[name].begin(run.token)
        reply = foreign_reply(self.mallory, wire.token_id(run.token))
        self.take(name, run, reply)
        if guesses:
            assert not self.take(name, run, self.guess(Kind.RESULT, hello, reply))

    @rule(back=backs, tries=st.sampled_from((1, BAD_PROOFS_MAX - 1, BAD_PROOFS_MAX)))
    def wear_out(self, back: int, tries: int) -> None:
        proofs = [data for data in self.frames if frame.parse(data).kind is Kind.PROOF]
        if proofs:
            for _ in range(tries):
                assert not self.deliver(crooked(proofs[-1 - back % len(proofs)]), twisted=True)

    def guess(self, kind: Kind, hello: bytes, reply: bytes) -> bytes:
        return wire.make_proof(
            kind,
            self.mallory.keyring.identity,
            b"guessed guessed!",
            wire.parse_hello(hello, Kind.HELLO),
            wire.parse_hello(reply, Kind.REPLY),
            own_card=self.mallory.card,
        )

    # What must hold

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert {row.token_id for row in JOINED.find(self.desk.connection)} <= set(self.spent)
        assert len(self.desk.peers("")) == len(self.spent)
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

    def deliver(self, data: bytes, *, fails: bool = False, twisted: bool = False) -> bytes:
        """The answer of the desk, empty for a refusal and for a commit that failed."""
        parsed = frame.parse(data)
        if not twisted:
            self.keep(data)
        before = self.desk.peers("")
        may_answer = self.may_answer(parsed)
        try:
            answer = self.desk.answer(data, fails=fails)
        except (Refusal, CommitFailed):
            assert self.desk.peers("") == before
            answer = b""
        assert may_answer or not answer
        events = self.desk.tokens.take_events()
        named = parsed.fields[:8]
        self.bad_proofs[named] += sum(event.kind is EventKind.BAD_PROOF for event in events)
        if parsed.kind is Kind.PROOF and answer:
            known = self.spent.get(named)
            assert known is None or known.result == answer
            assert (known is None) == any(event.kind is EventKind.PAIRED for event in events)
            if known is None:
                peer = self.desk.peers("")[-1]
                assert peer.identity == parsed.signer
                self.spent[named] = Spent(parsed.signer, self.desk.age_ms, peer.id or 0, answer)
        elif not answer:
            assert self.desk.peers("") == before
        if answer:
            self.keep(answer)
            self.note(answer)
        return answer

    def may_answer(self, parsed: frame.Frame) -> bool:
        """Whether a frame may be answered, if all else in it is good."""
        named = parsed.fields[:8]
        spent = self.spent.get(named)
        if spent is not None:
            live = {peer.id for peer in self.desk.peers()}
            return (
                parsed.signer == spent.identity
                and self.desk.age_ms - spent.age_ms < REPEAT_MS
                and (parsed.kind is Kind.HELLO or spent.peer in live)
            )
        since_ms = self.open_since_ms.get(named)
        return (
            since_ms is not None
            and self.desk.age_ms - since_ms < TOKEN_MS
            and self.bad_proofs[named] < BAD_PROOFS_MAX
        )

    def keep(self, data: bytes) -> None:
        """What the one in the middle has seen."""
        if data not in self.frames:
            self.frames.append(data)

    def next_frame(self, name: str, run: Run) -> bytes:
        side = self.joiners[name]
        self.busy.add(name)
        hello = side.begin(run.token)
        self.note(hello)
        data = side.write(lambda each: joining.pending_proof(each, run.token)) or hello
        self.keep(data)
        return data

    def take(self, name: str, run: Run, answer: bytes, *, fails: bool = False) -> bool:
        """Whether the joiner is paired by this answer, which may be anything."""
        side = self.joiners[name]
        self.note(side.begin(run.token))
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
        assert answer in [each.result for each in self.spent.values()]
        del self.runs[name]
        self.busy.discard(name)
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
            self.drive(name, run)
        if name not in self.runs and self.is_paired(name):
            return
        self.offer()
        self.runs[name] = Run(self.tokens[-1])
        assert self.drive(name, self.runs[name])
        assert self.is_paired(name)

    def must_pair(self, name: str, run: Run) -> bool:
        """Whether this token is open yet, or was spent by this joiner for a pairing that stands."""
        desk, named = self.desk, wire.token_id(run.token)
        joined, spent = JOINED.get(desk.connection, named), self.spent.get(named)
        hello = self.joiners[name].begin(run.token)
        if joined is None or spent is None:
            # Its own proof for another's reply may be one of the bad ones.
            since_ms = self.open_since_ms.get(named, -TOKEN_MS)
            is_open = desk.age_ms - since_ms < TOKEN_MS
            return not spent and is_open and self.bad_proofs[named] < BAD_PROOFS_MAX - 1
        return (
            joined.hello == frame.parse(hello).digest
            and desk.age_ms - spent.age_ms < REPEAT_MS
            and spent.peer in {peer.id for peer in desk.peers()}
        )

    def drive(self, name: str, run: Run) -> bool:
        """The steps of `join` over a network without faults; whether it pairs, and it must."""
        must = self.must_pair(name, run)
        for _ in range(2):
            answer = self.deliver(self.next_frame(name, run))
            if not answer:
                # Refused: another reply may be there by now.
                answer = self.deliver(self.joiners[name].begin(run.token))
            if not answer:
                break
            if self.take(name, run, answer):
                return True
            answer = self.deliver(self.next_frame(name, run))
            if answer and self.take(name, run, answer):
                return True
        assert not must
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
TestPairing.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
