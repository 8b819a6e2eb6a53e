"""The process that runs math-verify: one JSON request a line in, one JSON reply a line out.

It is started by path, so it imports nothing of slurmrl. Its parent enforces time limits by killing
it: math-verify's own limits use SIGALRM, which does not interrupt long operations on big numbers.

math-verify reads an answer as mathematics only inside a LaTeX environment, and takes single numbers
out of anything else: the 2 out of ``2\\sqrt{3}``. So `prepare` puts answers in environments. It
also rewrites notation that math-verify drops or does not know: bases, residues, repeating decimals.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import sys
from fractions import Fraction
from typing import Any

PR_SET_PDEATHSIG = 1

FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\A\$([^$\n]+)\$\Z"
    # A dollar before a digit may be money. As in Pandoc, mathematics has no spaces just inside its
    # dollars and no digit after the last one.
    r"|(?<![\\\d$])\$(?=\S)([^$\n]*?)(?<=[^\s\\])\$(?!\d)",
    re.DOTALL,
)
LONGEST_FORMULA = 300
"""Longest text without an environment that is read as one formula: math-verify's parser needs very
long to reject longer text."""
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
QUOTED = r"\\(?:text\w*|mbox|mathrm|mathbf|operatorname|begin|end)\s*\{[^{}]*\}"
COMMAND = re.compile(r"\\[A-Za-z]+")
PROSE = re.compile(
    r"\b(?!(?:a?(?:sin|cos|tan)h?|arc(?:sin|cos|tan)|cot|sec|csc|log|exp|sqrt|and|mod|gcd|lcm|det"
    r"|min|max|lim|inf|infty|infinity|percent|percentage|pct|alpha|beta|gamma|delta|theta|lambda"
    r"|sigma|omega|phi)\b)[A-Za-z]{3,}\b"
    r"|(?<!\S)(?:is|of|so|we|to|it|be|an|as|if|at|by)(?!\S)"
)
"""A word that is not a mathematical name."""
ARTICLE = re.compile(r"a|A|I")
ONE_WORD = re.compile(r"[A-Za-z]{3,}|no|No|NO")
TOKEN = re.compile(rf"(?:{QUOTED}|\S)+")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|~|\{,\})\d{3})+(?!\d)")
SPACED_THOUSANDS = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?")
SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]([-+]?\d+)")
MIXED = re.compile(r"(?<![\w./^{}])(\d+)\s+(\d+)/(\d+)(?![\w/^.])")
NUMBER = re.compile(r"(?<![\w.])-?(?:\\?\$ ?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?(?: ?\\?%)?")
CURRENCIES = re.compile("[€£¥₹]")
NAMED = re.compile(
    r"(?<![A-Za-z\\])(pi|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi)(?![A-Za-z])"
)
SYMBOLS = str.maketrans(
    {
        "∞": r"\infty ",
        "°": r"^\circ ",
        "≡": r"\equiv ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
    }
)
ROOT = re.compile(r"√\s*(\d+|[a-z])")
"""With SYMBOLS: characters that math-verify does not know."""
REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")
DIGITS = r"(?:\d[\dA-F]*|\d[\da-f]*\d|[A-F][\dA-F]+)(?:\.[\dA-F]+)?"
GROUP = r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
BASED = re.compile(
    rf"(?<![\w\\.^])(?:\(\s*({DIGITS})\s*\)|({DIGITS}))\s*_\s*([^\W_]|(?:\\text\s*)?{GROUP})"
)
NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
RESIDUE = re.compile(
    r"(?:[A-Za-z]\s*\\equiv\s*|(?<![\w.]))(-?\d+)\s*"
    r"(?:\\pmod\s*(?:\{\s*(\d+)\s*\}|(\d+))|\(\s*(?:\\[bp]?mod|\\text\s*\{\s*mod\s*\}|mod)\s*(\d+)\s*\))"
)
"""``x \\equiv 2 \\pmod 5`` or ``2 (mod 5)``."""


def main() -> None:
    """Answer until standard input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    import math_verify

    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        reference = read(request["reference"])
        reply: dict[str, Any] = {"refused": refusal(request["reference"], reference)}
        if "completion" in request and not reply["refused"]:
            reply["correct"] = correct(request, reference)
        replies.write(json.dumps(reply) + "\n")


def correct(request: dict[str, str], reference: list[Any]) -> bool:
    """Whether the completion equals the reference. A residue also equals the same number without
    the modulus."""
    from math_verify import verify

    readings, completion = [reference], request["completion"]
    if RESIDUE.search(request["reference"]):
        readings.append(read(RESIDUE.sub(r"\1", request["reference"])))
    else:
        completion = RESIDUE.sub(r"\1", completion)
    answer = read(completion)
    # A set equals a relation: (2, oo) and x > 2.
    options: dict[str, Any] = {"timeout_seconds": None, "allow_set_relation_comp": True}
    return any(verify(reading, answer, **options) for reading in readings)


def read(text: str) -> list[Any]:
    """math-verify's reading of an answer: expressions, and the text that they were read from."""
    from math_verify import parse

    prepared = prepare(text)
    mode = "first_match" if BOX.search(prepared) else "any_match"  # nothing outside a box counts
    reading: list[Any] = parse(prepared, extraction_mode=mode, parsing_timeout=None)
    return reading


