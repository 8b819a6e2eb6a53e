"""Find the part of a completion that is its answer, as a formula that math-verify reads.

Numbers, units and symbols are rewritten in notation that math-verify reads.
"""

from __future__ import annotations

import re
import string
import unicodedata
from decimal import Decimal
from fractions import Fraction
from math import gcd

from slurmrl.rewards.math_excluded import with_unequal_signs

SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
ROOT = re.compile(r"√\s*(?:(\d+|[a-z])|\(([^()]*)\))|\\sqrt\s*\(([^()]*)\)")
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
LOOKS = re.compile(
    r"</?(?:b|i|u|em|p|br|li|ul|ol|h[1-6]|[a-z]\w{3,})>|\\(?:displaystyle|small|[lL]arge|[hH]uge|underline|bm|boldsymbol"
    r"|(?:text)?color\s*\{\w+\}|hspace\s*\{[^{}]*\}|checkmark"
    r"|(?:mathbf|mathit|bf)(?=\s*\{?\s*[-\\\d]))(?![A-Za-z])"
)
"""Pattern of tags as in ``<answer>``, and of commands that only change a formula's look."""
LIFTED = re.compile(r"<su([pb])>([^<>]{1,40})</su\1>")
QUANTITY = re.compile(r"\\(?:SI|qty|num)\s*\{([^{}]*)\}(?:\s*\{[^{}]*\})?")
ROMAN = re.compile(
    r"\\(?:mathrm|text|textrm|operatorname|rm)(?:\s*\{\s*(?:(e|i)|\\?(pi))\s*\}|\s+([ei])(?![A-Za-z]))"
)
EMPTY = re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}")
IMAGINARY = re.compile(r"(?<=\d)i(?![A-Za-z])")
"""Pattern of an ``i`` after a digit. math-verify needs a space between them."""
THOUSANDS = re.compile(
    r"(?<![\d.,_])\d{1,3}(?:(?:\\[,;:! ]|~|['’]|_(?=\d{3})|\s*\{\s*,\s*\}\s*)\d{3})+(?![\d_])"
)
REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALED = re.compile(
    rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?){SPACE}*(\\(?:text\w*|mathrm|mbox)\s*\{{)?{SPACE}*"
    rf"({'|'.join(SCALES)})s?(?![A-Za-z])"
)
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
"""Pattern of ``x \\equiv 2 \\pmod 5`` or ``2 (mod 5)``."""
WORDS = r"\\(?:text\w*|mathrm|mbox)\s*\{"
NEGATIVE = re.compile(
    rf"(?:(?<=[={{:#(] )|(?<=[={{:(])|(?<=\bis )|(?<=\b[Ii]t's )|\A)"
    rf"(?:{WORDS}\s*(?:minus|negative)\s*\}}|(?:minus|negative)\b)\s*(?=\\?\$?[\d.]|\\[dt]?frac)",
    re.IGNORECASE,
)
"""Pattern of the word "minus" as a sign, not as in the calculation ``10 minus 7``."""
POWERS = {"squared": "^2", "cubed": "^3", "factorial": "!"}
AFTER_NUMBER = re.compile(
    rf"(?<=\d)(?:\s*{WORDS}\s*({'|'.join(POWERS)})\s*\}}|\s+({'|'.join(POWERS)})\b(?!\s*[A-Za-z]))"
)

AND_A_HALF = re.compile(
    rf"(?<![\d.,/^])(\d+(?:,\d{{3}})*)(?:{SPACE}+|{SPACE}*({WORDS})\s*)and\s+a\s+"
    r"(half|quarter)\b(?(2)\s*\})(?!\s+of\b)"
)

CURRENCY = r"(?:\\?\$|[€£¥₹¢₽₩]|\b(?:USD|EUR|GBP|INR|JPY|CNY|RMB|CAD|AUD|CHF|Rs\.?)(?![A-Za-z]))"
LEADING_CURRENCY = re.compile(rf"\A([-+]?)\s*(?:US|HK|A|C)?{CURRENCY}\s*(?=[-\d.])")
WRAPPED = (
    r"(?:\\(?:text\w*|math(?:rm|bf|it|sf)|mbox|operatorname|unit|si)\s*"
    r"\{(?!\s*(?:is|are|if|for|where|or)\b)(?:[^{}]|\{[^{}]*\})*\}"
    r"|\{\s*\\rm[^{}]*\})"
)
FUNCTION = r"(?:arc)?(?:sin|cos|tan)h?|a(?:sin|cos|tan)h?|cot|csc|ln|log|lg|exp|gcd"
UPRIGHT = re.compile(rf"\\(?:mathrm|text|operatorname)\s*\{{\s*({FUNCTION})\s*\}}")
"""Pattern of a function's name in upright letters. Such a name is not a unit."""
LOGARITHM = re.compile(r"\\(?:(lg)|log\s*_\s*(?:e|\{\s*e\s*\}))(?![A-Za-z])")
"""Pattern of logarithms that math-verify does not read."""
LEADING_TEXT = re.compile(
    rf"\A(?:\\(?:text\w*|mbox|math(?:rm|bf))\s*\{{(?!\s*(?:not|neither|nor|{FUNCTION}|sec|lcm|Re|Im|[A-Za-z](?!\s+[a-z]))\b)"
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
"""Pattern of units at the end of an answer, or of the end of an ordinal number."""
VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")

AROUND = re.compile(rf"\A{SPACE}+|{SPACE}+\Z")
PARENTHESES = re.compile(r"\A(?:\((.*)\)|\{([^{}]*)\})\Z", re.DOTALL)
EUROPEAN = r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?: \d{3})+,\d+"
"""Pattern of a number whose only reading has a decimal comma or dots between thousands."""
DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
SCIENTIFIC = (
    rf"(?:(?P<digits>{DECIMAL})[eE]|(?:(?P<digit>\d(?:\.\d+)?)\s*(?:\\times|\\cdot|[x×*·⋅])\s*)?"
    r"10\s*(?:\^|\*\*)\s*\{?)(?P<power>[-+]?\d{1,3})\}?"
)
"""Pattern of ``1e-8``, ``6.02 \\times 10^{23}`` or ``10^3``."""
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
    """Return an answer with symbols, thousands, bases and residues in math-verify's notation."""
    text = LIFTED.sub(lambda match: f"{'^' if match[1] == 'p' else '_'}{{{match[2]}}}", text)
    text = LOOKS.sub(" ", QUANTITY.sub(r"\1 ", with_unequal_signs(text)))
    text = COMPOSED.sub(decomposed, text.strip()).translate(SYMBOLS)
    text = AFTER_NUMBER.sub(lambda match: POWERS[match[1] or match[2]], text)
    text = UPRIGHT.sub(r"\\\1 ", NEGATIVE.sub("-", text))
    text = LOGARITHM.sub(lambda match: r"\log_{10} " if match[1] else r"\ln ", text)
    text = ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text)
    text = EMPTY.sub(r"\\emptyset ", text)
    text = ROMAN.sub(lambda match: match[1] or match[3] or r"\pi ", text)
    text = THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), IMAGINARY.sub(" i", text))
    text = RESIDUE.sub(residue_symbol, REPEATING.sub(fraction, text))
    text = AND_A_HALF.sub(lambda match: f"{match[1]}.{5 if match[3] == 'half' else 25}", text)
    return SCALED.sub(scaled, BASED.sub(based_symbol, text))


