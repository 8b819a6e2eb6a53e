"""The parser of allocation strings.

Blanks are ignored, letters are lower case, sizes are integers from 1 without leading zeros, and
each dimension occurs at most once. Errors point at a character.

    components := place ("+" place)*
    place      := single ("|" single)*
    single     := backend ["[" name "]"] ":" (dimensions | halves | "(" halves ")")
    halves     := "attn:" dimensions "|" "ffn:" dimensions
    dimensions := (("d" | "t" | "p" | "c" | "e") size)+
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from slurmrl.config.allocation.allocation import (
    ATTENTION_LETTERS,
    AXES,
    AXIS_OF,
    EXPERT_LETTERS,
    SPELLED,
    Allocation,
    Backend,
    Components,
    ExpertSizes,
)
from slurmrl.errors import AllocationError
from slurmrl.registry import near

ENDS = frozenset({"", "+", "|"})
"""Characters that may follow an allocation; the empty string stands for the end."""


def parse(text: str) -> Allocation:
    """Parse one allocation.

    Raises AllocationError with the position of the wrong character and the expected characters.
    """
    scanner = Scanner(text)
    allocation = single(scanner)
    if scanner.character in ("+", "|"):
        scanner.fail("expected a single allocation, without '+' or '|'")
    return allocation


def parse_components(text: str) -> Components:
    """Parse one or more allocations. Raises AllocationError.

    Three or more allocations must all have names. An allocation that shares the ranks of an earlier
    allocation must have a name and the same number of ranks.
    """
    scanner = Scanner(text)
    places: list[list[Allocation]] = [[]]
    starts: list[int] = []
    while True:
        scanner.skip_blanks()
        starts.append(scanner.position)
        allocation = single(scanner)
        _check_place(scanner, places[-1], allocation, starts[-1])
        _check_name(scanner, [part for place in places for part in place], allocation, starts[-1])
        places[-1].append(allocation)
        if scanner.take_if("+"):
            places.append([])
        elif not scanner.take_if("|"):
            break
    components = Components(tuple(tuple(place) for place in places))
    if len(components) > 2:
        for component, start in zip(components, starts, strict=True):
            if not component.name:
                scanner.fail("if there are three or more components, each needs a [name]", start)
    return components


def _check_place(
    scanner: Scanner, place: list[Allocation], allocation: Allocation, start: int
) -> None:
    if not place:
        return
    if not allocation.name:
        scanner.fail("a component that shares another's ranks needs a [name]", start)
    if allocation.world_size != place[0].world_size:
        scanner.fail(
            f"needs {allocation.world_size} ranks, but '{place[0]}', whose ranks it shares, has "
            f"{place[0].world_size}",
            start,
        )


def _check_name(
    scanner: Scanner, earlier: list[Allocation], allocation: Allocation, start: int
) -> None:
    if allocation.name and allocation.name in {component.name for component in earlier}:
        scanner.fail(f"two components are named '{allocation.name}'", start)


def single(scanner: Scanner) -> Allocation:
    """Read one allocation, up to a ``+``, a ``|`` or the end."""
    backend = _backend(scanner)
    name = _name(scanner)
    scanner.expect(":", f"':' and dimensions, for example {backend.name}:d2")
    if scanner.character == "(" or scanner.comes("attn"):
        allocation = _halves(scanner, backend, name)
    else:
        dimensions = _dimensions(scanner, backend.name, backend.dimensions)
        allocation = _plain(scanner, backend, name, dimensions)
    if scanner.character not in ENDS:
        scanner.fail("expected '+', '|' or the end")
    return allocation


@dataclass
class Dimensions:
    """Mappings from a letter to its size, and to its position in the string."""

    sizes: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)

    def axes(self) -> dict[str, int]:
        return dict.fromkeys(AXES, 1) | {AXIS_OF[letter]: n for letter, n in self.sizes.items()}


def _backend(scanner: Scanner) -> Backend:
    scanner.skip_blanks()
    start = scanner.position
    word, known = scanner.take(WORD), list(SPELLED)
    if word in SPELLED:
        return SPELLED[word]
    if not word:
        scanner.fail(f"expected a backend; allowed: {', '.join(known)}", start)
    return scanner.fail(f"unknown backend '{word}'; {near(word, known)}", start)


def _name(scanner: Scanner) -> str:
    if not scanner.take_if("["):
        return ""
    name = scanner.take(WORD)
    if not name:
        scanner.fail("expected a name of letters, digits and '_'")
    scanner.expect("]", "']' after the name")
    return name


def _dimensions(scanner: Scanner, owner: str, allowed: str, *, strict: bool = False) -> Dimensions:
    """Read dimensions; with ``strict``, only ``allowed`` letters may occur, even at size 1."""
    dimensions = Dimensions()
    listed = ", ".join(allowed)
    while scanner.character not in ENDS and scanner.character != ")":
        letter, start = scanner.character, scanner.position
        if letter not in AXIS_OF:
            scanner.fail(f"expected a dimension of {owner}: {listed}")
        if letter in dimensions.sizes:
            scanner.fail(f"dimension '{letter}' is repeated")
        scanner.position += 1
        size = scanner.size(letter)
        if letter not in allowed and (size > 1 or strict):
            scanner.fail(f"{owner} has no dimension '{letter}'; allowed: {listed}", start)
        dimensions.sizes[letter] = size
        dimensions.starts[letter] = start
    if not dimensions.sizes:
        scanner.fail(f"expected a dimension of {owner}: {listed}")
    return dimensions


def _plain(scanner: Scanner, backend: Backend, name: str, dimensions: Dimensions) -> Allocation:
    try:
        return Allocation(backend.name, name, dimensions.axes())
    except AllocationError as error:
        scanner.fail(str(error), dimensions.starts["e"])


def _halves(scanner: Scanner, backend: Backend, name: str) -> Allocation:
    if not backend.halves:
        able = ", ".join(other.name for other in SPELLED.values() if other.halves)
        scanner.fail(f"{backend.name} does not support (attn:…|ffn:…); allowed with: {able}")
    wrapped = scanner.take_if("(")
    attention = _half(scanner, backend, "attn", ATTENTION_LETTERS)
    scanner.expect("|", "'|' and 'ffn:' after the dimensions of attention")
    start = scanner.position
    ffn = _half(scanner, backend, "ffn", EXPERT_LETTERS)
    if wrapped:
        scanner.expect(")", "')' after the dimensions of the experts")
    elif scanner.character == ")":
        scanner.fail("this ')' has no matching '('")
    sizes = attention.axes() | {"ep": ffn.sizes.get("e", 1)}
    try:
        return Allocation(backend.name, name, sizes, _experts(scanner, sizes, ffn, start))
    except AllocationError as error:
        if error.position is not None:
            raise
        scanner.fail(str(error), start)


def _half(scanner: Scanner, backend: Backend, word: str, letters: str) -> Dimensions:
    if not scanner.take_if(word):
        scanner.fail(f"expected '{word}:' and its dimensions")
    scanner.expect(":", f"':' after {word}")
    allowed = "".join(letter for letter in letters if letter in backend.dimensions)
    dimensions = _dimensions(scanner, f"{word} of {backend.name}", letters, strict=True)
    for letter, size in dimensions.sizes.items():
        if letter not in allowed and size > 1:
            message = f"{backend.name} has no dimension '{letter}'; allowed: {', '.join(allowed)}"
            scanner.fail(message, dimensions.starts[letter])
    return dimensions


def _experts(scanner: Scanner, sizes: dict[str, int], ffn: Dimensions, start: int) -> ExpertSizes:
    """Return the experts' sizes; compute a missing ``d`` from the other sizes."""
    pp, tp, ep = sizes["pp"], ffn.sizes.get("t", 1), ffn.sizes.get("e", 1)
    if ffn.sizes.get("p", pp) != pp:
        scanner.fail(f"attention has p{pp}: both halves must have the same p", ffn.starts["p"])
    stage = sizes["dp"] * sizes["tp"] * sizes["cp"]
    if "d" not in ffn.sizes and stage % (tp * ep):
        scanner.fail(
            f"d of the experts cannot be derived: t*e = {tp * ep} does not divide the {stage} "
            "ranks (d*t*c) of a pipeline stage",
            start,
        )
    return ExpertSizes(ffn.sizes.get("d", stage // (tp * ep)), tp, ep)


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
        """Next character that is not blank; an empty string at the end."""
        self.skip_blanks()
        return self.text[self.position : self.position + 1]

    def take(self, pattern: re.Pattern[str]) -> str:
        """Consume and return the match at the position, which may be an empty string."""
        self.skip_blanks()
        match = pattern.match(self.text, self.position)
        if match is None:
            return ""
        self.position = match.end()
        return match[0]

    def take_if(self, text: str) -> bool:
        """Consume a string if it comes next; blanks may separate its characters."""
        start = self.position
        for character in text:
            if self.character != character:
                self.position = start
                return False
            self.position += 1
        return True

    def comes(self, text: str) -> bool:
        """Return whether a string comes next. Consumes nothing."""
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
            rule = f"an integer from 1 to {LARGEST_SIZE} without leading zeros"
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


def parse_gpus(text: str) -> tuple[int, ...]:
    """Return the ascending numbers in a list of numbers and ranges such as ``0-3,6``.

    Raises AllocationError, which points at a character.
    """
    scanner = Scanner(text)
    numbers: list[int] = []
    while True:
        scanner.skip_blanks()
        start = scanner.position
        first = _gpu_number(scanner)
        last = _gpu_number(scanner) if scanner.take_if("-") else first
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
    """Return ascending numbers as a list such as ``0-3,6``, which `parse_gpus` reads."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def _gpu_number(scanner: Scanner) -> int:
    scanner.skip_blanks()
    start = scanner.position
    digits = scanner.take(_DIGITS)
    if not digits or len(digits) > 7 or int(digits) >= LARGEST_SIZE:
        scanner.fail(f"expected the number of a GPU, from 0 to {LARGEST_SIZE - 1}", start)
    return int(digits)
