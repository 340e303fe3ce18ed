"""What HTTP bodies hold: frames behind their lengths, a deposit's answer, problem details."""

import base64
import binascii
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from agentmbx_protocol import limits
from agentmbx_protocol.errors import REFUSALS, REFUSALS_BY_NUMBER, Malformed, Refusal, TooLarge

FRAMES_MEDIA_TYPE: Final = "application/vnd.agentmbx.frames"
PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
_LENGTH: Final = struct.Struct(">I")
_REFUSED: Final = struct.Struct(">HBI")
_PROBLEM_TYPE: Final = "urn:agentmbx:problem:"


class Refused(msgspec.Struct, frozen=True):
    """One envelope of a deposit that was not taken: its position from 0, and why."""

    position: int
    refusal: Refusal


def join_frames(frames: Iterable[bytes]) -> bytes:
    """A body: each frame behind its length (SPEC section 8.1)."""
    return b"".join(part for data in frames for part in (_LENGTH.pack(len(data)), data))


def split_frames(body: bytes, count_max: int) -> list[bytes]:
    """The frames of a body, 0 to `count_max`; raises `Malformed` or `TooLarge`."""
    frames: list[bytes] = []
    at = 0
    while at < len(body):
        end, length = at + _LENGTH.size, 0
        if end <= len(body):
            (length,) = _LENGTH.unpack_from(body, at)
        at = end + length
        if not length or at > len(body):
            raise Malformed("The lengths of the frames do not fit the request.")
        if len(frames) == count_max:
            raise TooLarge("There are more frames in the request than belong there.")
        frames.append(body[end:at])
    return frames


def make_deposit_answer(statement: bytes, refused: Iterable[Refused]) -> bytes:
    """The answer to a deposit: a `held` or `stored` frame, then who was refused and why."""
    return _LENGTH.pack(len(statement)) + statement + b"".join(_pack_refused(refused))


def parse_deposit_answer(body: bytes, sent_count: int) -> tuple[bytes, list[Refused]]:
    """The statement and the refused positions of an answer; raises `Malformed`.

    The statement is not checked; what it says of custody is for `custody.believe_held`.
    """
    try:
        end = _LENGTH.unpack_from(body)[0] + _LENGTH.size
        refused = list(_iter_refused(body[end:]))
    except struct.error as error:
        raise Malformed("The answer to a deposit is not well formed.") from error
    positions = [each.position for each in refused]
    rising = all(left < right for left, right in itertools.pairwise(positions))
    if end > len(body) or not rising or any(position >= sent_count for position in positions):
        raise Malformed("The answer to a deposit is not well formed.")
    return body[_LENGTH.size : end], refused


def _pack_refused(refused: Iterable[Refused]) -> Iterator[bytes]:
    for each in refused:
        wait_s = each.refusal.retry_after_s or 0
        yield _REFUSED.pack(each.position, each.refusal.number, wait_s)


def _iter_refused(data: bytes) -> Iterator[Refused]:
    for position, number, wait_s in _REFUSED.iter_unpack(data):
        refusal = REFUSALS_BY_NUMBER.get(number)
        if refusal is None:
            raise Malformed("The answer to a deposit holds an unknown code.")
        yield Refused(position, refusal(retry_after_s=wait_s or None))


def problem(
    refusal: Refusal, queue_state: bytes | None = None, *, status: int | None = None
) -> bytes:
    """The problem details of a refusal (RFC 9457) as JSON bytes.

    `stale`, `superseded` and `retired` carry the signed `queue_state` that proves them. `status` is
    that of the answer, where it is not the refusal's own.
    """
    document: dict[str, object] = {
        "type": _PROBLEM_TYPE + refusal.code,
        "title": refusal.title,
        "status": status or refusal.status,
        "detail": refusal.detail,
        "code": refusal.code,
        "retryable": refusal.retryable,
    }
    if queue_state is not None:
        document["queue_state"] = base64.b64encode(queue_state).decode("ascii")
    return json.dumps(document).encode()


def parse_problem(
    body: bytes, retry_after_s: int | None = None
) -> tuple[Refusal, bytes | None] | None:
    """The refusal that a problem body names, and its queue_state; None when it names none.

    Only the code is taken from the body: what a foreign address writes is never shown.
    """
    if len(body) > limits.COMMAND_BYTES_MAX:
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, Mapping):
        return None
    code, state = document.get("code"), document.get("queue_state")
    refusal = REFUSALS.get(code) if isinstance(code, str) else None
    if refusal is None:
        return None
    try:
        proof = base64.b64decode(state, validate=True) if isinstance(state, str) else None
    except (ValueError, binascii.Error):
        proof = None
    return refusal(retry_after_s=retry_after_s), proof
