import hashlib
from collections.abc import Callable

import pytest

from agentmbx_protocol import queue_commands as commands
from agentmbx_protocol.errors import BadSignature, Malformed, Refusal
from agentmbx_protocol.queue_commands import (
    Admit,
    Collect,
    Command,
    Flag,
    QueueState,
    Register,
    Retire,
)
from vector_parts import crooked_keys, typical
from vector_parts.frame_cases import BAD_SIGNING_KEYS, COUNTER_END
from vector_parts.raw_forms import RawFrame, filler

KEY, RELAY = typical.QUEUE, typical.RELAY
SENDERS = tuple(sorted(crooked_keys.point(scalar) for scalar in range(1, 257)))
COMMON = {"queue": KEY.public, "relay": RELAY.public, "instance": typical.INSTANCE}
PARSERS = (
    (commands.parse_register, typical.register),
    (commands.parse_collect, typical.collect),
    (commands.parse_retire, typical.retire),
    (commands.parse_queue_state, typical.queue_state),
)


def collect(**changes: object) -> Collect:
    values = {"counter": 7, "senders_digest": bytes(32), "bytes_max": 0, "wait_s": 0, "acks": ()}
    return Collect(**(COMMON | values | changes))


@pytest.mark.parametrize("count", [0, 1, 2, 256])
def test_a_register_is_read_as_it_was_made(count: int) -> None:
    command = Register(**COMMON, counter=1, takeover=0, senders=SENDERS[:count])
    assert commands.parse_register(commands.make_register(KEY, command)) == command


def test_a_register_with_257_senders_is_malformed() -> None:
    many = [*SENDERS, b"\xff" * 32]
    with pytest.raises(Malformed):
        commands.parse_register(typical.register(senders=many).data)


@pytest.mark.parametrize(
    "order",
    [(1, 0), (0, 0), (0, 2, 1), (0, 1, 1), (1, 2, 0)],
)
def test_senders_out_of_order_or_named_twice_are_malformed(order: tuple[int, ...]) -> None:
    senders = [SENDERS[at] for at in order]
    with pytest.raises(Malformed):
        commands.parse_register(typical.register(senders=senders).data)


@pytest.mark.parametrize("name", BAD_SIGNING_KEYS)
def test_a_sender_that_is_no_valid_key_is_malformed(name: str) -> None:
    senders = sorted((SENDERS[0], BAD_SIGNING_KEYS[name]))
    with pytest.raises(Malformed):
        commands.parse_register(typical.register(senders=senders).data)


def test_the_signature_of_a_register_is_checked_before_its_keys() -> None:
    raw = typical.register(senders=[crooked_keys.NOT_ON_CURVE])
    with pytest.raises(BadSignature):
        commands.parse_register(raw._replace(word="collect").data)


@pytest.mark.parametrize("takeover", [0, 1, COUNTER_END - 1])
def test_a_takeover_below_two_to_the_63_is_read(takeover: int) -> None:
    assert commands.parse_register(typical.register(takeover=takeover).data).takeover == takeover


@pytest.mark.parametrize("takeover", [COUNTER_END, 2**64 - 1])
def test_a_takeover_of_two_to_the_63_or_more_is_malformed(takeover: int) -> None:
    with pytest.raises(Malformed):
        commands.parse_register(typical.register(takeover=takeover).data)


@pytest.mark.parametrize(("parse", "make"), PARSERS)
@pytest.mark.parametrize("counter", [1, COUNTER_END - 1])
def test_rule_7_counters_of_1_to_two_to_the_63_less_1_are_read(
    parse: Callable[[bytes], Command], make: Callable[[int], RawFrame], counter: int
) -> None:
    assert parse(make(counter).data).counter == counter


@pytest.mark.parametrize(("parse", "make"), PARSERS)
@pytest.mark.parametrize("counter", [0, COUNTER_END, 2**64 - 1])
def test_rule_7_no_frame_moves_a_counter_to_0_or_to_two_to_the_63(
    parse: Callable[[bytes], Command], make: Callable[[int], RawFrame], counter: int
) -> None:
    with pytest.raises(Malformed):
        parse(make(counter).data)