def decomposed(match: re.Match[str]) -> str:
    """Return the plain characters for a composed character, such as ``½``, or raised digits."""
    plain = unicodedata.normalize("NFKC", match[0].strip())
    if match[1]:
        return f"^{{{plain}}}"
    if match[2]:
        return r"\frac{{{}}}{{{}}}".format(*plain.split("\N{FRACTION SLASH}"))
    return plain if match[3] is None else r"\cdot "


def number(text: str, *, plain: bool) -> str:
    """Return the decimal number, or fraction in lowest terms, if an answer consists of one.

    The answer may have a currency or units. The result is "" for any other answer. `without_units`
    explains ``plain``. With ``plain``, a comma may also separate decimals.
    """
    text = AROUND.sub("", text.replace("{,}", ","))
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|(?<!\*)(?!(?<=10)\*\*[-+]?\d)\*\*(?!\*)", "", text)
    text = LEADING_TEXT.sub("", text.strip().rstrip(".,;:"))
    text = LEADING_CURRENCY.sub(r"\1", text.strip())
    text = PARENTHESES.sub(r"\1\2", without_units(text, plain=plain)).strip()
    match = LITERAL.fullmatch(text)
    if match is None or (match["comma"] and not plain):
        return ""
    value = _value(match)
    if value and match["percent"]:  # math-verify reads 25/2% as 25
        over, _, under = value.partition("/")
        value = f"{Decimal(over) / int(under or 1)}%"
    return f"{match['sign'].strip('+')}{value}" if value else ""


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
    """Return an answer without the units at its end.

    With ``plain``, the answer is compared with a plain number, so no letter is a variable.
    Otherwise, a letter at the end is a variable if the answer has other variables. A letter without
    a space before it is also a variable if it is a capital or follows a brace.
    """
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
    r"""Return ``0.1\overline{6}`` as an exact fraction."""
    whole, fixed, cycle = repeating[1], repeating[2], repeating[3] or repeating[4]
    numerator = int(whole + fixed + cycle) - int(f"0{whole}{fixed}")
    value = Fraction(numerator, 10 ** len(fixed) * (10 ** len(cycle) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def residue_symbol(residue: re.Match[str]) -> str:
    """Return a symbol that is equal only for congruent numbers with the same modulus."""
    modulus = int(residue[2] or residue[3] or residue[4])
    return rf"\Upsilon_{{{int(residue[1]) % modulus if modulus else residue[1]}mod{modulus}}}"


def based_symbol(number: re.Match[str]) -> str:
    """Return a symbol that is equal only for the same digits in the same base.

    In base ten, return only the digits. math-verify would ignore the base.
    """
    digits = number[1] or number[2]
    base = re.sub(r"\\text|base|[^0-9a-z]", "", number[3].lower())
    base = str(NUMERALS.index(base)) if base in NUMERALS else base
    letters = re.findall("[A-Fa-f]", digits)
    if any(not base.isdigit() or int(digit, 16) >= int(base) for digit in letters):
        return number[0]  # 5C_2 means 5 times C_2, not digits in base 2
    return digits if base == "10" else rf"\Upsilon_{{{digits}base{base}}}"


FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\A\$([^$\n]+)\$\Z"
    # A dollar before a digit may be money. As in Pandoc, mathematics has no spaces just inside its
    # dollars and no digit after the last one.
    r"|(?<![\\\d$])\$(?=\S)([^$\n]*?)(?<=[^\s\\])\$(?!\d)",
    re.DOTALL,
)
LONGEST_FORMULA = 300
"""Maximum number of characters of a formula without an environment. (math-verify's parser takes
very long to reject longer strings.)"""
BOX = re.compile(r"\\(?:boxed|f(?:rame)?box)\s*(?:(\{)|((?:[^\s{}$\\]|\\[A-Za-z]+|\{[^{}]*\})+))")
SAME_ANSWER = re.compile(
    r"(?:(?!.*\b(?:not|wrong|incorrect|mistaken?)\b)[^.!?,;:\n]{0,60}\band\b)?"
    r"(?:(?!\s*\n\s*\n)[\s$,;+}\\]|\\[\])(\[,;:! ]|\\q?quad|\b(?:and|or)\b"
    r"|\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|[A-Za-z](?:_\{?\w+\}?)?\s*=)*"
)
"""Pattern between two boxes of one answer: separators, names as in ``x_2 =``, words and "and"."""
BRACKETED = re.compile(r"(?<!\\)\[\s*(\$[^$]+\$)\s*\][\s.*]*\Z")
"""Pattern of a formula in brackets at the end, as in answers of Geometry3K."""
FINAL = re.compile(r"final answer\b[^\n]{0,100}?\bis:?\s*\**[$\\\d-]", re.IGNORECASE)
"""Pattern of words before an answer that math-verify prefers to a box."""
NUMBERED = re.compile(r"[\s*_]*\d+(?:\.\d+)*[.):]\s")
"""Pattern of the start of a numbered heading."""
VALUE = re.compile(r"[\s*_$=-]*(?:\\|[€£¥₹]|US\$)?\.?(?:\d|(?<=\\))")
"""Pattern of the start of a number or a formula."""
STEP = re.compile(r"[\s*_]*(?:step|part|case)\s*\d", re.IGNORECASE)
"""Pattern of the start of a heading above a part of the work."""
TITLE = re.compile(r"\b(?:answer|solution|result|conclusion)\W*\Z", re.IGNORECASE)
"""Pattern of the end of a heading above the answer."""
QUOTED = r"\\(?:text\w*|mbox|math(?:rm|bf|it|sf)|operatorname|begin|end)\s*\{[^{}]*\}"
COMMAND = re.compile(r"\\[A-Za-z]+")
PROSE = re.compile(
    rf"(?<!\S)[(\"'*]*((?=[A-Za-z]*[a-z])(?=[A-Za-z]*[aeiouyAEIOUY])(?!(?:{FUNCTION}"
    r"|sec|sqrt|and|mod|lcm|det|min|max|lim|inf|infty"
    r"|infinity|percent|percentage|pct|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi"
    r")(?![A-Za-z]))[A-Za-z]{3,}|is|of|so|we|to|it|be|an|as|if|at|by)(?![^\s.,;:!?)\"'*-])"
)
"""Pattern of a word between spaces. A word has a small letter and a vowel, and is no math name."""
ARTICLE = re.compile(r"a|A|I")
ONE_WORD = re.compile(r"[A-Za-z]{3,}|no|No|NO")
TOKEN = re.compile(rf"(?:{QUOTED}|\S)+")
MIXED = re.compile(r"(?<![\w./^{}])(\d+)\s+(\d+)/(\d+)(?![\w/^]|\.\d)")
NUMBER = re.compile(r"(?<![\w.])-?(?:\\?\$ ?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?(?: ?\\?%)?")
NO_PROSE = re.compile(r"[+*/^_\\{}<>|]|(?<=\s)-\s")
"""Pattern of characters that make a string with words and a number a formula."""
CURRENCIES = re.compile("[€£¥₹]")
NAMED = re.compile(
    r"(?<![A-Za-z\\])(pi|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi)(?![A-Za-z])"
)
CALLED = re.compile(
    r"(?<![A-Za-z\\])((?:arc)?(?:sin|cos|tan)h?|cot|csc|sec|ln|log|exp)(?=\s*[(_]|\s+[\w\\])"
)
"""Pattern of a function without its backslash."""
POWER = re.compile(r"(?<=[\w)}])\s*\*\*\s*(-?\d+(?:\.\d+)?|[A-Za-z]|\([^()]*\))")
ALIGNMENT = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}|&|\\\\\s*\Z")
APPROXIMATELY = re.compile(
    r"\\(?:(?:thick)?approx(?:eq)?|simeq|doteq)(?![A-Za-z])|≈|≃|\A\s*(?:~|\\sim(?![A-Za-z]))"
)
OPERAND = r"[-(\[]*\\?\$?\d[\d,.]*%?[)\]]*"
CALCULATION = re.compile(
    rf"(?<![\w.]){OPERAND}(?:\s*(?:[-+*/^×÷·⋅–]|\\times|\\cdot|\\div|x(?=[\s\d]))\s*{OPERAND})+"
    r"|(?<![\w.])\(?\d[\d,.]*\)?\([-\d][^()]*\)"
    rf"|{OPERAND}\s*[+^×÷·]\s*(?:[A-Za-z]|\{{[^{{}}]*\}}?)|[A-Za-z)}}]\s*[+^×÷·]\s*{OPERAND}"
)
"""Pattern of operators between numbers, or between a number and a letter."""
WRITTEN = re.compile(rf"(?<![\w.,^])(?:{EUROPEAN}|{SCIENTIFIC})(?![.,]?\d)")
"""Pattern of numbers that math-verify does not read in prose."""
OPENING = re.compile(r"(?:(?<!\w)[\[(\"'`*“_>~+]+|(?<!\d):)(?=[-$\d.])|\b(?:US|HK|A|C)(?=\$)")
"""Pattern of characters before a number where math-verify expects a space."""


