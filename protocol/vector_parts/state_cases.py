"""Vectors for the content of state letters, and states that are too long for vectors.json."""

from collections.abc import Iterator
from typing import Final

from agentmbx_protocol.messagepack import pack
from vector_parts.frame_cases import COUNTER_END, Case
from vector_parts.raw_forms import BAD_UTF8, array, filler, longer_forms, mapping
from vector_parts.typical import state_entries

LOW, HIGH = sorted((filler("stream", 16), filler("other stream", 16)))
SHORT: Final = filler("letter digest", 8)
DIGESTS: Final = sorted(filler(f"envelope {number}", 32) for number in range(33))
TOP: Final = COUNTER_END - 1
TRUE: Final = b"\xc3"
FALSE: Final = b"\xc2"
FULL: Final = {
    "streams": [[LOW, [[1, 4], [6, TOP]], [[1, SHORT], [6, SHORT]]], [HIGH, [[2, 2]], []]],
    "refused": [[LOW, 2, bytes(8)], [LOW, 2, SHORT], [HIGH, 1, bytes(8)]],
    "sent": [[LOW, 9, 0], [HIGH, TOP, TOP]],
    "void": [[HIGH, [[1, 1], [3, 3]]]],
    "void_seen": [[LOW, [[7, 9]]]],
    "peer_cards": [[5, DIGESTS[0]], [4, DIGESTS[2]], [4, DIGESTS[1]]],
    "unopened": DIGESTS[:2],
    "ask_seen": 1,
    "now_ms": 1_700_000_000_000,
    "ask": True,
    "bye": True,
}
# Any MessagePack at all, also what 3.3 does not allow.
UNREAD: Final = {
    "nil": b"\xc0",
    "a float": b"\xcb" + bytes(8),
    "a short float": b"\xca" + bytes(4),
    "a negative number": b"\xff",
    "a signed number of 8 bytes": b"\xd3" + b"\xff" * 8,
    "a number in a longer form": b"\xcd\0\1",
    "an extension": b"\xd8\x01" + bytes(16),
    "an extension of no bytes": b"\xc7\0\x01",
    "a str that is no UTF-8": b"\xd9\x02\xff\xfe",
    "a bin in a longer form": b"\xc6\0\0\0\0",
    "a map of any keys": b"\x82\xc0\x90\xc0\x81\x01\x02",
    "an array in a longer form": b"\xdd\0\0\0\x02\x01\xde\0\0",
    "64 arrays in each other": b"\x91" * 63 + b"\x90",
}
_BAD_VALUES: Final[dict[str, tuple[tuple[str, object], ...]]] = {
    "streams": (
        ("without a range", [[LOW, [], []]]),
        ("falling", [[HIGH, [[1, 1]], []], [LOW, [[1, 1]], []]]),
        ("the same twice", [[LOW, [[1, 1]], []], [LOW, [[2, 2]], []]]),
        ("without digests", [[LOW, [[1, 1]]]]),
        ("with an element more", [[LOW, [[1, 1]], [], 0]]),
        ("of 15 bytes", [[LOW[1:], [[1, 1]], []]]),
        ("with a range from 0", [[LOW, [[0, 1]], []]]),
        ("with a range to 2^63", [[LOW, [[1, TOP + 1]], []]]),
        ("with a range that falls", [[LOW, [[2, 1]], []]]),
        ("with a range of three", [[LOW, [[1, 2, 3]], []]]),
        ("with ranges that touch", [[LOW, [[1, 2], [3, 4]], []]]),
        ("with ranges that overlap", [[LOW, [[1, 3], [3, 4]], []]]),
        ("with ranges that fall", [[LOW, [[5, 6], [1, 2]], []]]),
        ("with a digest below the ranges", [[LOW, [[2, 4]], [[1, SHORT]]]]),
        ("with a digest between the ranges", [[LOW, [[2, 4], [6, 6]], [[5, SHORT]]]]),
        ("with a digest above the ranges", [[LOW, [[2, 4]], [[5, SHORT]]]]),
        ("with two digests of a number", [[LOW, [[1, 4]], [[2, SHORT], [2, bytes(8)]]]]),
        ("with digests that fall", [[LOW, [[1, 4]], [[3, SHORT], [2, SHORT]]]]),
        ("with a digest of 9 bytes", [[LOW, [[1, 4]], [[2, bytes(9)]]]]),
    ),
    "refused": (
        ("twice the same", [[LOW, 1, SHORT]] * 2),
        ("falling numbers", [[LOW, 2, SHORT], [LOW, 1, SHORT]]),
        ("number 0", [[LOW, 0, SHORT]]),
        ("a whole digest", [[LOW, 1, bytes(32)]]),
    ),
    "sent": (
        ("more confirmed than sent", [[LOW, 1, 2]]),
        ("nothing sent", [[LOW, 0, 0]]),
        ("the same stream twice", [[LOW, 1, 1], [LOW, 2, 1]]),
    ),
    "void": (("without a range", [[LOW, []]]), ("with digests", [[LOW, [[1, 1]], []]])),
    "void_seen": (("ranges that touch", [[LOW, [[1, 1], [2, 2]]]]),),
    "peer_cards": (
        ("rising", [[4, DIGESTS[0]], [5, DIGESTS[0]]]),
        ("the same twice", [[4, DIGESTS[0]]] * 2),
        ("sequence 0", [[0, DIGESTS[0]]]),
    ),
    "unopened": (
        ("the same twice", [DIGESTS[0]] * 2),
        ("falling", DIGESTS[1::-1]),
        ("of 31 bytes", [bytes(31)]),
        ("a map", {}),
    ),
    "ask_seen": (("2^63", COUNTER_END), ("nil", None)),
    "now_ms": (("2^63", COUNTER_END), ("negative", -1)),
    "ask": (("1", 1),),
}


