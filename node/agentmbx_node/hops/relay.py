"""The hop by a relay: deposit, collect, register and retire, believing only what is signed."""

import json
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.http import FarEnd, HopRefused, exchange, post_frames
from agentmbx_protocol import bodies, custody, limits
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.errors import ProtocolError, TooLarge
from agentmbx_protocol.keys import SigningKey, check_signing_public, key_from_text
from agentmbx_protocol.queue_commands import QueueState, parse_queue_state

ANSWER_S: Final = 30.0
RELAY: Final = FarEnd(
    name="relay",
    foreign="What answers at this URL is no AgentMBX relay.",
    connect_s=10.0,
    answer_bytes_max=limits.COLLECT_BYTES_MAX + limits.FRAME_BYTES_MAX + 64 * 1024,
)
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class RelayLine(msgspec.Struct, frozen=True):
    """What a person pastes: the relay's URL, perhaps its key, perhaps an invite."""

    url: str
    relay_key: bytes | None
    invite: SigningKey | None


class Deposited(msgspec.Struct, frozen=True):
    """What a deposit came to: believed facts by digest, and refusals by position."""

    held: Mapping[bytes, custody.HeldFact]
    refused: Sequence[bodies.Refused]


class Collected(msgspec.Struct, frozen=True):
    """What a collect brought: envelopes as bytes, and a state if the relay has another list."""

    state: QueueState | None
    envelopes: Sequence[bytes]


def parse_relay_line(text: str) -> RelayLine:
    """The line URL, URL#KEY or URL#KEY.INVITE; raises `ValueError` with a text for a person."""
    address, _, fragment = text.strip().partition("#")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("A relay is given as http(s)://HOST[:PORT][/PATH]#KEY.INVITE.")
    if parts.query or not address.isascii() or not address.isprintable():
        raise ValueError("A relay's URL has no query and no odd characters.")
    key_part, _, invite_part = fragment.partition(".")
    try:
        _ = parts.port  # raises for one that is out of range
        relay_key = check_signing_public(key_from_text(key_part)) if key_part else None
        invite = SigningKey(key_from_text(invite_part)) if invite_part else None
    except (ValueError, ProtocolError) as error:
        raise ValueError(
            "The part after # is not a relay's key and invite; paste the whole line."
        ) from error
    if relay_key is None and parts.scheme != "https" and parts.hostname not in _LOOPBACK:
        raise ValueError("Without a key after #, a relay must be https or on this machine.")
    return RelayLine(address.rstrip("/") + "/", relay_key, invite)


class RelayHop:
    """A relay as seen from a node; `relay_key` is pinned, and nothing else is trusted.

    `last_word` is the frame of the last `queue_state` that was believed; it gets a queue back from
    a relay that has forgotten it. Every method raises `HopRefused` for a refusal of the protocol,
    and `OperatingError` when no relay answers as one. No answer of either kind ends a letter
    (rule 5).
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, relay_key: bytes) -> None:
        self._session = session
        self._url = url
        self.relay_key = relay_key
        self.last_word = b""

    async def deposit(self, envelopes: Sequence[Envelope]) -> Deposited:
        """Offer 1 to 64 envelopes for one queue; raises `NotBelieved` for a false `held`."""
        body = bodies.join_frames(parcel.frame.data for parcel in envelopes)
        answer = await self._post("v1/deposit", body)
        try:
            statement, refused = bodies.parse_deposit_answer(answer, len(envelopes))
        except ProtocolError as error:
            raise RELAY.not_ours() from error
        return Deposited(custody.believe_held(statement, self.relay_key, envelopes), refused)

    async def collect(self, command: bytes, wait_s: int = 0) -> Collected:
        """Send a `collect` frame; `wait_s` is the long poll that it asks for."""
        body = bodies.join_frames([command])
        answer = await self._post("v1/collect", body, patience_s=wait_s + ANSWER_S)
        frames = self._split(answer)
        state = self._state(frames[0]) if frames and _is_state(frames[0]) else None
        return Collected(state, frames[1:] if state else frames)

    async def register(self, command: bytes, proof: bytes | None = None) -> QueueState:
        """Send a `register` frame, with an `admit` or old `queue_state` for a new queue."""
        return await self._command("v1/register", [command, proof] if proof else [command])

    async def retire(self, command: bytes) -> QueueState:
        """Send a `retire` frame."""
        return await self._command("v1/retire", [command])

    async def _command(self, path: str, frames: Sequence[bytes]) -> QueueState:
        answered = self._split(await self._post(path, bodies.join_frames(frames)))
        if len(answered) != 1:
            raise RELAY.not_ours()
        return self._state(answered[0])

    async def _post(self, path: str, body: bytes, patience_s: float = ANSWER_S) -> bytes:
        answer = await post_frames(self._session, self._url + path, body, RELAY, patience_s)
        if answer.is_ok:
            return answer.body
        try:
            refusal, proof = answer.read_refusal(RELAY)
        except OperatingError as error:
            if answer.status == TooLarge.status:
                # A proxy takes less than the relay behind it: one letter may be at fault (O1).
                text = "Something before the relay takes no request so large."
                raise HopRefused(TooLarge(text)) from error
            raise
        raise HopRefused(refusal, self._state(proof) if proof else None)

    def _state(self, data: bytes) -> QueueState:
        try:
            state = parse_queue_state(data)
        except ProtocolError as error:
            raise RELAY.not_ours() from error
        if state.relay != self.relay_key:
            raise OperatingError("The relay signs with another key than it should.", retry=True)
        self.last_word = data
        return state

    def _split(self, answer: bytes) -> list[bytes]:
        try:
            return bodies.split_frames(answer, limits.COLLECT_ACKS_MAX + 1)
        except ProtocolError as error:
            raise RELAY.not_ours() from error


async def fetch_info(session: aiohttp.ClientSession, url: str) -> Mapping[str, object]:
    """What `GET /v1/info` answers, with a checked `relay_key` text; raises `OperatingError`."""
    answer = await exchange(session, "GET", url + "v1/info", RELAY, ANSWER_S)
    try:
        document = json.loads(answer.body) if answer.is_ok else None
        if not isinstance(document, Mapping):
            raise RELAY.not_ours()
        check_signing_public(key_from_text(str(document.get("relay_key"))))
    except (ValueError, RecursionError, ProtocolError) as error:
        raise RELAY.not_ours() from error
    return document


def _is_state(data: bytes) -> bool:
    try:
        parse_queue_state(data)
    except ProtocolError:
        return False
    return True
