"""Reading a text from left to right, with errors that point at a character."""

from __future__ import annotations

import re
from typing import Final, NoReturn

from slurmrl.errors import AllocationError

LARGEST_SIZE: Final = 1_000_000
WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGITS: Final = re.compile(r"[0-9]+")


class Scanner:
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
        """Consume and return the text that matches at the position; it may be empty."""
        self.skip_blanks()
        match = pattern.match(self.text, self.position)
        if match is None:
            return ""
        self.position = match.end()
        return match[0]

    def take_if(self, text: str) -> bool:
        """Consume a text if it comes next; blanks may separate its characters."""
        start = self.position
        for character in text:
            if self.character != character:
                self.position = start
                return False
            self.position += 1
        return True

    def comes(self, text: str) -> bool:
        """Whether a text comes next. Consumes nothing."""
        start = self.position
        comes = self.take_if(text)
        self.position = start
        return comes

    def expect(self, character: str, wanted: str) -> None:
        if not self.take_if(character):
            self.fail(f"expected {wanted}")

    def size(self, letter: str) -> int:
        """Read a size in decimal digits."""
        self.skip_blanks()
        start = self.position
        digits = self.take(_DIGITS)
        if not digits or digits.startswith("0") or len(digits) > 7 or int(digits) > LARGEST_SIZE:
            rule = f"a whole number from 1 to {LARGEST_SIZE} without leading zeros"
            self.fail(f"'{letter}' needs {rule}", start)
        return int(digits)

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        position = self.position if at is None else at
        character = self.text[position : position + 1]
        shown = f"'{character}'" if character else "the end"
        raise AllocationError(
            f"{self.text!r}: at character {position + 1} ({shown}): {message}\n"
            f"    {self.text}\n    {' ' * position}^",
            position,
            message,
        )