def refusal(text: str, reference: list[Any]) -> str:
    """Why no completion can be compared with a reference; "" if one can. What math-verify cannot
    calculate with is compared as text."""
    if not FORMULA.search(text) and not BOX.search(text) and too_long(text):
        return f"its formula has more than {LONGEST_FORMULA} characters; put it in \\boxed{{}}"
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


def prepare(text: str) -> str:
    """An answer in notation that math-verify reads correctly, with its mathematics in LaTeX
    environments."""
    text = ROOT.sub(r"\\sqrt{\1}", text.strip().translate(SYMBOLS))
    text = THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = RESIDUE.sub(residue_symbol, REPEATING.sub(fraction, text))
    text = BASED.sub(based_symbol, text)
    if BOX.search(text):
        return replace_boxes(text)
    if FORMULA.search(text):
        return text
    formula = only_formula(text)
    return rf"\boxed{{{formula}}}" if formula else mark_formulas(text)


def only_formula(text: str) -> str | None:
    """The only formula, number or word of an answer, perhaps with prose around it; "" for nothing,
    None if there are several."""
    if FORMULA.search(text):
        return the_only(["".join(groups) for groups in FORMULA.findall(text)])
    text = CURRENCIES.sub("", text).strip().strip("*").rstrip(".,;:").strip()
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    if ONE_WORD.fullmatch(text) and (PROSE.fullmatch(text) or len(text) == 2):
        return rf"\text{{{text}}}"
    if SPACED_THOUSANDS.fullmatch(text):
        return text.replace(" ", "")
    if SCIENTIFIC.fullmatch(text):
        return SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    several_lines = "\n" in text and r"\begin" not in text
    if not several_lines and not PROSE.search(bare(text)):
        return NAMED.sub(r"\\\1", text) if len(text) <= LONGEST_FORMULA else None
    formulas = ["".join(groups) for groups in FORMULA.findall(mark_formulas(text))]
    return the_only(formulas or [match.group() for match in NUMBER.finditer(text)])


def fraction(repeating: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as an exact fraction."""
    whole, fixed, cycle = repeating[1], repeating[2], repeating[3] or repeating[4]
    numerator = int(whole + fixed + cycle) - int(f"0{whole}{fixed}")
    value = Fraction(numerator, 10 ** len(fixed) * (10 ** len(cycle) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def residue_symbol(residue: re.Match[str]) -> str:
    """A symbol that only congruent numbers with the same modulus share."""
    modulus = int(residue[2] or residue[3] or residue[4])
    return rf"\Upsilon_{{{int(residue[1]) % modulus if modulus else residue[1]}mod{modulus}}}"


def based_symbol(number: re.Match[str]) -> str:
    """A symbol that only the same digits in the same base share; digits alone in base ten.
    math-verify itself drops the base."""
    digits = number[1] or number[2]
    base = re.sub(r"\\text|base|[^0-9a-z]", "", number[3].lower())
    base = str(NUMERALS.index(base)) if base in NUMERALS else base
    if any(
        not base.isdigit() or int(digit, 16) >= int(base)
        for digit in re.findall("[A-Fa-f]", digits)
    ):
        return number[0]  # a product with an indexed letter: 5C_2
    return digits if base == "10" else rf"\Upsilon_{{{digits}base{base}}}"


def too_long(text: str) -> bool:
    """Whether an answer on one line is longer than a formula without an environment may be."""
    return len(text) > LONGEST_FORMULA and "\n" not in text and not PROSE.search(bare(text))


def the_only(formulas: list[str]) -> str | None:
    return formulas[0].strip() if len(formulas) == 1 else None


def bare(text: str) -> str:
    """A text without LaTeX's quoted words and commands."""
    return COMMAND.sub(" ", re.sub(QUOTED, " ", text))


def mark_formulas(text: str) -> str:
    """Prose with dollars around each run of tokens that has a LaTeX command. Runs that are too long
    are left out."""
    result: list[str] = []
    run: list[re.Match[str]] = []
    end = 0
    for match in [*TOKEN.finditer(text), None]:
        if match and not PROSE.search(bare(match[0])) and not ARTICLE.fullmatch(match[0]):
            run.append(match)
            continue
        if run:
            begin = run[0].start()
            formula = text[begin : run[-1].end()].rstrip(".,;:?")
            if COMMAND.search(formula):
                short = len(formula) <= LONGEST_FORMULA
                result += [text[end:begin], f"${formula}$" if short else ""]
                end = begin + len(formula)
            run = []
    return "".join([*result, text[end:]])


def replace_boxes(text: str) -> str:
    """Reduce each outermost box to its only formula. A box that has several, or no end, stays as it
    is."""
    result, at = [], 0
    while (box := BOX.search(text, at)) is not None:
        depth, end = 1, box.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth:
            break
        content = text[box.end() : end - 1]
        result += [text[at : box.start()], rf"\boxed{{{only_formula(content) or content}}}"]
        at = end
    return "".join([*result, text[at:]])


if __name__ == "__main__":
    main()
