"""One good frame of each kind in parts, and good contents by element: where faults go in."""

import struct
from collections.abc import Sequence
from typing import Final

from agentmbx_protocol import padding, pairing
from agentmbx_protocol.frame import Kind
from agentmbx_protocol.messagepack import pack
from vector_parts.raw_forms import (
    AnySigner,
    RawFrame,
    array,
    filler,
    sealing_key,
    signing_key,
    text,
)

RELAY: Final = signing_key("relay")
QUEUE: Final = signing_key("queue")
PAIR: Final = signing_key("pair")
IDENTITY: Final = signing_key("identity")
SUCCESSOR: Final = signing_key("successor")
OTHER: Final = signing_key("other")
SEALING: Final = sealing_key("sealing")
OTHER_SEALING: Final = sealing_key("other sealing")
INSTANCE: Final = filler("instance", 16)
TOKEN: Final = filler("token", 16)
ACCEPTED_MS: Final = 1_700_000_000_000


def command_fields(counter: int = 7) -> bytes:
    """The fields that all commands begin with."""
    return RELAY.public + counter.to_bytes(8, "big") + INSTANCE


def register(counter: int = 7, takeover: int = 0, senders: Sequence[bytes] = ()) -> RawFrame:
    """A register with these senders, in the order given."""
    fields = command_fields(counter) + takeover.to_bytes(8, "big")
    return RawFrame(Kind.REGISTER, QUEUE, fields, b"".join(senders))


def admit(lifetime_s: int = 900) -> RawFrame:
    """An admit for a queue of this lifetime."""
    fields = RELAY.public + QUEUE.public + lifetime_s.to_bytes(4, "big")
    return RawFrame(Kind.ADMIT, OTHER, fields)


def collect(
    counter: int = 7, bytes_max: int = 4 << 20, wait_s: int = 50, acks: Sequence[bytes] = ()
) -> RawFrame:
    """A collect with these acks."""
    fields = command_fields(counter) + filler("list", 32) + struct.pack(">IH", bytes_max, wait_s)
    return RawFrame(Kind.COLLECT, QUEUE, fields, b"".join(acks))


def retire(counter: int = 7) -> RawFrame:
    """A retire."""
    return RawFrame(Kind.RETIRE, QUEUE, command_fields(counter))


def queue_state(counter: int = 7, flag: int = 0) -> RawFrame:
    """A queue_state with this flag."""
    fields = QUEUE.public + counter.to_bytes(8, "big") + INSTANCE + filler("list", 32)
    return RawFrame(Kind.QUEUE_STATE, RELAY, fields + bytes((flag,)))


def envelope(ttl_s: int = 3600, plain_length: int = 1024, queue: bytes = QUEUE.public) -> RawFrame:
    """An envelope around bytes that look sealed."""
    sealed = filler(f"sealed {plain_length}", plain_length + 48)
    return RawFrame(Kind.ENVELOPE, PAIR, queue + ttl_s.to_bytes(4, "big"), sealed)


def held(count: int = 2, accepted_ms: int = ACCEPTED_MS, for_ms: int = 3_600_000) -> RawFrame:
    """A held for so many envelopes."""
    times = struct.pack(">QQ", accepted_ms, accepted_ms + for_ms)
    facts = b"".join(fact + times for fact in _facts(count))
    return RawFrame(Kind.HELD, RELAY, QUEUE.public, facts)


def stored(count: int = 2) -> RawFrame:
    """A stored for so many envelopes."""
    return RawFrame(Kind.STORED, PAIR, b"", b"".join(_facts(count)))


def _facts(count: int) -> list[bytes]:
    return [filler(f"envelope {at}", 32) + struct.pack(">I", 1216 + at) for at in range(count)]


def card(
    elements: Sequence[bytes] | None = None, *, sequence: int = 5, signer: AnySigner = IDENTITY
) -> RawFrame:
    """A card of these elements."""
    tail = array(card_elements() if elements is None else elements)
    return RawFrame(Kind.CARD, signer, sequence.to_bytes(8, "big"), tail)


def card_elements(
    name: bytes = b"build-box",
    sealing: bytes = SEALING.public,
    addresses: Sequence[bytes] = (),
    routes: Sequence[bytes] = (),
) -> list[bytes]:
    """A card's tail, element by element, each packed already."""
    return [text(name), pack(sealing), array([text(each) for each in addresses]), array(routes)]


