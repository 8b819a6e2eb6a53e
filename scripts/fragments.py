"""The changelog: one small file per change in changelog.d/, and a section per release."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

CATEGORIES = ("breaking", "added", "changed", "fixed", "performance")
"""Categories in the order of the changelog."""
FOLDER = "changelog.d"
CHANGELOG = "CHANGELOG.md"
README = "README.md"
WIDTH = 120
LONGEST = 280
"""Maximum number of characters of one entry, including its link."""
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
UNBROKEN = re.compile(r"\[[^\]]*\]\([^)]*\)|`[^`]*`")
SECTION = re.compile(r"(?m)^## ")


@dataclass(frozen=True)
class Fragment:
    """One change."""

    path: Path
    category: str
    text: str


def fragments(root: Path) -> tuple[list[Fragment], list[str]]:
    """Return the fragments of a checkout in the order of their names, and the problems."""
    found, problems = [], []
    for path in sorted((root / FOLDER).iterdir()):
        if path.name == README:
            continue
        category = path.name.split(".")[-2] if path.name.count(".") >= 2 else ""
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        wrong = []
        if path.suffix != ".md" or category not in CATEGORIES:
            wrong.append(f"its name must be NAME.CATEGORY.md, with one of {', '.join(CATEGORIES)}")
        if len(lines) != 1:
            wrong.append(f"it has {len(lines)} lines, and one is allowed")
        else:
            wrong += _problems(lines[0], root)
        problems += [f"{FOLDER}/{path.name}: {text}" for text in wrong]
        if not wrong:
            found.append(Fragment(path, category, lines[0]))
    return found, problems


def _problems(line: str, root: Path) -> list[str]:
    """Return the problems of the text of an entry."""
    wrong = []
    if not re.match(r"[A-Z][a-z-]+ ", line) or not line.endswith("."):
        wrong.append("it must begin with a verb, such as 'Add', and end with a period")
    if len(line) > LONGEST:
        wrong.append(f"it has {len(line)} characters, and {LONGEST} are allowed")
    links = [target for target, _ in LINK.findall(line) if "://" not in target]
    if not links:
        wrong.append("it must link the page that explains the change, as ([data](docs/data.md))")
    wrong += [f"it links {one}, which does not exist" for one in links if not (root / one).exists()]
    return wrong


def with_release(changelog: str, version: str, date: str, changes: list[Fragment]) -> str:
    """Return the changelog with ``changes`` in the section of a release.

    If the section exists already, with text for this release, the entries of a category follow its
    existing entries.
    """
    head, *sections = SECTION.split(changelog)
    mine = next((one for one in sections if re.match(rf"{re.escape(version)}[ \n]", one)), None)
    if mine is not None:
        sections.remove(mine)
    body = (mine or "").partition("\n")[2].strip()
    introduction, *parts = re.split(r"(?m)^### ", body)
    texts = {title.strip(): text.strip() for title, _, text in (p.partition("\n") for p in parts)}
    for category in CATEGORIES:
        title = category.capitalize()
        entries = [_wrapped(one.text) for one in changes if one.category == category]
        if entries:
            texts[title] = "\n".join(filter(None, [texts.get(title, ""), *entries]))
    titles = sorted(texts, key=_place)
    blocks = [f"{version} ({date})", introduction.strip()]
    blocks += [f"### {title}\n\n{texts[title]}" for title in titles]
    sections.insert(0, "\n\n".join(filter(None, blocks)) + "\n\n")
    return ("".join([head, *(f"## {one}" for one in sections)])).rstrip() + "\n"


def section(changelog: str, version: str) -> str:
    """Return the text of a release's section without its heading; empty if there is none."""
    for one in SECTION.split(changelog)[1:]:
        if re.match(rf"{re.escape(version)}[ \n]", one):
            return one.partition("\n")[2].strip()
    return ""


def _place(title: str) -> int:
    """Return the place of a category in a section; unknown categories come last."""
    name = title.lower()
    return CATEGORIES.index(name) if name in CATEGORIES else len(CATEGORIES)


def _wrapped(text: str) -> str:
    """Return an entry as lines that break no link and no code."""
    kept = UNBROKEN.sub(lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.fill(
        f"- {kept}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")
