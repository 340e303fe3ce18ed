import base64
import json
import struct

import pytest

from agentmbx_protocol import bodies
from agentmbx_protocol.bodies import Refused
from agentmbx_protocol.errors import REFUSALS, REFUSALS_BY_NUMBER, Malformed, QueueFull, TooLarge
from vector_parts import typical

FRAMES = [typical.retire().data, b"any bytes", b"\0"]
STATEMENT = typical.held().data


@pytest.mark.parametrize("count", range(4))
def test_frames_joined_are_split_again(count: int) -> None:
    assert bodies.split_frames(bodies.join_frames(FRAMES[:count]), 3) == FRAMES[:count]


def test_as_many_frames_as_the_call_takes_are_split_and_one_more_is_too_large() -> None:
    body = bodies.join_frames([b"f"] * 64)
    assert len(bodies.split_frames(body, 64)) == 64
    with pytest.raises(TooLarge):
        bodies.split_frames(body, 63)


def test_a_body_of_lengths_that_do_not_fit_is_malformed_whatever_the_count() -> None:
    body = bodies.join_frames(FRAMES)
    for wrong in (
        body[:-1],
        body + b"\0",
        body + bytes(4),
        bytes(4),
        b"\0",
        body[:4],
        b"\xff" * 4 + body,
    ):
        for count_max in (3, 64):
            with pytest.raises(Malformed):
                bodies.split_frames(wrong, count_max)


def test_every_cut_of_a_body_between_two_frames_is_malformed() -> None:
    body = bodies.join_frames(FRAMES)
    ends = {len(bodies.join_frames(FRAMES[:count])) for count in range(4)}
    for length in set(range(len(body))) - ends:
        with pytest.raises(Malformed):
            bodies.split_frames(body[:length], 64)


def refusals(*positions: int) -> list[Refused]:
    return [Refused(position, QueueFull(retry_after_s=30)) for position in positions]


def test_an_answer_to_a_deposit_is_read_as_it_was_made() -> None:
    answer = bodies.make_deposit_answer(STATEMENT, refusals(0, 5, 63))
    statement, refused = bodies.parse_deposit_answer(answer, 64)
    assert statement == STATEMENT
    assert [each.position for each in refused] == [0, 5, 63]
    assert all(type(each.refusal) is QueueFull for each in refused)
    assert {each.refusal.retry_after_s for each in refused} == {30}


@pytest.mark.parametrize("number", REFUSALS_BY_NUMBER)
def test_every_code_travels_in_an_answer_with_and_without_a_time(number: int) -> None:
    for wait_s in (None, 1, 2**32 - 1):
        sent = Refused(0, REFUSALS_BY_NUMBER[number](retry_after_s=wait_s))
        answer = bodies.make_deposit_answer(STATEMENT, [sent])
        _, [read] = bodies.parse_deposit_answer(answer, 1)
        assert type(read.refusal) is REFUSALS_BY_NUMBER[number]
        assert read.refusal.retry_after_s == wait_s


def test_a_time_of_0_in_an_answer_says_nothing() -> None:
    answer = bodies.make_deposit_answer(STATEMENT, [Refused(0, QueueFull(retry_after_s=0))])
    assert bodies.parse_deposit_answer(answer, 1)[1][0].refusal.retry_after_s is None


def test_an_answer_is_laid_out_as_the_page_says() -> None:
    answer = bodies.make_deposit_answer(b"statement", refusals(2))
    assert answer == struct.pack(">I", 9) + b"statement" + struct.pack(">HBI", 2, 7, 30)


def _wrong_answers() -> dict[str, bytes]:
    good = bodies.make_deposit_answer(STATEMENT, refusals(1, 2))
    return {
        "no bytes": b"",
        "half a length": good[:2],
        "a length too long": struct.pack(">I", len(STATEMENT) + 15) + good[4:],
        "a length of all bits": b"\xff" * 4 + good[4:],
        "a position cut": good[:-1],
        "a byte behind": good + b"\0",
        "positions falling": bodies.make_deposit_answer(STATEMENT, refusals(2, 1)),
        "a position twice": bodies.make_deposit_answer(STATEMENT, refusals(1, 1)),
        "a position that was not sent": bodies.make_deposit_answer(STATEMENT, refusals(3)),
        "code 0": good[:-5] + b"\0" + good[-4:],
        "code 15": good[:-5] + b"\x0f" + good[-4:],
        "code 255": good[:-5] + b"\xff" + good[-4:],
        "a statement cut": good[: len(STATEMENT)],
    }


@pytest.mark.parametrize("name", _wrong_answers())
def test_a_wrong_answer_to_a_deposit_is_malformed(name: str) -> None:
    with pytest.raises(Malformed):
        bodies.parse_deposit_answer(_wrong_answers()[name], 3)


@pytest.mark.parametrize("code", REFUSALS)
def test_a_problem_says_its_code_and_its_class_is_read_back(code: str) -> None:
    refusal = REFUSALS[code]("A detail.", retry_after_s=7)
    document = json.loads(bodies.problem(refusal))
    assert document == {
        "type": f"urn:agentmbx:problem:{code}",
        "title": refusal.title,
        "status": refusal.status,
        "detail": "A detail.",
        "code": code,
        "retryable": refusal.retryable,
    }
    read = bodies.parse_problem(bodies.problem(refusal), retry_after_s=9)
    assert read is not None
    assert (type(read[0]), read[0].retry_after_s, read[1]) == (REFUSALS[code], 9, None)


def test_a_problem_carries_the_queue_state_that_proves_it() -> None:
    state = typical.queue_state(flag=1).data
    body = bodies.problem(REFUSALS["stale"](), state)
    assert json.loads(body)["queue_state"] == base64.b64encode(state).decode()
    read = bodies.parse_problem(body)
    assert read is not None
    assert read[1] == state


def test_what_a_foreign_address_writes_is_never_taken_over() -> None:
    body = json.dumps({"code": "queue_full", "title": "<script>", "detail": "secret"}).encode()
    read = bodies.parse_problem(body)
    assert read is not None
    assert read[0].detail == QueueFull.title


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>502 Bad Gateway</html>",
        b"null",
        b"[]",
        b'"stale"',
        b"{}",
        b'{"code": null}',
        b'{"code": 10}',
        b'{"code": ["stale"]}',
        b'{"code": {"a": 1}}',
        b'{"code": "Stale"}',
        b'{"code": "\\ud83d"}',
        b'{"code": "stale\\u0000"}',
        b'{"code": "unknown"}',
        b'{"code": "stale"',
        b'{"code": "stale"} ,',
        b'{"code": 1e400}',
        b'{"code": ' + b"9" * 5000 + b"}",
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b"\xff\xfe\x00",
        b"\xed\xa0\xbd",
        b"\xc0\x80",
        b'{"code": "stale"}' + b" " * 65_536,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_body_that_names_no_code_is_no_problem_of_ours(body: bytes) -> None:
    assert bodies.parse_problem(body) is None


@pytest.mark.parametrize(
    "state",
    [
        "1",
        "null",
        "[]",
        '"*"',
        '"A"',
        '"\\ud83d"',
        '"\\u0000"',
        '"QUJD\\n"',
        '"\\u00fc"',
    ],
)
def test_a_queue_state_that_is_no_base64_is_left_out(state: str) -> None:
    read = bodies.parse_problem(f'{{"code": "stale", "queue_state": {state}}}'.encode())
    assert read is not None
    assert read[1] is None