def route_elements(
    url: bytes = b"https://relay.example.com",
    relay: bytes = RELAY.public,
    queue: bytes = QUEUE.public,
) -> list[bytes]:
    """One route of a card, element by element."""
    return [text(url), pack(relay), pack(queue)]


def rotation(
    inner: RawFrame | None = None, *, sequence: int = 6, signer: AnySigner = IDENTITY
) -> RawFrame:
    """A rotation from IDENTITY to the card of SUCCESSOR."""
    shown = inner or card(sequence=sequence, signer=SUCCESSOR)
    return RawFrame(Kind.ROTATION, signer, sequence.to_bytes(8, "big"), shown.data)


def hello(kind: Kind = Kind.HELLO, elements: Sequence[bytes] | None = None) -> RawFrame:
    """A hello by IDENTITY or a reply by SUCCESSOR."""
    signer = IDENTITY if kind is Kind.HELLO else SUCCESSOR
    fields = pairing.token_id(TOKEN) + filler(f"nonce of {kind.name}", 32)
    return RawFrame(kind, signer, fields, array(elements or hello_elements()))


def hello_elements(
    sealing: bytes = SEALING.public, pair: bytes = PAIR.public, name: bytes = b"build-box"
) -> list[bytes]:
    """The tail of a hello, element by element."""
    return [pack(sealing), pack(pair), text(name)]


def proof(kind: Kind = Kind.PROOF, sealed_length: int = 80) -> RawFrame:
    """A proof by IDENTITY or a result by SUCCESSOR, around bytes that look sealed."""
    signer = IDENTITY if kind is Kind.PROOF else SUCCESSOR
    first = Kind.HELLO if kind is Kind.PROOF else Kind.REPLY
    fields = pairing.token_id(TOKEN) + filler(f"nonce of {first.name}", 32) + filler("hmac", 32)
    return RawFrame(kind, signer, fields, filler("sealed card", sealed_length))


def letter_elements(
    number: int = 1,
    sent_ms: int = ACCEPTED_MS,
    lifetime_s: int = 259_200,
    content_type: bytes = b"text",
    content: bytes = b"Good morning.",
) -> list[bytes]:
    """A letter, element by element."""
    head = [pack(filler("stream", 16)), pack(number), pack(sent_ms), pack(lifetime_s)]
    return [*head, text(content_type), pack(content)]


def state_entries(**changes: bytes | None) -> list[tuple[bytes, bytes]]:
    """The three entries that every state has, and `changes` packed already; None takes one out."""
    entries = {
        "card_sequence": pack(5),
        "card_digest": pack(filler("card", 32)),
        "sequence": pack(1),
        **changes,
    }
    return [(key.encode(), value) for key, value in entries.items() if value is not None]


def inside_elements(
    letter: bytes | None = None, card_data: bytes = b"", rotations: Sequence[bytes] = ()
) -> list[bytes]:
    """A plaintext's array, element by element."""
    inner = array(letter_elements()) if letter is None else letter
    keys = [pack(PAIR.public), pack(OTHER.public)]
    return [*keys, pack(inner), pack(card_data), pack(list(rotations))]


def padded(packed: bytes) -> bytes:
    """The plaintext around a packed array."""
    return padding.pad(len(packed).to_bytes(4, "big") + packed)


FRAMES: Final = {
    Kind.ENVELOPE: envelope(),
    Kind.HELD: held(),
    Kind.STORED: stored(),
    Kind.REGISTER: register(senders=sorted((PAIR.public, OTHER.public))),
    Kind.ADMIT: admit(),
    Kind.COLLECT: collect(acks=(filler("envelope 0", 32), filler("envelope 1", 32))),
    Kind.RETIRE: retire(),
    Kind.QUEUE_STATE: queue_state(flag=1),
    Kind.CARD: card(
        card_elements(addresses=(b"192.0.2.7:7420",), routes=[array(route_elements())])
    ),
    Kind.ROTATION: rotation(),
    Kind.HELLO: hello(),
    Kind.REPLY: hello(Kind.REPLY),
    Kind.PROOF: proof(),
    Kind.RESULT: proof(Kind.RESULT),
}
