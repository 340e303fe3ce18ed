"""Letters into envelopes: sealed for the peer's machine, signed with the key that it knows."""

import sqlite3
from typing import Final, Self

from agentmbx_node.keyring import Keyring
from agentmbx_node.store.rows import Machine, Peer, machine_of
from agentmbx_protocol.envelope import DIRECT, Envelope, make_envelope, parse_envelope
from agentmbx_protocol.letter import seal_letter

DIRECT_TTL_S: Final = 1


class Sealer:
    """This machine's keys and card, as they are in one commit."""

    def __init__(self, keyring: Keyring, machine: Machine) -> None:
        self._keyring = keyring
        self.machine = machine

    @classmethod
    def of(cls, connection: sqlite3.Connection, keyring: Keyring) -> Self:
        """With the machine's row as it is now."""
        return cls(keyring, machine_of(connection))

    def seal(
        self,
        peer: Peer,
        letter: bytes,
        *,
        queue: bytes = DIRECT,
        ttl_s: int = DIRECT_TTL_S,
        sealing: bytes = b"",
    ) -> Envelope:
        """An envelope around the letter's bytes for one hop; new bytes at every call.

        It carries this machine's card until the peer has shown that it knows it. `sealing` is
        another key of the peer's than the one in its newest card.
        """
        pair = self._keyring.pair_key(peer.salt)
        is_known = peer.confirmed_card >= self.machine.card_sequence
        sealed = seal_letter(
            letter,
            sender=pair.public,
            receiver=peer.pair_key,
            sealing_public=sealing or peer.sealing,
            card=b"" if is_known else self.machine.card,
        )
        return parse_envelope(make_envelope(pair, queue, ttl_s, sealed))
