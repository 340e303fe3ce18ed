#!/usr/bin/env python3
"""Writes vectors.json: good and bad bytes for every rule of SPEC.md, the same at every run.

Each bad vector has one fault, is signed as it is, and bears the code that SPEC gives it. When the
package reads a vector in another way, nothing is written.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from vector_parts import content_cases, frame_cases, state_cases
from vector_parts.fields import expected
from vector_parts.frame_cases import Case

PATH: Final = Path(__file__).parent / "vectors.json"
_SOURCES: Final = (
    frame_cases.any_frame_cases,
    frame_cases.signature_cases,
    frame_cases.envelope_cases,
    frame_cases.custody_cases,
    frame_cases.command_cases,
    frame_cases.sender_list_cases,
    content_cases.card_cases,
    content_cases.route_cases,
    content_cases.rotation_cases,
    content_cases.pairing_cases,
    content_cases.letter_cases,
    content_cases.plaintext_cases,
    state_cases.state_cases,
    content_cases.body_cases,
)


def all_cases() -> Iterator[Case]:
    """Every case, in the order of the file."""
    for source in _SOURCES:
        yield from source()


def document(cases: Iterable[Case]) -> str:
    """The text of vectors.json; raises `ValueError` when the package contradicts a case."""
    lines: dict[str, str] = {}
    for case in cases:
        name, expect = f"{case.kind}: {case.name}", expected(case.kind, case.data)
        if (expect != case.code) if case.code else isinstance(expect, str):
            raise ValueError(f"{name}: the package says {expect}, not {case.code or 'ok'}")
        if name in lines:
            raise ValueError(f"two vectors are called {name}")
        row = {"name": name, "kind": case.kind, "hex": case.data.hex(), "expect": expect}
        lines[name] = json.dumps(row, separators=(",", ":"))
    return "[\n" + ",\n".join(lines.values()) + "\n]\n"


if __name__ == "__main__":
    PATH.write_text(document(all_cases()), encoding="ascii")
