"""Pairing by token: four frames after which both machines hold each other's card."""

import hashlib
import hmac
from typing import Annotated, Final

import msgspec

from agentmbx_protocol import card, frame, keys, limits
from agentmbx_protocol.errors import BadSignature, Malformed
from agentmbx_protocol.keys import SealingKey, SigningKey
from agentmbx_protocol.messagepack import pack, unpack

_NONCE_AT: Final = limits.TOKEN_ID_BYTES
_PROOF_AT: Final = _NONCE_AT + limits.NONCE_BYTES
_ROLES: Final = {frame.Kind.PROOF: b"joiner", frame.Kind.RESULT: b"initiator"}

_Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _Tail(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    sealing: _Key
    pair: _Key
    name: str


class Hello(msgspec.Struct, frozen=True):
    """The joiner's `hello` or the initiator's `reply`: keys, nonce and suggested name.

    `data` is the frame itself, which both proofs cover.
    """

    data: bytes
    identity: bytes
    token_id: bytes
    nonce: bytes
    sealing: bytes
    pair: bytes
    name: str


_tail_decoder = msgspec.msgpack.Decoder(_Tail)


def token_id(token: bytes) -> bytes:
    """The 8 bytes by which a joiner names a token that it never sends."""
    return hashlib.sha256(token).digest()[: limits.TOKEN_ID_BYTES]


def make_hello(
    kind: frame.Kind,
    identity: SigningKey,
    *,
    named_token: bytes,
    nonce: bytes,
    sealing: bytes,
    pair: bytes,
    name: str,
) -> bytes:
    """A signed `hello` or `reply` (SPEC section 7.1); raises `Malformed` for the name."""
    card.check_name(name)
    return frame.sign(kind, identity, named_token + nonce, pack(_Tail(sealing, pair, name)))


def parse_hello(data: bytes, kind: frame.Kind) -> Hello:
    """The `hello` or `reply` that `data` is, signature and keys checked; raises a `Refusal`."""
    parsed = frame.parse(data, kind)
    tail = unpack(parsed.tail, _tail_decoder)
    card.check_name(tail.name)
    parsed.verify()
    keys.check_signing_public(parsed.signer)
    keys.check_signing_public(tail.pair)
    keys.check_sealing_public(tail.sealing)
    return Hello(
        data=data,
        identity=parsed.signer,
        token_id=parsed.fields[:_NONCE_AT],
        nonce=parsed.fields[_NONCE_AT:],
        sealing=tail.sealing,
        pair=tail.pair,
        name=tail.name,
    )


def make_proof(
    kind: frame.Kind,
    identity: SigningKey,
    token: bytes,
    hello: Hello,
    reply: Hello,
    *,
    own_card: bytes,
) -> bytes:
    """A signed `proof` by the joiner or `result` by the initiator (SPEC section 7.2).

    It shows knowledge of the token over both frames and carries `own_card`, sealed to the other.
    """
    own, other = (hello, reply) if kind is frame.Kind.PROOF else (reply, hello)
    fields = hello.token_id + own.nonce + _proof_of(kind, token, hello, reply)
    return frame.sign(kind, identity, fields, keys.seal(own_card, other.sealing))


def open_proof(
    data: bytes,
    kind: frame.Kind,
    token: bytes,
    hello: Hello,
    reply: Hello,
    *,
    sealing_key: SealingKey,
) -> card.Card:
    """The other side's card, if its `proof` or `result` shows that it knows the token.

    Raises a `Refusal`: `BadSignature` when the signer, the proof or the signature is wrong, and
    `CannotOpen` when the card does not open.
    """
    parsed = frame.parse(data, kind)
    prover = hello if kind is frame.Kind.PROOF else reply
    fields = parsed.fields
    proved = hmac.compare_digest(fields[_PROOF_AT:], _proof_of(kind, token, hello, reply))
    if (
        not proved
        or parsed.signer != prover.identity
        or fields[:_PROOF_AT] != hello.token_id + prover.nonce
    ):
        raise BadSignature("The proof does not fit the token and the two machines.")
    parsed.verify()
    shown = card.parse_card(sealing_key.open(parsed.tail))
    if (shown.identity, shown.sealing) != (prover.identity, prover.sealing):
        raise Malformed("The card is not the one of the machine that proved the token.")
    return shown


def _proof_of(kind: frame.Kind, token: bytes, hello: Hello, reply: Hello) -> bytes:
    transcript = hashlib.sha256(hello.data).digest() + hashlib.sha256(reply.data).digest()
    label = b"agentmbx/1 pairing " + _ROLES[kind] + b"\0"
    return hmac.digest(token, label + transcript, "sha256")
