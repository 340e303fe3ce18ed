import inspect

import pytest

from agentmbx_protocol import frame, limits, padding

NUMBERS = {name: value for name, value in vars(limits).items() if name.isupper()}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_limit_is_a_positive_whole_number(name: str) -> None:
    assert isinstance(NUMBERS[name], int)
    assert NUMBERS[name] > 0


def run(source: str) -> None:
    exec(compile(source, "limits", "exec"), {})


@pytest.mark.parametrize(
    "line",
    [
        "COMMAND_BYTES_MAX: Final = 1024",
        "COLLECT_ACKS_MAX: Final = 2048",
        "SENDERS_MAX: Final = 2048",
        "PADDED_BYTES_MAX: Final = 524_288",
        "DEPOSIT_BYTES_MAX: Final = 524_288",
        "LETTER_BYTES_MAX: Final = 262_144",
        "ROTATION_CHAIN_MAX: Final = 64",
        "TTL_S_MAX: Final = 72 * 3600",
        "STATE_RANGES_MAX: Final = 8192",
    ],
)
def test_limits_that_contradict_each_other_are_refused_at_import(line: str) -> None:
    source, name = inspect.getsource(limits), line.partition(":")[0]
    old = next(each for each in source.splitlines() if each.startswith(f"{name}:"))
    with pytest.raises(AssertionError, match="contradict"):
        run(source.replace(old, line))


def test_the_limits_as_they_are_do_not_contradict_each_other() -> None:
    run(inspect.getsource(limits))


def test_the_largest_padded_plaintext_is_a_padded_length() -> None:
    assert padding.padded_length(limits.PADDED_BYTES_MAX) == limits.PADDED_BYTES_MAX


@pytest.mark.parametrize("kind", frame.Kind)
def test_no_kind_allows_a_frame_above_the_largest(kind: frame.Kind) -> None:
    layout = frame.LAYOUTS[kind]
    longest = limits.FRAME_OVERHEAD_BYTES + layout.fields + layout.tail_max
    assert longest <= limits.FRAME_BYTES_MAX
    assert layout.tail_min <= layout.tail_max
    assert layout.tail_min % layout.tail_step == 0
    assert layout.tail_max % layout.tail_step == 0


def test_the_longest_card_and_rotation_are_as_long_as_their_layouts_say() -> None:
    for kind, longest in (
        (frame.Kind.CARD, limits.CARD_BYTES_MAX),
        (frame.Kind.ROTATION, limits.ROTATION_BYTES_MAX),
    ):
        layout = frame.LAYOUTS[kind]
        assert limits.FRAME_OVERHEAD_BYTES + layout.fields + layout.tail_max == longest
