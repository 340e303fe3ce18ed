"""Tokens: the one word that pairs two machines, and those that are open at the one that made it."""

import base64
import binascii
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

import msgspec

from agentmbx_node.addresses import address_text, parse_address
from agentmbx_node.clock import Now
from agentmbx_node.errors import Failure
from agentmbx_protocol import limits
from agentmbx_protocol.errors import BadSignature
from agentmbx_protocol.pairing import Hello, token_id

TOKEN_MS: Final = 10 * 60 * 1000
TOKENS_MAX: Final = 16
EXCHANGES_MAX: Final = 32
BAD_PROOFS_MAX: Final = 20
EVENTS_MAX: Final = 64
_COMMAND: Final = re.compile(r"agentmbx\s+join\s+")
_TEXT_LENGTH: Final = 26

Draw = Callable[[int], bytes]


class EventKind(Enum):
    """What happened to a token."""

    PAIRED = "paired"  # it made a peer, and is spent
    REUSED = "reused"  # another joiner came with a spent one, and was refused
    LATE = "late"  # a joiner came after its ten minutes
    BAD_PROOF = "bad_proof"  # somebody who does not know it tried
    WORN_OUT = "worn_out"  # too many bad proofs ended it
    OWN = "own"  # it came back from this very machine


class Event(msgspec.Struct, frozen=True):
    """What the screen at the initiator shows; `identity` and `name` are of the joiner."""

    kind: EventKind
    token_id: bytes
    identity: bytes
    name: str = ""


class Exchange(msgspec.Struct, frozen=True):
    """A joiner's hello, the reply to it, and the salt of the pair key in that reply."""

    hello: Hello
    reply: Hello
    salt: bytes


class Offer(msgspec.Struct):
    """A token that waits for its joiner; exchanges are by the joiner's identity and nonce."""

    token: bytes
    age_ms: int
    exchanges: dict[bytes, Exchange] = {}
    bad_proofs: int = 0

    def remember(self, key: bytes, exchange: Exchange) -> None:
        """Keep the exchange of a joiner; of too many the oldest goes."""
        self.exchanges.pop(key, None)
        while len(self.exchanges) >= EXCHANGES_MAX:
            del self.exchanges[next(iter(self.exchanges))]
        self.exchanges[key] = exchange


class Tokens:
    """The open tokens, in memory: at most 16, single use, 10 minutes, 20 bad proofs.

    Offers may come from another thread than answers. `draw` gives that many random bytes.
    """

    def __init__(self, draw: Draw = secrets.token_bytes) -> None:
        self.draw = draw
        self._offers: dict[bytes, Offer] = {}
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)

    def offer(self, now: Now) -> bytes:
        """A new token; when there are too many, the oldest ends."""
        token = self.draw(limits.TOKEN_BYTES)
        with self._lock:
            while len(self._offers) >= TOKENS_MAX:
                del self._offers[next(iter(self._offers))]
            self._offers[token_id(token)] = Offer(token, now.age_ms)
        return token

    def find(self, named: bytes, now: Now, identity: bytes) -> Offer:
        """The open token of that id; raises the one refusal for any other."""
        with self._lock:
            offer = self._offers.get(named)
            if offer is None:
                raise refusal()
            if now.age_ms - offer.age_ms < TOKEN_MS:
                return offer
            del self._offers[named]
        self.report(EventKind.LATE, named, identity)
        raise refusal()

    def count_bad_proof(self, offer: Offer, identity: bytes) -> None:
        """One more proof of somebody who does not know the token; the last one ends it."""
        named = token_id(offer.token)
        offer.bad_proofs += 1
        self.report(EventKind.BAD_PROOF, named, identity)
        if offer.bad_proofs >= BAD_PROOFS_MAX:
            self.end(named)
            self.report(EventKind.WORN_OUT, named, identity)

    def forget(self, identity: bytes, *, but: Offer) -> None:
        """Drop what the joiner began with other tokens, so that it does not pair twice."""
        with self._lock:
            others = [each for each in self._offers.values() if each is not but]
        for offer in others:
            for key in [each for each in offer.exchanges if each.startswith(identity)]:
                del offer.exchanges[key]

    def end(self, named: bytes) -> None:
        """Take the token back, if it is open."""
        with self._lock:
            self._offers.pop(named, None)

    def report(self, kind: EventKind, named: bytes, identity: bytes, name: str = "") -> None:
        """Keep an event for the screen; of too many the oldest goes."""
        self._events.append(Event(kind, named, identity, name))

    def take_events(self) -> list[Event]:
        """What happened since the last call, oldest first."""
        return [self._events.popleft() for _ in range(len(self._events))]


def line(addresses: Sequence[str], token: bytes) -> str:
    """The one word to paste after `agentmbx join`."""
    return ",".join(addresses) + "#" + _token_text(token)


def parse_line(text: str) -> tuple[list[str], bytes]:
    """The addresses and the token of a pasted line, also with `agentmbx join` before it.

    Raises `Failure` with what a person can mend; the token is in no text.
    """
    word = _COMMAND.sub("", text.strip(), count=1) if _COMMAND.match(text.strip()) else text.strip()
    if not word or len(word.split()) != 1:
        raise _usage("The line is one word without spaces or breaks, ADDRESS#TOKEN.")
    listed, mark, written = word.partition("#")
    if not mark:
        raise _usage("The part from the # on is missing; the token stands there.")
    addresses = []
    for address in listed.split(","):
        try:
            ip, port = parse_address(address)
        except ValueError:
            raise _usage("An address in it is not like 192.0.2.7:7420.") from None
        if "%" in address:
            raise _usage("An address in it holds for one machine alone (the part from % on).")
        addresses.append(address_text(ip, port))
    if len(addresses) > limits.ADDRESSES_MAX:
        raise _usage(f"It has more than {limits.ADDRESSES_MAX} addresses.")
    return list(dict.fromkeys(addresses)), _read_token(written)


def refusal() -> BadSignature:
    """The one refusal for tokens that are unknown, spent or late, and for bad proofs."""
    return BadSignature("No token that is open here fits this.")


def _token_text(token: bytes) -> str:
    return base64.b32encode(token).decode("ascii").rstrip("=").lower()


def _read_token(text: str) -> bytes:
    try:
        token = base64.b32decode(text.upper().encode("ascii") + b"======")
    except (ValueError, binascii.Error):
        token = b""
    if len(text) != _TEXT_LENGTH or _token_text(token) != text.lower():
        raise _usage("What stands behind the # is not 26 letters a-z and digits 2-7.")
    return token


def _usage(problem: str) -> Failure:
    return Failure(
        "usage",
        f"This is no line that `agentmbx pair` printed. {problem}",
        "Copy the whole line once more, and paste it behind `agentmbx join`.",
        2,
    )
