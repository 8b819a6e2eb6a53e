"""Pictures of the status and the report for the documentation."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
COLUMNS = 64
LETTER, LINE, MARGIN, BAR = 7.3, 17, 14, 30
REPORT_SIZE = (1100, 780)
SHARED = "/shared/runs"
"""Path that the pictures show instead of the root of the runs."""
STYLE = """\
text { font: 12px ui-monospace, "DejaVu Sans Mono", Consolas, monospace; fill: #1b1f24;
  white-space: pre; }
.bar { fill: #eaeef2; }
.window { fill: #f6f8fa; stroke: #d0d7de; }
.command { font-weight: bold; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .bar { fill: #21262d; }
  .window { fill: #0d1117; stroke: #30363d; }
}"""


def take(runs: Path, trial: str, folder: Path) -> list[Path]:
    """Write pictures of the status and the report of a trial under the root ``runs``."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ("--root", str(runs))
    shown = _printed("status", trial, *options).replace(str(runs.absolute()), SHARED)
    status = folder / "status.svg"
    status.write_text(terminal(f"slurmrl status {trial}", shown.splitlines()), encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        _printed("report", trial, *options, "--output", str(page))
        reports = asyncio.run(_report(page, folder))
    return [status, *reports]


def terminal(command: str, lines: Sequence[str]) -> str:
    """Return a terminal with a command and its output as SVG."""
    width = round(max(map(len, (*lines, command))) * LETTER + 2 * MARGIN)
    height = BAR + LINE * (len(lines) + 1) + MARGIN
    rows = [("$ " + command, ' class="command"'), *((line, "") for line in lines)]
    body = "\n".join(
        f'<text x="{MARGIN}" y="{BAR + LINE * (place + 1)}"{style}>{escape(text.rstrip())}</text>'
        for place, (text, style) in enumerate(rows)
    )
    dots = "".join(f'<circle cx="{14 + 16 * n}" cy="11" r="4.5" fill="#8c959f"/>' for n in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(command)}</title>\n'
        f"<desc>{escape(' / '.join(line.strip() for line in lines))}</desc>\n"
        f'<style>\n{STYLE}\n</style>\n<rect class="window" x="0.5" y="0.5" width="{width - 1}" '
        f'height="{height - 1}" rx="6"/>\n<rect class="bar" x="1" y="1" width="{width - 2}" '
        f'height="21" rx="5"/>\n{dots}\n{body}\n</svg>\n'
    )


def _printed(*arguments: str) -> str:
    """Return what slurmrl prints on a terminal of ``COLUMNS`` columns."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "slurmrl", *arguments],
        stdout=theirs,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(COLUMNS)},
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux reports an error when the other end is closed.
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    if process.wait() != 0:
        sys.exit(f"screenshots: slurmrl {' '.join(arguments)} failed")
    return b"".join(parts).decode().replace("\r\n", "\n")


async def _report(page: Path, folder: Path) -> list[Path]:
    """Write the top of a report, in light and dark colors."""
    from tests.support import browser

    written = []
    for scheme in ("light", "dark"):
        async with browser.opened(page, scheme=scheme) as tab:
            await tab.resize(*REPORT_SIZE)
            await tab.until("document.querySelectorAll('#curves canvas').length > 0")
            file = folder / f"report.{scheme}.webp"
            await tab.screenshot(file)
            written.append(file)
    return written
