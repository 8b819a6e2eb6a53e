"""The documentation site in a real browser, opened from files."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import markdown
import pytest

from tests.support import browser
from tests.support.rotation import rotating

ROOT = Path(__file__).parents[2]
SCREENSHOTS = "SLURMRL_SCREENSHOTS"
"""Names a folder for screenshots; by default they lie in the test's folder."""
WIDTHS = (400, 1440)
FIRST_HITS = {
    "hyperparameter": ("configuration", "glossary", "index"),
    "goodput": ("glossary", "status"),
    "async": ("asynchronous",),
    "OOM": ("troubleshooting",),
    "NCCL": ("slurm", "gpus"),
    "checkpoint": ("checkpoints",),
    "stop a run": ("your-model",),
    "time limit": ("slurm",),
    "from scratch": ("models",),
    "cancel": ("reference/cli", "your-model"),
    "resume after preemption": ("slurm",),
    "stuck": ("status", "troubleshooting"),
    "out of memory": ("troubleshooting",),
    "learning rate": ("engines", "configuration/actor"),
    "multi-turn": ("rollouts",),
    "reward function": ("rewards",),
    "chat template": ("data",),
    "export to hugging face": ("checkpoints",),
    "wandb": ("howto/metrics",),
}
"""Pages that may be the first result of a search."""
DARK = ("index", "status", "algorithms/policy-gradients", "configuration")
LOOK = r"""
(() => {
  const root = document.documentElement, content = document.querySelector('.md-content');
  const prose = content.cloneNode(true);
  prose.querySelectorAll('pre, code, math').forEach((part) => part.remove());
  return {
    sideways: root.scrollWidth - root.clientWidth,
    wide: [...content.querySelectorAll('img')].filter((one) => one.clientWidth > root.clientWidth)
      .map((one) => one.src),
    broken: [...content.querySelectorAll('img')].filter((one) => !one.naturalWidth)
      .map((one) => one.src),
    latex: /\$\$|\\(frac|log|text|sum|sigma)/.exec(prose.textContent)?.[0] ?? '',
    unseen: [...content.querySelectorAll('.arithmatex')]
      .filter((one) => !(one.querySelector('math')?.getBoundingClientRect().height > 0)).length,
    formulas: content.querySelectorAll('math').length,
    anchors: [...document.querySelectorAll('a[href^="#"]')].map((one) => one.hash.slice(1))
      .filter((name) => name && !document.getElementById(decodeURIComponent(name))),
  };
})()
"""
RIGHT = {"sideways": 0, "wide": [], "broken": [], "latex": "", "unseen": 0, "anchors": []}
SEARCH = """
(() => {
  const hit = document.querySelector('.md-search-result__item > a');
  if (hit) return hit.href;
  const open = document.getElementById('__search');
  if (!open.checked) open.click();
  const field = document.querySelector('.md-search__input');
  field.focus();
  field.value = 'WORD';
  field.dispatchEvent(new Event('keyup', { bubbles: true }));
})()
"""
FORGET = "if (location.protocol === 'file:') localStorage.clear();"
BRIGHTNESS = r"""
Math.max(...getComputedStyle(document.body).backgroundColor.match(/\d+/g).slice(0, 3).map(Number))
"""


