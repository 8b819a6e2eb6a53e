"""``slurmrl docs``: topics, search, and a page as a terminal shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.cli import explain as module
from slurmrl.cli.main import main
from slurmrl.desk import manual
from tests.unit.cli.conftest import Command

ROOT = Path(__file__).parents[3]
PAGE = """# Guide

See [install](../howto/install.md#wheel), the
[changelog](../../CHANGELOG.md) and [torch](https://pytorch.org/a.md).

<!-- not run: takes
hours -->
```bash
slurmrl submit a.yaml   # [not](a.md) a link
```

![Two
hosts](../pictures/hosts.svg){ width="3" }

!!! warning "Beware"

    Text of the call-out.

=== "Slurm"

    ```bash
    !!! not a call-out
    ```

The end: `$HOME`, $a_t \\, b$ and $x$.

$$
y
$$
"""


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two pages in place of the documentation."""
    folder = tmp_path / "docs"
    (folder / "algorithms").mkdir(parents=True)
    (folder / "howto").mkdir()
    (folder / "algorithms" / "guide.md").write_text(PAGE)
    (folder / "howto" / "guide.md").write_text("# How to\n\n## Preempt a job\n\nWait for it.\n")
    monkeypatch.setattr(manual, "PAGES", folder)
    monkeypatch.setattr(manual, "CHANGELOG", tmp_path / "none")
    return folder


def test_docs_lists_every_page_of_the_repository(command: Command) -> None:
    listed = {line.split()[0] for line in command("docs").lines if line}
    pages = (ROOT / "docs").rglob("*.md")
    assert {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in pages} <= listed
    assert "changelog" in listed
    assert command("docs", "").lines == command("docs").lines, "an unset variable of a shell"


@pytest.mark.parametrize("name", ["howto/install", "install", "docs/howto/install.md", "Inst"])
def test_docs_prints_the_file_of_a_topic_without_a_terminal(command: Command, name: str) -> None:
    page = ROOT / "docs/howto/install.md"
    assert command("docs", name).out == page.read_text()
    assert command("docs", name, "--path").out == f"{page}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gide"], "no topic 'gide'; did you mean 'guide'?"),
        (["guide"], "'guide' is ambiguous: algorithms/guide, howto/guide"),
        (["gui"], "'gui' is ambiguous: algorithms/guide, howto/guide"),
        (["--search", "zeppelin"], "no section has all of the words 'zeppelin'"),
        (["--search", ""], "no section has all of the words ''"),
        (["guide", "--search", "job"], "--search takes no topic"),
        (["--path", "--browser"], "exclude each other"),
    ],
)
@pytest.mark.usefixtures("pages")
def test_docs_exits_with_2_on_wrong_usage(command: Command, words: list[str], said: str) -> None:
    assert said in command("docs", *words, code=2).err


@pytest.mark.usefixtures("pages")
def test_docs_search_finds_sections_with_all_words(command: Command) -> None:
    found = command("docs", "--search", "JOB wait").out
    assert found == "howto/guide: Preempt a job\n    Wait for it.\n"


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("stop a run", "your-model: 6. Stop, cancel and resume a run"),
        ("time limit", "slurm: Time limits, preemption and failures"),
        ("from scratch", "models: Models from scratch"),
        ("cancel", "reference/cli: slurmrl cancel"),
        ("resume after preemption", "slurm: Time limits, preemption and failures"),
        ("stuck", "status: Stuck runs and hangs"),
        ("out of memory", "troubleshooting: Out of memory"),
        ("learning rate", "engines: Optimizer and learning rate"),
        ("multi-turn", "rollouts: Multi-turn episodes and tools"),
        ("reward function", "rewards: Your own reward function"),
        ("chat template", "data: Chat templates"),
        ("export to hugging face", "checkpoints: Inspect checkpoints and export to Hugging Face"),
        ("wandb", "howto/metrics: Weights & Biases (`wandb`)"),
        ("how do I resume a run", "your-model: 6. Stop, cancel and resume a run"),
    ],
)
def test_docs_lists_the_right_page_first_for_words_of_users(
    command: Command, words: str, first: str
) -> None:
    searched = command("docs", "--search", words).out
    assert searched.startswith(first)
    assert command("docs", *words.split()).out == searched
    assert searched.count("\n    ") <= 20


def test_terminal_shows_a_page_without_the_syntax_of_the_site() -> None:
    shown = manual.for_terminal("algorithms/guide", PAGE)
    assert "[install](howto/install), the\n[changelog](changelog) and" in shown
    assert "[torch](https://pytorch.org/a.md)" in shown
    assert "```bash\nslurmrl submit a.yaml   # [not](a.md) a link\n```" in shown
    assert "hours" not in shown
    assert "[picture: Two\nhosts]\n" in shown
    assert "\n**Beware**\n\n\nText of the call-out." in shown
    assert "\n**Slurm**\n\n\n```bash\n!!! not a call-out\n```\n\nThe end" in shown
    assert ": `$HOME`, `a_t \\, b` and `x`.\n\n`y`\n" in shown


@pytest.mark.usefixtures("pages")
def test_terminal_gets_the_page_in_a_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = list[str]()
    monkeypatch.setattr(module, "width", lambda: 60)
    monkeypatch.setattr("click.echo_via_pager", paged.append)
    assert main(["docs", "algorithms/guide"]) == 0
    (text,) = paged
    assert "Text of the call-out." in text
    assert "\x1b[" in text
    assert "!!! warning" not in text


def test_docs_opens_the_built_page_in_a_browser(
    command: Command, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = command("docs", "howto/guide", "--browser", code=3).err
    assert "scripts/make-docs --site builds the site" in rejected
    site = pages.parent / "build/site/howto/guide.html"
    site.parent.mkdir(parents=True)
    site.touch()
    opened = list[str]()
    monkeypatch.setattr("click.launch", lambda url: opened.append(url) or 0)
    command("docs", "howto/guide", "--browser")
    assert opened == [site.as_uri()]
