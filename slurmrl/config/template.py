"""Templates of prompts and answers: ``Question: {prompt}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmrl.errors import UsageError

DOUBLING = "write {{ and }} for braces in the text"


@dataclass(frozen=True)
class Template:
    """Literal strings with a field between any two.

    ``literals`` has one entry more than ``fields``.
    """

    literals: tuple[str, ...]
    fields: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> Template:
        """``{name}`` is a field; ``{{`` and ``}}`` are braces.

        Raises UsageError for an unbalanced brace, an empty name, and a text without fields.
        """
        literals, fields, at = [""], [], 0
        while at < len(text):
            if text[at : at + 2] in ("{{", "}}"):
                literals[-1] += text[at]
                at += 2
            elif text[at] == "{":
                end = text.find("}", at)
                name = text[at + 1 : end]
                if end < 0 or "{" in name:
                    raise UsageError(f"the brace at {_place(text, at)} is not closed; {DOUBLING}")
                if not name.strip():
                    raise UsageError(f"the braces at {_place(text, at)} enclose no key; {DOUBLING}")
                fields.append(name)
                literals.append("")
                at = end + 1
            elif text[at] == "}":
                raise UsageError(f"the brace at {_place(text, at)} was not opened; {DOUBLING}")
            else:
                literals[-1] += text[at]
                at += 1
        if not fields:
            raise UsageError("has no {key}: every line would give the same text")
        return Template(tuple(literals), tuple(fields))

    def fill(self, values: Mapping[str, str]) -> str:
        """Insert the values of all fields. Braces in the values are kept."""
        parts = [self.literals[0]]
        for name, literal in zip(self.fields, self.literals[1:], strict=True):
            parts += [values[name], literal]
        return "".join(parts)


def _place(text: str, at: int) -> str:
    """Return ``character 7 ('{x')``."""
    return f"character {at + 1} ({text[at : at + 12]!r})"
