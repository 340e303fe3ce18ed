"""The typed refusals of the protocol: one class for each code, one table for all of them.

A `Refusal` is an answer: a stable `code`, the HTTP status that carries it, whether trying again
can help, and the byte that stands for it in a deposit's answer (SPEC section 8). `CannotOpen` is
no answer: it stays inside the machine that could not open a seal, and has one text, so that
nobody learns which step failed.
"""

from collections.abc import Mapping
from typing import ClassVar, Final


class ProtocolError(Exception):
    """Anything that this package raises for bytes or values that are not as SPEC says."""


class CannotOpen(ProtocolError):
    """The sealed bytes do not open to a letter from this sender for this machine."""

    def __init__(self) -> None:
        super().__init__("the seal does not open")


class Refusal(ProtocolError):
    """A refusal with a stable code.

    `detail` is one sentence for a person; it never holds bytes, names or addresses of the
    request. `retry_after_s` is at least how long to wait, or None when the code decides.
    """

    code: ClassVar[str]
    number: ClassVar[int]
    status: ClassVar[int]
    retryable: ClassVar[bool]
    title: ClassVar[str]

    def __init__(self, detail: str = "", *, retry_after_s: int | None = None) -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.retry_after_s = retry_after_s


class Malformed(Refusal):
    """The bytes are not a frame, body or value of this protocol."""

    code, number, status, retryable = "malformed", 1, 400, False
    title = "The request is not well formed."


class UnsupportedVersion(Refusal):
    """The frame is of a version that this program does not speak."""

    code, number, status, retryable = "unsupported_version", 2, 400, False
    title = "This protocol version is not supported."


class BadSignature(Refusal):
    """The signature does not fit the bytes and the signer."""

    code, number, status, retryable = "bad_signature", 3, 403, False
    title = "The signature is not valid."


class TooLarge(Refusal):
    """More bytes or items than the limits allow."""

    code, number, status, retryable = "too_large", 4, 413, False
    title = "The request is larger than this relay takes."


class NoSuchQueue(Refusal):
    """There is no queue of that key that takes mail from this signer."""

    code, number, status, retryable = "no_such_queue", 5, 404, True
    title = "No queue here takes mail from this sender."


class NotAdmitted(Refusal):
    """The relay makes no queue for this request."""

    code, number, status, retryable = "not_admitted", 6, 403, False
    title = "This relay makes a queue only for a valid invite."


class QueueFull(Refusal):
    """The queue, or the sender's share of it, has no room."""

    code, number, status, retryable = "queue_full", 7, 507, True
    title = "The queue has no room for this sender now."


class RelayFull(Refusal):
    """The relay has no room for anybody."""

    code, number, status, retryable = "relay_full", 8, 507, True
    title = "The relay has no room now."


class RateLimited(Refusal):
    """Too many requests in a short time."""

    code, number, status, retryable = "rate_limited", 9, 429, True
    title = "Too many requests."


class Stale(Refusal):
    """The command's counter is not above the last one; the answer holds a `queue_state`."""

    code, number, status, retryable = "stale", 10, 409, True
    title = "The counter of this command is not above the last one."


class Superseded(Refusal):
    """Another instance commands this queue; the answer holds a `queue_state`."""

    code, number, status, retryable = "superseded", 11, 409, False
    title = "Another copy of this machine commands the queue."


class Retired(Refusal):
    """The queue was retired or its lifetime is over; the answer holds a `queue_state`."""

    code, number, status, retryable = "retired", 12, 410, False
    title = "This queue was retired."


class ShuttingDown(Refusal):
    """The relay is stopping; nothing of the request was done."""

    code, number, status, retryable = "shutting_down", 13, 503, True
    title = "The relay is restarting; come back shortly."


class Unavailable(Refusal):
    """The relay cannot do this now for a reason of its own; nothing of the request was done."""

    code, number, status, retryable = "unavailable", 14, 503, True
    title = "The relay cannot do this now."


REFUSALS: Final[Mapping[str, type[Refusal]]] = {
    cls.code: cls
    for cls in (
        Malformed,
        UnsupportedVersion,
        BadSignature,
        TooLarge,
        NoSuchQueue,
        NotAdmitted,
        QueueFull,
        RelayFull,
        RateLimited,
        Stale,
        Superseded,
        Retired,
        ShuttingDown,
        Unavailable,
    )
}
REFUSALS_BY_NUMBER: Final[Mapping[int, type[Refusal]]] = {
    cls.number: cls for cls in REFUSALS.values()
}
