"""The process that runs math-verify. A request is a line of JSON, and so is its reply.

At a time limit, the parent kills the process: math-verify's own limits use SIGALRM, which does not
interrupt long operations on big numbers.

math-verify reads an answer as mathematics only inside a LaTeX environment. From other text,
math-verify extracts single numbers: 2 from ``2\\sqrt{3}``. Answers are therefore put in a box.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any

from slurmrl.rewards.math_answer import (
    ALL_TEXT,
    APPROXIMATELY,
    BOX,
    BRACKETED,
    CURRENCY,
    FINAL,
    FORMULA,
    LONGEST_FORMULA,
    NUMBER,
    RESIDUE,
    SPACE,
    boxed,
    closing_braces,
    formula_of,
    mark_formulas,
    number,
    only_formula,
    rewritten,
    stated,
    too_long,
    without_units,
)
from slurmrl.rewards.math_excluded import (
    IMAGINARY_NUMBER,
    OTHER_NUMBER,
    RELATED,
    without_other_numbers,
)
from slurmrl.rewards.process_pool import end_with_parent, send, take_pipes

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<{}>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_DAY = r"(?<!\d)(?P<{}>[12]\d|3[01]|0?[1-9])(?:st|nd|rd|th)?(?![\d:/]|[.,]\d)"
DATE = re.compile(
    rf"(?:{_MONTH.format('m1')}\s+(?:the\s+)?{_DAY.format('d1')}"
    rf"|{_DAY.format('d2')}\s+(?:of\s+)?{_MONTH.format('m2')})(?:,?\s+(?P<y>\d{{4}})\b)?"
    r"|(?<![\w-])(?P<y3>\d{4})-(?P<m3>0[1-9]|1[0-2])-(?P<d3>[12]\d|3[01]|0[1-9])(?![\w-])",
    re.IGNORECASE,
)
TIME = re.compile(
    r"(?<![\d:.])(?P<hour>[01]?\d|2[0-3])(?::(?P<minute>[0-5]\d))?\s*(?P<half>[ap])\.?\s?m\b\.?"
    r"|(?<![\d:.])(?P<hour2>[01]?\d|2[0-3]):(?P<minute2>[0-5]\d)(?![\d:])",
    re.IGNORECASE,
)
PRODUCT = re.compile(r"\$?\d+[ap]m\$?")
"""Pattern of a time that may also be a product of variables: ``2am`` equals ``2ma``."""
WEEKDAY = re.compile(r"\A\s*(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day\b,?)?\s*", re.IGNORECASE)
_LATEX = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{|\\[,;:! ]|\^|[{}~$]")
Moment = tuple[int | None, int, int]


def moments(text: str, *, whole: bool = False) -> list[Moment]:
    """Return the dates in a string, or the times of day if there are no dates.

    :param whole: return [] unless the whole string is one date, or one time with "am" or "pm".
    :return: (year, month, day) of each date, with None for a missing year; (-1, hour, minute) of
        each time, with hours from 0 to 23.
    """
    text = _LATEX.sub(" ", text)
    text = re.sub(
        r"(?<=\d)\s+(?=(?:st|nd|rd|th)\b)|(?<!\s)\s*:\s*(?=\d)", lambda m: m[0].strip(), text
    )
    if whole:
        text = WEEKDAY.sub("", text.strip().rstrip("."))
        found = DATE.fullmatch(text) or TIME.fullmatch(text)
        if found is None or ("half" in found.groupdict() and not found["half"]):
            return []
    dates = [_date(match) for match in DATE.finditer(text)]
    return dates or [_time(match) for match in TIME.finditer(text)]


def same_moment(given: Moment, reference: Moment) -> bool:
    """Return whether two moments agree. Years are compared only if both moments have a year."""
    return given[1:] == reference[1:] and (
        given[0] == reference[0]
        or (-1 not in (given[0], reference[0]) and None in (given[0], reference[0]))
    )


def _date(match: re.Match[str]) -> Moment:
    year = match["y"] or match["y3"]
    day = int(match["d1"] or match["d2"] or match["d3"])
    name = (match["m1"] or match["m2"] or "")[:3].lower()
    return int(year) if year else None, int(match["m3"] or MONTHS.index(name) + 1), day


def _time(match: re.Match[str]) -> Moment:
    hour = int(match["hour"] or match["hour2"])
    if match["half"]:
        hour = hour % 12 + 12 * (match["half"].lower() == "p")
    return -1, hour, int(match["minute"] or match["minute2"] or 0)


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
"""Pattern of the letter that prose chooses: ``option B``."""


def chosen(text: str, *, inside: bool) -> str:
    """Return the letter of a multiple choice that a string chooses; "" if it chooses none.

    With ``inside``, the string is from a box or after the marker, and has no prose.
    """
    text = re.sub(r"\\(?:text|math)\w*|\\[ ,;]|[{}$*]", " ", text)
    if (inside or OPTION.fullmatch(text)) and (label := LABEL.match(text)):
        return label[1]
    found = ANSWER_IS.findall(text) or OPTION_IS.findall(text)  # text may follow
    return "".join(found[-1:])


AMOUNT = r"(?<![\w.,/])(\d[\d,]*(?:\.\d+)?)"
DOZEN = re.compile(rf"{AMOUNT}({SPACE}*(?:\\(?:text\w*|mbox)\s*\{{)?){SPACE}*dozens?(?![A-Za-z])")
LETTERS = {"k": 3, "K": 3, "M": 6, "B": 9}
IN_SHORT = re.compile(rf"({CURRENCY}\s*)?{AMOUNT}(k|(?(1)[KMB]|(?!)))(?![\w^\\])")
"""Pattern of ``5k`` or ``$5M``."""
Reading = list[Any]
"""Expressions that math-verify has read from a string, and the string itself."""


def main() -> None:
    """Answer until standard input ends."""
    end_with_parent()
    requests, replies = take_pipes()
    import math_verify

    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
    compare_relatively()
    send(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        reference = read(request["reference"])
        reply: dict[str, Any] = {"rejected": rejection(request["reference"], reference)}
        if "completion" in request and not reply["rejected"]:
            reply["correct"] = correct(request, reference)
        send(replies, reply)


def compare_relatively() -> None:
    """Make math-verify round numbers below 1 to six significant digits, not decimals.

    By default, math-verify rounds 1e-7 and 2e-7 to 0, so both would equal 0.
    """
    from math_verify import grader

    rounded = grader.sympy_numeric_eq

    def relative(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
        zeros = leading_zeros(a, b)
        return bool(rounded(a, b, float_rounding + zeros, numeric_precision + zeros))

    grader.sympy_numeric_eq = relative


def leading_zeros(*numbers: Any) -> int:
    """Return the number of zeros after the decimal point of the smallest nonzero number.

    Return 0 if a value is not a number.
    """
    if not all(getattr(each, "is_number", False) for each in numbers):
        return 0
    try:
        sizes = [Decimal(str(abs(each.doit()).evalf(5))) for each in numbers]
    except (ArithmeticError, TypeError, ValueError):
        return 0
    return max([0, *(-1 - size.adjusted() for size in sizes if size)])


def correct(request: dict[str, Any], reference: Reading) -> bool:
    """Return whether the completion equals the reference.

    A residue in the reference also equals the same number without the modulus.
    """
    from math_verify import verify

    text, completion = request["reference"], request["completion"]
    if not OTHER_NUMBER.search(text):
        completion = without_other_numbers(completion)
    box = boxed(completion)
    inside = box or (completion if request["marked"] else "")
    if (not box and is_open(completion)) or not (inside or request["finished"]):
        return False
    if not inside:
        inside = "".join(BRACKETED.findall(completion))
    content = boxed(text) or ALL_TEXT.sub(r"\1", text)
    letter = LETTER.fullmatch(content)
    if letter and (choice := chosen(inside or completion, inside=bool(inside))):
        return choice == letter[1]
    if moment := moments(content, whole=True):
        given = moments(inside or completion)[-1:]
        if given or not PRODUCT.fullmatch(content):
            return any(same_moment(each, moment[0]) for each in given)
    plain = bool(number(only_formula(rewritten(content)) or "", plain=False))
    if plain:
        inside, completion = (IN_SHORT.sub(in_full, each) for each in (inside, completion))
    if plain and (request["literal"] or not inside):
        answers = [read_stated(each) for each in counted(inside or completion)]
    elif inside and _same(inside, content):
        return True
    else:
        if not RESIDUE.search(text):
            inside, completion = (RESIDUE.sub(r"\1", each) for each in (inside, completion))
        parts = [part for part in APPROXIMATELY.split(inside) if part.strip()] or [completion]
        parts = [each for part in parts for each in (counted(part) if plain else [part])]
        answers = [read(rf"\boxed{{{each}}}" if box else each, plain=plain) for each in parts]
    others = {number(each, plain=True) for each in counted(content)}
    others = {RESIDUE.sub(r"\1", text), *others} - {text, ""}
    references = [reference, *(read(other) for other in others)]
    # Let a set equal a relation: (2, oo) and x > 2.
    options: dict[str, Any] = {"timeout_seconds": None, "allow_set_relation_comp": True}
    return any(verify(one, other, **options) for one in references for other in answers)


def is_open(text: str) -> bool:
    """Return whether the last box lacks its closing brace, and no final answer follows it."""
    boxes = [box.end() for box in BOX.finditer(text) if box[1]]
    if not boxes or FINAL.search(text, boxes[-1]):
        return False
    return boxes[-1] - 1 not in closing_braces(text)


def in_full(match: re.Match[str]) -> str:
    """Return ``5000`` for ``5k``."""
    value = Decimal(match[2].replace(",", "")).scaleb(LETTERS[match[3]])
    return f"{match[1] or ''}{value:f}"


def counted(text: str) -> list[str]:
    """Return a string and, if it counts dozens, also the string with the number of pieces."""
    pieces = DOZEN.sub(lambda match: f"{12 * Decimal(match[1].replace(',', ''))}{match[2]}", text)
    return list(dict.fromkeys((text, pieces)))


def _same(one: str, other: str) -> bool:
    """Return whether formulas are equal, ignoring dollars and white space around operators."""
    one, other = (re.sub(r"\s+(?!\w)|(?<!\w)\s+", "", text).strip("$") for text in (one, other))
    return one == other


@lru_cache(maxsize=64)  # all completions of a prompt have one reference
def read(text: str, *, plain: bool = False) -> Reading:
    """Parse an answer with math-verify. With ``plain``, the reference is a plain number."""
    from math_verify import parse

    prepared = prepare(text, plain=plain)
    mode = "first_match" if BOX.search(prepared) else "any_match"  # a box outranks other text
    reading: Reading = parse(prepared, targets(), extraction_mode=mode, parsing_timeout=None)
    return reading


@cache
def targets() -> list[Any]:
    """Return math-verify's settings for extracting formulas and numbers.

    math-verify must not remove units, because it mistakes most letters, and ``bc``, for units.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    formulas = LatexExtractionConfig()
    normalization = replace(formulas.normalization_config, units=False)
    return [replace(formulas, normalization_config=normalization), ExprExtractionConfig()]


