"""The relay's settings: one table for flags, environment, TOML file, help and example file.

A flag beats the environment (MBX_RELAY_...), that beats the TOML file, that beats the default.
Whatever is not exactly understood is refused with its name, value and source.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from ipaddress import IPv6Address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

ENVIRONMENT_PREFIX: Final = "MBX_RELAY_"
FILE_NAME: Final = "relay.toml"
_HOST: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_SIZE: Final = re.compile(r"([0-9]{1,15})(B|KiB|MiB|GiB|)")
_SIZE_UNITS: Final = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])")
_DURATION_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LEVELS: Final = ("debug", "info", "warning", "error")


class SettingsError(Exception):
    """A setting that is not understood; the text names it, its value and where it stands."""


class Address(msgspec.Struct, frozen=True):
    """A host (an IP literal or a name) and a TCP port; port 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What `relay serve` runs with; sizes in bytes, times in seconds; see `TABLE` for each."""

    data: Path
    listen: Address
    metrics_listen: Address | None
    public_url: str
    open: bool
    name: str
    queue_bytes_max: int
    relay_bytes_max: int
    queues_max: int
    disk_reserve: int
    connections_max: int
    head_timeout: int
    body_timeout: int
    write_timeout: int
    idle_timeout: int
    log_level: str


class Setting(msgspec.Struct, frozen=True):
    """One row of the table: how it is written, read and explained."""

    name: str
    metavar: str
    default: str
    parse: Callable[[str], object]
    text: str

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()


class Found(msgspec.Struct, frozen=True):
    """A setting's text and where it was found."""

    text: str
    source: str


def parse_address(text: str) -> Address:
    """HOST:PORT or [IPV6]:PORT; raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = str(IPv6Address(host[1:-1]))
    elif ":" in host:
        raise ValueError("write an IPv6 address as [ADDRESS]:PORT")
    elif not _HOST.fullmatch(host):
        raise ValueError("write HOST:PORT, with the host as an address or a name")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) >= 2**16:
        raise ValueError("write HOST:PORT, with a port of 0 to 65535")
    return Address(host, int(port))


def parse_url(text: str) -> str:
    """A public http or https URL with a trailing slash, or nothing; raises `ValueError`."""
    if not text:
        return ""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("write a URL such as https://relay.example.com")
    _ = parts.port  # raises for one that is out of range
    if parts.query or parts.fragment or not text.isascii() or not text.isprintable():
        raise ValueError("write a URL without a query, a fragment or odd characters")
    return text.rstrip("/") + "/"


def parse_size(text: str) -> int:
    """Bytes, or a number with KiB, MiB or GiB; raises `ValueError`."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError("write bytes, or a size such as 256MiB or 2GiB")
    return int(match[1]) * _SIZE_UNITS[match[2]]


def parse_duration_s(text: str) -> int:
    """Seconds from a number with s, m, h or d, at least 1 s; raises `ValueError`."""
    match = _DURATION.fullmatch(text)
    if not match or not int(match[1]):
        raise ValueError("write a time with its unit, such as 30s, 10m, 12h or 7d")
    return int(match[1]) * _DURATION_UNITS[match[2]]


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise ValueError("write a whole number from 1")
    return int(text)


def _parse_boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("write true or false")
    return text == "true"


def _parse_listen_or_off(text: str) -> Address | None:
    return None if text == "off" else parse_address(text)


def _parse_level(text: str) -> str:
    if text not in _LEVELS:
        raise ValueError("write one of " + ", ".join(_LEVELS))
    return text


def _parse_folder(text: str) -> Path:
    if not text.strip() or "\0" in text:
        raise ValueError("write the path of a folder")
    return Path(text)


def _parse_name(text: str) -> str:
    from agentmbx_protocol.card import check_name  # noqa: PLC0415 - help needs no cryptography
    from agentmbx_protocol.errors import Malformed  # noqa: PLC0415

    try:
        check_name(text)
    except Malformed as error:
        raise ValueError("write 1 to 64 bytes of visible text") from error
    return text


