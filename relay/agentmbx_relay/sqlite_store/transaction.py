"""The verbs of the relay's work on SQLite, inside one transaction of the writer thread."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from agentmbx_protocol import limits
from agentmbx_protocol.custody import HeldFact
from agentmbx_relay.sqlite_store.mirror import Mirror
from agentmbx_relay.store import Deposit, Invite, Queue, Sender, Swept

RETIRED_KEPT_MS: Final = 90 * 24 * 3600 * 1000
TEMPORARY_KEPT_MS: Final = 24 * 3600 * 1000
_ROW_BYTES: Final = 4096


class SqliteTransaction:
    """See `store.Transaction`; `held_bytes` and `written_bytes` tell the store what it did."""

    def __init__(self, connection: sqlite3.Connection, mirror: Mirror, free_bytes: int) -> None:
        self._connection = connection
        self._mirror = mirror
        self._free_bytes = free_bytes
        self._before: dict[int, tuple[int, bytes]] = {}
        self.held_bytes = 0
        self.written_bytes = 0

    @property
    def used(self) -> int:
        """See `store.Transaction.used`."""
        return self._mirror.used

    @property
    def free_bytes(self) -> int:
        """See `store.Transaction.free_bytes`."""
        return self._free_bytes - self.written_bytes

    @property
    def queue_count(self) -> int:
        """See `store.Transaction.queue_count`."""
        return self._mirror.live_count

    def queue(self, key: bytes) -> Queue | None:
        """See `store.Transaction.queue`."""
        return self._mirror.queues.get(key)

    def add_queue(self, key: bytes, ends_ms: int) -> Queue:
        """See `store.Transaction.add_queue`."""
        number = self._write(
            "INSERT INTO queue (key, counter, instance, ends_ms, retired_ms)"
            " VALUES (?, 0, ?, ?, 0)",
            (key, b"", ends_ms),
        ).lastrowid
        queue = Queue(number or 0, key, 0, b"", b"", ends_ms, 0, {})
        self._mirror.queues[key] = self._mirror.by_id[queue.id] = queue
        self._mirror.live_count += 1
        self._mirror.index(queue)
        return queue

    def command(self, queue: Queue, counter: int, instance: bytes, *, lazily: bool = False) -> None:
        """See `store.Transaction.command`."""
        self._before.setdefault(queue.id, (queue.counter, queue.instance))
        queue.counter = counter
        queue.instance = instance
        self._mirror.lazy[queue.id] = queue
        if not lazily:
            self.written_bytes += _ROW_BYTES

    def list_senders(self, queue: Queue, senders: Sequence[bytes]) -> None:
        """See `store.Transaction.list_senders`."""
        wanted = set(senders)
        for key, sender in list(queue.senders.items()):
            if sender.listed != (key in wanted):
                sender.listed = not sender.listed
                self._write("UPDATE sender SET listed = ? WHERE id = ?", (sender.listed, sender.id))
        for key in senders:
            if key not in queue.senders:
                number = self._write(
                    "INSERT INTO sender (queue, key, listed) VALUES (?, ?, 1)", (queue.id, key)
                ).lastrowid
                sender = Sender(number or 0, key, listed=True)
                queue.senders[key] = self._mirror.senders[sender.id] = sender
        self._mirror.index(queue)
        self._forget_unused(queue)

    def retire(self, queue: Queue, now_ms: int) -> None:
        """See `store.Transaction.retire`."""
        self.list_senders(queue, ())
        queue.retired_ms = now_ms
        self._mirror.live_count -= 1
        self._write("UPDATE queue SET retired_ms = ? WHERE id = ?", (now_ms, queue.id))

    def vouched(self, key: bytes) -> Sequence[int]:
        """See `store.Transaction.vouched`."""
        rows = self._connection.execute("SELECT ends_ms FROM voucher WHERE key = ?", (key,))
        return [row[0] for row in rows]

    def vouch(self, key: bytes, ends_ms: int) -> None:
        """See `store.Transaction.vouch`."""
        self._write("INSERT INTO voucher (key, ends_ms) VALUES (?, ?)", (key, ends_ms))

    def invite(self, key: bytes) -> Invite | None:
        """See `store.Transaction.invite`."""
        row = self._connection.execute(
            "SELECT key, uses_left, ends_ms FROM invite WHERE key = ?", (key,)
        ).fetchone()
        return Invite(*row) if row else None

    def put_invite(self, invite: Invite) -> None:
        """See `store.Transaction.put_invite`."""
        if invite.uses_left:
            self._write(
                "INSERT OR REPLACE INTO invite (key, uses_left, ends_ms) VALUES (?, ?, ?)",
                (invite.key, invite.uses_left, invite.ends_ms),
            )
        else:
            self._write("DELETE FROM invite WHERE key = ?", (invite.key,))

    def find(self, digest: bytes) -> HeldFact | None:
        """See `store.Transaction.find`."""
        row = self._connection.execute(
            "SELECT digest, length, accepted_ms, until_ms FROM envelope WHERE digest = ?", (digest,)
        ).fetchone()
        return HeldFact(*row) if row else None

    def hold(
        self, queue: Queue, sender: Sender, deposit: Deposit, now_ms: int
    ) -> tuple[HeldFact, bool]:
        """See `store.Transaction.hold`."""
        mirror = self._mirror
        fact = HeldFact(deposit.digest, deposit.length, now_ms, now_ms + deposit.ttl_s * 1000)
        row = (mirror.next_seq, queue.id, sender.id, *_columns(fact))
        insert = (
            "INSERT INTO envelope (seq, queue, sender, digest, length, accepted_ms, until_ms, held)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT (digest) DO NOTHING"
        )
        # Counted first: a deposit that finds no room must not be given the reserve of the acks.
        self.held_bytes += deposit.length
        if self._connection.execute(insert, row).rowcount == 0:
            known = self.find(deposit.digest)
            if known is not None and known.until_ms > now_ms:
                self.held_bytes -= deposit.length
                return known, False
            self._remove("WHERE digest = ?", (deposit.digest,))
            self._connection.execute(insert, row)
        self._write(
            "INSERT INTO envelope_bytes (seq, data) VALUES (?, ?)",
            (mirror.next_seq, deposit.data),
        )
        mirror.next_seq += 1
        mirror.envelopes += 1
        mirror.newest_ms = max(mirror.newest_ms, now_ms)
        mirror.charge(queue, sender, deposit.length)
        self.written_bytes += deposit.length
        return fact, True

    def ack(self, queue: Queue, digests: Sequence[bytes]) -> int:
        """See `store.Transaction.ack`."""
        count = 0
        for digest in digests:
            row = self._connection.execute(
                "UPDATE envelope SET held = 0 WHERE digest = ? AND queue = ? AND held = 1"
                " RETURNING seq, sender, length",
                (digest, queue.id),
            ).fetchone()
            if row is None:
                continue
            seq, sender_id, length = row
            self._write("DELETE FROM envelope_bytes WHERE seq = ?", (seq,))
            sender = self._mirror.senders[sender_id]
            self._mirror.charge(queue, sender, limits.TOMBSTONE_BYTES - length)
            count += 1
        self._mirror.envelopes -= count
        self._mirror.tombstones += count
        return count

    def sweep(self, now_ms: int, rows_max: int) -> Swept:
        """See `store.Transaction.sweep`."""
        ended = [q for q in self._mirror.queues.values() if 0 < q.ends_ms <= now_ms]
        for queue in ended:
            if not queue.retired:
                self.retire(queue, now_ms)
        expired, tombstones = self._remove(
            "WHERE until_ms <= ? ORDER BY until_ms LIMIT ?", (now_ms, rows_max)
        )
        dropped = 0
        retired = [queue for queue in self._mirror.queues.values() if queue.retired]
        for queue in retired:
            room = rows_max - expired - tombstones - dropped
            dropped += self._remove("WHERE queue = ? AND held = 1 LIMIT ?", (queue.id, room))[0]
            kept_ms = TEMPORARY_KEPT_MS if queue.ends_ms else RETIRED_KEPT_MS
            if not queue.used and queue.retired_ms + kept_ms <= now_ms:
                self._forget_queue(queue)
        for statement in (
            "DELETE FROM invite WHERE ends_ms <= ?",
            "DELETE FROM voucher WHERE ends_ms BETWEEN 1 AND ?",
        ):
            count = self._connection.execute(statement, (now_ms,)).rowcount
            self.written_bytes += count * _ROW_BYTES
        removed = expired + tombstones + dropped
        return Swept(expired, dropped, tombstones, more=removed >= rows_max)

    def save_url(self, url: str) -> None:
        """See `store.Transaction.save_url`."""
        self._write("UPDATE relay SET url = ?", (url,))

    def save_clock(self, clock_ms: int, wall_ms: int) -> None:
        """See `store.Transaction.save_clock`."""
        self._write("UPDATE relay SET clock_ms = ?, wall_ms = ?", (clock_ms, wall_ms))
        self._mirror.clock = clock_ms, wall_ms

    def touch(self) -> None:
        """Write something that changes nothing, to see whether the disk takes it."""
        self._write("UPDATE relay SET clock_ms = clock_ms", ())

    def finish(self) -> None:
        """Write what is lazy, if anything at all is written."""
        if self.written_bytes:
            self._connection.executemany(
                "UPDATE queue SET counter = ?, instance = ? WHERE id = ?",
                [(queue.counter, queue.instance, queue.id) for queue in self._mirror.lazy.values()],
            )

    def undo_counters(self) -> None:
        """Take back the counters that this transaction moved, since it was rolled back.

        Else the same work, done again, would meet its own counter. What was moved lazily before
        it stays moved.
        """
        for number, (counter, instance) in self._before.items():
            queue = self._mirror.by_id.get(number)
            if queue is not None:
                queue.counter, queue.instance = counter, instance

    def _write(self, statement: str, values: Sequence[object]) -> sqlite3.Cursor:
        self.written_bytes += _ROW_BYTES
        return self._connection.execute(statement, tuple(values))

    def _remove(self, where: str, values: Sequence[object]) -> tuple[int, int]:
        rows = self._connection.execute(
            f"SELECT seq, queue, sender, length, held FROM envelope {where}",  # noqa: S608
            tuple(values),
        ).fetchall()
        held_count = 0
        for seq, queue_id, sender_id, length, held in rows:
            self._write("DELETE FROM envelope WHERE seq = ?", (seq,))
            queue, sender = self._mirror.by_id[queue_id], self._mirror.senders[sender_id]
            if held:
                held_count += 1
                self._write("DELETE FROM envelope_bytes WHERE seq = ?", (seq,))
            self._mirror.charge(queue, sender, -(length if held else limits.TOMBSTONE_BYTES))
            if not sender.used and not sender.listed:
                self._forget_sender(queue, sender)
        self._mirror.envelopes -= held_count
        self._mirror.tombstones -= len(rows) - held_count
        return held_count, len(rows) - held_count

    def _forget_unused(self, queue: Queue) -> None:
        for sender in list(queue.senders.values()):
            if not sender.listed and not sender.used:
                self._forget_sender(queue, sender)

    def _forget_sender(self, queue: Queue, sender: Sender) -> None:
        self._mirror.forget_sender(queue, sender)
        self._write("DELETE FROM sender WHERE id = ?", (sender.id,))

    def _forget_queue(self, queue: Queue) -> None:
        del self._mirror.queues[queue.key], self._mirror.by_id[queue.id]
        self._mirror.lazy.pop(queue.id, None)
        self._write("DELETE FROM voucher WHERE key = ?", (queue.key,))
        self._write("DELETE FROM queue WHERE id = ?", (queue.id,))


def _columns(fact: HeldFact) -> tuple[bytes, int, int, int]:
    return fact.digest, fact.length, fact.accepted_ms, fact.until_ms
