"""A second reader of the wire protocol, written from SPEC.md alone, to hold that page to account.

It shares no code with the package, so what both say of the same bytes is what the page says.
"""

import hashlib
import ipaddress
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import nacl.bindings as sodium
from nacl.exceptions import BadSignatureError

Fields = dict[str, object]
Row = list[Any]

_U32, _U64 = range(2**32), range(2**64)
_FROM_0, _FROM_1 = range(2**63), range(1, 2**63)
_WEEK_S = 604_800
_PADDED_MAX = 507_904
_FLAGS: dict[object, str] = {0: "ok", 1: "stale", 2: "superseded", 3: "retired"}

# MessagePack's longer forms: first byte to (bytes of the number, least number that needs them).
_Forms = dict[int, tuple[int, int]]
_UINT: _Forms = {0xCC: (1, 128), 0xCD: (2, 2**8), 0xCE: (4, 2**16), 0xCF: (8, 2**32)}
_BIN: _Forms = {0xC4: (1, 0), 0xC5: (2, 2**8), 0xC6: (4, 2**16)}
_STR: _Forms = {0xD9: (1, 32), 0xDA: (2, 2**8)}
_ARRAY: _Forms = {0xDC: (2, 16)}
_MAP: _Forms = {0xDE: (2, 16)}

# What is behind the first byte of a value that is passed over: so many bytes, or a number of this
# width that counts bytes (and one more for an extension's type) or values (one or two for each).
_PLAIN = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_PLAIN |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_PLAIN |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_VALUES = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}

_CONTENT_TYPE = re.compile(r"[a-z0-9][a-z0-9./-]{0,63}")
_ADDRESS = re.compile(r"(?:\[([0-9a-f:.]+)\]|([0-9.]+)):([1-9][0-9]{0,4})")
_URL = re.compile(
    r"https?://(?:[a-z0-9.-]+|\[([0-9A-Fa-f:.]+)\])(?::([1-9][0-9]{0,4}))?"
    r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?"
)
_NOT_IN_NAMES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


class _Refused(Exception):
    def __init__(self, code: str = "malformed") -> None:
        super().__init__(code)
        self.code = code


def _need(*facts: object) -> None:
    if not all(facts):
        raise _Refused


