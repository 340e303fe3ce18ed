"""Vectors for what any frame can have wrong, and for the frames between machines and relays."""

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from agentmbx_protocol.frame import Kind
from vector_parts import crooked_keys, typical
from vector_parts.raw_forms import RawFrame, Signer, filler

COUNTER_END: Final = 2**63
BAD_SIGNING_KEYS: Final = {
    **crooked_keys.SMALL_ORDER,
    **crooked_keys.NON_CANONICAL,
    "mixed order": crooked_keys.mixed_order(typical.PAIR.public),
    "no point of the curve": crooked_keys.NOT_ON_CURVE,
}

# Every kind shows these; the rest of what any frame can have wrong is shown by one kind.
_EVERY_KIND: Final = (
    "of another kind",
    "tail length one too many",
    "a field byte more",
    "of the next version",
    "a byte behind",
    "signed as another kind",
    "a bit of the signature flipped",
)


class Case(NamedTuple):
    """One vector: `code` is that of the refusal, or empty where the bytes are good."""

    kind: str
    name: str
    data: bytes
    code: str = "malformed"


def good(raw: RawFrame, name: str) -> Case:
    """A frame that is read."""
    return Case(Kind(raw.kind).name.lower(), name, raw.data, "")


def bad(raw: RawFrame, name: str, code: str = "malformed") -> Case:
    """A frame that is refused with `code`."""
    return Case(Kind(raw.kind).name.lower(), name, raw.data, code)


def any_frame_cases() -> Iterator[Case]:
    """A typical frame of each kind, and each with one fault at a time."""
    for kind, raw in typical.FRAMES.items():
        yield good(raw, "typical")
        for name, data, code in frame_faults(raw):
            if kind is Kind.RETIRE or name in _EVERY_KIND:
                yield Case(kind.name.lower(), name, data, code)
    retire, word = typical.retire(), "retire"
    for length in (0, 3, 4, 40, 41, len(retire.data) - 64):
        yield Case(word, f"the first {length} bytes", retire.data[:length])
    newer = retire._replace(magic=b"MBX\xff").data
    yield Case(word, "41 bytes of version 255", newer[:41], "unsupported_version")
    yield Case(word, "40 bytes of version 255", newer[:40])
    yield Case(word, "kind 255", retire._replace(kind=255).data)
    yield bad(retire._replace(tail=bytes(32)), "a tail where none belongs")
    yield Case(word, "text", b"GET /v1/collect HTTP/1.1\r\nHost: relay.example.com\r\n\r\n")


def frame_faults(raw: RawFrame) -> Iterator[tuple[str, bytes, str]]:
    """What can be wrong with a frame of any kind: name, bytes, code."""
    length = len(raw.tail)
    forms = {
        "of another magic": raw._replace(magic=b"XBX1"),
        "kind 0": raw._replace(kind=0),
        "kind 15": raw._replace(kind=15),
        "of another kind": raw._replace(kind=raw.kind % 14 + 1),
        "first reserved byte set": raw._replace(reserved=b"\1\0\0"),
        "second reserved byte set": raw._replace(reserved=b"\0\x80\0"),
        "third reserved byte set": raw._replace(reserved=b"\0\0\1"),
        "tail length one too many": raw._replace(tail_length=length + 1),
        "tail length one too few": raw._replace(tail_length=(length - 1) % 2**32),
        "a field byte more": raw._replace(fields=raw.fields + b"\0"),
    }
    for name, form in forms.items():
        yield name, form.data, "malformed"
    yield "of the next version", raw._replace(magic=b"MBX2").data, "unsupported_version"
    yield "last byte cut", raw.data[:-1], "malformed"
    yield "a byte behind", raw.data + b"\0", "malformed"
    stranger = Signer(raw.signer.public, typical.SUCCESSOR.sign)
    if raw.signer.public == typical.SUCCESSOR.public:
        stranger = Signer(raw.signer.public, typical.IDENTITY.sign)
    yield "signed by another key", raw._replace(signer=stranger).data, "bad_signature"
    word = Kind(raw.kind % 14 + 1).name.lower()
    yield "signed as another kind", raw._replace(word=word).data, "bad_signature"
    flipped = raw.data[:-1] + bytes((raw.data[-1] ^ 1,))
    yield "a bit of the signature flipped", flipped, "bad_signature"


