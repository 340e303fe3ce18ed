"""Vectors for cards, rotations and pairing, for what is inside a seal, and for HTTP bodies."""

from collections.abc import Iterator
from typing import Final

from agentmbx_protocol.bodies import join_frames
from agentmbx_protocol.frame import Kind
from vector_parts import crooked_keys, typical
from vector_parts.frame_cases import BAD_SIGNING_KEYS, COUNTER_END, Case, bad, good
from vector_parts.raw_forms import BAD_UTF8, RawFrame, Signer, array, filler, pack_faults

BAD_SEALING_KEYS: Final = {**crooked_keys.SEALING_TOO_LARGE, **crooked_keys.SEALING_LOW_ORDER}
GOOD_NAMES: Final = {
    "of one letter": "a",
    "of 64 bytes": "n" * 64,
    "with an inner space": "build box",
    "of emoji": "\U0001f4ec\U0001f98a",
    "of 16 four-byte characters": "\U0001f4ec" * 16,
    "in NFD": "Bu\u0308ro",
    "in NFC": "B\u00fcro",
    "in Hebrew": "\u05de\u05d7\u05e9\u05d1",
    "with shell characters": "$(reboot);'\"\\",
}
BAD_NAMES: Final = {
    "empty": "",
    "of 65 bytes": "n" * 65,
    "of 65 bytes in 33 characters": "\u00fc" * 32 + "n",
    "of a space": " ",
    "with a space before": " n",
    "with a space behind": "n ",
    "with a no-break space behind": "n\u00a0",
    "with NUL": "n\0m",
    "with a line feed": "n\nm",
    "with an escape": "\x1b[31mn",
    "with a C1 control": "n\u0085m",
    "with a right-to-left override": "n\u202em",
    "with a bidi isolate": "n\u2066m",
    "with a zero-width joiner": "n\u200dm",
    "with a byte order mark": "\ufeffn",
    "with a soft hyphen": "n\u00adm",
    "with a line separator": "n\u2028m",
    "with a paragraph separator": "n\u2029m",
    "with a private character": "n\ue000m",
    "with a noncharacter": "n\uffffm",
    "with the last code point": "n\U0010ffffm",
    "with a tag character": "n\U000e0041m",
}
GOOD_ADDRESSES: Final = (
    "192.0.2.7:1",
    "127.0.0.1:65535",
    "10.0.0.1:7420",
    "255.255.255.255:7420",
    "[2001:db8::7]:7420",
    "[::1]:7420",
    "[fd00::1]:7420",
    "[2001:db8:0:1:1:1:1:1]:7420",
    "[2001:0:0:1::1]:7420",
    "[64:ff9b::c000:207]:7420",
)
BAD_ADDRESSES: Final = (
    "",
    ":",
    "192.0.2.7",
    "192.0.2.7:",
    "192.0.2.7:0",
    "192.0.2.7:65536",
    "192.0.2.7:07420",
    "192.0.2.7:7_420",
    "192.0.2.7:\u0667",
    "192.0.2.7:7420 ",
    "192.0.2.7:7420\n",
    "192.0.2.07:7420",
    "192.0.2:7420",
    "3221225991:7420",
    "\uff11\uff19\uff12.0.2.7:7420",
    "[192.0.2.7]:7420",
    "build-box:7420",
    "2001:db8::7:7420",
    "[2001:db8::7:7420",
    "2001:db8::7]:7420",
    "[2001:DB8::7]:7420",
    "[2001:db8:0:0:0:0:0:7]:7420",
    "[2001:0db8::7]:7420",
    "[2001:db8::1:1:1:1:1]:7420",
    "[2001:0:0:0:1::1]:7420",
    "[2001:db8::192.0.2.7]:7420",
    "[2001:db8::7%eth0]:7420",
    "[2001:db8::7%\u202e]:7420",
    "169.254.169.254:80",
    "[fe80::1]:7420",
    "[fe80::1%1]:7420",
    "224.0.0.251:7420",
    "[ff02::fb]:7420",
    "[::ffff:192.0.2.7]:7420",
    "[::ffff:c000:207]:7420",
    "0.0.0.0:7420",
    "[::]:7420",
)
GOOD_URLS: Final = (
    "https://relay.example.com",
    "https://relay.example.com/",
    "http://relay.example.com:1/mbx",
    "https://relay.example.com:65535/a/b/~c!",
    "http://192.0.2.7:7421",
    "https://[2001:db8::7]:7421/mbx",
    "http://[::1]",
    "https://r",
)
BAD_URLS: Final = (
    "",
    "https://",
    "https:///mbx",
    "//relay.example.com",
    "ftp://relay.example.com",
    "HTTPS://relay.example.com",
    "https://user@relay.example.com",
    "https://user:secret@relay.example.com/",
    "https://Relay.example.com",
    "https://relay_1.example.com",
    "https://b\u00fcro.example.com",
    "https://relay.example.com:",
    "https://relay.example.com:0",
    "https://relay.example.com:65536",
    "https://relay.example.com:080",
    "https://relay.example.com:80:80",
    "https://relay.example.com?mbx",
    "https://relay.example.com/mbx?go",
    "https://relay.example.com/mbx#key",
    "https://relay.example.com/{mbx}",
    "https://relay.example.com#mbx",
    "https://relay.example.com\\mbx",
    "https://relay.example.com/a b",
    "https://relay.example.com/\u00fc",
    "https://relay.example.com/\x7f",
    "https://relay.example.com/\n",
    " https://relay.example.com",
    "https://relay.example.com\r\nHost: other",
    "https://[2001:db8::7",
    "https://[2001:db8::g]",
    "https://[2001:db8::7%25eth0]",
    "https://[]",
    "https://[::::]",
    "https://2001:db8::7",
)