def state_cases() -> Iterator[Case]:
    """SPEC 5.4."""
    least = state_entries()
    full = [*least, *((key.encode(), pack(value)) for key, value in FULL.items())]
    unknown = [(b"u" * number, each) for number, each in enumerate(UNREAD.values(), 1)]
    letters = [bytes((letter,)) for letter in b"abcdefghijklmnopqrstuvwxyz"]
    keys_61 = [(key, b"\0") for key in (*letters, *(b"_" + each for each in letters))]
    keys_61 += [(b"x" * number, b"\0") for number in range(32, 23, -1)]
    goods = {
        "least": least,
        "typical": full,
        "numbers of 2^63 - 1": state_entries(
            card_sequence=pack(TOP), sequence=pack(TOP), ask_seen=pack(TOP), now_ms=pack(TOP)
        ),
        "with unknown keys of every type": [*unknown[:6], *least, *unknown[6:], (b"bye", TRUE)],
        "with 64 keys": [*least, *keys_61],
    }
    for label, entries in goods.items():
        yield Case("state", label, mapping(entries), "")
    yield from _map_cases(least, keys_61)
    for key in ("card_sequence", "card_digest", "sequence"):
        yield Case("state", f"without {key}", mapping(state_entries(**{key: None})))
    for key in ("card_sequence", "sequence"):
        for number in (0, COUNTER_END):
            yield Case("state", f"{key} {number}", mapping(state_entries(**{key: pack(number)})))
    yield Case(
        "state",
        "card_digest of 31 bytes",
        mapping(state_entries(card_digest=b"\xc4\x1f" + bytes(31))),
    )
    for key, empty in (("void", b"\x90"), ("ask_seen", b"\0"), ("bye", FALSE)):
        yield Case("state", f"{key} that is empty", mapping([*least, (key.encode(), empty)]))
    for key, values in _BAD_VALUES.items():
        for label, value in values:
            data = mapping([*least, (key.encode(), pack(value))])
            yield Case("state", f"{key}: {label}", data)
    cards = pack([[number, DIGESTS[0]] for number in range(17, 0, -1)])
    yield Case("state", "17 cards", mapping(state_entries(peer_cards=cards)), "too_large")


