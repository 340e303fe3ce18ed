"""Hypothesis strategies for the values that frames and letters are made of."""

import string

from hypothesis import settings
from hypothesis import strategies as st

from agentmbx_protocol import card
from agentmbx_protocol.keys import SealingKey, SigningKey
from agentmbx_protocol.letter import Letter

few, some, many = (settings(max_examples=count, deadline=None) for count in (25, 80, 300))

seeds = st.binary(min_size=32, max_size=32)
signing_keys = st.builds(SigningKey, seeds)
sealing_keys = st.builds(SealingKey, seeds)
digests = st.binary(min_size=32, max_size=32)
instances = st.binary(min_size=16, max_size=16)
counters = st.integers(1, 2**63 - 1)
words32, words64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
visible = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"))
names = st.text(visible, min_size=1, max_size=64).map(
    lambda name: name.encode()[:64].decode(errors="ignore")
)
addresses = st.builds(
    "{}:{}".format,
    st.one_of(
        st.ip_addresses(v=4, network="10.0.0.0/8"),
        st.ip_addresses(v=4, network="192.0.0.0/9"),
        st.ip_addresses(v=6, network="2000::/3").map("[{}]".format),
        st.ip_addresses(v=6, network="fd00::/8").map("[{}]".format),
    ),
    st.integers(1, 65_535),
)
texts = st.text(
    st.one_of(
        st.characters(),
        st.characters(categories=("Cs",)),
        st.sampled_from("\0\x1b\n\u2028\u2029\u202e\ufeff\U0001f4ece\u0301"),
    ),
    max_size=80,
)
numbers = st.one_of(
    st.integers(-5, 5),
    st.integers(),
    st.sampled_from((2**31, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400))),
)
contents = st.one_of(
    st.binary(max_size=3000),
    st.text(max_size=300).map(str.encode),
    st.sampled_from(
        [
            "\U0001f4ec\U0001f468\u200d\U0001f469 a\u2028b\u2029c\x85".encode(),
            "e\u0301 \u00e9 \u212b \ufb01".encode(),
            b'{"a": 1e-7, "b": 1152921504606846976, "c": -0, "d": -0.0, "e": 1E400, "a": 2}',
            '{"\U0001d4d0": {"\U0001d4d1": 1}, "b" : [ ]}'.encode(),
            b'"\\ud83d"',
            b"\0\xc0\x80\xed\xa0\xbd\xff\xfe",
            b"[" * 2000,
            b"9" * 400,
            b"",
            b" " * 100,
        ]
    ),
)
letters = st.builds(
    Letter,
    stream=instances,
    number=counters,
    sent_ms=st.integers(0, 2**63 - 1),
    lifetime_s=st.integers(1, 259_200),
    content_type=st.from_regex(r"\A[a-z0-9][a-z0-9./-]{0,63}\Z").filter(lambda t: t != "state"),
    content=contents,
)


hosts = st.text("abcz019.-", min_size=1, max_size=30)
ports = st.just("") | st.integers(1, 65_535).map(":{}".format)
paths = st.just("") | st.text(
    st.sampled_from(string.ascii_letters + string.digits + "-._~!$&'()*+,;=:@%/")
).map("/{}".format)
urls = st.builds("{}{}{}{}".format, st.sampled_from(("http://", "https://")), hosts, ports, paths)
publics = signing_keys.map(lambda key: key.public)
routes = st.builds(card.Route, urls.map(lambda url: url[:512]), publics, publics)


@st.composite
def signed_cards(draw: st.DrawFn, key: SigningKey | None = None) -> tuple[SigningKey, card.Card]:
    identity = key or draw(signing_keys)
    shown = card.Card(
        identity.public,
        draw(counters),
        draw(names),
        draw(sealing_keys).public,
        tuple(draw(st.lists(addresses, max_size=3))),
        tuple(draw(st.lists(routes, max_size=2))),
    )
    return identity, shown