class _Reader:
    """Takes bytes from the front; what is not there is malformed."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def more(self) -> bool:
        return self.at < len(self.data)

    def end(self) -> None:
        _need(not self.more())

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        _need(len(part) == count)
        self.at += count
        return part

    def uint(self, width: int, within: range = _U64) -> int:
        value = int.from_bytes(self.take(width), "big")
        _need(value in within)
        return value


class _Pack(_Reader):
    """MessagePack in one form (3.3)."""

    def _count(self, short: range, forms: _Forms, within: range) -> int:
        first = self.uint(1)
        if first in short:
            value = first - short.start
        else:
            # Another type's first byte has no width: it reads as 0 and is below its least.
            width, least = forms.get(first, (0, 1))
            value = self.uint(width)
            _need(value >= least)
        _need(value in within)
        return value

    def number(self, within: range) -> int:
        return self._count(range(0x80), _UINT, within)

    def bin(self, within: range = _U32) -> bytes:
        return self.take(self._count(range(0), _BIN, within))

    def key(self) -> bytes:
        return self.bin(range(32, 33))

    def str(self) -> str:
        try:
            return self.take(self._count(range(0xA0, 0xC0), _STR, _U32)).decode()
        except UnicodeDecodeError:
            raise _Refused from None

    def array(self, least: int, most: int) -> range:
        return range(self._count(range(0x90, 0xA0), _ARRAY, range(least, most + 1)))

    def map(self, most: int) -> range:
        return range(self._count(range(0x80, 0x90), _MAP, range(most + 1)))

    def rows(self, *parts: Callable[[], object]) -> list[Row]:
        """An array of arrays, each of exactly these parts."""
        rows = []
        for _ in self.array(0, 2**16):
            self.array(len(parts), len(parts))
            rows.append([part() for part in parts])
        return rows

    def over(self) -> None:
        """Passes over one value of any type."""
        left = 1
        while left:
            first, left = self.uint(1), left - 1
            if first in _PLAIN:
                self.take(_PLAIN[first])
            elif first in _BYTES:
                self.take(self.uint(_BYTES[first]))
            elif first in _EXTENSIONS:
                self.take(self.uint(_EXTENSIONS[first]) + 1)
            elif first in _VALUES:
                width, each = _VALUES[first]
                left += self.uint(width) * each
            elif first in range(0x80, 0x90):
                left += 2 * (first - 0x80)
            elif first in range(0x90, 0xA0):
                left += first - 0x90
            elif first in range(0xA0, 0xC0):
                self.take(first - 0xA0)
            else:
                _need(first < 0x80 or first >= 0xE0)


class _Later:
    """What is checked only when all forms are right: signatures (step 5), then keys (step 6)."""

    def __init__(self) -> None:
        self.signatures: list[tuple[bytes, bytes]] = []
        self.ed25519: list[bytes] = []
        self.x25519: list[bytes] = []

    def check(self) -> None:
        try:
            for signed, signer in self.signatures:
                sodium.crypto_sign_open(signed, signer)
        except BadSignatureError:
            raise _Refused("bad_signature") from None
        _need(*map(sodium.crypto_core_ed25519_is_valid_point, self.ed25519))
        for key in self.x25519:
            _need(int.from_bytes(key, "little") < 2**255 - 19)
            try:
                sodium.crypto_scalarmult(bytes(range(32)), key)
            except RuntimeError:
                raise _Refused from None


def _padded(size: int) -> int:
    e = max(size, 1).bit_length() - 1
    low = (1 << max(e - e.bit_length(), 0)) - 1
    return max((size + low) & ~low, 1024)


def _name(text: str) -> str:
    kinds = {unicodedata.category(character) for character in text}
    _need(len(text.encode()) in range(1, 65), text == text.strip(), not kinds & _NOT_IN_NAMES)
    never = [c for c in map(ord, text) if c & 0xFFFE == 0xFFFE or 0xFDD0 <= c <= 0xFDEF]
    _need(not never)
    return text


def _ip(six: str | None, four: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.IPv6Address(six) if six else ipaddress.IPv4Address(four or "")
    except ValueError:
        raise _Refused from None


def _address(text: str) -> str:
    six, four, port = _groups(_ADDRESS, text)
    ip = _ip(six, four)
    _need(str(ip) == (six or four), int(port or 0) in range(1, 65_536))
    _need(not isinstance(ip, ipaddress.IPv6Address) or ip.ipv4_mapped is None)
    _need(not ip.is_link_local, not ip.is_multicast, not ip.is_unspecified)
    return text


def _url(text: str) -> str:
    six, port = _groups(_URL, text)
    _need(len(text) <= 512, six is None or _ip(six, None), int(port or 1) in range(1, 65_536))
    return text


def _groups(pattern: re.Pattern[str], text: str) -> tuple[str | None, ...]:
    found = pattern.fullmatch(text)
    if found is None:
        raise _Refused
    return found.groups()


# A layout lists (name, bytes, range); without a range they are bytes, else a number within it.
_Layout = tuple[tuple[str, int, range | None], ...]
_QUEUE: _Layout = (("queue", 32, None),)
_LENGTH: _Layout = (("digest", 32, None), ("length", 4, _U32))
_COUNTED: _Layout = (("counter", 8, _FROM_1), ("instance", 16, None))
_COMMAND: _Layout = (("relay", 32, None), *_COUNTED)
_DIGEST: _Layout = (("senders_digest", 32, None),)
_TOKEN: _Layout = (("token_id", 8, None), ("nonce", 32, None))


def _laid(source: _Reader, layout: _Layout) -> Fields:
    return {
        name: source.take(size).hex() if within is None else source.uint(size, within)
        for name, size, within in layout
    }


# A rule gives what the tail says, once the fields before it are known.
_Rule = Callable[[Fields, bytes, _Later], Fields]


def _nothing(_known: Fields, _tail: bytes, _later: _Later) -> Fields:
    return {}


def _sealed(_known: Fields, tail: bytes, _later: _Later) -> Fields:
    size = len(tail) - 48
    _need(size == _padded(size), size <= _PADDED_MAX)
    return {"sealed": tail.hex()}


def _facts(layout: _Layout) -> _Rule:
    def rule(_known: Fields, tail: bytes, _later: _Later) -> Fields:
        rows, facts = _Reader(tail), []
        while rows.more():
            facts.append(list(_laid(rows, layout).values()))
        return {"facts": facts}

    return rule


def _senders(_known: Fields, tail: bytes, later: _Later) -> Fields:
    keys = [tail[at : at + 32] for at in range(0, len(tail), 32)]
    _need(keys == sorted(set(keys)))
    later.ed25519 += keys
    return {"senders": [key.hex() for key in keys]}


def _acks(_known: Fields, tail: bytes, _later: _Later) -> Fields:
    return {"acks": [tail[at : at + 32].hex() for at in range(0, len(tail), 32)]}


def _flag(known: Fields, _tail: bytes, _later: _Later) -> Fields:
    return {"flag": _FLAGS[known["flag"]]}


def _card(_known: Fields, tail: bytes, later: _Later) -> Fields:
    pack, routes = _Pack(tail), []
    pack.array(4, 4)
    name, sealing = _name(pack.str()), pack.key()
    addresses = [_address(pack.str()) for _ in pack.array(0, 16)]
    for _ in pack.array(0, 4):
        pack.array(3, 3)
        url, relay, queue = _url(pack.str()), pack.key(), pack.key()
        routes.append([url, relay.hex(), queue.hex()])
        later.ed25519 += [relay, queue]
    pack.end()
    later.x25519.append(sealing)
    return {"name": name, "sealing": sealing.hex(), "addresses": addresses, "routes": routes}


def _rotation(known: Fields, tail: bytes, later: _Later) -> Fields:
    try:
        card = _frame("card", tail, later)
    except _Refused:
        # The card is a part of this frame's form, also when its magic is that of a later version.
        raise _Refused from None
    _need(card["sequence"] == known["sequence"], card["signer"] != known["signer"])
    return {"card": card}


def _greeting(_known: Fields, tail: bytes, later: _Later) -> Fields:
    pack = _Pack(tail)
    pack.array(3, 3)
    sealing, pair, name = pack.key(), pack.key(), _name(pack.str())
    pack.end()
    later.x25519.append(sealing)
    later.ed25519.append(pair)
    return {"sealing": sealing.hex(), "pair": pair.hex(), "name": name}


def _sealed_card(_known: Fields, tail: bytes, _later: _Later) -> Fields:
    return {"sealed_card": tail.hex()}


class _Kind(NamedTuple):
    number: int
    layout: _Layout
    tails: range
    rule: _Rule
    learned: bool = False


_ENVELOPE: _Layout = (*_QUEUE, ("ttl_s", 4, range(1, _WEEK_S + 1)))
_HELD: _Layout = (*_LENGTH, ("accepted_ms", 8, _U64), ("until_ms", 8, _U64))
_REGISTER: _Layout = (*_COMMAND, ("takeover", 8, _FROM_0))
_ADMIT: _Layout = (("relay", 32, None), *_QUEUE, ("lifetime_s", 4, range(_WEEK_S + 1)))
_COLLECT: _Layout = (*_COMMAND, *_DIGEST, ("bytes_max", 4, _U32), ("wait_s", 2, range(51)))
_STATE: _Layout = (*_QUEUE, *_COUNTED, *_DIGEST, ("flag", 1, range(4)))
_SEQUENCE: _Layout = (("sequence", 8, _FROM_1),)
_PROOF: _Layout = (*_TOKEN, ("proof", 32, None))
_KINDS = {
    "envelope": _Kind(1, _ENVELOPE, range(1072, 524_145), _sealed),
    "held": _Kind(2, _QUEUE, range(52, 3329, 52), _facts(_HELD)),
    "stored": _Kind(3, (), range(36, 2305, 36), _facts(_LENGTH)),
    "register": _Kind(4, _REGISTER, range(0, 8193, 32), _senders, learned=True),
    "admit": _Kind(5, _ADMIT, range(1), _nothing),
    "collect": _Kind(6, _COLLECT, range(0, 32_769, 32), _acks),
    "retire": _Kind(7, _COMMAND, range(1), _nothing),
    "queue_state": _Kind(8, _STATE, range(1), _flag),
    "card": _Kind(9, _SEQUENCE, range(1, 4097), _card, learned=True),
    "rotation": _Kind(10, _SEQUENCE, range(117, 4213), _rotation),
    "hello": _Kind(11, _TOKEN, range(1, 145), _greeting, learned=True),
    "reply": _Kind(12, _TOKEN, range(1, 145), _greeting, learned=True),
    "proof": _Kind(13, _PROOF, range(49, 4261), _sealed_card),
    "result": _Kind(14, _PROOF, range(49, 4261), _sealed_card),
}


def _frame(word: str, data: bytes, later: _Later) -> Fields:
    if data[:4] != b"MBX1":
        newer = data[:3] == b"MBX" and len(data) > 40
        raise _Refused("unsupported_version" if newer else "malformed")
    kind, whole = _KINDS[word], _Reader(data[4:])
    _need(whole.uint(1) == kind.number, whole.uint(3) == 0)
    signer = whole.take(32)
    known: Fields = {"signer": signer.hex(), "digest": hashlib.sha256(data).hexdigest()}
    known |= _laid(whole, kind.layout)
    tail, signature = whole.take(whole.uint(4)), whole.take(64)
    whole.end()
    _need(len(tail) in kind.tails)
    label = b"agentmbx/1 " + word.encode() + b"\0"
    later.signatures.append((signature + label + hashlib.sha256(data[:-64]).digest(), signer))
    later.ed25519 += [signer] * kind.learned
    return known | kind.rule(known, tail, later)


def _any_frame(word: str, data: bytes) -> Fields:
    if len(data) > 524_288:
        raise _Refused("too_large")
    later = _Later()
    known = _frame(word, data, later)
    later.check()
    return known


def _letter(data: bytes) -> Fields:
    _need(len(data) <= 327_680)
    pack = _Pack(data)
    pack.array(6, 6)
    letter: Fields = {
        "stream": pack.bin(range(16, 17)).hex(),
        "number": pack.number(_FROM_0),
        "sent_ms": pack.number(_FROM_0),
        "lifetime_s": pack.number(range(1, 259_201)),
        "content_type": (content_type := pack.str()),
        "content": pack.bin().hex(),
        "digest": hashlib.sha256(b"agentmbx/1 letter\0" + data).hexdigest(),
    }
    pack.end()
    _need(_CONTENT_TYPE.fullmatch(content_type))
    _need((letter["number"] == 0) == (content_type == "state"))
    return letter


_STATE_KEY = re.compile(r"[a-z_]{1,32}")
# The most elements of each list, or of all the lists at one place of its elements.
_STATE_MOST = (
    ("streams", None, 64),
    ("streams", 1, 1024),
    ("streams", 2, 4096),
    ("refused", None, 256),
    ("sent", None, 64),
    ("void", None, 64),
    ("void", 1, 1024),
    ("void_seen", None, 64),
    ("void_seen", 1, 1024),
    ("peer_cards", None, 16),
    ("unopened", None, 32),
)


class _State(_Pack):
    """The values of a state letter's keys (5.4)."""

    def from_1(self) -> int:
        return self.number(_FROM_1)

    def from_0(self) -> int:
        return self.number(_FROM_0)

    def digest(self) -> str:
        return self.key().hex()

    def short(self) -> str:
        return self.bin(range(8, 9)).hex()

    def stream(self) -> str:
        return self.bin(range(16, 17)).hex()

    def flag(self) -> bool:
        _need(self.take(1) == b"\xc3")
        return True

    def ranges(self) -> list[Row]:
        rows = self.rows(self.from_1, self.from_1)
        _need(rows, *(first <= last for first, last in rows))
        _need(*(first > last + 1 for (_, last), (first, _) in itertools.pairwise(rows)))
        return rows

    def streams(self) -> list[Row]:
        rows = self.rows(self.stream, self.ranges, lambda: self.rows(self.from_1, self.short))
        for _, ranges, digests in rows:
            _need(_rises(number for number, _ in digests))
            at = 0
            for number, _ in digests:
                while at < len(ranges) and ranges[at][1] < number:
                    at += 1
                _need(at < len(ranges) and ranges[at][0] <= number)
        return _by_stream(rows)

    def refused(self) -> list[Row]:
        rows = self.rows(self.stream, self.from_1, self.short)
        _need(rows, _rises(rows))
        return rows

    def sent(self) -> list[Row]:
        rows = self.rows(self.stream, self.from_1, self.from_0)
        _need(*(confirmed <= last for _, last, confirmed in rows))
        return _by_stream(rows)

    def void(self) -> list[Row]:
        return _by_stream(self.rows(self.stream, self.ranges))

    def peer_cards(self) -> list[Row]:
        rows = self.rows(self.from_1, self.digest)
        _need(rows, _rises(rows[::-1]))
        return rows

    def unopened(self) -> list[str]:
        digests = [self.digest() for _ in self.array(1, 2**16)]
        _need(_rises(digests))
        return digests