def marked_answer(text: str, marker: str) -> str | None:
    """Return the rest of the line after the last marker that is not a Markdown heading.

    Return None if there is no marker, or if the answer is in a box (in a later line, or before a
    heading).
    """
    before, separator, after = text.rpartition(marker)
    if not separator or BOX.search(after.partition("\n")[2]):
        return None
    lines = [each.partition("\n")[0].strip() for each in text.split(marker)[1:]]
    if marker.strip("#") or not is_heading(lines[-1]):
        return lines[-1]
    if BOX.search(before) or TITLE.search(lines[-1]):
        return None
    last = None if STEP.match(lines[-1]) else lines[-1]
    return next((line for line in reversed(lines) if not is_heading(line)), last)


def is_heading(line: str) -> bool:
    """Return whether the line after a marker is empty, or a title as in a Markdown heading."""
    if not line.strip() or NUMBERED.match(line):
        return True
    return is_prose(line) and not VALUE.match(line)


def boxed(text: str) -> str:
    """Return the content of the last box; "" if there is no box.

    The result includes boxes of the same answer: ``1, 2`` for ``\\boxed{1} and \\boxed{2}``.
    """
    contents: list[str] = []
    closed = closing_braces(text)
    at = 0
    while (box := BOX.search(text, at)) is not None:
        begin, at = at, box.end()
        if box[2]:
            content = box[2].rstrip(".,;:")
        elif (close := closed.get(at - 1)) is None:
            contents = []
            continue
        else:
            content, at = text[at:close], close + 1
        if not SAME_ANSWER.fullmatch(text, begin, box.start()):
            contents = []
        content = ALL_TEXT.sub(r"\1", AROUND.sub("", content))
        if content not in contents:
            contents.append(content)
    return "" if FINAL.search(text, at) else ", ".join(contents)


