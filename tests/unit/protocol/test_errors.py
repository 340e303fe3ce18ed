import pytest

from agentmbx_protocol import errors
from agentmbx_protocol.custody import NotBelieved
from agentmbx_protocol.errors import (
    REFUSALS,
    REFUSALS_BY_NUMBER,
    CannotOpen,
    ProtocolError,
    Refusal,
)


@pytest.mark.parametrize("code", REFUSALS)
def test_every_code_is_a_class_with_a_number_a_status_and_a_title(code: str) -> None:
    cls = REFUSALS[code]
    assert cls.code == code
    assert REFUSALS_BY_NUMBER[cls.number] is cls
    assert 400 <= cls.status <= 599
    assert cls.title.endswith(".")
    assert isinstance(cls.retryable, bool)


def test_no_refusal_stands_outside_the_table() -> None:
    here = {cls for cls in Refusal.__subclasses__() if cls.__module__ == errors.__name__}
    assert here == set(REFUSALS.values())


def test_no_two_codes_share_a_number() -> None:
    assert sorted(REFUSALS_BY_NUMBER) == list(range(1, len(REFUSALS) + 1))


def test_a_refusal_without_a_detail_says_its_title() -> None:
    refusal = errors.QueueFull()
    assert refusal.detail == str(refusal) == errors.QueueFull.title
    assert refusal.retry_after_s is None


def test_a_refusal_says_its_detail_and_how_long_to_wait() -> None:
    refusal = errors.RateLimited("Slower, please.", retry_after_s=7)
    assert (refusal.detail, str(refusal), refusal.retry_after_s) == (
        "Slower, please.",
        "Slower, please.",
        7,
    )


def test_every_failure_to_open_has_one_text() -> None:
    assert str(CannotOpen()) == str(CannotOpen())
    with pytest.raises(TypeError):
        CannotOpen("a reason")  # type: ignore[call-arg]


@pytest.mark.parametrize("cls", [Refusal, CannotOpen, NotBelieved])
def test_all_that_the_package_raises_for_bytes_has_one_root(cls: type[Exception]) -> None:
    assert issubclass(cls, ProtocolError)


def test_a_seal_that_does_not_open_is_no_answer_to_anybody() -> None:
    assert not issubclass(CannotOpen, Refusal)