def card_cases() -> Iterator[Case]:
    """SPEC 6.1, without routes."""
    word = typical.card_elements
    yield good(typical.card(), "least")
    for sequence in (1, COUNTER_END - 1):
        yield good(typical.card(sequence=sequence), f"sequence {sequence}")
    for sequence in (0, COUNTER_END, 2**64 - 1):
        yield bad(typical.card(sequence=sequence), f"sequence {sequence}")
    for label, name in GOOD_NAMES.items():
        yield good(typical.card(word(name=name.encode())), f"name {label}")
    for label, name in BAD_NAMES.items():
        yield bad(typical.card(word(name=name.encode())), f"name {label}")
    for label, utf8 in BAD_UTF8.items():
        yield bad(typical.card(word(name=utf8)), f"name with {label}")
        yield bad(typical.card(word(addresses=(utf8,))), f"address with {label}")
    listed = tuple(address.encode() for address in GOOD_ADDRESSES)
    yield good(typical.card(word(addresses=listed)), "addresses of every kind")
    yield good(typical.card(word(addresses=listed[:1] * 16)), "16 addresses")
    yield bad(typical.card(word(addresses=listed[:1] * 17)), "17 addresses")
    for address in BAD_ADDRESSES:
        yield bad(typical.card(word(addresses=(address.encode(),))), f"address {address!a}")
    for label, sealing in BAD_SEALING_KEYS.items():
        yield bad(typical.card(word(sealing=sealing)), f"sealing key of {label}")
    yield bad(typical.card()._replace(tail=b""), "without a tail")
    for label, tail in pack_faults(word()):
        if "element 2" in label or "longer form" in label:
            yield bad(typical.card()._replace(tail=tail), f"tail: {label}")