def read_stated(text: str) -> Reading:
    """Parse, with math-verify, the number that a string states."""
    from math_verify import ExprExtractionConfig, parse

    numbers = [ExprExtractionConfig()]
    text = rewritten(IMAGINARY_NUMBER.sub("", text))
    text = RELATED.sub(lambda match: match[1] or "", text)
    reading: Reading = parse(stated(text), numbers, parsing_timeout=None)
    return reading


def prepare(text: str, *, plain: bool = False) -> str:
    """Return an answer in notation that math-verify reads correctly.

    The result is a number, or a string with its mathematics in LaTeX environments.
    """
    text = rewritten(text)
    content = boxed(text)
    formula = only_formula(content or text, plain=plain) or content
    if value := number(formula, plain=False):
        return value  # math-verify parses LaTeX slowly
    marked = FORMULA.search(text)
    if formula and (content or not marked):
        return rf"\boxed{{{formula}}}"
    text = text if marked else mark_formulas(text)
    for each in map(formula_of, FORMULA.finditer(text)):
        text = text.replace(each, without_units(each, plain=plain))
    return text


def rejection(text: str, reference: Reading) -> str:
    """Return why completions cannot be compared with a reference; "" if they can.

    Expressions that math-verify cannot compute are compared as strings, and are not rejected.
    """
    if not FORMULA.search(text) and not BOX.search(text) and too_long(text):
        return f"its formula has more than {LONGEST_FORMULA} characters; put it in \\boxed{{}}"
    if moments(boxed(text) or text, whole=True):
        return ""
    if not reference:
        return "it has no number, no formula and no one-word answer"
    read_from = str(reference[-1])
    if all(isinstance(part, str) for part in reference) and (
        read_from.count("{") != read_from.count("}") or not re.search(r"\w", read_from)
    ):
        return f"math-verify cannot read {read_from!r}"
    single = "\n" not in text and "=" not in text and "answer" not in text.lower()
    if single and not BOX.search(text) and only_formula(text) is None:
        numbers = [match.group() for match in NUMBER.finditer(text)]
        if len(numbers) > 1 and not FORMULA.search(mark_formulas(text)):
            return f"it has several numbers: {', '.join(numbers)}; put the answer in \\boxed{{}}"
    return ""


if __name__ == "__main__":
    main()
