"""Numbers, units and symbols that math-verify drops or does not know, in notation that it reads."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from math import gcd

SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
ROOT = re.compile(r"√\s*(\d+|[a-z])")
SYMBOLS = str.maketrans(
    {
        "∞": r"\infty ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "℃": r"^\circ C",
        "℉": r"^\circ F",
        "≡": r"\equiv ",
        "∅": r"\emptyset ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "−": "-",
        "\u00a0": " ",
        "\u202f": " ",
    }
)
"""With ROOT: characters that math-verify does not know."""
ROMAN = re.compile(r"\\(?:mathrm|text|textrm|operatorname|rm)\s*\{\s*(?:(e|i)|\\?(pi))\s*\}")
EMPTY = re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}")
IMAGINARY = re.compile(r"(?<=\d)i(?![A-Za-z])")
"""math-verify reads numbers as complex only if it finds a separate ``i``."""
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|~|\s*\{\s*,\s*\}\s*)\d{3})+(?!\d)")
REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALED = re.compile(
    rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?){SPACE}*(\\(?:text\w*|mathrm|mbox)\s*\{{)?{SPACE}*"
    rf"({'|'.join(SCALES)})s?(?![A-Za-z])"
)
"""``1.5 million``, perhaps inside ``\\text``."""
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

CURRENCY = r"(?:\\?\$|[€£¥₹¢₽₩]|\b(?:USD|EUR|GBP|INR|JPY|CNY|RMB|CAD|AUD|CHF|Rs\.?)(?![A-Za-z]))"
LEADING_CURRENCY = re.compile(rf"\A([-+]?)\s*(?:US|HK|A|C)?{CURRENCY}\s*(?=[-\d.])")
WRAPPED = (
    r"(?:\\(?:text\w*|math(?:rm|bf|it|sf)|mbox|operatorname|unit|si)\s*\{(?:[^{}]|\{[^{}]*\})*\}"
    r"|\{\s*\\rm[^{}]*\})"
)
LEADING_TEXT = re.compile(rf"\A\\(?:text|mbox)\s*\{{[^{{}}\d]*\}}{SPACE}*(?=[-\d.])")
ALL_TEXT = re.compile(r"\A\\(?:text\w*|math(?:rm|bf)|mbox)\s*\{([^{}]*\d[^{}]*)\}\Z")
DEGREES = (
    r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)"
    r"(?:\s*(?:[CFK]|\\(?:text\w*|mathrm)\s*\{\s*[CFK]\s*\}))?"
)
UNIT = (
    r"(?:[kcdmunpMGTµμ]?(?:m|g|s|l|L|N|J|W|V|A|F|H|K|T|Hz|Pa|eV|Wh|mol|cal|bar|rad|bps|Ω)|[KMGT]?B"
    r"|in|ft|yd|mi|oz|lbs?|pt|qt|gal|min|hrs?|h|d|yrs?|wks?|mph|kmp?h|kph|rpm|bpm|fps|psi|atm|dB"
    rf"|ppm|ha|AU|Nm|deg|C|sq|cu|cc|units?|[kM]?\\(?:ohm|Omega|celsius)|\\mu{SPACE}*(?:[mgslL]|{WRAPPED})|{DEGREES}|{CURRENCY})(?![A-Za-z])"
)
EXPONENT = r"(?:\s*(?:\^|\*\*)\s*(?:\{\s*-?\d+\s*\}|-?\d+)|[²³]|(?<=[a-z])[23](?!\d))?"
TERM = (
    rf"(?:\\[dt]?frac\s*\{{\s*{WRAPPED}{EXPONENT}\s*\}}\s*\{{\s*{WRAPPED}{EXPONENT}\s*\}}"
    rf"|(?:{WRAPPED}|{UNIT}){EXPONENT})"
)
BETWEEN = rf"{SPACE}*(?:/|\\cdot|[·⋅*]|\\times|per(?![A-Za-z])|{SPACE}|(?=\\)){SPACE}*"
AFTER = rf"(?:(?<=[\d}})%.])|(?<=\\pi)(?={SPACE}+[a-z]{{2}}))"
UNITS = re.compile(rf"{AFTER}({SPACE}*){TERM}(?:{BETWEEN}{TERM})*{SPACE}*\Z")
"""Units at the end of an answer."""
VARIABLE = re.compile(r"[A-Z]")
"""A unit that may be a variable if no space separates it from its number: ``5N``."""

PARENTHESES = re.compile(r"\A\((.*)\)\Z", re.DOTALL)
EUROPEAN = r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?: \d{3})+,\d+"
"""A number with a decimal comma or with dots between thousands, and no other meaning."""
DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
SCIENTIFIC = (
    rf"(?:(?P<digits>{DECIMAL})[eE]|(?:(?P<digit>\d(?:\.\d+)?)\s*(?:\\times|\\cdot|[x×*·⋅])\s*)?"
    r"10\s*(?:\^|\*\*)\s*\{?)(?P<power>[-+]?\d{1,3})\}?"
)
"""``1e-8``, ``6.02 \\times 10^{23}`` or ``10^3``."""
LITERAL = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<plain>[1-9]\d{{0,2}}(?:[ ,]\d{{3}})+(?:\.\d+)?|{DECIMAL})"
    rf"|(?P<comma>{EUROPEAN}|\d+,\d+)"
    rf"|{SCIENTIFIC}"
    r"|(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    r"|\\[dtc]?frac\s*(?:\{\s*(?P<n>-?\d+)\s*\}\s*\{\s*(?P<d>\d+)\s*\}|(?P<n1>\d)(?P<d1>\d)))"
    r"(?P<percent>\s*\\?%)?"
)


def rewritten(text: str) -> str:
    """An answer with its symbols, thousands, bases, residues and the like in notation that
    math-verify reads."""
    text = ROOT.sub(r"\\sqrt{\1}", text.strip().translate(SYMBOLS))
    text = EMPTY.sub(r"\\emptyset ", text)
    text = ROMAN.sub(lambda match: match[1] or r"\pi ", text)
    text = THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), IMAGINARY.sub(" i", text))
    text = RESIDUE.sub(residue_symbol, REPEATING.sub(fraction, text))
    return SCALED.sub(scaled, BASED.sub(based_symbol, text))


def number(text: str, *, plain: bool) -> str:
    """The decimal number or fraction in lowest terms that an answer consists of, perhaps with a
    currency or units; "" if it is anything else. ``plain``: as in `without_units`; then a comma
    may also separate decimals."""
    text = text.replace("{,}", ",")
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|(?<!\*)(?!(?<=10)\*\*[-+]?\d)\*\*(?!\*)", "", text)
    text = LEADING_TEXT.sub("", text.strip().rstrip(".,;:"))
    text = LEADING_CURRENCY.sub(r"\1", text.strip())
    text = PARENTHESES.sub(r"\1", without_units(text, plain=plain)).strip()
    match = LITERAL.fullmatch(text)
    if match is None or (match["comma"] and not plain):
        return ""
    value = _value(match)
    return f"{match['sign'].strip('+')}{value}{'%' if match['percent'] else ''}" if value else ""


def _value(literal: re.Match[str]) -> str:
    if literal["plain"]:
        return re.sub("[ ,]", "", literal["plain"])
    if literal["comma"]:
        return re.sub("[ .]", "", literal["comma"]).replace(",", ".")
    if literal["power"]:
        digits = literal["digits"] or literal["digit"] or "1"
        return format(Decimal(digits).scaleb(int(literal["power"])), "f")
    over, under = (
        int(literal[a] or literal[b] or literal[c])
        for a, b, c in (("over", "n", "n1"), ("under", "d", "d1"))
    )
    return f"{over}/{under}" if under > 1 and gcd(over, under) == 1 else ""


def without_units(text: str, *, plain: bool) -> str:
    """An answer without the units at its end. ``plain``: it is compared with a plain number, so
    that no letter is a variable."""
    match = UNITS.search(text)
    if match is None or (
        not plain and not match[1] and VARIABLE.fullmatch(text[match.start() :].strip())
    ):
        return text
    return text[: match.start()]


def scaled(match: re.Match[str]) -> str:
    value = Decimal(match[1].replace(",", "")).scaleb(SCALES[match[3]])
    return f"{value:f}" + (f" {match[2]}" if match[2] else "")


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
