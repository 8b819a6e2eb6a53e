"""The documentation agrees with the code: pages, messages, the table of files of a run, and
commands.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
from ruamel.yaml import YAML

import slurmrl
from slurmrl.run.paths import RunPaths
from slurmrl.watch import diagnosis
from tests.support.rotation import rotating

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
TOKEN = re.compile(
    r"^ *<!-- (?P<mark>run first|not run|file):(?P<text>.*?)-->$"
    r"|^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
"""What decides about the commands of a page: a comment before a block, or the block."""


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    mark: str
    """``not run``, ``file``, or empty: what the comment before it says."""
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in order. A comment ``run first`` is a separate block."""
    mark, text = "", ""
    for token in TOKEN.finditer((DOCS / page).read_text(encoding="utf-8")):
        if token["mark"] == "run first":
            yield Block("bash", token["text"], "", "")
        elif token["mark"]:
            mark, text = token["mark"], token["text"].strip()
        else:
            yield Block(token["language"], dedent(token["body"]), mark, text)
            mark, text = "", ""


def leaves(tree: object) -> Iterator[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from leaves(part)
    elif isinstance(tree, list):
        for part in tree:
            yield from leaves(part)


@cache
def texts() -> tuple[str, ...]:
    """Return all literal parts of strings in the package."""
    trees = (ast.parse(path.read_text()) for path in Path(slurmrl.__file__).parent.rglob("*.py"))
    return tuple(
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_navigation_has_each_page_once() -> None:
    named = list(leaves(YAML(typ="safe").load(ROOT / "mkdocs.yml")["nav"]))
    own = sorted(page for page in named if not page.startswith("files/"))
    assert own == PAGES, "mkdocs.yml: nav"


def linked(page: str) -> set[str]:
    """The pages that a page links to."""
    text = (DOCS / page).read_text(encoding="utf-8")
    folder = (DOCS / page).parent
    targets = {folder / found for found in re.findall(r"\]\((?!\w+:)([^)#\s]+)", text)}
    return {os.path.relpath(target, DOCS) for target in targets} & set(PAGES)


def test_every_page_is_within_two_clicks_of_home() -> None:
    first = linked("index.md")
    reached = first.union(*(linked(page) for page in first)) | {"index.md"}
    assert set(PAGES) - reached == set()


def test_examples_page_links_every_example() -> None:
    page = (DOCS / "examples.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[(\S+)\]\(\.\./examples/\1\) \|", page, re.MULTILINE)
    examples = ROOT / "examples"
    assert sorted(linked) == sorted(
        str(path.relative_to(examples))
        for path in examples.rglob("*.yaml")
        if path.relative_to(examples).parts[0] != "data"
    )


def test_each_example_is_named_in_its_guide() -> None:
    page = (DOCS / "examples.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\S+)\]\(\.\./examples/.*\|([^|]*)\|$", page, re.MULTILINE)
    assert len(rows) > 20
    for name, guides in rows:
        pages = re.findall(r"\]\(([^)#]+)", guides)
        assert any(name in (DOCS / one).read_text(encoding="utf-8") for one in pages), name


def test_troubleshooting_messages_occur_in_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) >= 30
    parts = [(part.strip(), message) for message in messages for part in message.split("…")]
    assert not [pair for pair in parts if not any(pair[0] in text for text in texts())]


def test_troubleshooting_lists_each_finding_of_status() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("## Findings of `status`")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    listed = re.findall(r"`(\w+)`", " ".join(cells))
    calls = (node for node in ast.walk(ast.parse(Path(diagnosis.__file__).read_text())))
    codes = {
        node.args[0].value
        for node in calls
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == diagnosis.StatusFinding.__name__
        and isinstance(node.args[0], ast.Constant)
    }
    assert sorted(listed) == sorted(codes)


def test_run_directory_page_lists_every_entry() -> None:
    page = (DOCS / "run-directory.md").read_text(encoding="utf-8")
    paths = RunPaths(Path("run"))
    for name in vars(RunPaths):
        if isinstance(path := getattr(paths, name), Path):
            entry = path.relative_to(paths.run)
            assert re.search(rf"^\|.*`{re.escape(str(entry))}[`/]", page, re.MULTILINE), name


def test_each_skip_mark_belongs_to_a_block_and_has_a_reason() -> None:
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        marked = [block for block in blocks(page) if block.mark]
        assert all(block.text for block in marked), page
        assert len(marked) == len(re.findall(r"^ *<!-- (?:not run|file)", text, re.M)), page


def commands(page: str) -> list[str]:
    """Return the shell lines that make a page's files and run its commands."""
    lines = []
    for block in blocks(page):
        if block.mark == "file":
            lines.append(f"cat >{block.text} <<'END OF FILE'\n{block.body}END OF FILE")
        elif block.language == "bash" and block.mark != "not run":
            lines.append(block.body)
    return lines


SLOW = (
    "gpus.md",
    "howto/air-gapped.md",
    "howto/python.md",
    "search.md",
    "simulate.md",
    "tutorial.md",
)
"""Pages whose commands take most of the time. They take turns."""
QUICK = sorted({page for page in PAGES if commands(page)} - {*SLOW})


@pytest.mark.long
@pytest.mark.parametrize("page", [*QUICK, *rotating(*SLOW, shares=3)])
def test_commands_of_each_page_work(page: str, tmp_path: Path) -> None:
    """Run all bash blocks of a page in one shell, except blocks marked ``not run``; ``file`` marks
    file contents.
    """
    prepare(tmp_path)
    own = ("SLURMRL_ROOT", "SLURMRL_PROFILE")
    variables = {name: value for name, value in os.environ.items() if name not in own}
    variables |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    variables |= {"XDG_CONFIG_HOME": f"{tmp_path}/config", "SCRATCH": f"{tmp_path}/scratch"}
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(commands(page))],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]


def prepare(folder: Path) -> None:
    """Prepare a folder with the examples, data, the scripts and the commands."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("data"))
    (folder / "scripts").symlink_to(ROOT / "scripts")
    data = folder / "examples/data/gsm8k"
    data.mkdir(parents=True)
    for part in ("train", "test"):
        rows = (
            f'{{"question": "Ann has {n} nuts and gets {n}. How many has she?", '
            f'"answer": "She has {n}+{n} = <<{n}+{n}={2 * n}>>{2 * n} nuts.\\n#### {2 * n}"}}\n'
            for n in range(200)
        )
        (data / f"{part}.jsonl").write_text("".join(rows))
    (folder / "bin").mkdir()
    for name, module in (("slurmrl", " -m slurmrl"), ("python", "")):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        command.chmod(0o755)


SHOWING = """index tutorial concepts status doctor checkpoints asynchronous engines slurm
gpus data rewards algorithms/policy-gradients algorithms/dpo"""


@pytest.mark.parametrize("page", SHOWING.split())
def test_each_guide_shows_output_or_a_picture(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert re.search(r"^ *```(text|console)$|!\[[^]]+\]\(\S+\.(svg|png)", text, re.MULTILINE)


def test_docs_words_are_spelled_correctly() -> None:
    pytest.importorskip("codespell_lib", reason="codespell is not installed here")
    where = ["README.md", "CHANGELOG.md", "docs", "examples", "slurmrl", "scripts", "cuda", ".ci"]
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_language_counts_do_not_rise() -> None:
    """The number of hard phrases must not increase."""
    command = [sys.executable, str(ROOT / "scripts" / "check-language")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
