"""One own queue at a relay: keeps it registered, and collects what waits there."""

import asyncio
import secrets
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from typing import Final

import aiohttp
import structlog

from agentmbx_node.arrivals import Arrivals
from agentmbx_node.clock import Clock, Now
from agentmbx_node.errors import OperatingError
from agentmbx_node.hops.http import HopRefused
from agentmbx_node.hops.relay import Collected, RelayHop
from agentmbx_node.inbox import Fate
from agentmbx_node.keyring import Keyring
from agentmbx_node.store.database import Database, StoreFailed
from agentmbx_node.store.rows import QUEUE, QueueRow
from agentmbx_node.waiting import Alarm
from agentmbx_protocol import limits
from agentmbx_protocol.envelope import parse_envelope
from agentmbx_protocol.errors import NoSuchQueue, Refusal, Retired, Stale, Superseded
from agentmbx_protocol.keys import SigningKey
from agentmbx_protocol.queue_commands import (
    Collect,
    Flag,
    QueueState,
    Register,
    Retire,
    make_collect,
    make_register,
    make_retire,
    senders_digest,
)

WAIT_S: Final = 50
BYTES_MAX: Final = 2 * 1024 * 1024
PAUSE_MS_MIN: Final = 1000
PAUSE_MS_MAX: Final = 900 * 1000
DISK_PAUSE_MS: Final = 30 * 1000
NOTE_MS: Final = 60 * 1000
# An answer that brings nothing comes no sooner, if the relay waits as it was asked to.
QUICK_MS: Final = 1000
QUICK_STEPS_MAX: Final = 4
QUICK_PAUSE_MS_MAX: Final = 5000
SUPERSEDED: Final = "Another copy of this machine commands this queue, so this one stopped."

log = structlog.get_logger("agentmbx.node")


