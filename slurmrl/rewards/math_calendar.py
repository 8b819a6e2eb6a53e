"""Compare dates and times of day, which math-verify reads as differences and ratios."""

from __future__ import annotations

import re

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

    :param whole: return a result only if the string is nothing but one date, or one time with "am"
        or "pm".
    :return: (year, month, day) of each date; the year is None if it is missing. (-1, hour, minute)
        of each time, with hours from 0 to 23.
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


def same(given: Moment, reference: Moment) -> bool:
    """Whether two moments agree. A year counts only if both have one."""
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
