"""The table of families in docs/models.md, from the results that scripts/models keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

KEPT: Final = Path(__file__).with_name("models.json")
BEGIN: Final = "<!-- Written by scripts/make-docs from the results of scripts/models. -->"
END: Final = "<!-- End of the results. -->"
SHOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "logits": ("load", "logits"),
    "generation": ("generation",),
    "SFT": ("sft", "export"),
    "GRPO": ("grpo",),
    "resume": ("resume",),
    "LoRA": ("lora",),
    "t2": ("t2",),
    "megatron": ("megatron",),
    "SGLang": ("sglang",),
    "vLLM": ("vllm",),
    "built-in": ("builtin",),
}
"""Columns of the table, with the checks that each of them needs."""


def page(text: str) -> str:
    """Return docs/models.md with the table of the kept results.

    Raises ValueError if the page has no place for it.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/models.md lacks the lines '{BEGIN}' and '{END}'")
    return "\n".join([before + begin, "", *_table(json.loads(KEPT.read_text())), "", end + after])


def _table(kept: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in kept["versions"].items())
    families: Mapping[str, Mapping[str, str]] = kept["families"]
    notes: dict[str, int] = {}
    rows = [_row(family, results, notes) for family, results in families.items()]
    passed = sum(all(not results.get(each, "?") for each in CORE) for results in families.values())
    return [
        f"{kept['date']}: {passed} of {len(families)} families pass the first five columns.",
        f"Versions: {versions}.",
        "",
        "| " + " | ".join(["`model_type`", *SHOWN]) + " |",
        "|---" * (1 + len(SHOWN)) + "|",
        *rows,
        "",
        "Reasons:",
        "",
        *(f"{number}. {reason}" for reason, number in notes.items()),
    ]


CORE: Final = tuple(check for checks in list(SHOWN.values())[:5] for check in checks)
"""Checks of the columns that need no further engine or setting."""


def _row(family: str, results: Mapping[str, str], notes: dict[str, int]) -> str:
    cells = [_cell(family, [results.get(each) for each in checks], notes)
             for checks in SHOWN.values()]  # fmt: skip
    return "| " + " | ".join([f"`{family}`", *cells]) + " |"


def _cell(family: str, reasons: list[str | None], notes: dict[str, int]) -> str:
    """Return ``yes``, ``no`` with the number of its reason, or a dash if it was not run."""
    wrong = next((reason for reason in reasons if reason), "")
    if wrong:
        known = _plain(wrong.replace(f"'{family}'", "…"))
        return f"no {notes.setdefault(known, len(notes) + 1)}"
    return "–" if None in reasons else "yes"


def _plain(reason: str) -> str:
    """Return a reason as text of a page: without hints, and code in it is not markup."""
    reason = re.sub(r"did you mean .*?\? ", "", reason)
    reason = reason.partition("; 'implementation: hf' runs")[0]
    return "`" + re.sub(r"\s+", " ", reason.replace("`", "'")).strip() + "`"
