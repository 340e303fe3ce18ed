"""What the databases of two machines and a relay say of the same mail, once these have stopped."""

import sqlite3
from contextlib import closing

from agentmbx_node.machine import DATABASE_NAME
from agentmbx_node.store.rows import LETTER, MAIL
from node_process import NodeProcess
from relay_process import RelayProcess


def held_count(relay: RelayProcess) -> int:
    """How many envelopes wait at the relay, which may run."""
    with closing(sqlite3.connect(relay.data / "relay.db")) as connection:
        (count,) = connection.execute("SELECT COUNT(*) FROM envelope WHERE held = 1").fetchone()
    return int(count)


def assert_views_agree(sender: NodeProcess, receiver: NodeProcess) -> None:
    """Both have stopped: what one sent is, letter for letter, what the other one has."""
    with closing(sqlite3.connect(sender.home / DATABASE_NAME)) as connection:
        sent = {(each.id, each.stream, each.number): each for each in LETTER.find(connection)}
    with closing(sqlite3.connect(receiver.home / DATABASE_NAME)) as connection:
        mail = {(each.id, each.stream, each.number): each for each in MAIL.find(connection)}
        ranges = connection.execute("SELECT SUM(last - first + 1) FROM stored_range").fetchone()
    assert {each.state for each in sent.values()} == {"stored"}
    assert set(sent) == set(mail)
    assert all(mail[key].data == each.data for key, each in sent.items())
    assert ranges == (len(mail),)
