"""Who may make a queue on a closed relay (SPEC section 10)."""

from agentmbx_protocol.errors import NotAdmitted, RelayFull, Stale
from agentmbx_protocol.queue_commands import Admit, Flag, QueueState, Register
from agentmbx_relay.store import Invite, Queue, Transaction

SUCCESSORS_MAX = 1
TEMPORARY_MAX = 4
FREE_LIFETIME_S = 900
COARSE_MS = 60_000


def admit(
    transaction: Transaction,
    command: Register,
    proof: Admit | QueueState | None,
    *,
    now_ms: int,
    is_open: bool,
    queues_max: int,
) -> Queue:
    """The new queue of `command`, if `proof` or an open relay admits it.

    `proof` is well signed, and by this relay's key if it is a `queue_state`. Raises `NotAdmitted`,
    `RelayFull` beyond `queues_max`, or `Stale` when the command's counter is not above the one
    that the `queue_state` names.
    """
    if transaction.queue_count >= queues_max:
        raise RelayFull("The relay has as many queues as it takes.")
    match proof:
        case Admit(queue=command.queue, relay=command.relay):
            lifetime_ms = proof.lifetime_s * 1000
            ends_ms = now_ms + lifetime_ms if lifetime_ms else 0
            if not is_open:
                _spend(transaction, proof, ends_ms, now_ms)
        case QueueState(queue=command.queue, relay=command.relay, flag=Flag.OK):
            if command.counter <= proof.counter:
                raise Stale
            ends_ms = 0
        case _ if is_open:
            ends_ms = 0
        case _:
            raise NotAdmitted
    return transaction.add_queue(command.queue, ends_ms)


def _spend(transaction: Transaction, proof: Admit, ends_ms: int, now_ms: int) -> None:
    invite = transaction.invite(proof.signer)
    if invite is not None:
        if invite.ends_ms <= now_ms:
            raise NotAdmitted
        if not 0 < proof.lifetime_s <= FREE_LIFETIME_S:
            transaction.put_invite(Invite(invite.key, invite.uses_left - 1, invite.ends_ms))
            return
    else:
        voucher = transaction.queue(proof.signer)
        # A queue with a lifetime vouches for none, so that it cannot outlive itself.
        if voucher is None or voucher.retired or voucher.ends_ms:
            raise NotAdmitted
    vouched = [ends for ends in transaction.vouched(proof.signer) if not ends or ends > now_ms]
    of_its_kind = [ends for ends in vouched if bool(ends) == bool(ends_ms)]
    if len(of_its_kind) >= (TEMPORARY_MAX if ends_ms else SUCCESSORS_MAX):
        raise NotAdmitted
    # Kept coarser than the end of the queue itself, so that the two rows share no value.
    transaction.vouch(proof.signer, ends_ms and ends_ms + COARSE_MS - ends_ms % COARSE_MS)
