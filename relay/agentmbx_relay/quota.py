"""How the room of a queue is shared, so that no sender can shut out another (rule 3)."""

import msgspec

from agentmbx_protocol import limits
from agentmbx_protocol.errors import QueueFull, RelayFull
from agentmbx_relay.store import Queue, Sender, Transaction

FULL_RETRY_S = 60


class Quota(msgspec.Struct, frozen=True):
    """The bounds in bytes: of one queue, of the relay, and of the disk that stays free."""

    queue_bytes_max: int
    relay_bytes_max: int
    disk_reserve_bytes: int

    def check(self, transaction: Transaction, queue: Queue, sender: Sender, length: int) -> None:
        """Raise `QueueFull` or `RelayFull` when there is no room for `length` bytes more.

        Half of a queue is common, half is divided among its listed senders. What a sender uses
        beyond its share is taken from the common half. When a list changes, what was taken before
        may exceed the common half: then a sender still has its whole share, so a queue may come
        to hold up to half as much again as its bound, never more.
        """
        charge = max(length, limits.TOMBSTONE_BYTES)
        if (
            transaction.used + charge > self.relay_bytes_max
            or transaction.free_bytes - charge < self.disk_reserve_bytes
        ):
            raise RelayFull(retry_after_s=FULL_RETRY_S)
        if queue.used + charge > self.queue_bytes_max * 3 // 2:
            raise QueueFull(retry_after_s=FULL_RETRY_S)
        common = self.queue_bytes_max // 2
        if queue.used + charge <= common:
            return
        share = (self.queue_bytes_max - common) // max(queue.listed_count, 1)
        if sender.used + charge <= share:
            return
        taken = sum(
            max(other.used - (share if other.listed else 0), 0)
            for other in queue.senders.values()
            if other is not sender
        )
        if taken + max(sender.used + charge - share, 0) > common:
            raise QueueFull(retry_after_s=FULL_RETRY_S)
