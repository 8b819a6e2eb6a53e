"""Reads ``<backend>[<name>]:<dimensions>``, for example ``fsdp:d2`` or ``megatron[big]:d2 p2 t4``.

Blanks are ignored, letters are lower case, sizes are whole numbers from 1 without leading zeros,
and each dimension stands at most once. Errors point at the character.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn

from slurmrl.allocation.allocation import AXES, Allocation
from slurmrl.allocation.backends import AXIS_OF, BACKENDS, Backend
from slurmrl.errors import AllocationError
from slurmrl.registry import near

_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGITS: Final = re.compile(r"[0-9]+")
LARGEST_SIZE: Final = 1_000_000


def parse(text: str) -> Allocation:
    """Raises AllocationError that points at the character and says what is allowed there."""
    scanner = Scanner(text)
    backend = _backend(scanner)
    name = _name(scanner)
    scanner.expect(":", f"':' and dimensions, for example {backend.name}:d2")
    sizes = _dimensions(scanner, backend)
    return Allocation(backend.name, name, sizes)


class Scanner:
    """A position in a text, and errors that point there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def skip_blanks(self) -> None:
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1

    @property
    def character(self) -> str:
        """The next character that is not blank; empty at the end."""
        self.skip_blanks()
        return self.text[self.position : self.position + 1]

    def take(self, pattern: re.Pattern[str]) -> str:
        """The text at the position that matches, which may be empty."""
        self.skip_blanks()
        match = pattern.match(self.text, self.position)
        if match is None:
            return ""
        self.position = match.end()
        return match[0]

    def expect(self, character: str, wanted: str) -> None:
        if self.character != character:
            self.fail(f"expected {wanted}")
        self.position += 1

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        position = self.position if at is None else at
        found = self.text[position : position + 1]
        shown = f"'{found}'" if found else "the end"
        raise AllocationError(
            f"{self.text!r}: at character {position + 1} ({shown}): {message}\n"
            f"    {self.text}\n    {' ' * position}^"
        )


def _backend(scanner: Scanner) -> Backend:
    scanner.skip_blanks()
    start = scanner.position
    word = scanner.take(_WORD)
    if word not in BACKENDS:
        known = list(BACKENDS)
        if not word:
            scanner.fail(f"expected a backend; allowed: {', '.join(known)}", start)
        scanner.fail(f"unknown backend '{word}'; {near(word, known)}", start)
    return BACKENDS[word]


def _name(scanner: Scanner) -> str:
    if scanner.character != "[":
        return ""
    scanner.position += 1
    name = scanner.take(_WORD)
    if not name:
        scanner.fail("expected a name of letters, digits and '_'")
    scanner.expect("]", "']' after the name")
    return name


def _dimensions(scanner: Scanner, backend: Backend) -> dict[str, int]:
    sizes: dict[str, int] = {}
    while scanner.character:
        letter = scanner.character
        allowed = ", ".join(backend.dimensions)
        if letter not in AXIS_OF:
            scanner.fail(f"expected a dimension of {backend.name}: {allowed}")
        if AXIS_OF[letter] in sizes:
            scanner.fail(f"dimension '{letter}' is there twice")
        start = scanner.position
        scanner.position += 1
        size = _size(scanner, letter)
        if size > 1 and letter not in backend.dimensions:
            scanner.fail(f"{backend.name} has no dimension '{letter}'; allowed: {allowed}", start)
        sizes[AXIS_OF[letter]] = size
    if not sizes:
        scanner.fail(f"expected a dimension of {backend.name}: {', '.join(backend.dimensions)}")
    return dict.fromkeys(AXES, 1) | sizes


def _size(scanner: Scanner, letter: str) -> int:
    scanner.skip_blanks()
    start = scanner.position
    digits = scanner.take(_DIGITS)
    if not digits or digits.startswith("0") or len(digits) > 7 or int(digits) > LARGEST_SIZE:
        scanner.fail(
            f"'{letter}' needs a whole number from 1 to {LARGEST_SIZE} without leading zeros", start
        )
    return int(digits)
