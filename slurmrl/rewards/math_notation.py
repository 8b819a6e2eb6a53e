"""Numbers, units and symbols that math-verify drops or does not know, in notation that it reads."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from math import gcd

SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
ROOT = re.compile(r"√\s*(?:(\d+|[a-z])|\(([^()]*)\))")
SYMBOLS = str.maketrans(
    {
        "∞": r"\infty ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "℃": r"^\circ C",
        "℉": r"^\circ F",
        "≡": r"\equiv ",
        "∅": r"\emptyset ",
        "π": r"\pi ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "ℝ": r"\mathbb{R}",
        "−": "-",
        "–": "-",
        "\u00a0": " ",
        "\u202f": " ",
    }
)
COMPOSED = re.compile(r"([⁰¹²³⁴-⁹⁺⁻]+)|([¼-¾⅐-⅞])|[！-～]|(?<=[\w)}])(\s?)[·⋅]")
"""With ROOT: characters that math-verify does not know."""
LOOKS = re.compile(
    r"</?[a-z]\w{3,}>|\\(?:displaystyle|small|[lL]arge|[hH]uge|underline|bm|boldsymbol"
    r"|(?:text)?color\s*\{\w+\})(?![A-Za-z])"
)
"""Tags as in ``<answer>``, and commands that change only how a formula looks."""
ROMAN = re.compile(
    r"\\(?:mathrm|text|textrm|operatorname|rm)(?:\s*\{\s*(?:(e|i)|\\?(pi))\s*\}|\s+([ei])(?![A-Za-z]))"
)
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
    r"(?:\\(?:text\w*|math(?:rm|bf|it|sf)|mbox|operatorname|unit|si)\s*"
    r"\{(?!\s*(?:is|are|if|for|where|or)\b)(?:[^{}]|\{[^{}]*\})*\}"
    r"|\{\s*\\rm[^{}]*\})"
)
FUNCTION = r"(?:arc)?(?:sin|cos|tan)h?|a(?:sin|cos|tan)h?|cot|csc|ln|log|lg|exp|gcd"
UPRIGHT = re.compile(rf"\\(?:mathrm|text|operatorname)\s*\{{\s*({FUNCTION})\s*\}}")
"""The name of a function in upright letters, which is no unit."""
LEADING_TEXT = re.compile(
    rf"\A(?:\\(?:text\w*|mbox|math(?:rm|bf))\s*\{{(?!\s*(?:not|neither|nor|{FUNCTION}|sec|lcm|Re|Im|[A-Za-z])\b)"
    rf"[^{{}}\d]*\}}|\([A-J]\)){SPACE}*"
    r"(?=[-\d.]|\\[dt]?frac)"
)
ALL_TEXT = re.compile(r"\A\\(?:text\w*|math(?:rm|bf)|mbox)\s*\{([^{}]*\d[^{}]*)\}\Z")
DEGREES = (
    r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)"
    r"(?:\s*(?:[CFK]|\\(?:text\w*|mathrm)\s*\{\s*[CFK]\s*\}))?"
)
UNIT = (
    r"(?:[kcdmunpMGTµμ]?(?:m|g|s|l|L|N|J|W|V|A|F|H|K|T|Hz|Pa|eV|Wh|mol|cal|bar|rad|bps|Ω)|[KMGT]?B"
    r"|K[gGmM]|in|ft|yd|mi|oz|lbs?|pt|qt|gal|min|secs?|hrs?|h|d|st|nd|rd|th|yrs?|wks?|mph|kmp?h|kph|rpm|bpm|fps|psi|atm|dB"
    rf"|ppm|ha|AU|Nm|deg|C|sq|cu|cc|units?|[kM]?\\(?:ohm|Omega|celsius)|\\mu{SPACE}*(?:[mgslL]|{WRAPPED})|{DEGREES}|{CURRENCY})(?![A-Za-z])"
)
EXPONENT = r"(?:\s*(?:\^|\*\*)\s*(?:\{\s*-?\d+\s*\}|-?\d+)|(?<=[a-z])[23](?!\d))?"
TERM = (
    rf"(?:\\[dt]?frac\s*\{{\s*{WRAPPED}{EXPONENT}\s*\}}\s*\{{\s*{WRAPPED}{EXPONENT}\s*\}}"
    rf"|(?:{WRAPPED}|{UNIT}){EXPONENT}|[a-z]{{4,}}(?=/)|(?<=/)(?:day|[a-z]{{4,}}))"
)
ORDINAL = r"\^\s*(?:\{\s*)?(?:\\(?:text\w*|mathrm)\s*\{)?\s*(?:st|nd|rd|th)\s*\}*"
BETWEEN = rf"{SPACE}*(?:/|\\cdot|[⋅*]|\\times|per(?![A-Za-z])|{SPACE}|(?=\\)){SPACE}*"
AFTER = (
    rf"(?:(?<=[\d}})%.])|(?<=\\pi)(?={SPACE}+[a-z]{{2}}|{SPACE}*\\text)"
    rf"|(?<=(?<![A-Za-z\\])[A-Za-z])(?={SPACE}*\\(?:text|mbox)))"
)
UNITS = re.compile(
    rf"{AFTER}({SPACE}*)(?:/{SPACE}*(?=\\text|\\mathrm|[a-z]{{3}}))?(?:{ORDINAL}|{TERM}(?:{BETWEEN}{TERM})*)"
    rf"{SPACE}*\Z"
)
"""Units at the end of an answer, or the end of an ordinal number."""
VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")

AROUND = re.compile(rf"\A{SPACE}+|{SPACE}+\Z")
PARENTHESES = re.compile(r"\A(?:\((.*)\)|\{([^{}]*)\})\Z", re.DOTALL)
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
    r"|(?:(?P<whole>\d+)\s)?\s*(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    r"|(?P<before>\d+)?\s*\\[dtc]?frac\s*(?:\{\s*(?P<n>-?\d+)\s*\}\s*\{\s*(?P<d>\d+)\s*\}"
    r"|(?P<n1>\d)(?P<d1>\d)))"
    r"(?P<percent>\s*\\?%)?"
)


def rewritten(text: str) -> str:
    """An answer with its symbols, thousands, bases, residues and the like in notation that
    math-verify reads."""
    text = COMPOSED.sub(decomposed, LOOKS.sub(" ", text).strip()).translate(SYMBOLS)
    text = UPRIGHT.sub(r"\\\1 ", text)
    text = ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = EMPTY.sub(r"\\emptyset ", text)
    text = ROMAN.sub(lambda match: match[1] or match[3] or r"\pi ", text)
    text = THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), IMAGINARY.sub(" i", text))
    text = RESIDUE.sub(residue_symbol, REPEATING.sub(fraction, text))
    return SCALED.sub(scaled, BASED.sub(based_symbol, text))


def decomposed(match: re.Match[str]) -> str:
    """A character for several, such as ``½``, or digits above the line, by the plain ones."""
    plain = unicodedata.normalize("NFKC", match[0].strip())
    if match[1]:
        return f"^{{{plain}}}"
    if match[2]:
        return r"\frac{{{}}}{{{}}}".format(*plain.split("\N{FRACTION SLASH}"))
    return plain if match[3] is None else r"\cdot "


def number(text: str, *, plain: bool) -> str:
    """The decimal number or fraction in lowest terms that an answer consists of, perhaps with a
    currency or units; "" if it is anything else. ``plain``: as in `without_units`; then a comma
    may also separate decimals."""
    text = AROUND.sub("", text.replace("{,}", ","))
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|(?<!\*)(?!(?<=10)\*\*[-+]?\d)\*\*(?!\*)", "", text)
    text = LEADING_TEXT.sub("", text.strip().rstrip(".,;:"))
    text = LEADING_CURRENCY.sub(r"\1", text.strip())
    text = PARENTHESES.sub(r"\1\2", without_units(text, plain=plain)).strip()
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
    whole = int(literal["whole"] or literal["before"] or 0)
    return f"{over + whole * under}/{under}" if under > 1 and gcd(over, under) == 1 else ""


def without_units(text: str, *, plain: bool) -> str:
    """An answer without the units at its end. ``plain``: it is compared with a plain number, so
    that no letter is a variable. Elsewhere a letter may be one if there are others, or if no space
    separates it from its number and it is a capital or follows a brace."""
    match = UNITS.search(text)
    if match is None:
        return text
    before, unit = text[: match.start()], text[match.start() :].strip()
    if plain or unit.startswith(("\\", "^")):
        return before
    glued = len(unit) == 1 and not match[1] and (unit.isupper() or before[-1] == "}")
    return text if glued or VARIABLE.search(before.rpartition("=")[2]) else before


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
