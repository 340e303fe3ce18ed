"""The tree of commands, made of entry points; errors as text or JSON, with their exit codes."""

from collections.abc import Sequence
from functools import cached_property
from importlib import metadata
from typing import Final

import click

from agentmbx_node.cli import text
from agentmbx_node.errors import Failure

GROUP: Final = "agentmbx.commands"
_GROUP_HELP: Final = {
    "": (
        "Mail between coding agents on different machines.\n\n"
        "An untrusted relay carries it where machines cannot reach each other; it holds only "
        "what it cannot read."
    ),
    "relay": "Run a relay, invite machines to it, try one, and collect from one.",
    "relay.config": "Look at the settings of a relay.",
}


class EntryPointGroup(click.Group):
    """A group whose commands are the entry points below a path such as `relay`."""

    def __init__(self, path: tuple[str, ...]) -> None:
        about = _GROUP_HELP.get(".".join(path))
        super().__init__(path[-1] if path else "agentmbx", help=about, no_args_is_help=True)
        self._path = path

    @cached_property
    def _below(self) -> dict[str, metadata.EntryPoint | None]:
        """The next words below this group; None where more words follow."""
        found: dict[str, metadata.EntryPoint | None] = {}
        depth = len(self._path)
        for entry in metadata.entry_points(group=GROUP):
            words = tuple(entry.name.split("."))
            if words[:depth] == self._path and len(words) > depth:
                found[words[depth]] = entry if len(words) == depth + 1 else None
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The words that may follow, sorted."""
        del ctx
        return sorted(self._below)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that word, imported now; None when there is none."""
        del ctx
        if cmd_name not in self._below:
            return None
        entry = self._below[cmd_name]
        if entry is None:
            return EntryPointGroup((*self._path, cmd_name))
        command = entry.load()
        if not isinstance(command, click.Command):
            raise TypeError(f"entry point {entry.name} is no command")
        return command


def run(arguments: Sequence[str]) -> int:
    """Run `arguments`; the exit code: 0 done, 1 failed, 2 usage, 3 refused, 4 unreachable."""
    as_json = "--json" in arguments
    return text.guarded(lambda: _run(arguments, as_json=as_json), as_json=as_json)


def _run(arguments: Sequence[str], *, as_json: bool) -> int:
    root = click.version_option(message="agentmbx %(version)s", package_name="agentmbx")(
        EntryPointGroup(())
    )
    try:
        result = root.main(list(arguments), prog_name="agentmbx", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        if not as_json:
            error.show()
            return error.exit_code
        usage = Failure("usage", error.format_message(), "See --help.", error.exit_code)
        return text.fail(usage, as_json=True)
    except click.Abort as error:
        raise KeyboardInterrupt from error
    return result if isinstance(result, int) else 0
