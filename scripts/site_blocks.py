"""Call-outs, tabs and table cells of the documentation site (a hook of mkdocs).

Their notation is also readable as plain Markdown. A call-out is a quotation whose first line is
``[!NOTE]``, ``[!TIP]``, ``[!IMPORTANT]``, ``[!WARNING]`` or ``[!CAUTION]``. Tabs are between ``<!--
tabs -->`` and ``<!-- end of tabs -->``; a bold paragraph is the name of each tab.

In table cells, a key such as ``rollout.max_new_tokens`` may break after a dot or an underscore.
"""

from __future__ import annotations

import re
from textwrap import indent

CALL_OUT = re.compile(
    r"^> \[!(?P<kind>NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\n(?P<text>(?:^>.*\n?)+)", re.MULTILINE
)
KINDS = {"IMPORTANT": "info", "CAUTION": "danger"}
"""Material's names of kinds of call-outs, if they differ."""
TABS = re.compile(r"^<!-- tabs -->\n(?P<tabs>.*?)^<!-- end of tabs -->$", re.MULTILINE | re.DOTALL)
TAB = re.compile(r"^\*\*(?P<name>[^*\n]+)\*\*$", re.MULTILINE)
INDENT = " " * 4
CELL = re.compile(r"<t[dh][^>]*>.*?</t[dh]>", re.DOTALL)
CODE = re.compile(r"<code>[^<]+")
BREAK = re.compile(r"(?<=[\w\]][._/=])(?=[\w<])")
"""Places in code at which a line may break."""


def call_out(found: re.Match[str]) -> str:
    kind = KINDS.get(found["kind"], found["kind"].lower())
    text = re.sub(r"^> ?", "", found["text"], flags=re.MULTILINE)
    return f"!!! {kind}\n\n{indent(text, INDENT)}\n"


def tabs(found: re.Match[str]) -> str:
    _, *parts = TAB.split(found["tabs"])
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return "\n".join(f'=== "{name}"\n{indent(text, INDENT)}' for name, text in pairs)


def on_page_markdown(markdown: str, **_: object) -> str:
    return TABS.sub(tabs, CALL_OUT.sub(call_out, markdown))


def on_page_content(html: str, **_: object) -> str:
    def with_breaks(cell: re.Match[str]) -> str:
        return CODE.sub(lambda code: BREAK.sub("<wbr>", code[0]), cell[0])

    return CELL.sub(with_breaks, html)
