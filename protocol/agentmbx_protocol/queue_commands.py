"""What a queue's owner tells a relay, and the relay's signed answer about the queue."""

import hashlib
import itertools
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum, unique
from typing import Final

import msgspec

from agentmbx_protocol import frame, keys, limits
from agentmbx_protocol.errors import Malformed
from agentmbx_protocol.keys import SigningKey

_REGISTER: Final = struct.Struct(">32sQ16sQ")
_ADMIT: Final = struct.Struct(">32s32sI")
_COLLECT: Final = struct.Struct(">32sQ16s32sIH")
_RETIRE: Final = struct.Struct(">32sQ16s")
_QUEUE_STATE: Final = struct.Struct(">32sQ16s32sB")


@unique
class Flag(IntEnum):
    """What the relay made of the command that it answers."""

    OK = 0
    STALE = 1
    SUPERSEDED = 2
    RETIRED = 3


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What all commands share.

    `queue` is the signer; `counter` counts the commands of one queue at one relay and only goes
    up, 1 to 2^63 - 1, never compared with a clock; `instance` is 16 random bytes of this copy of
    the machine.
    """

    queue: bytes
    relay: bytes
    counter: int
    instance: bytes


class Register(Command, frozen=True, kw_only=True):
    """Makes the queue or replaces its whole list of senders (SPEC section 4.4).

    `takeover` is 0, or the counter of the `queue_state` just seen when this instance takes the
    queue over from another. `senders` are 0 to 256 pair keys in strictly rising order.
    """

    takeover: int
    senders: tuple[bytes, ...]


class Collect(Command, frozen=True, kw_only=True):
    """Asks for what waits, and acks what is stored here or done with (SPEC section 4.6).

    `bytes_max` bounds the answer (one envelope may exceed it), `wait_s` the long poll, at most
    50 s; `senders_digest` is the digest of the list that the owner believes to be registered.
    """

    senders_digest: bytes
    bytes_max: int
    wait_s: int
    acks: tuple[bytes, ...]


class Retire(Command, frozen=True, kw_only=True):
    """Ends the queue for good; what it still holds is dropped (SPEC section 4.7)."""


class Admit(msgspec.Struct, frozen=True):
    """Lets `queue` be made at `relay` (SPEC section 4.5).

    `signer` is an invite's key or a queue key that is replaced or vouches; `lifetime_s` is 0 for
    a lasting queue, else 1 s to 7 days.
    """

    signer: bytes
    relay: bytes
    queue: bytes
    lifetime_s: int


class QueueState(msgspec.Struct, frozen=True):
    """The relay's signed word about a queue; it alone moves an owner's counter (rule 7)."""

    relay: bytes
    queue: bytes
    counter: int
    instance: bytes
    senders_digest: bytes
    flag: Flag


def senders_digest(senders: Iterable[bytes]) -> bytes:
    """SHA-256 of the sorted list of senders, key after key."""
    return hashlib.sha256(b"".join(senders)).digest()


def make_register(key: SigningKey, command: Register) -> bytes:
    """The signed frame of `command`; `command.queue` must be the public half of `key`."""
    _check_counter(command.counter)
    _check_list(command.senders, command.takeover)
    fields = _REGISTER.pack(command.relay, command.counter, command.instance, command.takeover)
    return frame.sign(frame.Kind.REGISTER, key, fields, b"".join(command.senders))


def parse_register(data: bytes) -> Register:
    """The command that `data` is, signature and all keys checked; raises a `Refusal`."""
    parsed = frame.parse(data, frame.Kind.REGISTER)
    relay, counter, instance, takeover = _REGISTER.unpack(parsed.fields)
    _check_counter(counter)
    tail = parsed.tail
    senders = tuple(tail[at : at + limits.KEY_BYTES] for at in range(0, len(tail), 32))
    _check_list(senders, takeover)
    parsed.verify()
    keys.check_signing_public(parsed.signer)
    for sender in senders:
        keys.check_signing_public(sender)
    return Register(
        queue=parsed.signer,
        relay=relay,
        counter=counter,
        instance=instance,
        takeover=takeover,
        senders=senders,
    )


def make_collect(key: SigningKey, command: Collect) -> bytes:
    """The signed frame of `command`; `command.queue` must be the public half of `key`."""
    _check_counter(command.counter)
    _check_wait(command.wait_s)
    fields = _COLLECT.pack(
        command.relay,
        command.counter,
        command.instance,
        command.senders_digest,
        command.bytes_max,
        command.wait_s,
    )
    return frame.sign(frame.Kind.COLLECT, key, fields, b"".join(command.acks))


def parse_collect(data: bytes) -> Collect:
    """The command that `data` is, its signature checked; raises a `Refusal`."""
    parsed = frame.parse(data, frame.Kind.COLLECT)
    relay, counter, instance, digest, bytes_max, wait_s = _COLLECT.unpack(parsed.fields)
    _check_counter(counter)
    _check_wait(wait_s)
    parsed.verify()
    tail = parsed.tail
    acks = tuple(tail[at : at + limits.DIGEST_BYTES] for at in range(0, len(tail), 32))
    return Collect(
        queue=parsed.signer,
        relay=relay,
        counter=counter,
        instance=instance,
        senders_digest=digest,
        bytes_max=bytes_max,
        wait_s=wait_s,
        acks=acks,
    )


def make_retire(key: SigningKey, command: Retire) -> bytes:
    """The signed frame of `command`; `command.queue` must be the public half of `key`."""
    _check_counter(command.counter)
    fields = _RETIRE.pack(command.relay, command.counter, command.instance)
    return frame.sign(frame.Kind.RETIRE, key, fields)


def parse_retire(data: bytes) -> Retire:
    """The command that `data` is, its signature checked; raises a `Refusal`."""
    parsed = frame.parse(data, frame.Kind.RETIRE)
    relay, counter, instance = _RETIRE.unpack(parsed.fields)
    _check_counter(counter)
    parsed.verify()
    return Retire(queue=parsed.signer, relay=relay, counter=counter, instance=instance)


def make_admit(key: SigningKey, relay: bytes, queue: bytes, lifetime_s: int = 0) -> bytes:
    """A signed `admit` by an invite's key or a queue key; raises `ValueError` for the lifetime."""
    if not 0 <= lifetime_s <= limits.QUEUE_LIFETIME_S_MAX:
        raise ValueError("lifetime_s is 0 to 604800")
    return frame.sign(frame.Kind.ADMIT, key, _ADMIT.pack(relay, queue, lifetime_s))


