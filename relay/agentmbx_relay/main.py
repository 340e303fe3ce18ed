"""`agentmbx relay serve`, as the command line sees it: its options and its settings."""

import os

import click

from agentmbx_relay import settings as relay_settings
from agentmbx_relay.failure import Failure


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = []
    for row in relay_settings.TABLE:
        text = f"{row.text} [{row.variable}]"
        if row.default:
            text += f" Default: {row.default}."
        if row.name == "open":
            options.append(click.Option([row.flag, row.name], flag_value="true", help=text))
        else:
            options.append(click.Option([row.flag, row.name], metavar=row.metavar, help=text))
    return options


def _serve(**flags: str | None) -> None:
    """Run a relay: hold sealed envelopes for queues, and sign that they are held.

    The first start makes the relay's key and store in the data folder. Each setting can also be
    given in the environment or in DIR/relay.toml; a flag beats both. Stop it with SIGTERM or
    Ctrl-C: it finishes what it has begun.

    \b
    Examples:
      agentmbx relay serve --data ./relay
      agentmbx relay serve --data /var/lib/agentmbx --public-url https://relay.example.com
    """  # noqa: D301 - \b keeps click from joining the lines
    try:
        settings = relay_settings.resolve(relay_settings.find(flags, os.environ))
    except relay_settings.SettingsError as error:
        raise Failure("usage", str(error), "See `agentmbx relay serve --help`.", 2) from error
    from agentmbx_relay import serving  # noqa: PLC0415 - help does not pay for a web server

    serving.run(settings)


serve = click.Command(
    "serve",
    params=_options(),
    callback=_serve,
    help=_serve.__doc__,
    short_help="Run a relay.",
)
