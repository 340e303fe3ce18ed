"""README and docs say what is true of the code."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from agentmbx_relay import settings

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]


def test_the_example_settings_are_those_of_the_table() -> None:
    assert (ROOT / "relay/relay.example.toml").read_text() == settings.example_file()


def test_each_claim_of_the_threat_model_names_a_test_that_is_there() -> None:
    text = (ROOT / "docs/threat-model.md").read_text()
    named = re.findall(r"`(tests/[a-z_/]+\.py)`", text)
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_each_dependency_has_a_line_that_says_why() -> None:
    text = (ROOT / "docs/dependencies.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[><=; ]", each)[0].lower() for each in needed}
    missing = [name for name in names if name.removeprefix("types-") not in text.lower()]
    assert missing == []


def test_constraints_pin_what_is_needed_and_name_no_host() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[><=; ]", each)[0].lower().replace("_", "-") for each in needed}
    assert names - pinned == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_commands_of_the_readme_are_commands() -> None:
    commands = {entry.name for entry in metadata.entry_points(group="agentmbx.commands")}
    text = (ROOT / "README.md").read_text()
    for words in re.findall(r"agentmbx (relay [a-z]+(?: show)?)", text):
        if words != "relay set":  # which the page says is yet to come
            assert words.replace(" ", ".") in commands, words


def test_the_rooms_of_modules_are_described_in_their_readme() -> None:
    for room in ("protocol", "relay"):
        text = (ROOT / room / "README.md").read_text()
        for module in (ROOT / room / f"agentmbx_{room}").glob("[a-z]*.py"):
            assert f"`{module.stem}`" in text, f"{room}: {module.stem}"