def closing_braces(text: str) -> dict[int, int]:
    """Map the index of each brace that opens a group to the index of the brace that closes it."""
    opened: list[int] = []
    closed: dict[int, int] = {}
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closed[opened.pop()] = brace.start()
    return closed


def stated(text: str) -> str:
    """Return a string without its calculations.

    A formula is replaced by the number after its last ``=``. Calculations in prose are removed,
    except fractions and powers of ten.
    """
    text = FORMULA.sub(lambda match: _last_number(formula_of(match)), text)
    text = FORMULA.sub(lambda match: _last_number(match[0].strip("$")), mark_formulas(text))
    text = APPROXIMATELY.sub(" = ", text.replace(r"\$", "$").replace("-$", "$-"))
    text = MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text)
    text = WRITTEN.sub(lambda match: f"{number(match[0], plain=True)} ", text)
    text = CALCULATION.sub(lambda match: f" {number(match[0].strip('()[]'), plain=True)} ", text)
    return re.sub(r"\s+(?=[.,;:!?](?:\s|\Z))", "", OPENING.sub(" ", text))


def formula_of(match: re.Match[str]) -> str:
    """Return the formula in a match of `FORMULA`, without its delimiters."""
    return "".join(filter(None, match.groups()))


def _last_number(formula: str) -> str:
    """Return the number after the last ``=``, before ``\\approx`` if there is one."""
    for part in APPROXIMATELY.split(ALIGNMENT.sub(" ", formula)):
        if value := number(re.split(r"(?<![<>!\\])=", part)[-1], plain=True):
            return f" {value} "
    return " "


