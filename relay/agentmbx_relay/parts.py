"""Builds the parts of a running relay and hands each what it needs; `main` runs them."""

from functools import partial
from typing import Final

import msgspec
import structlog

from agentmbx_protocol import limits
from agentmbx_protocol.errors import Refusal
from agentmbx_protocol.keys import SigningKey
from agentmbx_relay.clock import RelayClock, wall_ms
from agentmbx_relay.connections import ConnectionServer, Deadlines
from agentmbx_relay.group_commit import GroupCommit
from agentmbx_relay.health import Health
from agentmbx_relay.http import Front, metrics_page
from agentmbx_relay.maintenance import Maintenance, Worker
from agentmbx_relay.metrics import Metrics
from agentmbx_relay.quota import Quota
from agentmbx_relay.relay import Policy, Relay
from agentmbx_relay.settings import Settings
from agentmbx_relay.signatures import Signatures
from agentmbx_relay.store import Store, Transaction

METRICS_CONNECTIONS_MAX: Final = 16

log = structlog.get_logger("agentmbx.relay")


class Parts(msgspec.Struct, frozen=True):
    """What `main` needs of a built relay."""

    relay: Relay
    commits: GroupCommit
    server: ConnectionServer
    metrics_server: ConnectionServer
    workers: list[Worker]

    async def save_url(self, url: str) -> None:
        """Record the public URL for the invites that are printed beside the running relay.

        A full disk does not keep the relay from starting: acks make room.
        """

        def work(transaction: Transaction) -> None:
            transaction.save_url(url)

        try:
            await self.commits.submit(work)
        except Refusal as refusal:
            log.warning("public_url_not_saved", code=refusal.code)


def build(
    key: SigningKey, store: Store, settings: Settings, *, version: str, connections_max: int
) -> Parts:
    """The parts of a relay on an opened store, wired together; nothing runs yet."""
    metrics = Metrics(version)
    saved_ms, saved_wall_ms = store.saved_clock()
    clock = RelayClock(saved_ms, saved_wall_ms, now_wall_ms=wall_ms())
    commits = GroupCommit(store, metrics)
    signatures = Signatures(key)
    quota = Quota(settings.queue_bytes_max, settings.relay_bytes_max, settings.disk_reserve)
    policy = Policy(settings.name, settings.open, settings.queues_max, quota)
    relay = Relay(key, store, commits, signatures, clock=clock, policy=policy, metrics=metrics)
    health = Health()
    maintenance = Maintenance(store, commits, clock=clock, metrics=metrics, health=health)
    deadlines = Deadlines(
        settings.head_timeout, settings.body_timeout, settings.write_timeout, settings.idle_timeout
    )
    front = Front(relay, health, metrics)
    server = ConnectionServer(front.handle, deadlines, connections_max)
    page = partial(metrics_page, metrics, store.totals)
    metrics_server = ConnectionServer(page, deadlines, METRICS_CONNECTIONS_MAX)
    workers = [
        Worker("commits", commits.run),
        Worker("signatures", signatures.run),
        Worker("maintenance", maintenance.run),
        Worker("connections", server.cut_off_slow),
        Worker("metrics_connections", metrics_server.cut_off_slow),
    ]
    health.watch("workers", lambda: not any(worker.failing for worker in workers))
    health.watch("commit", lambda: not commits.failing)
    health.watch("maintenance", lambda: not maintenance.failing)
    # Ready means that there is room for the largest envelope.
    wanted_bytes = settings.disk_reserve + limits.FRAME_BYTES_MAX
    health.watch("disk", lambda: store.totals()["free_bytes"] >= wanted_bytes)
    health.watch("serving", lambda: not relay.draining)
    metrics.watch(ready=lambda: health.ready, polls=lambda: relay.poll_count)
    return Parts(relay, commits, server, metrics_server, workers)