class Collector:
    """Collects from one queue until it is retired; `alarm` says that the peers have changed."""

    def __init__(
        self,
        queue: int,
        database: Database,
        keyring: Keyring,
        clock: Clock,
        session: aiohttp.ClientSession,
        arrivals: Arrivals,
        changed: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._database = database
        self._keyring = keyring
        self._clock = clock
        self._session = session
        self._arrivals = arrivals
        self._changed = changed
        self._acks: list[bytes] = []
        self._counter = 0
        self._noted_ms = 0
        self._failures = 0
        self._quick_steps = 0
        self._brought = False
        self.alarm = Alarm()

    async def run(self) -> None:
        """Register and collect until the queue is retired, superseded or this is cancelled."""
        while True:
            row, senders = await self._database.read(
                lambda connection: (
                    QUEUE.get(connection, self._queue),
                    _senders(connection, self._clock.now()),
                )
            )
            if row is None or row.state == "retired" or row.error == SUPERSEDED:
                return
            began_ms = self._clock.now().age_ms
            self._brought = False
            try:
                pause_ms = await self._step(row, senders) or self._pace(began_ms)
            except StoreFailed as error:
                # What is not acked comes again (N4); a full disk takes nothing until there is room.
                log.error("collect_failed", reason=str(error))
                pause_ms = DISK_PAUSE_MS
            if pause_ms:
                await self.alarm.wait(pause_ms)

    def _pace(self, began_ms: int) -> int:
        """How long to pause after answers that came at once and brought nothing.

        An honest relay makes few of them in a row: a register, acks, its word about a counter.
        """
        is_quick = self._clock.now().age_ms - began_ms < QUICK_MS and not self._brought
        self._quick_steps = self._quick_steps + 1 if is_quick else 0
        over = self._quick_steps - QUICK_STEPS_MAX
        return min(PAUSE_MS_MIN << min(over, 10), QUICK_PAUSE_MS_MAX) if over > 0 else 0

    async def _step(self, row: QueueRow, senders: Sequence[bytes]) -> int:
        """One command to the relay; how long to pause after it."""
        hop = RelayHop(self._session, row.url, row.relay_key)
        key = self._keyring.queue_key(row.salt)
        try:
            if row.state == "new" or row.senders_digest != senders_digest(senders):
                await self._register(hop, key, row, senders)
            else:
                pause_ms = await self._collect(hop, key, row, senders)
                if pause_ms:
                    return pause_ms
        except HopRefused as refused:
            return await self._heed(refused, row)
        except OperatingError as error:
            return await self._fail(row, str(error))
        self._failures = 0
        return 0

    async def _register(
        self, hop: RelayHop, key: SigningKey, row: QueueRow, senders: Sequence[bytes]
    ) -> None:
        command = Register(
            queue=key.public,
            relay=row.relay_key,
            counter=self._next_counter(row),
            instance=row.instance,
            takeover=row.answered if row.has_takeover else 0,
            senders=tuple(senders),
        )
        state = await hop.register(make_register(key, command), row.proof or None)
        _check_queue(state, key)

        def work(connection: sqlite3.Connection) -> None:
            kept = _row(connection, self._queue)
            kept.state = "live" if kept.state == "new" else kept.state
            kept.senders_digest = state.senders_digest
            kept.answered = max(kept.answered, state.counter)
            # The relay's own word gets the queue back when the relay is restored from a backup.
            kept.proof = hop.last_word or kept.proof
            kept.has_takeover = False
            kept.error, kept.contact_ms = "", self._clock.now().wall_ms
            QUEUE.save(connection, kept)

        await self._database.write(work)
        self._changed()

    async def _collect(
        self, hop: RelayHop, key: SigningKey, row: QueueRow, senders: Sequence[bytes]
    ) -> int:
        acks, rest = self._acks[: limits.COLLECT_ACKS_MAX], self._acks[limits.COLLECT_ACKS_MAX :]
        is_done = row.state == "draining" and await self._database.read(_is_replaced)
        wait_s = 0 if rest or is_done else WAIT_S
        command = Collect(
            queue=key.public,
            relay=row.relay_key,
            counter=self._next_counter(row),
            instance=row.instance,
            senders_digest=senders_digest(senders),
            bytes_max=BYTES_MAX,
            wait_s=wait_s,
            acks=tuple(acks),
        )
        collected = await self._unless_rung(hop.collect(make_collect(key, command), wait_s), wait_s)
        if collected is None:
            self._brought = True
            return 0
        if collected.state is not None:
            _check_queue(collected.state, key)
        self._acks = rest
        await self._note_contact(row, collected.state)
        if collected.envelopes:
            await self._take(collected.envelopes)
        elif is_done and not acks:
            await self._retire(hop, key, row)
        return 0

    async def _unless_rung(
        self, collecting: Coroutine[None, None, Collected], wait_s: int
    ) -> Collected | None:
        """What was collected; None if a long poll was left early, since the peers have changed."""
        if not wait_s:
            return await collecting
        poll = asyncio.create_task(collecting)
        rung = asyncio.create_task(self.alarm.wait(None))
        try:
            await asyncio.wait([poll, rung], return_when=asyncio.FIRST_COMPLETED)
            # Nothing is leased by a poll, so one that is left loses nothing.
            return poll.result() if poll.done() else None
        finally:
            for task in (poll, rung):
                task.cancel()
            await asyncio.gather(poll, rung, return_exceptions=True)

    async def _take(self, envelopes: Sequence[bytes]) -> None:
        parcels = []
        done: list[bytes] = []
        for data in envelopes:
            try:
                parcels.append(parse_envelope(data))
            except Refusal:
                continue
        if not parcels:
            raise OperatingError("What the relay hands out is no mail.", retry=True)
        if len(parcels) < len(envelopes):
            log.warning("relay_handed_out_no_envelope", count=len(envelopes) - len(parcels))
        receipts = await self._arrivals.take(parcels, "relay")
        self._brought = any(receipt.is_new for receipt in receipts)
        for parcel, receipt in zip(parcels, receipts, strict=True):
            # What nobody known signed is acked too, so that it blocks nothing (O4).
            if receipt.fate is Fate.UNKNOWN:
                log.info("envelope_of_a_stranger")
            done.append(parcel.digest)
        self._acks += done

    async def _retire(self, hop: RelayHop, key: SigningKey, row: QueueRow) -> None:
        command = Retire(
            queue=key.public,
            relay=row.relay_key,
            counter=self._next_counter(row),
            instance=row.instance,
        )
        await hop.retire(make_retire(key, command))
        await self._save(state="retired")

    async def _heed(self, refused: HopRefused, row: QueueRow) -> int:
        """What to do about a refusal; a signed queue_state alone moves the counter (rule 7)."""
        refusal, state = refused.refusal, refused.state
        if state is not None and state.queue != self._keyring.queue_key(row.salt).public:
            state = None
        # A word that was said for another reason is no proof, though the relay signed it.
        flag = state.flag if state is not None else None
        is_stale = isinstance(refusal, Stale) and flag is Flag.STALE
        if is_stale and state is not None and state.counter < limits.COUNTER_MAX:
            self._counter = max(self._counter, state.counter)
            return PAUSE_MS_MIN if self._failures else 0
        if isinstance(refusal, Superseded) and state is not None and flag is Flag.SUPERSEDED:
            if state.counter < row.answered or state.instance == row.instance:
                # The relay was restored from a backup, or the answer is an old one.
                await self._save(has_takeover=True, senders_digest=b"", answered=state.counter)
                return PAUSE_MS_MIN
            await self._save(error=SUPERSEDED)
            self._changed()
            return PAUSE_MS_MIN
        if isinstance(refusal, Retired) and flag is Flag.RETIRED:
            await self._save(state="retired", error=refusal.detail)
            self._changed()
            return PAUSE_MS_MIN
        if isinstance(refusal, NoSuchQueue) and row.senders_digest:
            await self._save(senders_digest=b"")
            return PAUSE_MS_MIN
        return await self._fail(row, refusal.detail, refusal.retry_after_s)

    async def _fail(self, row: QueueRow, text: str, retry_after_s: int | None = None) -> int:
        self._failures += 1
        if row.error != text:
            await self._save(error=text)
            self._changed()
        wait_ms = min(PAUSE_MS_MAX, PAUSE_MS_MIN << min(self._failures, 10))
        spread_ms = secrets.randbelow(wait_ms // 2 + 1)
        return max(wait_ms // 2 + spread_ms, min(retry_after_s or 0, 900) * 1000)

    def _next_counter(self, row: QueueRow) -> int:
        # Not written down: one that a crash forgets is answered with `stale`, and the signed state.
        self._counter = max(self._counter, row.counter, self._clock.now().wall_ms - 1) + 1
        return self._counter

    async def _note_contact(self, row: QueueRow, state: QueueState | None) -> None:
        now_ms = self._clock.now().wall_ms
        if state is None and not row.error and abs(now_ms - self._noted_ms) < NOTE_MS:
            return
        self._noted_ms = now_ms
        changes: dict[str, object] = {
            "error": "",
            "contact_ms": now_ms,
            "counter": self._counter,
        }
        if state is not None:
            changes |= {"senders_digest": state.senders_digest, "answered": state.counter}
        await self._save(**changes)

    async def _save(self, **changes: object) -> None:
        def work(connection: sqlite3.Connection) -> None:
            row = _row(connection, self._queue)
            for name, value in changes.items():
                setattr(row, name, value)
            QUEUE.save(connection, row)

        await self._database.write(work)


def _check_queue(state: QueueState, key: SigningKey) -> None:
    if state.queue != key.public:
        raise OperatingError("The relay speaks of another queue.", retry=True)


def _senders(connection: sqlite3.Connection, now: Now) -> list[bytes]:
    """The sorted pair keys of all peers that may deposit, those who are told bye too."""
    rows = connection.execute(
        "SELECT pair_key FROM peer WHERE state != 'left' OR leave_age_ms > ?"
        " ORDER BY pair_key LIMIT 256",
        (now.age_ms,),
    )
    return [row[0] for row in rows]


def _is_replaced(connection: sqlite3.Connection) -> bool:
    """Whether every peer has shown that it knows the newest card, and so the newest route."""
    (behind,) = connection.execute(
        "SELECT COUNT(*) FROM peer, machine WHERE peer.state = 'paired'"
        " AND peer.confirmed_card < machine.card_sequence"
    ).fetchone()
    return not behind


def _row(connection: sqlite3.Connection, number: int) -> QueueRow:
    row = QUEUE.get(connection, number)
    if row is None:
        raise LookupError("the queue is gone")
    return row
