"""What the SQLite store keeps in memory: queues, senders and running totals."""

import sqlite3
from collections.abc import Mapping
from typing import Self

from agentmbx_protocol import limits
from agentmbx_protocol.queue_commands import senders_digest
from agentmbx_relay.store import Queue, Sender


class Mirror:
    """The writer's picture of the small tables, and sums over the large one.

    `by_sender` is keyed by queue key and pair key together and holds only what may deposit now.
    `lazy` are the queues whose counter is newer here than in the store.
    """

    def __init__(self) -> None:
        self.queues: dict[bytes, Queue] = {}
        self.by_id: dict[int, Queue] = {}
        self.by_sender: dict[bytes, tuple[Queue, Sender]] = {}
        self.senders: dict[int, Sender] = {}
        self.lazy: dict[int, Queue] = {}
        self.live_count = 0
        self.envelopes = 0
        self.tombstones = 0
        self.used = 0
        self.next_seq = 1
        self.newest_ms = 0
        self.clock = (0, 0)

    @classmethod
    def load(cls, connection: sqlite3.Connection) -> Self:
        """Read it all: two small tables whole, and one pass over the facts of envelopes."""
        mirror = cls()
        mirror._read(connection, {})
        return mirror

    def reload(self, connection: sqlite3.Connection) -> None:
        """Read it all again after a failed commit; counters that were lazily moved stay moved.

        The new picture replaces the old one when it is whole, since others look at it meanwhile.
        """
        fresh = Mirror()
        fresh._read(connection, self.lazy)
        vars(self).update(vars(fresh))

    @property
    def saved_clock(self) -> tuple[int, int]:
        """The relay's clock and the wall clock when it was saved or the newest was accepted."""
        clock_ms, wall_ms = self.clock
        lead_ms = max(self.newest_ms - clock_ms, 0)
        return clock_ms + lead_ms, wall_ms + lead_ms

    def _read(self, connection: sqlite3.Connection, moved: Mapping[int, Queue]) -> None:
        for values in connection.execute(
            "SELECT id, key, counter, instance, ends_ms, retired_ms FROM queue"
        ):
            number, key, counter, instance, ends_ms, retired_ms = values
            queue = Queue(number, key, counter, instance, b"", ends_ms, retired_ms, {})
            self.queues[key] = self.by_id[number] = queue
            self.live_count += not retired_ms
            newer = moved.get(number)
            if newer is not None and newer.counter > counter:
                queue.counter, queue.instance = newer.counter, newer.instance
                self.lazy[number] = queue
        for number, queue_id, key, listed in connection.execute(
            "SELECT id, queue, key, listed FROM sender"
        ):
            sender = Sender(number, key, bool(listed))
            self.senders[number] = self.by_id[queue_id].senders[key] = sender
        for queue in self.queues.values():
            self.index(queue)
        for queue_id, sender_id, held, count, used, newest_ms in connection.execute(
            "SELECT queue, sender, held, COUNT(*), SUM(CASE held WHEN 1 THEN length ELSE ? END),"
            " MAX(accepted_ms) FROM envelope GROUP BY queue, sender, held",
            (limits.TOMBSTONE_BYTES,),
        ):
            self.charge(self.by_id[queue_id], self.senders[sender_id], used)
            self.envelopes += count if held else 0
            self.tombstones += 0 if held else count
            self.newest_ms = max(self.newest_ms, newest_ms)
        (self.next_seq,) = connection.execute(
            "SELECT COALESCE(MAX(seq), 0) + 1 FROM envelope"
        ).fetchone()
        self.clock = connection.execute("SELECT clock_ms, wall_ms FROM relay").fetchone()

    def index(self, queue: Queue) -> None:
        """Bring `by_sender` and the list's digest in step with the queue's senders."""
        listed = []
        for key, sender in queue.senders.items():
            if sender.listed:
                listed.append(key)
                self.by_sender[queue.key + key] = (queue, sender)
            else:
                self.by_sender.pop(queue.key + key, None)
        queue.senders_digest = senders_digest(sorted(listed))

    def charge(self, queue: Queue, sender: Sender, amount: int) -> None:
        """Add `amount` bytes (or take them off) to all three running totals."""
        sender.used += amount
        queue.used += amount
        self.used += amount

    def forget_sender(self, queue: Queue, sender: Sender) -> None:
        """Drop a sender that is not listed and uses nothing."""
        del queue.senders[sender.key]
        del self.senders[sender.id]
        self.by_sender.pop(queue.key + sender.key, None)
