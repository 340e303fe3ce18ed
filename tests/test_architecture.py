"""The house rules that a machine can see, beyond what lint, types and import contracts check."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    path
    for room in ("protocol", "relay", "node")
    for path in sorted((ROOT / room / f"agentmbx_{room}").rglob("*.py"))
]
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
BAD_NAMES = {"util", "utils", "helper", "helpers", "manager", "core", "base", "common", "misc"}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_says_what_it_is_for_and_has_a_plain_name(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MODULE_LINES_MAX
    assert ast.get_docstring(ast.parse(text))
    assert not BAD_NAMES & set(path.stem.split("_"))
    long = [
        each.name
        for each in functions(path)
        if each.end_lineno and each.end_lineno - each.lineno >= FUNCTION_LINES_MAX
    ]
    assert long == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_product_code_asks_whether_it_is_under_test(path: Path) -> None:
    text = path.read_text().lower()
    assert "pytest" not in text
    assert "under_test" not in text
