"""Find the letter that a completion chooses in a multiple choice."""

from __future__ import annotations

import re

LETTER = re.compile(r"(?:\\(?:text|math)\w*\s*\{\s*)?\(?([A-J])\)?\s*\}?")
LABEL = re.compile(
    r"\s*(?:(?i:option|choice|answer)\W+)?\(?\s*([A-J])\s*(?:\Z|[).:](?!.*\b[A-J]\b))", re.DOTALL
)
OPTION = re.compile(r"\s*\(?[A-J][).][^\n]*")
"""Pattern of a whole completion that repeats one option: ``C) 42``."""
CHOSEN = (
    r"[\s:：_(（]*([A-J])(?![\s_)]*(?:[,&]|(?:and|or)\b)\s*\(?[A-J]\b)"
    r"(?=[\s_)]*(?:[.,;:)\n。，）]|(?:because|since|as|is\s+(?:correct|right))\b|\Z))"
)
ANSWER_IS = re.compile(
    rf"(?i:(?:\banswer\b(?:\s+is)?|答案[是为]?)(?:\s+(?:option|choice))?){CHOSEN}"
)
OPTION_IS = re.compile(rf"(?i:\b(?:option|choice)\b(?:\s+is)?){CHOSEN}")
"""Patterns of a multiple choice's letter: in a reference, in a box or after the marker, in prose.
"""


def chosen(text: str, *, inside: bool) -> str:
    """Return the letter that a string chooses, or "". With ``inside``, the string has no prose."""
    text = re.sub(r"\\(?:text|math)\w*|\\[ ,;]|[{}$*]", " ", text)
    if (inside or OPTION.fullmatch(text)) and (label := LABEL.match(text)):
        return label[1]
    found = ANSWER_IS.findall(text) or OPTION_IS.findall(text)  # explanations of options may follow
    return "".join(found[-1:])
