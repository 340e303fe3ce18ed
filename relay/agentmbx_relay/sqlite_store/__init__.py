"""The relay's store on SQLite."""

from agentmbx_relay.sqlite_store.engine import SqliteStore
from agentmbx_relay.sqlite_store.files import add_invite, create

__all__ = ["SqliteStore", "add_invite", "create"]
