"""The pages of the documentation that are part of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import dirname, normpath
from typing import Final, NamedTuple

from slurmrl import package
from slurmrl.errors import EnvironmentFailure, UnknownNameError, UsageError
from slurmrl.registry import near

PAGES: Final = package.FOLDER / "docs"
CHANGELOG: Final = package.FOLDER / "CHANGELOG.md"
HOME: Final = "index"
SITE: Final = ("build", "site")
"""Folder in which a checkout has its built site."""
FENCE: Final = re.compile(r"\s*(```+|~~~+)")
COMMENT: Final = re.compile(r"<!--.*?-->\n?", re.DOTALL)
PAGE_LINK: Final = re.compile(r"(?<!!)\]\((?!\w+:|#)([^)\s#]+)\.md(#[^)\s]*)?\)")
PICTURE: Final = re.compile(r"!\[([^\]]*)\]\([^)]*\)(\{[^}\n]*\})?")
ATTRIBUTES: Final = re.compile(r"(?<=[)`])\{[:.#][^}\n]*\}")
FORMULA: Final = re.compile(
    r"```.*?```|`[^`]*`|\$\$(.+?)\$\$|\$(?=\S)((?:(?!\n\n)[^$])+)(?<=\S)\$", re.DOTALL
)
"""Pattern of code, which stays unchanged, or of a LaTeX formula."""
CALL_OUT: Final = re.compile(r'(!!!|\?\?\?\+?|===\+?!?) *([\w-]*) *(?:"([^"]*)")?')
EMPTY: Final = re.compile("an?|and|are|as|by|can|do|for|from|how|i|in|is|it|my|of|on|the|to|with")
LATER: Final = re.compile(
    "(architecture|benchmarks|changelog|engine-internals|ops|protocols|releasing)$|configuration/"
    "|reference/python"
)
"""Pages for developers and generated pages, which come later in a search."""


class Match(NamedTuple):
    """A line of a page that has the words of a search."""

    topic: str
    heading: str
    line: str


def topics() -> dict[str, Path]:
    """Return a mapping from topics (``howto/install``) to pages, top-level pages first.

    Raises EnvironmentFailure if this slurmrl was copied without its documentation.
    """
    if not PAGES.is_dir():
        raise EnvironmentFailure(
            f"{PAGES} is missing: this slurmrl was copied without its documentation; install it"
        )
    found = {str(path.relative_to(PAGES).with_suffix("")): path for path in PAGES.rglob("*.md")}
    if CHANGELOG.is_file():
        found["changelog"] = CHANGELOG
    return {name: found[name] for name in sorted(found, key=lambda name: (name.count("/"), name))}


def find(name: str) -> str:
    """Return the topic ``howto/install`` for ``install``, ``inst``, ``docs/howto/install.md`` etc.

    Raises UsageError with the closest topics if no topic or several topics have this name.
    """
    known = topics()
    wanted = name.strip("/").lower().removeprefix("docs/").removesuffix(".md")
    if wanted in known:
        return wanted
    last = {topic: topic.rpartition("/")[2] for topic in known}
    found = [topic for topic in known if f"/{topic}".endswith(f"/{wanted}")]
    found = found or [topic for topic in known if wanted and last[topic].startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"'{name}' is ambiguous: {', '.join(found)}")
    best, mark, _ = near(wanted, [*known, *last.values()]).partition("? ")
    raise UnknownNameError(
        f"no topic '{name}'; {mark and best + mark}slurmrl docs lists all, --search WORD finds them"
    )


def title(path: Path) -> str:
    """Return the first heading of a page."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            return line[2:].strip()
    return path.stem


def search(words: str) -> list[Match]:
    """Return the best line of each section with all ``words``, the best section first.

    A word matches longer words that begin with it. Headings count more than text. Words such as
    `of` count only if there are no other words.
    """
    typed = re.findall(r"[\w&]+", words.lower())
    chosen = [word for word in typed if not EMPTY.fullmatch(word)] or typed
    wanted = [re.compile(rf"(?<![^\W_]){word}", re.IGNORECASE) for word in chosen]
    phrase = re.compile(r"\W+".join(typed), re.IGNORECASE)
    found = list[tuple[float, Match]]()
    for topic, path in topics().items() if typed else ():
        weight = 0.7 if LATER.match(topic) else 1
        for number, (heading, lines) in enumerate(_sections(path.read_text(encoding="utf-8"))):
            text = "\n".join([heading, *lines])
            counts = [min(len(word.findall(text)), 5) for word in wanted]
            if lines and all(counts):
                titled = sum(bool(word.search(heading)) for word in wanted)
                score = titled * (16.0 if number else 32.0) + sum(counts)
                score += 8 * titled * len(typed) / max(len(heading.split()), len(typed))
                score += 4 * len(wanted) * len(phrase.findall(text)[:2])
                best = max(lines, key=lambda one: sum(bool(word.search(one)) for word in wanted))
                found.append((weight * score, Match(topic, heading, best.strip())))
    return [match for _, match in sorted(found, key=lambda each: -each[0])]


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the headings of a page with the lines below each."""
    heading, lines = "", list[str]()
    fenced = False
    for line in COMMENT.sub("", text).splitlines():
        fenced ^= bool(FENCE.match(line))
        if line.startswith("#") and not fenced:
            if heading or lines:
                yield heading, lines
            heading, lines = line.lstrip("# "), []
        else:
            lines.append(line)
    yield heading, lines


def for_terminal(topic: str, text: str) -> str:
    """Return a page's Markdown without the parts that only the site shows.

    Links between pages name topics. Pictures become descriptions, formulas become code with their
    source, and call-outs and tabs become paragraphs with a title.
    """
    lines, indents = list[str](), list[int]()
    fenced = False
    text = PICTURE.sub(lambda found: f"[picture: {found[1]}]", COMMENT.sub("", text))
    for line in FORMULA.sub(_as_code, text).splitlines():
        depth = len(line) - len(line.lstrip())
        while indents and line.strip() and depth < indents[-1]:
            indents.pop()
        line = line[indents[-1] if indents else 0 :]
        fenced ^= bool(FENCE.match(line))
        if not fenced and (start := CALL_OUT.fullmatch(line.rstrip())):
            indents.append((indents[-1] if indents else 0) + 4)
            lines.append(f"**{start[3] or start[2].capitalize()}**\n")
        else:
            lines.append(line if fenced else _without_site(topic, line))
    return "\n".join(lines) + "\n"


def _as_code(found: re.Match[str]) -> str:
    formula = found[1] or found[2]
    return f"`{' '.join(formula.split())}`" if formula else found[0]


def _without_site(topic: str, line: str) -> str:
    def named(link: re.Match[str]) -> str:
        target = normpath(f"{dirname(topic)}/{link[1]}").lstrip("/")
        return f"]({'changelog' if PurePosixPath(target).name == 'CHANGELOG' else target})"

    return PAGE_LINK.sub(named, ATTRIBUTES.sub("", line))


def site_page(topic: str | None) -> Path:
    """Return the page of the built site. Raises EnvironmentFailure if the site is missing."""
    page = f"files/{CHANGELOG.stem}" if topic == "changelog" else topic or HOME
    path = PAGES.resolve().parent.joinpath(*SITE, f"{page}.html")
    if not path.is_file():
        raise EnvironmentFailure(
            f"{path} is missing: in a clone, scripts/make-docs --site builds the site; "
            "slurmrl docs shows the pages in the terminal"
        )
    return path
