"""The rows of the database as structs; `schema/` says what each column means."""

import sqlite3
import unicodedata

import msgspec

from agentmbx_node.store.table import Table


class Machine(msgspec.Struct):
    """This machine: one row."""

    id: int
    name: str
    instance: bytes
    card_sequence: int
    card: bytes
    age_ms: int
    wall_ms: int


class Peer(msgspec.Struct):
    """A pairing, as this machine has it."""

    id: int | None
    salt: bytes
    name: str
    name_key: str
    state: str
    identity: bytes
    sealing: bytes
    pair_key: bytes
    card: bytes
    card_sequence: int
    loopback: bool
    paired_ms: int
    stream: bytes
    last_number: int = 0
    confirmed_card: int = 0
    state_sequence: int = 0
    seen_card: int = 0
    seen_sequence: int = 0
    ask_seen: int = 0
    void_seen: bytes = b""
    unopened: bytes = b""
    other_sealing: bytes = b""
    is_due: bool = False
    has_news: bool = False
    is_unanswered: bool = False
    is_telling: bool = False
    state_age_ms: int = 0
    asked_age_ms: int = 0
    card_tries: int = 0
    void_tries: int = 0
    void_age_ms: int = 0
    unopened_age_ms: int = 0
    failures: int = 0
    retry_age_ms: int = 0
    direct_retry_age_ms: int = 0
    direct_error: str = ""
    direct_ms: int = 0
    relay_error: str = ""
    relay_ms: int = 0
    contact_ms: int = 0
    clock_ahead_ms: int = 0
    leave_age_ms: int = 0


class LetterRow(msgspec.Struct):
    """A letter to a peer, from the commit that numbered it on."""

    id: str
    peer: int
    stream: bytes
    number: int
    data: bytes
    digest: bytes
    state: str
    way: str
    why: str
    queued_ms: int
    deadline_age_ms: int
    next_age_ms: int
    was_tried: bool = False
    is_void: bool = False
    envelope: bytes = b""
    envelope_digest: bytes = b""
    queue: bytes = b""
    deposits: int = 0
    held_age_ms: int = 0
    ask_sequence: int = 0
    direct_age_ms: int = 0
    rounds: int = 0
    retry_key: str | None = None


class Event(msgspec.Struct):
    """A step in the life of a letter."""

    letter: str
    at_ms: int
    state: str
    way: str
    detail: str


class Mail(msgspec.Struct):
    """A letter that arrived."""

    id: str
    peer: int
    stream: bytes
    number: int
    digest: bytes
    data: bytes
    arrived_ms: int
    way: str
    is_late: bool
    read_ms: int = 0


class QueueRow(msgspec.Struct):
    """A queue of this machine's at a relay."""

    id: int | None
    salt: bytes
    url: str
    relay_key: bytes
    instance: bytes
    state: str
    counter: int = 0
    answered: int = 0
    proof: bytes = b""
    senders_digest: bytes = b""
    has_takeover: bool = False
    error: str = ""
    contact_ms: int = 0


MACHINE = Table("machine", Machine)
PEER = Table("peer", Peer)
LETTER = Table("letter", LetterRow, fixed=("data",))
EVENT = Table("letter_event", Event)
MAIL = Table("mail", Mail, fixed=("data",))
QUEUE = Table("queue", QueueRow)


def machine_of(connection: sqlite3.Connection) -> Machine:
    """This machine's row."""
    machine = MACHINE.get(connection, 1)
    if machine is None:
        raise LookupError("the database has no machine")
    return machine


def name_key(name: str) -> str:
    """What two names have in common when a person would take them for one."""
    return unicodedata.normalize("NFKC", name).casefold()
