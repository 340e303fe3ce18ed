"""What the package reads in any bytes of the protocol, in the words of SPEC section 13.

One table from a vector's kind to its decoded fields, for the vectors and for the tests.
"""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from agentmbx_protocol import bodies, card, custody, frame, letter, limits, pairing
from agentmbx_protocol import queue_commands as commands
from agentmbx_protocol.envelope import parse_envelope
from agentmbx_protocol.errors import Refusal
from agentmbx_protocol.frame import Kind
from agentmbx_protocol.state import parse_state

Fields = dict[str, object]


def expected(kind: str, data: bytes) -> Fields | str:
    """The vector's `expect` for `data` read as `kind`: an object, or the code of the refusal.

    An exception that is no `Refusal` is a bug of the package and passes through.
    """
    try:
        fields = DECODERS[kind](data)
    except Refusal as refusal:
        return refusal.code
    shown = _shown(fields)
    if not isinstance(shown, dict):
        raise TypeError("decoded fields are an object")
    return {"ok": True, **shown}


def _shown(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items()}
    return value


def _frame_fields(data: bytes) -> Fields:
    parsed = frame.parse(data)
    return {"signer": parsed.signer, "digest": parsed.digest}


def _envelope(data: bytes) -> Fields:
    parcel = parse_envelope(data)
    parcel.frame.verify()
    return {"queue": parcel.queue, "ttl_s": parcel.ttl_s, "sealed": parcel.sealed}


def _held(data: bytes) -> Fields:
    held = custody.parse_held(data)
    return {"queue": held.queue, "facts": [msgspec.structs.astuple(fact) for fact in held.facts]}


def _stored(data: bytes) -> Fields:
    facts = custody.parse_stored(data).facts
    return {"facts": [msgspec.structs.astuple(fact) for fact in facts]}


def _without_signer(command: msgspec.Struct, signer: str) -> Fields:
    fields = msgspec.structs.asdict(command)
    del fields[signer]
    return fields


def _queue_state(data: bytes) -> Fields:
    state = commands.parse_queue_state(data)
    return _without_signer(state, "relay") | {"flag": state.flag.name.lower()}


def _card(data: bytes) -> Fields:
    return _card_fields(card.parse_card(data))


def _card_fields(shown: card.Card) -> Fields:
    routes = [msgspec.structs.astuple(route) for route in shown.routes]
    return _without_signer(shown, "identity") | {"routes": routes}


def _rotation(data: bytes) -> Fields:
    rotation = card.parse_rotation(data)
    inner = _frame_fields(frame.parse(data).tail) | _card_fields(rotation.card)
    return {"sequence": rotation.sequence, "card": inner}


def _hello(kind: Kind) -> Callable[[bytes], Fields]:
    def decode(data: bytes) -> Fields:
        hello = pairing.parse_hello(data, kind)
        names = ("token_id", "nonce", "sealing", "pair", "name")
        return {name: getattr(hello, name) for name in names}

    return decode


def _proof(kind: Kind) -> Callable[[bytes], Fields]:
    def decode(data: bytes) -> Fields:
        parsed = frame.parse(data, kind)
        parsed.verify()
        fields, nonce_at = parsed.fields, limits.TOKEN_ID_BYTES
        proof_at = nonce_at + limits.NONCE_BYTES
        return {
            "token_id": fields[:nonce_at],
            "nonce": fields[nonce_at:proof_at],
            "proof": fields[proof_at:],
            "sealed_card": parsed.tail,
        }

    return decode


def _letter(data: bytes) -> Fields:
    return msgspec.structs.asdict(letter.decode_letter(data)) | {
        "digest": letter.letter_digest(data)
    }


def _plaintext(data: bytes) -> Fields:
    return msgspec.structs.asdict(letter.parse_plaintext(data))


def _state(data: bytes) -> Fields:
    fields = msgspec.structs.asdict(parse_state(data))
    return {
        name: msgspec.to_builtins(each, builtin_types=(bytes,)) for name, each in fields.items()
    }


def _frames(data: bytes) -> Fields:
    return {"frames": bodies.split_frames(data, limits.DEPOSIT_ENVELOPES_MAX)}


def _named(decode: Callable[[bytes], Fields]) -> Callable[[bytes], Fields]:
    def decode_frame(data: bytes) -> Fields:
        fields = decode(data)
        return _frame_fields(data) | fields

    return decode_frame


_FRAMES: Final[Mapping[Kind, Callable[[bytes], Fields]]] = {
    Kind.ENVELOPE: _envelope,
    Kind.HELD: _held,
    Kind.STORED: _stored,
    Kind.REGISTER: lambda data: _without_signer(commands.parse_register(data), "queue"),
    Kind.ADMIT: lambda data: _without_signer(commands.parse_admit(data), "signer"),
    Kind.COLLECT: lambda data: _without_signer(commands.parse_collect(data), "queue"),
    Kind.RETIRE: lambda data: _without_signer(commands.parse_retire(data), "queue"),
    Kind.QUEUE_STATE: _queue_state,
    Kind.CARD: _card,
    Kind.ROTATION: _rotation,
    Kind.HELLO: _hello(Kind.HELLO),
    Kind.REPLY: _hello(Kind.REPLY),
    Kind.PROOF: _proof(Kind.PROOF),
    Kind.RESULT: _proof(Kind.RESULT),
}
DECODERS: Final[Mapping[str, Callable[[bytes], Fields]]] = {
    **{kind.name.lower(): _named(decode) for kind, decode in _FRAMES.items()},
    "letter": _letter,
    "plaintext": _plaintext,
    "state": _state,
    "frames": _frames,
}