def route_cases() -> Iterator[Case]:
    """SPEC 6.1, the routes."""

    def card_with(*routes: bytes) -> RawFrame:
        return typical.card(typical.card_elements(routes=routes))

    word = typical.route_elements
    longest = b"https://relay.example.com/" + b"p" * (512 - 26)
    for at in (0, 4):
        routes = [array(word(url=url.encode())) for url in GOOD_URLS[at : at + 4]]
        yield good(card_with(*routes), f"4 routes, from {GOOD_URLS[at]} on")
    yield good(card_with(array(word(url=longest))), "URL of 512 bytes")
    yield bad(card_with(array(word(url=longest + b"p"))), "URL of 513 bytes")
    for url in BAD_URLS:
        yield bad(card_with(array(word(url=url.encode()))), f"URL {url!a}")
    yield bad(card_with(*[array(word())] * 5), "5 routes")
    for label in ("order 8", "y of p + 3", "mixed order", "no point of the curve"):
        key = BAD_SIGNING_KEYS[label]
        yield bad(card_with(array(word(relay=key))), f"route to a relay of {label}")
        yield bad(card_with(array(word(queue=key))), f"route to a queue of {label}")
    for label, packed in pack_faults(word()):
        if "longer form" in label or "an element" in label:
            yield bad(card_with(packed), f"route: {label}")


def rotation_cases() -> Iterator[Case]:
    """SPEC 6.2."""
    raw, successor = typical.rotation(), typical.SUCCESSOR
    top = COUNTER_END - 1
    yield good(typical.rotation(sequence=top), f"sequence {top}")
    for sequence in (0, COUNTER_END):
        yield bad(typical.rotation(sequence=sequence), f"sequence {sequence}")
    inner = typical.card(sequence=6, signer=successor)
    yield bad(typical.rotation(inner, sequence=5), "a sequence below the card's")
    yield bad(typical.rotation(inner, sequence=7), "a sequence above the card's")
    yield bad(typical.rotation(typical.card(sequence=6)), "to its own key")
    inner_faults = {
        "of another magic": inner._replace(magic=b"XBX1"),
        "of the next version": inner._replace(magic=b"MBX2"),
        "of kind hello": typical.hello(),
        "that is a rotation": raw,
        "with a reserved byte set": inner._replace(reserved=b"\0\0\1"),
        "with a name of a space": typical.card(
            typical.card_elements(name=b" "), sequence=6, signer=successor
        ),
        "with a low-order sealing key": typical.card(
            typical.card_elements(sealing=bytes(32)), sequence=6, signer=successor
        ),
    }
    for label, other in inner_faults.items():
        yield bad(typical.rotation(other), f"to a card {label}")
    yield bad(raw._replace(tail=raw.tail[:-1]), "to a card cut by a byte")
    yield bad(raw._replace(tail=raw.tail + b"\0"), "to a card with a byte behind")
    yield bad(raw._replace(tail=b"\0" * 116), "a tail of 116 bytes")
    forged = raw._replace(tail=raw.tail[:-1] + bytes((raw.tail[-1] ^ 1,)))
    yield bad(forged, "to a card that the new key did not sign", "bad_signature")
    forged = raw._replace(signer=Signer(typical.IDENTITY.public, successor.sign))
    yield bad(forged, "signed by the new key", "bad_signature")


