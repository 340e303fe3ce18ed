"""The verbs of the relay's work on SQLite, inside one transaction of the writer thread."""

import sqlite3
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from agentmbx_protocol import limits
from agentmbx_protocol.custody import HeldFact
from agentmbx_relay.sqlite_store.mirror import Mirror
from agentmbx_relay.store import Deposit, Invite, Queue, Sender, Swept

RETIRED_KEPT_MS: Final = 90 * 24 * 3600 * 1000
TEMPORARY_KEPT_MS: Final = 24 * 3600 * 1000
ROWS_MAX: Final = 64
_ROW_BYTES: Final = 4096
_FACTS: Final = "SELECT digest, length, accepted_ms, until_ms FROM envelope WHERE digest IN "
_ACKABLE: Final = "SELECT queue, seq, sender, length FROM envelope WHERE held = 1 AND digest IN "
_INSERT: Final = (
    "INSERT INTO envelope (seq, queue, sender, digest, length, accepted_ms, until_ms, held) VALUES "
)
_INSERT_BYTES: Final = "INSERT INTO envelope_bytes (seq, data) VALUES "
_COUNTERS: Final = (
    "WITH v (id, counter, instance) AS (VALUES {}) UPDATE queue"
    " SET counter = v.counter, instance = v.instance FROM v WHERE queue.id = v.id"
)

T = TypeVar("T")
_Row = tuple[int, int, int, bytes, int, int, int]


class SqliteTransaction:
    """See `store.Transaction`; `held_bytes` and `written_bytes` tell the store what it did.

    Each statement that SQLite runs gives up Python's lock and must win it again, so rows go in and
    out many to a statement: new envelopes are gathered and written before anything else looks at
    them, and what is known of `expected` digests is read at once.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        mirror: Mirror,
        free_bytes: int,
        expected: Sequence[bytes] = (),
    ) -> None:
        self._connection = connection
        self._mirror = mirror
        self._free_bytes = free_bytes
        self._before: dict[int, tuple[int, bytes]] = {}
        self._new: dict[bytes, tuple[_Row, bytes]] = {}
        self._known: dict[bytes, HeldFact | None] = dict.fromkeys(expected)
        for row in self._select(_FACTS, list(self._known)):
            self._known[row[0]] = HeldFact(*row)
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
        if digest not in self._known:
            rows = self._select(_FACTS, [digest])
            self._known[digest] = HeldFact(*rows[0]) if rows else None
        return self._known[digest]

    def hold(
        self, queue: Queue, sender: Sender, deposit: Deposit, now_ms: int
    ) -> tuple[HeldFact, bool]:
        """See `store.Transaction.hold`."""
        known = self.find(deposit.digest)
        if known is not None:
            if known.until_ms > now_ms:
                return known, False
            self._write_new()
            self._remove("WHERE digest = ?", (deposit.digest,))
        mirror = self._mirror
        fact = HeldFact(deposit.digest, deposit.length, now_ms, now_ms + deposit.ttl_s * 1000)
        self._new[deposit.digest] = (
            (mirror.next_seq, queue.id, sender.id, *_columns(fact)),
            deposit.data,
        )
        self._known[deposit.digest] = fact
        mirror.next_seq += 1
        mirror.envelopes += 1
        mirror.newest_ms = max(mirror.newest_ms, now_ms)
        mirror.charge(queue, sender, deposit.length)
        self.held_bytes += deposit.length
        self.written_bytes += deposit.length + _ROW_BYTES
        return fact, True

    def ack(self, queue: Queue, digests: Sequence[bytes]) -> int:
        """See `store.Transaction.ack`."""
        self._write_new()
        rows = [
            row
            for row in self._select(_ACKABLE, list(dict.fromkeys(digests)))
            if row[0] == queue.id
        ]
        seqs = [row[1] for row in rows]
        self._change("UPDATE envelope SET held = 0 WHERE seq IN ", seqs)
        self._change("DELETE FROM envelope_bytes WHERE seq IN ", seqs)
        for _, _, sender_id, length in rows:
            sender = self._mirror.senders[sender_id]
            self._mirror.charge(queue, sender, limits.TOMBSTONE_BYTES - length)
        self._mirror.envelopes -= len(rows)
        self._mirror.tombstones += len(rows)
        return len(rows)

    def sweep(self, now_ms: int, rows_max: int) -> Swept:
        """See `store.Transaction.sweep`."""
        self._write_new()
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
        """Write what is gathered, and what is lazy if anything at all is written."""
        self._write_new()
        if self.written_bytes:
            for part in _parts(list(self._mirror.lazy.values()), ROWS_MAX):
                self._connection.execute(
                    _COUNTERS.format(_tuples(3, len(part))),
                    [value for q in part for value in (q.id, q.counter, q.instance)],
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

    def _write_new(self) -> None:
        new, self._new = self._new, {}
        for part in _parts(list(new.values()), ROWS_MAX):
            self._connection.execute(
                _INSERT + _tuples(8, len(part)), [value for row, _ in part for value in (*row, 1)]
            )
            self._connection.execute(
                _INSERT_BYTES + _tuples(2, len(part)),
                [value for row, data in part for value in (row[0], data)],
            )

    def _select(self, statement: str, keys: Sequence[bytes]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for part in _parts(keys, ROWS_MAX):
            found = self._connection.execute(statement + _tuples(len(part), 1), part)
            rows += found.fetchall()
        return rows

    def _change(self, statement: str, seqs: Sequence[int]) -> None:
        for part in _parts(seqs, ROWS_MAX):
            self._connection.execute(statement + _tuples(len(part), 1), part)
        self.written_bytes += len(seqs) * _ROW_BYTES

    def _remove(self, where: str, values: Sequence[object]) -> tuple[int, int]:
        rows = self._connection.execute(
            f"SELECT seq, queue, sender, length, held, digest FROM envelope {where}",  # noqa: S608
            tuple(values),
        ).fetchall()
        self._change("DELETE FROM envelope WHERE seq IN ", [row[0] for row in rows])
        held_seqs = [row[0] for row in rows if row[4]]
        self._change("DELETE FROM envelope_bytes WHERE seq IN ", held_seqs)
        for _, queue_id, sender_id, length, held, digest in rows:
            queue, sender = self._mirror.by_id[queue_id], self._mirror.senders[sender_id]
            self._mirror.charge(queue, sender, -(length if held else limits.TOMBSTONE_BYTES))
            if not sender.used and not sender.listed:
                self._forget_sender(queue, sender)
            self._known.pop(digest, None)
        self._mirror.envelopes -= len(held_seqs)
        self._mirror.tombstones -= len(rows) - len(held_seqs)
        return len(held_seqs), len(rows) - len(held_seqs)

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


def _parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _tuples(width: int, count: int) -> str:
    return ",".join(["(" + ",".join("?" * width) + ")"] * count)
