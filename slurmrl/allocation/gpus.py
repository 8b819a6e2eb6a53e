"""Lists of GPUs of a trial: ``0-3,6``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from slurmrl.allocation.scanner import LARGEST_SIZE, Scanner

_NUMBER: Final = re.compile(r"[0-9]+")


def parse_gpus(text: str) -> tuple[int, ...]:
    """The numbers in a list of numbers and ranges, in order. Raises AllocationError that points at
    the character."""
    scanner = Scanner(text)
    numbers: list[int] = []
    while True:
        scanner.skip_blanks()
        start = scanner.position
        first = _number(scanner)
        last = _number(scanner) if scanner.take_if("-") else first
        if last < first:
            scanner.fail(f"the range {first}-{last} is descending", start)
        if numbers and first <= numbers[-1]:
            scanner.fail(f"{first} comes after {numbers[-1]}: numbers must ascend", start)
        numbers += range(first, last + 1)
        if not scanner.take_if(","):
            break
    if scanner.character:
        scanner.fail("expected ',' or the end, for example 0-3,6")
    return tuple(numbers)


def format_gpus(numbers: Sequence[int]) -> str:
    """The shortest list that parses back to these ascending numbers."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def _number(scanner: Scanner) -> int:
    scanner.skip_blanks()
    start = scanner.position
    digits = scanner.take(_NUMBER)
    if not digits or len(digits) > 7 or int(digits) >= LARGEST_SIZE:
        scanner.fail(f"expected the number of a GPU, from 0 to {LARGEST_SIZE - 1}", start)
    return int(digits)