def parse_admit(data: bytes) -> Admit:
    """The admission that `data` is, its signature checked; raises a `Refusal`."""
    parsed = frame.parse(data, frame.Kind.ADMIT)
    relay, queue, lifetime_s = _ADMIT.unpack(parsed.fields)
    if lifetime_s > limits.QUEUE_LIFETIME_S_MAX:
        raise Malformed("The lifetime of a queue is at most 7 days, or 0 for a lasting one.")
    parsed.verify()
    return Admit(parsed.signer, relay, queue, lifetime_s)


def make_queue_state(relay_key: SigningKey, state: QueueState) -> bytes:
    """The signed frame of `state`; `state.relay` must be the public half of `relay_key`."""
    fields = _QUEUE_STATE.pack(
        state.queue, state.counter, state.instance, state.senders_digest, state.flag
    )
    return frame.sign(frame.Kind.QUEUE_STATE, relay_key, fields)


def parse_queue_state(data: bytes) -> QueueState:
    """The statement that `data` is, its signature checked; raises a `Refusal`."""
    parsed = frame.parse(data, frame.Kind.QUEUE_STATE)
    queue, counter, instance, digest, flag = _QUEUE_STATE.unpack(parsed.fields)
    _check_counter(counter)
    if flag not in Flag.__members__.values():
        raise Malformed("The flag of a queue_state is not known.")
    parsed.verify()
    return QueueState(parsed.signer, queue, counter, instance, digest, Flag(flag))


def _check_counter(counter: int) -> None:
    if not 1 <= counter <= limits.COUNTER_MAX:
        raise Malformed("A counter is 1 to 2^63 - 1.")


def _check_list(senders: Sequence[bytes], takeover: int) -> None:
    if any(left >= right for left, right in itertools.pairwise(senders)):
        raise Malformed("The list of senders is not sorted, or names one twice.")
    if not 0 <= takeover <= limits.COUNTER_MAX:
        raise Malformed("A takeover is 0 to 2^63 - 1.")


def _check_wait(wait_s: int) -> None:
    if not 0 <= wait_s <= limits.COLLECT_WAIT_S_MAX:
        raise Malformed("A collect waits at most 50 seconds.")