def pairing_cases() -> Iterator[Case]:
    """SPEC 7.1 and 7.2, without what needs a token."""
    word = typical.hello_elements
    for label, key in BAD_SIGNING_KEYS.items():
        yield bad(typical.hello(elements=word(pair=key)), f"pair key of {label}")
    for label in ("p + 9", "high bit set", "1", "order 8"):
        key = BAD_SEALING_KEYS[label]
        yield bad(typical.hello(elements=word(sealing=key)), f"sealing key of {label}")
    for kind in (Kind.HELLO, Kind.REPLY):
        for label in ("of 64 bytes", "of emoji"):
            name = GOOD_NAMES[label].encode()
            yield good(typical.hello(kind, word(name=name)), f"name {label}")
        for label in ("empty", "of 65 bytes", "with a space behind", "with a bidi isolate"):
            name = BAD_NAMES[label].encode()
            yield bad(typical.hello(kind, word(name=name)), f"name {label}")
        small_order, p = crooked_keys.ORDER_8, crooked_keys.SEALING_TOO_LARGE["p"]
        yield bad(typical.hello(kind, word(pair=small_order)), "pair key of a small order")
        yield bad(typical.hello(kind, word(sealing=p)), "sealing key of the prime")
        yield bad(typical.hello(kind)._replace(tail=b""), "without a tail")
        yield bad(typical.hello(kind)._replace(tail=bytes(145)), "a tail of 145 bytes")
    for label, utf8 in BAD_UTF8.items():
        yield bad(typical.hello(elements=word(name=utf8)), f"name with {label}")
    for label, tail in pack_faults(word()):
        if "element 1" in label or "longer form" in label:
            yield bad(typical.hello()._replace(tail=tail), f"tail: {label}")
    for kind in (Kind.PROOF, Kind.RESULT):
        yield good(typical.proof(kind, 49), "the shortest sealed card")
        yield bad(typical.proof(kind, 48), "a sealed card of nothing")


def letter_cases() -> Iterator[Case]:
    """The letter's bytes of SPEC 5.2."""
    word = typical.letter_elements
    contents = {
        "empty": b"",
        "emoji": "\U0001f4ec\U0001f468\u200d\U0001f469".encode(),
        "line separators": "a\u2028b\u2029c\x85d".encode(),
        "NFD and NFC": "e\u0301 \u00e9".encode(),
        "numbers in JSON": b'{"a": 1e-7, "b": 1152921504606846976, "c": -0, "c": 0}',
        "NUL": b"\0",
        "a lone surrogate in JSON": b'"\\ud83d"',
        "no UTF-8": b"\xc0\x80\xed\xa0\xbd\xff",
        "deep nesting": b"[" * 300,
        "300 bytes": filler("content", 300),
    }
    for label, content in contents.items():
        yield Case("letter", f"content: {label}", array(word(content=content)), "")
    goods = {
        "typical": word(),
        "a state letter": word(number=0, content_type=b"state"),
        "number 2^63 - 1": word(number=COUNTER_END - 1),
        "sent at 0": word(sent_ms=0),
        "sent at 2^63 - 1": word(sent_ms=COUNTER_END - 1),
        "lifetime of one second": word(lifetime_s=1),
        "type of one character": word(content_type=b"0"),
        "type of 64 characters": word(content_type=b"text/markdown-1.0" + b"a" * 47),
        "unknown type": word(content_type=b"x.example/v2"),
    }
    bads = {
        "number 0 and not state": word(number=0),
        "state with a number": word(content_type=b"state"),
        "number 2^63": word(number=COUNTER_END),
        "number 2^64 - 1": word(number=2**64 - 1),
        "sent at 2^63": word(sent_ms=COUNTER_END),
        "lifetime of nothing": word(lifetime_s=0),
        "lifetime beyond 72 h": word(lifetime_s=259_201),
        "type empty": word(content_type=b""),
        "type of 65 characters": word(content_type=b"a" * 65),
        "type with a capital": word(content_type=b"Text"),
        "type with a space": word(content_type=b"text plain"),
        "type with a line feed behind": word(content_type=b"text\n"),
        "type that begins with a dot": word(content_type=b".text"),
        "type that begins with a slash": word(content_type=b"/text"),
        "type with an umlaut": word(content_type="t\u00fcxt".encode()),
        "type with NUL": word(content_type=b"text\0"),
        "stream of 15 bytes": [b"\xc4\x0f" + bytes(15), *word()[1:]],
        "stream of 17 bytes": [b"\xc4\x11" + bytes(17), *word()[1:]],
    }
    for label, elements in goods.items():
        yield Case("letter", label, array(elements), "")
    for label, elements in bads.items():
        yield Case("letter", label, array(elements))
    for label, utf8 in BAD_UTF8.items():
        yield Case("letter", f"type with {label}", array(word(content_type=utf8)))
    for label, data in pack_faults(word()):
        yield Case("letter", label, data)
    yield Case("letter", "no bytes", b"")
    yield Case("letter", "500 arrays in each other", b"\x91" * 500)
    yield Case("letter", "JSON", b'["AAAAAAAAAAAAAAAAAAAAAA==", 1, 2, 3, "text", ""]')