def signature_cases() -> Iterator[Case]:
    """The edges of Ed25519, on a kind whose signer is not learned and on those where it is."""
    for name, signer in _bad_signers().items():
        yield bad(typical.retire()._replace(signer=signer), name, "bad_signature")
    honest = Signer(
        crooked_keys.point(7), _made(crooked_keys.point(7), 7, 9, crooked_keys.point(9))
    )
    yield good(typical.retire()._replace(signer=honest), "a small scalar and a small nonce")
    holds, fails = (_mixed_signer(holds=holds) for holds in (True, False))
    yield good(typical.retire()._replace(signer=holds), "signer of mixed order, right as it is")
    learned = (typical.register(), typical.card(), typical.hello(), typical.hello(Kind.REPLY))
    for raw in learned:
        yield bad(raw._replace(signer=holds), "signer of mixed order, right as it is")
    for raw in (typical.retire(), *learned):
        crooked = raw._replace(signer=fails)
        yield bad(crooked, "signer of mixed order, right with cofactor", "bad_signature")


def _bad_signers() -> dict[str, Signer]:
    queue, straight = typical.QUEUE, crooked_keys.point(7)
    mixed_r = crooked_keys.mixed_order(crooked_keys.point(9))
    canonless = crooked_keys.NON_CANONICAL["y of p + 1"]
    signers = {
        "S + the group order": Signer(
            queue.public, lambda message: crooked_keys.with_larger_s(queue.sign(message))
        ),
        "S of all bits": Signer(queue.public, lambda m: queue.sign(m)[:32] + b"\xff" * 32),
        "signature of zeros": Signer(queue.public, lambda _: bytes(64)),
        "R of mixed order, right with cofactor": Signer(straight, _made(straight, 7, 9, mixed_r)),
        "R of order 1, not canonical": Signer(straight, _made(straight, 7, 0, canonless)),
    }
    for name, commitment in crooked_keys.SMALL_ORDER.items():
        signers[f"R of {name}"] = Signer(straight, _made(straight, 7, 0, commitment))
    for name, public in BAD_SIGNING_KEYS.items():
        made = _made(public, 0, 9, crooked_keys.point(9))
        signers[f"signer of {name}"] = Signer(public, made)
    return signers


def _made(public: bytes, scalar: int, nonce: int, commitment: bytes) -> Callable[[bytes], bytes]:
    return lambda message: crooked_keys.signature(message, public, scalar, nonce, commitment)


def _mixed_signer(*, holds: bool) -> Signer:
    public = crooked_keys.mixed_order(crooked_keys.point(7))
    return Signer(
        public, lambda message: crooked_keys.mixed_signature(message, public, 7, holds=holds)
    )


def envelope_cases() -> Iterator[Case]:
    """SPEC 4.1."""
    direct = typical.envelope(ttl_s=1, queue=bytes(32))
    yield good(direct, "direct, for one second")
    yield good(typical.envelope(ttl_s=604_800, plain_length=1088), "for 7 days, the next length")
    for ttl_s in (0, 604_801, 2**32 - 1):
        yield bad(typical.envelope(ttl_s=ttl_s), f"ttl of {ttl_s} seconds")
    for length in (1023, 1025):
        yield bad(typical.envelope(plain_length=length), f"of {length} bytes, no padded length")
    yield bad(typical.envelope()._replace(tail=b""), "without a seal")