def only_formula(text: str, *, plain: bool = False) -> str | None:
    """Return the only formula, number or word of an answer, which may have prose around it.

    The result is None if the answer has none of these, or several. With ``plain``, the answer is
    compared with a plain number.
    """
    text = text.strip().removeprefix("=")
    if FORMULA.search(text):
        return the_only([formula_of(match) for match in FORMULA.finditer(text)])
    if value := number(text, plain=plain):
        return value.replace("%", r"\%")
    text = CURRENCIES.sub("", text).strip().strip("*").rstrip(".,;:").strip()
    if ONE_WORD.fullmatch(text) and (is_prose(text) or len(text) == 2):
        return rf"\text{{{text}}}"
    text = without_units(MIXED.sub(r"\1\\frac{\2}{\3}", text), plain=plain)
    several_lines = "\n" in text and r"\begin" not in text
    if not several_lines and not is_prose(bare(text)):
        return latex(text) if len(text) <= LONGEST_FORMULA else None
    formulas = [formula_of(match) for match in FORMULA.finditer(mark_formulas(text))]
    if formulas or NO_PROSE.search(NUMBER.sub("", text)):
        return the_only(formulas)
    return the_only([match.group() for match in NUMBER.finditer(text)])


def latex(formula: str) -> str:
    """Return a formula with names, functions and powers in LaTeX: ``x^{2}+\\ln (y)``."""
    formula = POWER.sub(r"^{\1}", formula)
    return NAMED.sub(r"\\\1", CALLED.sub(r"\\\1", formula))


def too_long(text: str) -> bool:
    """Return whether an answer on one line is too long for a formula in plain text."""
    return len(text) > LONGEST_FORMULA and "\n" not in text and not is_prose(bare(text))


def the_only(formulas: list[str]) -> str | None:
    return formulas[0].strip() if len(formulas) == 1 else None


def is_prose(text: str) -> bool:
    """Return whether a string has a word. Products of adjacent letters (``abc``) do not count."""
    words = ("".join(sorted(word.lower())) for word in PROSE.findall(text))
    return any(word not in string.ascii_lowercase or len(word) < 3 for word in words)


def bare(text: str) -> str:
    """Return a string without LaTeX's quoted words and commands."""
    return COMMAND.sub(" ", re.sub(QUOTED, " ", text))


def mark_formulas(text: str) -> str:
    """Put dollars around each formula with a LaTeX command in prose; remove too long formulas."""
    result: list[str] = []
    run: list[re.Match[str]] = []
    end = 0
    for match in [*TOKEN.finditer(text), None]:
        if match and not is_prose(bare(match[0])) and not ARTICLE.fullmatch(match[0]):
            run.append(match)
            continue
        if run:
            begin = run[0].start()
            formula = text[begin : run[-1].end()].rstrip(".,;:? ")
            if COMMAND.search(formula):
                short = len(formula) <= LONGEST_FORMULA
                result += [text[end:begin], f"${formula}$" if short else ""]
                end = begin + len(formula)
            run = []
    return "".join([*result, text[end:]])