TABLE: Final = (
    Setting("data", "DIR", "", _parse_folder, "Folder of the relay's key and store."),
    Setting("listen", "HOST:PORT", "0.0.0.0:7421", parse_address, "Where nodes connect."),
    Setting(
        "metrics_listen",
        "HOST:PORT|off",
        "127.0.0.1:9464",
        _parse_listen_or_off,
        "Where Prometheus scrapes /metrics; keep it off the Internet.",
    ),
    Setting(
        "public_url", "URL", "", parse_url, "The URL by which nodes reach this relay, for invites."
    ),
    Setting("open", "true|false", "false", _parse_boolean, "Admit queues without an invite."),
    Setting("name", "TEXT", "agentmbx relay", _parse_name, "Name that /v1/info shows."),
    Setting("queue_bytes_max", "SIZE", "256MiB", parse_size, "Bound of one queue."),
    Setting("relay_bytes_max", "SIZE", "8GiB", parse_size, "Bound of all queues together."),
    Setting("queues_max", "COUNT", "10000", _parse_count, "Bound on how many queues there are."),
    Setting(
        "disk_reserve",
        "SIZE",
        "64MiB",
        parse_size,
        "Free disk below which deposits are refused; acks go on.",
    ),
    Setting("connections_max", "COUNT", "4000", _parse_count, "Bound on open connections."),
    Setting("head_timeout", "TIME", "10s", parse_duration_s, "For the head of a request."),
    Setting("body_timeout", "TIME", "30s", parse_duration_s, "For the body of a request."),
    Setting("write_timeout", "TIME", "60s", parse_duration_s, "For a peer to read an answer."),
    Setting("idle_timeout", "TIME", "75s", parse_duration_s, "For a connection without request."),
    Setting("log_level", "LEVEL", "info", _parse_level, "One of " + ", ".join(_LEVELS) + "."),
)
_ROWS: Final = {row.name: row for row in TABLE}


def find(flags: Mapping[str, str | None], environment: Mapping[str, str]) -> dict[str, Found]:
    """Each setting's text and source; raises `SettingsError` for what is not known.

    `flags` holds those given on the command line. The TOML file is DIR/relay.toml, if there.
    """
    found = {row.name: Found(row.default, "default") for row in TABLE}
    from_environment = _from_environment(environment)
    from_flags = {
        name: Found(text, "flag " + _ROWS[name].flag)
        for name, text in flags.items()
        if text is not None
    }
    folder = from_flags.get("data") or from_environment.get("data")
    if folder is None or not folder.text.strip():
        raise SettingsError("Say where the relay keeps its data: --data DIR or MBX_RELAY_DATA.")
    return found | _from_file(Path(folder.text) / FILE_NAME) | from_environment | from_flags


def resolve(found: Mapping[str, Found]) -> Settings:
    """The settings of those texts; raises `SettingsError` that names value and source."""
    values: dict[str, object] = {}
    for row in TABLE:
        text, source = found[row.name].text, found[row.name].source
        try:
            values[row.name] = row.parse(text)
        except ValueError as error:
            raise SettingsError(f"{row.name} = {text!r} ({source}): {error}.") from error
    return Settings(**values)  # type: ignore[arg-type] # each row's parser gives its field's type


def example_file() -> str:
    """The example of DIR/relay.toml: every setting with its default, switched off."""
    lines = [
        "# DIR/relay.toml: settings of `agentmbx relay serve`. Flags and MBX_RELAY_... beat it."
    ]
    for row in TABLE:
        if row.name != "data":
            bare = row.default.isdecimal() or row.parse is _parse_boolean
            value = row.default if bare else f'"{row.default}"'
            lines += ["", f"# {row.text} {row.metavar}.", f"# {row.name} = {value}"]
    return "\n".join(lines) + "\n"


def _from_environment(environment: Mapping[str, str]) -> dict[str, Found]:
    known = {row.variable: row.name for row in TABLE}
    found = {}
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            if variable not in known:
                raise SettingsError(f"{variable} is no setting of the relay.")
            found[known[variable]] = Found(text, "environment " + variable)
    return found


def _from_file(path: Path) -> dict[str, Found]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError as error:
        if not os.access(path.parent, os.X_OK):
            return {}  # whoever opens the folder says more about it
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read as TOML: {error}.") from error
    found = {}
    for name, value in document.items():
        if name not in _ROWS or name == "data":
            raise SettingsError(f"{path}: {name} is no setting that this file may hold.")
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, str | int):
            text = str(value)
        else:
            raise SettingsError(f"{path}: {name} = {value!r} is not a text, number or boolean.")
        found[name] = Found(text, str(path))
    return found
