"""A message as the content of a letter; names are plain, and more keys may come."""

from typing import Annotated, Final

import msgspec

from agentmbx_node.errors import Failure
from agentmbx_protocol import limits
from agentmbx_protocol.letter import Letter

CONTENT_TYPE: Final = "message"
OWNER: Final = "owner"
KINDS: Final = ("message", "request", "reply", "status", "decision", "alert", "task")
SUBJECT_CHARACTERS_MAX: Final = 200
NAME_CHARACTERS_MAX: Final = 64

_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message; a reader ignores keys that it does not know."""

    sender: _Name = OWNER
    recipient: _Name = OWNER
    subject: str = ""
    body: str = ""
    kind: str = "message"


_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The content of a letter with this message; raises `Failure` for what no reader takes."""
    try:
        body_bytes = len(message.body.encode())
        for text in (message.subject, message.sender, message.recipient):
            text.encode()
    except UnicodeEncodeError as error:
        raise _refuse("The text holds something that is not a Unicode character.") from error
    if body_bytes > limits.BODY_BYTES_MAX:
        raise _refuse(f"The body is {body_bytes:,} bytes; at most {limits.BODY_BYTES_MAX:,} go.")
    if not 1 <= len(message.subject) <= SUBJECT_CHARACTERS_MAX or not _is_one_line(message.subject):
        raise _refuse(f"A subject is one line of 1 to {SUBJECT_CHARACTERS_MAX} characters.")
    for name in (message.sender, message.recipient):
        if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable() or "@" in name:
            raise _refuse("A name is 1 to 64 visible characters without @.")
    if message.kind not in KINDS:
        raise _refuse(f"A kind is one of {', '.join(KINDS)}.")
    return msgspec.msgpack.encode(message)


def decode(letter: Letter) -> Message:
    """The message of a letter; of one that this version cannot read, a message that says so."""
    if letter.content_type == CONTENT_TYPE:
        try:
            return _decoder.decode(letter.content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    return Message(
        sender="",
        subject=f"(a letter of type {letter.content_type} that this version cannot read)",
    )


def _is_one_line(text: str) -> bool:
    return len(text.splitlines()) == 1 and text == text.strip()


def _refuse(text: str) -> Failure:
    return Failure("usage", text, "Nothing was sent.", 2)