def _map_cases(
    least: list[tuple[bytes, bytes]], keys_61: list[tuple[bytes, bytes]]
) -> Iterator[Case]:
    data = mapping(least)
    bads = {
        "no bytes": b"",
        "an array": array([]),
        "an empty map": mapping([]),
        "a byte behind": data + b"\0",
        "a byte cut": data[:-1],
        "a map head of 2 bytes": b"\xde\0\3" + data[1:],
        "a map head of 4 bytes": b"\xdf\0\0\0\3" + data[1:],
        "counts one entry more": mapping(least, counted=4),
        "counts one entry less": mapping(least, counted=2),
        "65 keys": mapping([*least, *keys_61, (b"_", b"\0")]),
        "a key of 33 characters": mapping([*least, (b"k" * 33, b"\0")]),
        "an empty key": mapping([*least, (b"", b"\0")]),
        "a key with a capital": mapping([*least, (b"Ask", b"\0")]),
        "a key with a line feed behind": mapping([*least, (b"k\n", b"\0")]),
        "a key with a digit": mapping([*least, (b"k1", b"\0")]),
        "a key that is a bin": mapping(least, counted=4) + b"\xc4\1k\0",
        "a key in a longer form": mapping(least, counted=4) + b"\xd9\1k\0",
        "a known key twice": mapping([*least, least[2]]),
        "an unknown key twice": mapping([*least, (b"k", b"\0"), (b"k", b"\0")]),
        "known keys in another order": mapping([least[1], least[0], least[2]]),
        "an unknown key of a byte of no type": mapping([*least, (b"k", b"\xc1")]),
        "an unknown key with too little behind": mapping([*least, (b"k", b"\xc6\0\0\0\1")]),
        "an unknown key of 2^32 - 1 elements": mapping([*least, (b"k", b"\xdd\xff\xff\xff\xff")]),
    }
    for label, wrong in bads.items():
        yield Case("state", label, wrong)
    for label, utf8 in list(BAD_UTF8.items())[:2]:
        yield Case("state", f"a key with {label}", mapping([*least, (utf8, b"\0")]))
    for at, (key, value) in enumerate(least):
        for number, form in enumerate(longer_forms(value)):
            if number == 0:
                wrong = mapping([*least[:at], (key, form), *least[at + 1 :]])
                yield Case("state", f"{key.decode()} in a longer form", wrong)


def large_states() -> Iterator[tuple[str, bytes]]:
    """States at each bound and one beyond it, and the code of each: `ok` or that of a refusal."""
    streams = sorted(filler(f"stream {number}", 16) for number in range(65))
    lists = {
        "sent": [[stream, TOP, TOP] for stream in streams],
        "void": [[stream, [[1, 1]]] for stream in streams],
        "void_seen": [[stream, [[1, 1]]] for stream in streams],
        "streams": [[stream, [[1, 1]], [[1, SHORT]]] for stream in streams],
        "refused": [[LOW, number, SHORT] for number in range(1, 258)],
        "unopened": DIGESTS,
    }
    for key, full in lists.items():
        yield "ok", _state_with(key, full[:-1])
        yield "too_large", _state_with(key, full)
        yield "malformed", _state_with(key, [*full, full[0]])
    for count, code in ((1024, "ok"), (1025, "too_large")):
        low = [[number, number] for number in range(1, 1201, 2)]
        high = [[TOP - 2 * number, TOP - 2 * number] for number in range(count - len(low))][::-1]
        for key in ("void", "void_seen"):
            yield code, _state_with(key, [[LOW, low], [HIGH, high]])
        yield code, _state_with("streams", [[LOW, low, []], [HIGH, high, []]])
    for count, code in ((4096, "ok"), (4097, "too_large")):
        low = [[number, SHORT] for number in range(1, 3001)]
        high = [[number, SHORT] for number in range(1, count - len(low) + 1)]
        yield code, _state_with("streams", [[LOW, [[1, 3000]], low], [HIGH, [[1, 3000]], high]])
    length = 327_680 - len(mapping(state_entries(k=b"\xc6" + bytes(4))))
    for more, code in ((0, "ok"), (1, "too_large")):
        unread = b"\xc6" + (length + more).to_bytes(4, "big") + bytes(length + more)
        yield code, mapping(state_entries(k=unread))
    yield "too_large", bytes(327_681)


def _state_with(key: str, value: object) -> bytes:
    return mapping(state_entries(**{key: pack(value)}))