def _rises(values: Iterable[Any]) -> bool:
    return all(lower < higher for lower, higher in itertools.pairwise(values))


def _by_stream(rows: list[Row]) -> list[Row]:
    _need(rows, _rises(row[0] for row in rows))
    return rows


# The keys in their order, each with how its value is read and what it means when it is left out.
_STATE_KEYS: dict[str, tuple[Callable[[_State], object], object]] = {
    "card_sequence": (_State.from_1, None),
    "card_digest": (_State.digest, None),
    "sequence": (_State.from_1, None),
    "streams": (_State.streams, []),
    "refused": (_State.refused, []),
    "sent": (_State.sent, []),
    "void": (_State.void, []),
    "void_seen": (_State.void, []),
    "peer_cards": (_State.peer_cards, []),
    "unopened": (_State.unopened, []),
    "ask_seen": (_State.from_1, 0),
    "now_ms": (_State.from_1, 0),
    "ask": (_State.flag, False),
    "bye": (_State.flag, False),
}


def _state(data: bytes) -> Fields:
    if len(data) > 327_680:
        raise _Refused("too_large")
    pack, seen, known = _State(data), set(), {}
    for _ in pack.map(64):
        key = pack.str()
        _need(_STATE_KEY.fullmatch(key), key not in seen)
        seen.add(key)
        if key in _STATE_KEYS:
            known[key] = _STATE_KEYS[key][0](pack)
        else:
            pack.over()
    pack.end()
    _need(list(known) == [key for key in _STATE_KEYS if key in known])
    whole: dict[str, Any] = {key: empty for key, (_, empty) in _STATE_KEYS.items()} | known
    _need(None not in whole.values())
    for key, part, most in _STATE_MOST:
        count = len(whole[key]) if part is None else sum(len(row[part]) for row in whole[key])
        if count > most:
            raise _Refused("too_large")
    return whole


