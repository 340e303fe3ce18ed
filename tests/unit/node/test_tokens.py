"""The line to paste, and what the initiator's screen is told."""

import pytest

from agentmbx_node import tokens
from agentmbx_node.errors import Failure
from agentmbx_node.tokens import EventKind, Tokens, line, parse_line

TOKEN = bytes(range(16))
TEXT = "aaaqeayeaudaocajbifqydiob4"
ADDRESS = "192.0.2.7:7420"


def test_the_line_is_one_word_and_is_read_as_it_was_made() -> None:
    addresses = [ADDRESS, "[2001:db8::7]:7420"]
    text = line(addresses, TOKEN)
    assert text == f"192.0.2.7:7420,[2001:db8::7]:7420#{TEXT}"
    assert parse_line(text) == (addresses, TOKEN)


@pytest.mark.parametrize(
    "text",
    [
        f"agentmbx join {ADDRESS}#{TEXT}",
        f"  agentmbx  join  {ADDRESS}#{TEXT}\n",
        f"{ADDRESS}#{TEXT.upper()}",
        f"{ADDRESS},{ADDRESS}#{TEXT}",
    ],
)
def test_the_command_and_spaces_may_be_pasted_along(text: str) -> None:
    assert parse_line(text) == ([ADDRESS], TOKEN)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "agentmbx join ",
        ADDRESS,
        f"{ADDRESS}#",
        f"#{TEXT}",
        f",{ADDRESS}#{TEXT}",
        f"{ADDRESS}#{TEXT}#{TEXT}",
        f"{ADDRESS}#{TEXT[:-1]}",
        f"{ADDRESS}#{TEXT}a",
        f"{ADDRESS}#{TEXT[:-1]}5",  # unused last bits that are not 0
        f"{ADDRESS}#{TEXT[:-1]}1",
        f"{ADDRESS}#{TEXT[:-1]}ö",
        f"{ADDRESS}#{TEXT[:13]} {TEXT[13:]}",
        f"{ADDRESS} #{TEXT}",
        f"192.0.2.7#{TEXT}",
        f"192.0.2.7:0#{TEXT}",
        f"desk.example:7420#{TEXT}",
        f"[fe80::1%eth0]:7420#{TEXT}",
        ",".join(f"192.0.2.{number}:7420" for number in range(17)) + f"#{TEXT}",
        f"agentmbx pair {ADDRESS}#{TEXT}",
    ],
)
def test_another_line_is_refused_with_what_to_do_and_without_the_token(text: str) -> None:
    with pytest.raises(Failure) as caught:
        parse_line(text)
    assert (caught.value.code, caught.value.exit_code) == ("usage", 2)
    assert "agentmbx join" in caught.value.next_step
    assert TEXT[:13] not in str(caught.value)


def test_events_have_a_bound() -> None:
    kept = Tokens()
    for number in range(100):
        kept.report(EventKind.LATE, b"%d" % number, b"")
    events = kept.take_events()
    assert len(events) == tokens.EVENTS_MAX
    assert events[-1].token_id == b"99"
    assert kept.take_events() == []
