"""What a person asks about mail: what is here, what was sent, why it waits and what comes next."""

import sqlite3
from collections.abc import Mapping, Sequence

from agentmbx_node import outbox
from agentmbx_node.clock import Now
from agentmbx_node.errors import Failure
from agentmbx_node.mail import message
from agentmbx_node.store.rows import EVENT, LETTER, MAIL, PEER, LetterRow, Mail, Peer, name_key
from agentmbx_protocol.letter import decode_letter

Document = Mapping[str, object]


def inbox(connection: sqlite3.Connection, machine: str, owner: str | None) -> list[Document]:
    """All mail, or that of one name, the newest first; looking marks nothing read (L3)."""
    names = _names(connection)
    listed: list[Document] = []
    for mail in MAIL.find(connection, "ORDER BY arrived_ms DESC, number DESC"):
        document = _mail_document(mail, names, machine)
        if owner is None or name_key(str(document["recipient"])) == name_key(owner):
            listed.append({key: document[key] for key in document if key != "recipient"})
    return listed


def read(connection: sqlite3.Connection, machine: str, mail_id: str, now: Now) -> Document:
    """One message with its body, marked as read."""
    mail = MAIL.get(connection, _find_id(connection, "mail", mail_id))
    if mail is None:
        raise _unknown(mail_id)
    if not mail.read_ms:
        mail.read_ms = now.wall_ms
        MAIL.save(connection, mail)
    document = dict(_mail_document(mail, _names(connection), machine))
    del document["recipient"]
    document["body"] = message.decode(decode_letter(mail.data)).body
    return document


def sent(
    connection: sqlite3.Connection, now: Now, letter_id: str | None, *, only_open: bool
) -> list[Document]:
    """Letters with their way, their states with times, why they wait and what comes next."""
    if letter_id is not None:
        row = LETTER.get(connection, _find_id(connection, "letter", letter_id))
        if row is None:
            raise _unknown(letter_id)
        rows: Sequence[LetterRow] = [row]
    elif only_open:
        rows = LETTER.find(
            connection, "WHERE state IN ('queued', 'held') ORDER BY queued_ms, number"
        )
    else:
        rows = LETTER.find(connection, "ORDER BY queued_ms DESC, number DESC LIMIT 200")
    peers = {peer.id: peer for peer in PEER.find(connection)}
    return [_letter_document(connection, row, peers.get(row.peer), now) for row in rows]


def find_letter(connection: sqlite3.Connection, letter_id: str) -> LetterRow:
    """The letter of that id, or of the id that begins so; raises `Failure`."""
    row = LETTER.get(connection, _find_id(connection, "letter", letter_id))
    if row is None:
        raise _unknown(letter_id)
    return row


def unread_count(connection: sqlite3.Connection) -> int:
    """How many messages nobody has read."""
    (count,) = connection.execute("SELECT COUNT(*) FROM mail WHERE read_ms = 0").fetchone()
    return int(count)


def _mail_document(mail: Mail, names: Mapping[int, str], machine: str) -> Document:
    letter = decode_letter(mail.data)
    told = message.decode(letter)
    return {
        "id": mail.id,
        # The machine is stamped from the pairing; the letter says only who there wrote it.
        "from": f"{told.sender}@{names.get(mail.peer, '?')}",
        "to": f"{told.recipient}@{machine}",
        "recipient": told.recipient,
        "subject": told.subject,
        "kind": told.kind,
        "sent_ms": letter.sent_ms,
        "arrived_ms": mail.arrived_ms,
        "way": mail.way,
        "late": bool(mail.is_late),
        "read": bool(mail.read_ms),
    }


def _letter_document(
    connection: sqlite3.Connection, row: LetterRow, peer: Peer | None, now: Now
) -> Document:
    told = message.decode(decode_letter(row.data))
    events = EVENT.find(connection, "WHERE letter = ? ORDER BY rowid", (row.id,))
    is_open = row.state in outbox.OPEN
    return {
        "id": row.id,
        "to": f"{told.recipient}@{peer.name if peer else '?'}",
        "subject": told.subject,
        "state": row.state,
        "way": row.way,
        "events": [
            {"at_ms": each.at_ms, "state": each.state, "way": each.way, "detail": each.detail}
            for each in events
        ],
        "why": row.why if is_open else "",
        "next": _next(row, peer, now) if is_open else "",
    }


def _next(row: LetterRow, peer: Peer | None, now: Now) -> str:
    left_ms = row.deadline_age_ms - now.age_ms
    if peer is None:
        return "its peer is gone"
    wait_ms = max(row.next_age_ms, peer.retry_age_ms) - now.age_ms
    when = "now" if wait_ms <= 0 else f"in {_span(wait_ms)}"
    if row.state == "held":
        return f"waits for the peer's word; deposited again {when}"
    if left_ms <= 0:
        return f"its 72 hours are over; a last round begins {when}"
    return f"tried again {when}, for {_span(left_ms)} more"


def _span(ms: int) -> str:
    seconds = max(ms // 1000, 1)
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _names(connection: sqlite3.Connection) -> dict[int, str]:
    return {peer.id or 0: peer.name for peer in PEER.find(connection)}


def _find_id(connection: sqlite3.Connection, table: str, start: str) -> str:
    rows = connection.execute(
        f"SELECT id FROM {table} WHERE id >= ? AND id < ? LIMIT 2",  # noqa: S608 - own names
        (start.lower(), start.lower() + "\x7f"),
    ).fetchall()
    if len(rows) != 1 or not start:
        raise _unknown(start)
    return str(rows[0][0])


def _unknown(letter_id: str) -> Failure:
    return Failure(
        "no_such_id",
        f"There is no message {letter_id!r}, or more than one begins so.",
        "`agentmbx inbox` and `agentmbx sent` list ids.",
        3,
    )
