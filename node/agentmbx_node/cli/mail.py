"""`agentmbx send`, `read`, `sent` and `outbox`: mail, its way and its states."""

import os
import sys
from typing import Any, Final

import click

from agentmbx_node.cli import text
from agentmbx_node.cli.asking import ask, json_option, stream, wants_json
from agentmbx_node.errors import Failure

BODY_BYTES_MAX: Final = 262_144
SUBJECT_CHARACTERS_MAX: Final = 200
_REACHED: Final = {"held": ("held", "stored"), "stored": ("stored",)}
_SENT_KEYS: Final = ("id", "state", "letter")


@click.command(short_help="Send a message to a name on a peer.")
@click.argument("to", metavar="NAME@PEER")
@click.argument("subject")
@click.option("--body", default="", metavar="TEXT|-", help="The text; - reads standard input.")
@click.option("--as", "speaker", metavar="NAME", help="Who writes. [env: MBX_AGENT]")
@click.option("--kind", default="message", show_default=True, help="What kind of message it is.")
@click.option(
    "--wait", type=click.Choice(["held", "stored"]), help="Return only when it is there, or ended."
)
@click.option("--key", help="The same key again is the same message, however often it is sent.")
@json_option
def send(
    to: str,
    subject: str,
    body: str,
    speaker: str | None,
    kind: str,
    wait: str | None,
    key: str | None,
    as_json: bool,  # noqa: FBT001
) -> int:
    """Put a message into the outbox, durably, and print its id.

    It goes directly if the peer can be reached, else to its relay, and is tried for 72 hours.

    \b
    Examples:
      agentmbx send owner@desktop 'Build is red' --body 'main fails'
      git diff | agentmbx send owner@server 'A diff' --body - --wait stored
    """  # noqa: D301 - \b keeps click from joining the lines
    request = {
        "do": "send",
        "to": _checked(to),
        "subject": _check_subject(_checked(subject)),
        "body": _read_body(body),
        "as": speaker or os.environ.get("MBX_AGENT") or "owner",
        "kind": kind,
        "wait": wait,
        "key": key,
    }
    answer: dict[str, Any] = {}
    for answer in stream(request):  # noqa: B007 - the last one counts
        pass
    if wait and answer["state"] not in _REACHED[wait]:
        words, step = f"The letter is {answer['state']}.", f"See `agentmbx sent {answer['id']}`."
        failure = Failure(f"not_{wait}", words, step, 1)
        return text.fail(failure, as_json=as_json, **{key: answer[key] for key in _SENT_KEYS})
    text.show(answer, as_json, lambda answer: text.escape(answer["id"]))
    if not as_json and wait:
        text.hint(_one_line(answer["letter"]))
    return 0


@click.command(short_help="Read one message.")
@click.argument("message_id", metavar="ID")
@json_option
def read(message_id: str, as_json: bool) -> None:  # noqa: FBT001
    """Show the message whose ID is or begins so, and mark it as read."""
    ask({"do": "read", "id": message_id}, as_json=as_json, render=_render_message)


@click.command(short_help="Show what was sent, its way and its states.")
@click.argument("letter_id", metavar="[ID]", required=False)
@json_option
def sent(letter_id: str | None, as_json: bool) -> None:  # noqa: FBT001
    """List the letters that were sent, the newest first; with ID one of them with all its steps."""
    ask({"do": "sent", "id": letter_id}, as_json=as_json, render=_render_letters)


@click.group(short_help="Show what waits to leave, and why.", invoke_without_command=True)
@json_option
@click.pass_context
def outbox(context: click.Context, as_json: bool) -> None:  # noqa: FBT001
    """List the letters that have not ended: the way of each, why it waits, what comes next."""
    if context.invoked_subcommand is None:
        ask({"do": "outbox"}, as_json=as_json, render=_render_letters)


