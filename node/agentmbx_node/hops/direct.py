"""The direct hop: to the peer's own machine, believing only what its pair key signed."""

from collections.abc import Sequence
from typing import Final

import aiohttp
import msgspec

from agentmbx_node.addresses import address_text, parse_address
from agentmbx_node.hops.http import FarEnd, HopRefused, post_frames
from agentmbx_protocol import bodies, custody, limits
from agentmbx_protocol.envelope import Envelope
from agentmbx_protocol.errors import ProtocolError

TOTAL_S: Final = 10.0
PAIR_FRAMES_MAX: Final = 2
MACHINE: Final = FarEnd(
    name="machine",
    foreign="What answers at this address is no AgentMBX node.",
    connect_s=3.0,
    answer_bytes_max=limits.COMMAND_BYTES_MAX,
)


class DirectDeposited(msgspec.Struct, frozen=True):
    """What a direct deposit came to: digests that the peer has stored, refusals by position."""

    stored: frozenset[bytes]
    refused: Sequence[bodies.Refused]


class DirectHop:
    """A machine as seen from another, at one `address` of its card.

    `peer_key` is the pair key that the peer uses with this machine; it is empty while pairing,
    when there is none yet and so no deposit is believed. Raises `ValueError` for an `address` that
    is no IP literal with a port.

    Both calls raise `HopRefused` for a refusal of the protocol, and `OperatingError` when no node
    answers as one within `total_s`. No answer of either kind ends a letter (rule 5).
    """

    def __init__(self, session: aiohttp.ClientSession, address: str, peer_key: bytes = b"") -> None:
        self._session = session
        # Read and written anew, so that nothing but an address gets into the URL.
        self._url = f"http://{address_text(*parse_address(address))}/"
        self._peer_key = peer_key

    async def deposit(
        self, envelopes: Sequence[Envelope], *, total_s: float = TOTAL_S
    ) -> DirectDeposited:
        """Offer 1 to 64 envelopes; raises `NotBelieved` for a false `stored`."""
        body = bodies.join_frames(parcel.frame.data for parcel in envelopes)
        answer = await self._post("v1/deposit", body, total_s)
        try:
            statement, refused = bodies.parse_deposit_answer(answer, len(envelopes))
        except ProtocolError as error:
            raise MACHINE.not_ours() from error
        stored = custody.believe_stored(statement, self._peer_key, envelopes)
        return DirectDeposited(stored, refused)

    async def pair(self, frames: Sequence[bytes], *, total_s: float = TOTAL_S) -> list[bytes]:
        """Send frames of a pairing; the 1 or 2 frames of the answer, not looked at yet."""
        answer = await self._post("v1/pair", bodies.join_frames(frames), total_s)
        try:
            answered = bodies.split_frames(answer, PAIR_FRAMES_MAX)
        except ProtocolError as error:
            raise MACHINE.not_ours() from error
        if not answered:
            raise MACHINE.not_ours()
        return answered

    async def _post(self, path: str, body: bytes, total_s: float) -> bytes:
        # A kept connection may be dead without a sign, after a night asleep or in another network.
        # The first letter would fail and have the peer's address left alone for minutes.
        answer = await post_frames(
            self._session, self._url + path, body, MACHINE, total_s, closes=True
        )
        if answer.is_ok:
            return answer.body
        refusal, _ = answer.read_refusal(MACHINE)
        raise HopRefused(refusal)
