"""Remove numbers that an answer excludes: ``not 7``, ``7 fails``, ``x > 7``."""

from __future__ import annotations

import re
from math import factorial

GAP = r"(?:[\s~:*]|\\[,;:! ])*+\}?(?:[\s~*]|\\[,;:! ])*+"
AMOUNT = r"(?:\\[$([]|\$)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
OTHER_NUMBER = re.compile(
    r"(?<![\\\w])(?:(?:not|never|\w+n't|cannot)(?:\s+(?:be|equal)(?:\s+to)?)?|none\s+of(?:\s+the)?|(?-i:no)(?=\s)"
    r"|(?:any|every)(?:thing|\s+\w+)\s+(?:but|except)|(?:instead|in\s+place)\s+of|rather\s+than|unlike"
    r"|(?<!no )(?:less|fewer|more|greater|smaller|larger)\s+(?:than|(?:than\s+)?or\s+equal\s+to)"
    r"|(?<!not )(?<!n't )(?<!cannot )(?:exceed|surpass)(?:s|es|ed|ing)?"
    r"|(?<!\d )(?<!left )(?:over|under|above|below|beyond)(?=[^\S\n]+[^\s:])"
    rf"|(?:half|double|triple)(?:\s+of)?|twice|thrice){GAP}{AMOUNT}"
    rf"|(?<!\w)(?P<none>(?:no(?:thing|ne)?(?:\s+\w+){{0,4}}|fail(?:s|ed)?)\s+)?\b(?:except(?:\s+for)?|excluding|other\s+than|(?:different|distinct)\s+from){GAP}{AMOUNT}"
    rf"|(?<![\w.,/]){AMOUNT}(?:/\d+)?(?:\\\)|\$)?(?:\s+(?:fails(?=\s*(?:[.,;!)]|\Z|to\b|the\b|because\b))"
    r"|(?:is|was)\s+(?:also\s+)?(?:wrong|incorrect|false|invalid|impossible|too\s+\w+|not\s+(?:an?\s+|the\s+)?(?:valid|correct|right|possible|allowed|solution|root|answer)\b)"
    r"|(?:do(?:es)?\s*n[o']t|can\s?not|can't)\s+(?:work|fit|hold|satisfy|be\s+(?:right|correct|the\s+answer))\b)"
    r"|\s*\?\s*no\b)",
    re.IGNORECASE,
)
"""Pattern of a number that is not the answer, such as ``not 7``, ``twice 7`` or ``7 fails``."""
RELATED = re.compile(
    r"(?<![\w.,])(?<![-+*/^] )-?\$?\d[-+*/^\d,.]*\s*[<>≤≥≠]=?\s*(?=[A-Za-z](?![\w>]))"
    r"|(?:(?<![\w</.])([\w)}$]+) ?[<>]=?|[<>]=|[≤≥≠<])(?<![=-]>)\s*-?\$?\d[\d,]*(?:\.\d+)?"
    r"|(?<![\w.,:])\d+(?::\d+)+(?![\w:])"
)
"""Pattern of bounds and ratios: ``x > 7``, ``7 < x`` and ``7:1``."""
IMAGINARY_NUMBER = re.compile(
    r"(?<![\w.,])\d(?:[\d.,]*\d)?(?:i(?!\w|\.\s?e\b)|(?: |\\[,;:! ])i(?=[^\w(]*\Z))"
)
"""Pattern of ``7i``, but not of ``7 i.e.`` or ``7, i think``."""
UNEQUAL = re.compile(r"\\not\s*=|<>|≠|(?<![\d\s])\s*!=|(?<!\S)!=")
FACTORIAL = re.compile(r"(?<![\w.])(\d+)\s*!=\s*(\d[\d,]*)(?!\w|\.\d)")
LARGEST_FACTORIAL = 200


def without_other_numbers(text: str) -> str:
    """Return a string with ``?`` for each number that is not given as the answer.

    The 7 in ``no number other than 7`` stays, because it is the answer.
    """
    return OTHER_NUMBER.sub(lambda match: match[0] if match["none"] else "?", text)


def with_unequal_signs(text: str) -> str:
    r"""Return a formula with ``\neq`` for each ``!=`` that means "unequal".

    Between two numbers, ``!=`` means a factorial and ``=`` if this equation is true: ``5!=120``.
    Everywhere else, ``!=`` without a space between its characters means "unequal".
    """
    return UNEQUAL.sub(r" \\neq ", FACTORIAL.sub(_factorial, text))


def _factorial(match: re.Match[str]) -> str:
    base, value = match[1], match[2].replace(",", "")
    small = len(base) <= len(str(LARGEST_FACTORIAL)) and int(base) <= LARGEST_FACTORIAL
    true = small and str(factorial(int(base))) == value
    return f"{base}! = {value}" if true else rf"{base} \neq {match[2]}"
