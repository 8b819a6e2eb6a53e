"""The text of a site profile."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from slurmrl.config.source import KeyPath
from slurmrl.desk.init.questions import Question

WIDTH: Final = 100
_PLAIN: Final = re.compile(r"(?:[A-Za-z]|~?/)[A-Za-z0-9_./-]*")
_WORDS: Final = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""What YAML of some version does not read as a text."""
HEAD: Final = """\
# Site profile of slurmrl, by `slurmrl init site`{of}.
# Each setting holds for all of your configurations that do not set it themselves; `slurmrl plan`
# shows which ones. `root` and all settings of `cluster` are allowed here.
"""
UNSET: Final = "..."
"""In place of a value that was left out."""


def render(
    questions: Sequence[Question], values: Mapping[KeyPath, Any], *, cluster: str = ""
) -> str:
    """The profile with a comment at each setting; one without a value is a comment too."""
    lines = [HEAD.format(of=f" for {cluster}" if cluster else "")]
    opened: list[KeyPath] = []
    order = sorted(questions, key=lambda one: (one.key[0] != "root", len(one.key)))
    for question in order:
        for depth in range(1, len(question.key)):
            section = question.key[:depth]
            if section not in opened:
                opened.append(section)
                used = any(key[:depth] == section for key in values)
                lines.append(_line(section, "", is_set=used))
        lines += _comment(question)
        is_set = question.key in values
        shown = _value(values[question.key]) if is_set else UNSET
        lines.append(_line(question.key, f" {shown}", is_set=is_set))
        if question.key == ("root",):
            lines.append("")
    return "\n".join(lines) + "\n"


def _line(key: KeyPath, value: str, *, is_set: bool) -> str:
    indent = "  " * (len(key) - 1)
    return f"{indent}{'' if is_set else '# '}{key[-1]}:{value}"


def _comment(question: Question) -> Iterator[str]:
    prefix = "  " * (len(question.key) - 1) + "# "
    yield from textwrap.wrap(
        question.about,
        WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_on_hyphens=False,
    )


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