@pytest.mark.parametrize("counter", [-1, 0, COUNTER_END])
def test_a_command_with_a_counter_out_of_range_is_never_made(counter: int) -> None:
    register = Register(**COMMON, counter=counter, takeover=0, senders=())
    with pytest.raises(Malformed):
        commands.make_register(KEY, register)
    with pytest.raises(Malformed):
        commands.make_collect(KEY, collect(counter=counter))
    with pytest.raises(Malformed):
        commands.make_retire(KEY, Retire(**COMMON, counter=counter))


@pytest.mark.parametrize("count", [0, 1, 1024])
def test_a_collect_is_read_as_it_was_made(count: int) -> None:
    acks = tuple(filler(f"ack {at}", 32) for at in range(count))
    command = collect(bytes_max=2**32 - 1, wait_s=50, acks=acks)
    assert commands.parse_collect(commands.make_collect(KEY, command)) == command


def test_a_collect_with_1025_acks_is_malformed() -> None:
    with pytest.raises(Malformed):
        commands.parse_collect(typical.collect(acks=[bytes(32)] * 1025).data)


@pytest.mark.parametrize("wait_s", [51, 2**16 - 1])
def test_a_collect_that_waits_more_than_50_seconds_is_malformed(wait_s: int) -> None:
    with pytest.raises(Malformed):
        commands.parse_collect(typical.collect(wait_s=wait_s).data)


def test_a_retire_is_read_as_it_was_made() -> None:
    command = Retire(**COMMON, counter=COUNTER_END - 1)
    assert commands.parse_retire(commands.make_retire(KEY, command)) == command


@pytest.mark.parametrize("lifetime_s", [0, 1, 604_800])
def test_an_admit_is_read_as_it_was_made(lifetime_s: int) -> None:
    data = commands.make_admit(typical.OTHER, RELAY.public, KEY.public, lifetime_s)
    expected = Admit(typical.OTHER.public, RELAY.public, KEY.public, lifetime_s)
    assert commands.parse_admit(data) == expected


def test_an_admit_for_a_lifetime_beyond_7_days_is_malformed_and_never_made() -> None:
    for lifetime_s in (604_801, 2**32 - 1):
        with pytest.raises(Malformed):
            commands.parse_admit(typical.admit(lifetime_s).data)
        with pytest.raises(ValueError, match="lifetime_s"):
            commands.make_admit(typical.OTHER, RELAY.public, KEY.public, lifetime_s)


@pytest.mark.parametrize("flag", Flag)
def test_a_queue_state_is_read_as_it_was_made(flag: Flag) -> None:
    state = QueueState(RELAY.public, KEY.public, 9, typical.INSTANCE, filler("list", 32), flag)
    assert commands.parse_queue_state(commands.make_queue_state(RELAY, state)) == state


@pytest.mark.parametrize("flag", range(4, 256))
def test_an_unknown_flag_is_malformed(flag: int) -> None:
    with pytest.raises(Malformed):
        commands.parse_queue_state(typical.queue_state(flag=flag).data)


@pytest.mark.parametrize(
    ("parse", "raw"),
    [
        (commands.parse_register, typical.register()),
        (commands.parse_collect, typical.collect()),
        (commands.parse_retire, typical.retire()),
        (commands.parse_admit, typical.admit()),
        (commands.parse_queue_state, typical.queue_state()),
    ],
)
def test_no_command_stands_in_for_another_and_none_without_its_signature(
    parse: Callable[[bytes], object], raw: RawFrame
) -> None:
    for other in typical.FRAMES.values():
        if other.kind != raw.kind:
            with pytest.raises(Malformed):
                parse(other.data)
    with pytest.raises(BadSignature):
        parse(raw._replace(word="envelope").data)


def test_a_retire_signed_by_the_relay_does_not_end_another_queue() -> None:
    command = commands.parse_retire(typical.retire()._replace(signer=RELAY).data)
    assert command.queue == RELAY.public


def test_the_digest_of_a_list_is_the_hash_of_its_keys_one_after_another() -> None:
    data = typical.register(senders=SENDERS[:3]).data
    assert commands.senders_digest(commands.parse_register(data).senders) == (
        hashlib.sha256(data[108:204]).digest()
    )
    assert commands.senders_digest(()) == hashlib.sha256(b"").digest()


def test_every_refusal_of_a_command_has_a_code() -> None:
    with pytest.raises(Refusal) as refused:
        commands.parse_retire(b"MBX9" + bytes(200))
    assert refused.value.code == "unsupported_version"