@pytest.mark.long
@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("third", rotating(0, 1, 2))
def test_site_is_usable_from_disk_at_both_widths(tmp_path: Path, third: int) -> None:
    site = tmp_path / "site"
    command = [sys.executable, ROOT / "scripts" / "make-docs", "--site", site]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    shots = Path(os.environ.get(SCREENSHOTS, tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    always = [site / f"{name}.html" for name in DARK]
    asyncio.run(_look(site, list(dict.fromkeys([*always, *pages[third::3]])), shots))


async def _look(site: Path, pages: list[Path], shots: Path) -> None:
    """Visit the pages, search, and look at some pages in dark colors."""
    faults: list[tuple[str, Any]] = []
    formulas = 0
    # A page stores the first scheme and then ignores what the user prefers.
    async with browser.opened(site / "index.html", before=FORGET) as page:
        for path in pages:
            name = str(path.relative_to(site))
            await page.visit(path)
            for width in WIDTHS:
                await page.resize(width)
                seen = await page.evaluate(LOOK)
                formulas += seen.pop("formulas")
                if seen != RIGHT:
                    faults.append((f"{name} at {width} px", seen))
        for word, expected in FIRST_HITS.items():
            hit = await _first_hit(page, site / "index.html", word)
            if hit not in [(site / f"{name}.html").as_uri() for name in expected]:
                faults.append((f"search for {word}", hit))
        for width in WIDTHS:
            await page.resize(width)
            for scheme in ("light", "dark"):
                await page.prefer(scheme)
                for name in DARK:
                    await page.visit(site / f"{name}.html")
                    shot = f"site.{name.replace('/', '-')}.{width}.{scheme}.png"
                    await page.screenshot(shots / shot)
                    if (await page.evaluate(BRIGHTNESS) < 128) != (scheme == "dark"):
                        faults.append((name, f"is not {scheme}"))
        assert not faults, "\n".join(f"{where}: {what}" for where, what in faults)
        assert formulas > 0
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


async def _first_hit(page: browser.Page, home: Path, word: str) -> str:
    """Return the URL, without query and anchor, of the first result of a search."""
    await page.visit(home)
    found: str = await page.until(SEARCH.replace("WORD", word))
    return found.partition("?")[0].partition("#")[0]


ADDRESS = "\nproject_urls =\n    Repository = https://gitlab.example/team/slurmrl"
METADATA = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('made')"


@pytest.mark.parametrize("address", ["", ADDRESS])
def test_package_and_site_link_to_the_repository_only_if_it_is_named(
    tmp_path: Path, address: str
) -> None:
    setup = (ROOT / "setup.cfg").read_text()
    (tmp_path / "setup.cfg").write_text(setup.replace("[metadata]", f"[metadata]{address}", 1))
    for name in ("docs", "docs/guide", "slurmrl", "made"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurmrl/__init__.py").write_text('__version__ = "0.2.0"\n')
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "docs/index.md", "docs/guide/a.md"):
        (tmp_path / name).write_text(f"# {name}\n")
    hook = ROOT / "scripts" / "site_links.py"
    theme = "theme: {name: material, font: false, features: [content.action.edit]}"
    settings = f"site_name: slurmrl\nuse_directory_urls: false\nhooks: [{hook}]\n{theme}\n"
    (tmp_path / "mkdocs.yml").write_text(settings)

    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    for words in (["-c", METADATA], ["-m", "mkdocs", "build", "--quiet"]):
        command = [sys.executable, *words]
        subprocess.run(command, cwd=tmp_path, env=quiet, check=True, capture_output=True)
    (metadata,) = tmp_path.glob("made/*.dist-info/METADATA")
    found = [line for line in metadata.read_text().splitlines() if "://" in line]
    pages = {name: (tmp_path / f"site/{name}.html").read_text() for name in ("index", "guide/a")}
    pages["CHANGELOG"] = (tmp_path / "site/files/CHANGELOG.html").read_text()
    edits = {
        name: re.findall(r'href="([^"]*)"[^>]*rel="edit"', text) for name, text in pages.items()
    }
    assert not any('data-md-component="source"' in text for text in pages.values())
    if not address:
        assert (found, edits) == ([], {name: [] for name in pages})
        assert not any('class="md-source"' in text for text in pages.values())
        return
    home = "https://gitlab.example/team/slurmrl"
    assert found == [f"Project-URL: Repository, {home}"]
    files = {"index": "docs/index.md", "guide/a": "docs/guide/a.md", "CHANGELOG": "CHANGELOG.md"}
    assert edits == {name: [f"{home}/-/edit/main/{file}"] for name, file in files.items()}
    assert all(f'<a href="{home}"' in text and "team/slurmrl" in text for text in pages.values())


MARKED = """\
> [!WARNING]
> Never do `this`.

<!-- tabs -->
**Laptop**

```bash
slurmrl submit a.yaml
```

**Slurm**

Run **sbatch**.

<!-- end of tabs -->

> a quotation
"""


def test_call_outs_and_tabs_of_plain_markdown_are_rendered() -> None:
    convert = runpy.run_path(str(ROOT / "scripts" / "site_blocks.py"))["on_page_markdown"]
    used = ["admonition", "pymdownx.superfences", "pymdownx.tabbed"]
    style = {"pymdownx.tabbed": {"alternate_style": True}}
    html = markdown.markdown(convert(MARKED), extensions=used, extension_configs=style)
    assert '<div class="admonition warning">' in html
    assert re.findall(r"<label[^>]*>(\w+)</label>", html) == ["Laptop", "Slurm"]
    assert html.count('<div class="tabbed-block">') == 2
    assert "<p>Run <strong>sbatch</strong>.</p>" in html
    assert "<blockquote>" in html


def test_long_keys_in_table_cells_break_after_dots_and_underscores() -> None:
    breaks = runpy.run_path(str(ROOT / "scripts" / "site_blocks.py"))["on_page_content"]
    cell = "<td><code>rollout.max_tokens</code> a.b</td>"
    assert breaks(cell) == "<td><code>rollout.<wbr>max_<wbr>tokens</code> a.b</td>"
    assert breaks("<p><code>a.b</code></p>") == "<p><code>a.b</code></p>"


@pytest.mark.parametrize("latex", [r"\begin{aligned} a &= b \end{aligned}", r"\unknown x"])
def test_unsupported_formula_is_rejected(latex: str) -> None:
    mathml = runpy.run_path(str(ROOT / "scripts" / "site_formulas.py"))["mathml"]
    assert "<mfrac>" in mathml(r"\frac{1}{T} \log p", "block")
    with pytest.raises(ValueError, match="cannot convert"):
        mathml(latex, "inline")