def plaintext_cases() -> Iterator[Case]:
    """SPEC 5.1 and the array of 5.2."""
    card, link = typical.card().data, typical.rotation().data
    inside = typical.inside_elements
    unread = array(typical.letter_elements(content=filler("long", 1100)))
    goods = {
        "typical": inside(),
        "with a card and a rotation": inside(card_data=card, rotations=(link,)),
        "of a longer padded length": inside(letter=unread),
        "a letter and 16 rotations that are none": inside(b"\xc1", rotations=[b"\0"] * 16),
    }
    for label, elements in goods.items():
        yield Case("plaintext", label, typical.padded(array(elements)), "")
    packed = array(inside())
    data = typical.padded(packed)
    at = 4 + len(packed)
    bads = {
        "no bytes": b"",
        "three bytes": data[:3],
        "only a length": data[:4],
        "not padded": data[:at],
        "padding cut by a byte": data[:-1],
        "padding longer by a byte": data + b"\0",
        "padded to the next length": data + bytes(64),
        "first byte of the padding set": data[:at] + b"\1" + data[at + 1 :],
        "last byte of the padding set": data[:-1] + b"\1",
        "length one too many": (len(packed) + 1).to_bytes(4, "big") + data[4:],
        "length one too few": (len(packed) - 1).to_bytes(4, "big") + data[4:],
        "length of nothing": bytes(4) + data[4:],
        "length of all bits": b"\xff" * 4 + data[4:],
        "length of all that is there": (len(data) - 4).to_bytes(4, "big") + data[4:],
        "zeros": bytes(1024),
        "no letter": typical.padded(array(inside(letter=b""))),
        "17 rotations": typical.padded(array(inside(rotations=[b"\0"] * 17))),
    }
    for label, wrong in bads.items():
        yield Case("plaintext", label, wrong)
    for label, form in pack_faults(inside()):
        if "element 2 in" in label or "element 0 is a str" in label or "a byte" in label:
            yield Case("plaintext", label, typical.padded(form))
    for at, label, length in ((0, "sender", 31), (1, "receiver", 33)):
        elements = inside()
        elements[at] = bytes((0xC4, length)) + bytes(length)
        yield Case("plaintext", f"{label} of {length} bytes", typical.padded(array(elements)))


def body_cases() -> Iterator[Case]:
    """SPEC 8.1."""
    frames = [typical.retire().data, b"any bytes", b"\0"]
    body = join_frames(frames)
    goods = {
        "no frame": b"",
        "one frame": join_frames(frames[:1]),
        "three frames": body,
        "64 frames": join_frames([b"f"] * 64),
    }
    bads = {
        "one byte": b"\0",
        "three bytes of a length": body[:3],
        "only a length": body[:4],
        "last byte cut": body[:-1],
        "a byte behind": body + b"\0",
        "a length of 0": bytes(4),
        "a length of 0 behind a frame": body + bytes(4),
        "a length of all bits": b"\xff" * 4 + body[4:],
        "a length one too many": join_frames([b"f"])[:3] + b"\2f",
        "64 frames and a byte": join_frames([b"f"] * 64) + b"\0",
        "64 frames and a length of 0": join_frames([b"f"] * 64) + bytes(4),
    }
    for label, data in goods.items():
        yield Case("frames", label, data, "")
    for label, data in bads.items():
        yield Case("frames", label, data)
    yield Case("frames", "65 frames", join_frames([b"f"] * 65), "too_large")
    yield Case("frames", "text", b"POST /v1/deposit")
