"""`status` and `inbox` as click knows them, for the list of commands; they run in `quick`."""

import sys

import click

from agentmbx_node.cli import quick


@click.command(
    short_help="Show this machine, its peers and what waits.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def status(arguments: tuple[str, ...]) -> None:
    """Show this machine, its peers and the ways to them, its relay, and what waits."""
    sys.exit(quick.run("status", arguments))


@click.command(
    short_help="List the mail that arrived.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def inbox(arguments: tuple[str, ...]) -> None:
    """List the mail that arrived, the newest first."""
    sys.exit(quick.run("inbox", arguments))