def _plaintext(data: bytes) -> Fields:
    if len(data) > _PADDED_MAX:
        raise _Refused("too_large")
    whole = _Reader(data)
    pack = _Pack(whole.take(whole.uint(4)))
    _need(len(data) == _padded(whole.at), not any(data[whole.at :]))
    pack.array(5, 5)
    plaintext: Fields = {
        "sender": pack.key().hex(),
        "receiver": pack.key().hex(),
        "letter": pack.bin(range(1, 327_681)).hex(),
        "card": pack.bin().hex(),
        "rotations": [pack.bin().hex() for _ in pack.array(0, 16)],
    }
    pack.end()
    return plaintext


def _frames(data: bytes) -> Fields:
    whole = _Reader(data)
    frames: list[str] = []
    while whole.more():
        frames.append(whole.take(whole.uint(4, _FROM_1)).hex())
        if len(frames) > 64:
            raise _Refused("too_large")
    return {"frames": frames}


_OTHERS = {"letter": _letter, "plaintext": _plaintext, "state": _state, "frames": _frames}


def read(kind: str, data: bytes) -> dict[str, object] | str:
    """What section 13 expects for these bytes: the decoded fields, or the code of the refusal."""
    try:
        known = _OTHERS[kind](data) if kind in _OTHERS else _any_frame(kind, data)
    except _Refused as refused:
        return refused.code
    return {"ok": True, **known}
