"""The table of families in docs/models.md, from the results that scripts/models keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Results = Mapping[str, str]
"""Result of each check: empty if it passed, or else the reason."""

KEPT: Final = Path(__file__).with_name("models.json")
PLACES: Final = {
    part: (
        f"<!-- Written by scripts/make-docs from the results of scripts/models: {part}. -->",
        f"<!-- End of the results: {part}. -->",
    )
    for part in ("images", "families")
}
"""Lines around each table of the page, by the key of its results: for families that read images,
and for families that read only text."""
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
"""Columns of the tables, with the checks that each of them needs."""
OF_IMAGES: Final = 6
"""Number of leading columns that the table of families with images has."""
CORE: Final = 5
"""Number of leading columns that need no further engine or setting."""


def page(text: str) -> str:
    """Return docs/models.md with the tables of the kept results.

    Raises ValueError if the page has no place for one of them.
    """
    kept = json.loads(KEPT.read_text())
    for part, (begin, end) in PLACES.items():
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"docs/models.md lacks the lines '{begin}' and '{end}'")
        columns = list(SHOWN.items())[: OF_IMAGES if part == "images" else None]
        table = _table(kept, kept[part], dict(columns))
        text = "\n".join([before + begin, "", *table, "", end + after])
    return text


def _table(
    kept: Mapping[str, Any], families: Mapping[str, Results], shown: Mapping[str, tuple[str, ...]]
) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in kept["versions"].items())
    notes: dict[str, int] = {}
    rows = [_row(family, results, shown, notes) for family, results in families.items()]
    core = [check for checks in list(shown.values())[:CORE] for check in checks]
    passed = sum(all(not results.get(each, "?") for each in core) for results in families.values())
    return [
        f"{kept['date']}: {passed} of {len(families)} families pass the first five columns.",
        f"Versions: {versions}.",
        "",
        "| " + " | ".join(["`model_type`", *shown]) + " |",
        "|---" * (1 + len(shown)) + "|",
        *rows,
        "",
        "Reasons:",
        "",
        *(f"{number}. {reason}" for reason, number in notes.items()),
    ]


def _row(
    family: str, results: Results, shown: Mapping[str, tuple[str, ...]], notes: dict[str, int]
) -> str:
    if results.keys() == {"load"}:  # nothing else is run for a family that is rejected
        results = {check: results["load"] for checks in shown.values() for check in checks}
    cells = [_cell(family, [results.get(each) for each in checks], notes)
             for checks in shown.values()]  # fmt: skip
    return "| " + " | ".join([f"`{family}`", *cells]) + " |"


def _cell(family: str, reasons: list[str | None], notes: dict[str, int]) -> str:
    """Return ``yes``, ``no`` with the number of its reason, or a dash without a result."""
    wrong = next((reason for reason in reasons if reason), "")
    if wrong:
        known = _plain(re.sub(rf"'{family}'|\b{family}(?= models)", "…", wrong))
        return f"no {notes.setdefault(known, len(notes) + 1)}"
    return "–" if None in reasons else "yes"


def _plain(reason: str) -> str:
    """Return a reason as text of a page, without hints and without active markup."""
    reason = re.sub(r"did you mean .*?\? ", "", reason)
    reason = re.split("; 'implementation: hf' runs|; allowed families", reason)[0]
    return "`" + re.sub(r"\s+", " ", reason.replace("`", "'")).strip() + "`"