def custody_cases() -> Iterator[Case]:
    """SPEC 4.2 and 4.3."""
    yield good(typical.held(1), "one envelope")
    yield good(typical.held(1, 0, 0), "times of 0")
    yield good(typical.held(1, 2**64 - 1, 0), "times of 2^64 - 1")
    yield good(typical.held(1, 2**53, 1), "times that no double holds")
    twice = typical.held(1)
    yield good(twice._replace(tail=twice.tail * 2), "one envelope twice")
    yield good(typical.stored(1), "one envelope")
    lengths = b"".join(filler("d", 32) + struct.pack(">I", n) for n in (0, 2**32 - 1))
    yield good(typical.stored()._replace(tail=lengths), "lengths of 0 and 2^32 - 1")
    yield good(typical.held(16), "16 envelopes")
    for raw in (typical.held(), typical.stored()):
        yield bad(raw._replace(tail=b""), "no envelope")
        yield bad(raw._replace(tail=raw.tail[:-1]), "an envelope cut by a byte")
        yield bad(raw._replace(tail=raw.tail + b"\0"), "an envelope and a byte")


def command_cases() -> Iterator[Case]:
    """SPEC 4.4 to 4.8, without the list of senders."""
    for counter in (1, COUNTER_END - 1):
        yield good(typical.register(counter), f"counter {counter}")
        yield good(typical.collect(counter), f"counter {counter}")
        yield good(typical.retire(counter), f"counter {counter}")
        yield good(typical.queue_state(counter), f"counter {counter}")
    for counter in (0, COUNTER_END, 2**64 - 1):
        yield bad(typical.register(counter), f"counter {counter}")
        yield bad(typical.collect(counter), f"counter {counter}")
        yield bad(typical.retire(counter), f"counter {counter}")
        yield bad(typical.queue_state(counter), f"counter {counter}")
    for lifetime_s in (0, 1, 604_800):
        yield good(typical.admit(lifetime_s), f"lifetime of {lifetime_s} seconds")
    for lifetime_s in (604_801, 2**32 - 1):
        yield bad(typical.admit(lifetime_s), f"lifetime of {lifetime_s} seconds")
    for flag in (0, 2, 3):
        yield good(typical.queue_state(flag=flag), f"flag {flag}")
    for flag in (4, 255):
        yield bad(typical.queue_state(flag=flag), f"flag {flag}")
    for raw in (typical.admit(), typical.retire(), typical.queue_state()):
        yield bad(raw._replace(tail=b"\0"), "a tail of one byte")
    yield good(typical.collect(bytes_max=0, wait_s=0), "at most 0 bytes, at once")
    yield good(typical.collect(bytes_max=2**32 - 1), "at most 2^32 - 1 bytes")
    ack = filler("ack", 32)
    yield good(typical.collect(acks=(ack,)), "one ack")
    yield good(typical.collect(acks=(ack, bytes(32), ack)), "acks unsorted and twice")
    for wait_s in (51, 65_535):
        yield bad(typical.collect(wait_s=wait_s), f"waits {wait_s} seconds")
    yield bad(typical.collect(acks=(ack, ack[:31])), "an ack cut by a byte")


def sender_list_cases() -> Iterator[Case]:
    """SPEC 4.4, the list of senders and the takeover."""
    keys = sorted(crooked_keys.point(scalar) for scalar in range(1, 10))
    for takeover in (1, COUNTER_END - 1):
        yield good(typical.register(takeover=takeover), f"takeover {takeover}")
    for takeover in (COUNTER_END, 2**64 - 1):
        yield bad(typical.register(takeover=takeover), f"takeover {takeover}")
    yield good(typical.register(senders=keys[:1]), "one sender")
    yield good(typical.register(senders=keys), "9 senders")
    yield bad(typical.register(senders=(keys[1], keys[0])), "senders falling")
    yield bad(typical.register(senders=(keys[0], keys[2], keys[1])), "last two senders falling")
    yield bad(typical.register(senders=(keys[0], keys[0])), "a sender twice")
    yield bad(typical.register(senders=(keys[0], keys[1][:31])), "a sender cut by a byte")
    for name, key in BAD_SIGNING_KEYS.items():
        yield bad(typical.register(senders=sorted((keys[0], key))), f"a sender of {name}")