@outbox.command(short_help="Try at once what waits.")
@click.argument("letter_id", metavar="[ID]", required=False)
@json_option
@click.pass_context
def retry(context: click.Context, letter_id: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Try all that waits at once, by every way; with ID all that waits for the same peer."""
    request = {"do": "outbox_retry", "id": letter_id}
    ask(
        request,
        as_json=wants_json(context, as_json=as_json),
        render=lambda answer: f"{answer['count']} are tried now.",
    )


@outbox.command(short_help="Take a letter back.")
@click.argument("letter_id", metavar="ID")
@json_option
@click.pass_context
def cancel(context: click.Context, letter_id: str, as_json: bool) -> None:  # noqa: FBT001
    """End the letter ID; if it was tried before, it may still arrive."""
    request = {"do": "outbox_cancel", "id": letter_id}
    ask(request, as_json=wants_json(context, as_json=as_json), render=_render_cancelled)


def _render_cancelled(answer: dict[str, Any]) -> str:
    tail = "It was tried before, so it may still arrive." if answer["may_still_arrive"] else ""
    return f"Cancelled {text.escape(answer['id'])}. {tail}".rstrip()


def _render_message(answer: dict[str, Any]) -> str:
    told = answer["message"]
    head = [("From", "from"), ("To", "to"), ("Subject", "subject"), ("Kind", "kind")]
    lines = [f"{title + ':':9}{text.escape(told[key])}" for title, key in head]
    late = ", later than its sender asked for" if told["late"] else ""
    lines.append(f"{'Arrived:':9}{text.ago(told['arrived_ms'])}, {told['way']}{late}")
    return "\n".join(lines) + "\n\n" + text.escape_body(told["body"])


def _render_letters(answer: dict[str, Any]) -> str:
    letters = answer["letters"]
    if not letters:
        return "Nothing."
    if len(letters) == 1:
        return _whole(letters[0])
    rows: list[list[object]] = [["ID", "TO", "SUBJECT", "STATE", "WAY", "SINCE", "WHY, AND NEXT"]]
    for each in letters:
        since = text.ago(each["events"][-1]["at_ms"])
        why = "; ".join(part for part in (each["why"], each["next"]) if part)
        columns = (each["id"], each["to"], each["subject"], each["state"], each["way"])
        rows.append([*columns, since, why])
    return text.table(rows)


def _whole(letter: dict[str, Any]) -> str:
    lines = [f"{letter['id']}  to {text.escape(letter['to'])}: {text.escape(letter['subject'])}"]
    for each in letter["events"]:
        detail = " ".join(part for part in (each["way"], each["detail"]) if part)
        lines.append(f"  {each['state']:14}{text.ago(each['at_ms']):14}{text.escape(detail)}")
    if letter["why"]:
        lines.append(f"  why   {text.escape(letter['why'])}")
    if letter["next"]:
        lines.append(f"  next  {text.escape(letter['next'])}")
    return "\n".join(lines)


def _one_line(letter: dict[str, Any]) -> str:
    return text.escape(f"{letter['state']} by {letter['way'] or 'no way yet'}")


def _read_body(given: str) -> str:
    if given != "-":
        body = _checked(given)
    else:
        data = sys.stdin.buffer.read(BODY_BYTES_MAX + 1)
        try:
            body = data.decode()
        except UnicodeDecodeError as error:
            if len(data) <= BODY_BYTES_MAX:
                raise Failure(
                    "usage", "Standard input is no UTF-8 text.", "Nothing was sent.", 2
                ) from error
            body = data.decode("utf-8", "replace")
    if len(body.encode()) > BODY_BYTES_MAX:
        text_ = f"The body is larger than {BODY_BYTES_MAX:,} bytes."
        raise Failure("usage", text_, "Send a path or a link instead.", 2)
    return body


def _check_subject(subject: str) -> str:
    subject = subject.strip()
    is_line = len(subject.splitlines()) == 1
    if not is_line or not 1 <= len(subject) <= SUBJECT_CHARACTERS_MAX:
        text_ = f"A subject is one line of 1 to {SUBJECT_CHARACTERS_MAX} characters."
        raise Failure("usage", text_, "Put the rest into --body.", 2)
    return subject


def _checked(given: str) -> str:
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise Failure(
            "usage", "What was given is no valid UTF-8 text.", "Nothing was sent.", 2
        ) from error
    return given
