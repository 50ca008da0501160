"""docs/cases.md names tests that exist, and leaves out no case of its range."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "cases.md").read_text()
# The groups that this version answers for; numbers that were never given are not asked for.
RANGES = ((30, 43), (48, 60), (63, 67), (83, 131), (145, 145))
NEVER_GIVEN = {31, 36, 40, 64, 84, 87, 90, 100, 108, 117, 123}


def rows() -> list[tuple[list[int], str]]:
    found = []
    for line in TEXT.splitlines():
        match = re.match(r"\| ([\d, ]+) \| .* \| (.*) \|$", line)
        if match:
            found.append(([int(n) for n in match.group(1).split(",")], match.group(2)))
    return found


def test_every_case_of_the_ranges_has_a_row() -> None:
    numbers = [number for given, _ in rows() for number in given]
    assert len(numbers) == len(set(numbers))
    wanted = {n for low, high in RANGES for n in range(low, high + 1)} - NEVER_GIVEN
    assert set(numbers) == wanted


def test_every_row_names_tests_that_exist() -> None:
    for numbers, cell in rows():
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
        assert tests, f"cases {numbers}: {cell}"
        for path, name in tests:
            source = (ROOT / path).read_text()
            assert re.search(rf"^def {name}\(|^{name} = ", source, re.MULTILINE), f"{path}::{name}"
