"""The rules of the relay: take, hold, hand over, end. Pure work on a transaction.

Every function here decides before it writes, so that a refusal leaves nothing behind. Times are
milliseconds of the relay's own clock.
"""

from collections.abc import Sequence

import msgspec

from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.errors import NoSuchQueue, Refusal, Retired, Stale, Superseded
from agentmbx_protocol.queue_commands import Admit, Collect, Command, QueueState, Register, Retire
from agentmbx_relay import admission
from agentmbx_relay.quota import Quota
from agentmbx_relay.store import Deposit, Queue, Transaction


class Holding(msgspec.Struct, frozen=True):
    """What became of the envelopes of one deposit, in their order, and how many are new."""

    queue_id: int
    outcomes: Sequence[HeldFact | Refusal]
    new_count: int


class QueueFacts(msgspec.Struct, frozen=True):
    """What a `queue_state` says, as it was in the commit that made it durable."""

    queue_id: int
    key: bytes
    counter: int
    instance: bytes
    senders_digest: bytes


class CommandRefused(Refusal):
    """A refusal of a command that comes with the queue's state; `refusal` is what is answered."""

    def __init__(self, refusal: Refusal, queue: Queue) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal
        self.queue = queue


def hold(
    transaction: Transaction,
    queue_key: bytes,
    signer: bytes,
    deposits: Sequence[Deposit],
    *,
    quota: Quota,
    now_ms: int,
) -> Holding:
    """The facts of each deposit, or why it was not taken (rules 2, 3 and 8).

    Whether the queue takes mail from the signer is looked at again here, since its owner may have
    changed the list while the signature was checked.
    """
    queue = transaction.queue(queue_key)
    sender = queue.senders.get(signer) if queue else None
    if queue is None or queue.retired or sender is None or not sender.listed:
        raise NoSuchQueue
    outcomes: list[HeldFact | Refusal] = []
    new_count = 0
    for deposit in deposits:
        try:
            quota.check(transaction, queue, sender, deposit.length)
        except Refusal as refusal:
            known = transaction.find(deposit.digest)
            outcomes.append(known if known and known.until_ms > now_ms else refusal)
        else:
            fact, is_new = transaction.hold(queue, sender, deposit, now_ms)
            outcomes.append(fact)
            new_count += is_new
    return Holding(queue.id, outcomes, new_count)


def register(
    transaction: Transaction,
    command: Register,
    proof: Admit | QueueState | None,
    *,
    now_ms: int,
    is_open: bool,
    queues_max: int,
) -> QueueFacts:
    """Make the queue if it is admitted, and replace its list of senders.

    Raises `CommandRefused` (stale, superseded, retired) or what `admission.admit` raises.
    """
    queue = transaction.queue(command.queue)
    if queue is None:
        queue = admission.admit(
            transaction, command, proof, now_ms=now_ms, is_open=is_open, queues_max=queues_max
        )
    else:
        taken_over = command.takeover and command.takeover >= queue.counter
        if command.instance != queue.instance and not queue.retired and not taken_over:
            raise CommandRefused(Superseded(), queue)
        _check_counter(queue, command)
    transaction.command(queue, command.counter, command.instance)
    transaction.list_senders(queue, command.senders)
    return _facts(queue)


def collect(transaction: Transaction, command: Collect) -> tuple[Queue, int]:
    """Check the command, then count its acks; the queue and how many acks there were.

    Raises `NoSuchQueue`, or `CommandRefused` before any ack counts.
    """
    queue = _commanded(transaction, command)
    transaction.command(queue, command.counter, command.instance, lazily=True)
    return queue, transaction.ack(queue, command.acks) if command.acks else 0


def retire(transaction: Transaction, command: Retire, now_ms: int) -> QueueFacts:
    """End the queue for good; one that is retired already stays as it is.

    Raises `NoSuchQueue`, or `CommandRefused` (stale, superseded).
    """
    known = transaction.queue(command.queue)
    if known is not None and known.retired:
        return settle(transaction, known)
    queue = _commanded(transaction, command)
    transaction.command(queue, command.counter, command.instance)
    transaction.retire(queue, now_ms)
    return _facts(queue)


def settle(transaction: Transaction, queue: Queue) -> QueueFacts:
    """Make the queue's counter durable, also if it was moved lazily, so that it may be signed.

    `queue` may be from an earlier transaction; what is written is as the store has it now.
    """
    known = transaction.queue(queue.key)
    if known is None:
        raise NoSuchQueue
    transaction.command(known, known.counter, known.instance)
    return _facts(known)


def _facts(queue: Queue) -> QueueFacts:
    return QueueFacts(queue.id, queue.key, queue.counter, queue.instance, queue.senders_digest)


def _commanded(transaction: Transaction, command: Command) -> Queue:
    queue = transaction.queue(command.queue)
    if queue is None:
        raise NoSuchQueue
    if command.instance != queue.instance and not queue.retired:
        raise CommandRefused(Superseded(), queue)
    _check_counter(queue, command)
    return queue


def _check_counter(queue: Queue, command: Command) -> None:
    if queue.retired:
        raise CommandRefused(Retired(), queue)
    if command.counter <= queue.counter:
        raise CommandRefused(Stale(), queue)
