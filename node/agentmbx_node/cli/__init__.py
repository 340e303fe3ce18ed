"""The `agentmbx` command: finds its groups by entry points and imports them when they are used."""

import sys

# Run at every prompt, so they go without click.
_QUICK = ("inbox", "status")


def main() -> None:
    """Run the command line; ends the process with the exit code that README.md lists."""
    if sys.argv[1:] == ["--version"]:
        from importlib import metadata  # noqa: PLC0415 - start-up time is a feature

        sys.stdout.write(f"agentmbx {metadata.version('agentmbx')}\n")
        return
    # A terminal that cannot show a character of a peer's text is no reason to fail.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.argv[1:2] and sys.argv[1] in _QUICK:
        from agentmbx_node.cli import quick  # noqa: PLC0415 - start-up time is a feature

        sys.exit(quick.run(sys.argv[1], sys.argv[2:]))
    from agentmbx_node.cli import command_line  # noqa: PLC0415 - click is not free

    sys.exit(command_line.run(sys.argv[1:]))
