"""Files outside docs/ as pages of the site, and links to the repository (a hook of mkdocs).

A page may link to a file of the repository, as ``../examples/grpo.yaml``. The site shows such a
file under ``files/``: Markdown as a page, other files as a block of code. Links to the file lead to
this page.

If setup.cfg names the repository, the header links to it, and each page links to its file there.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from project import edit_address, repository

LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)")
"""A relative link up to its anchor."""
ALWAYS = ("CHANGELOG.md",)
BEHIND = {"boost": 0.3}
"""Weight of pages for developers and of files among the results of a search."""


def repository_path(page: str) -> str:
    """Return the file of a page of the site: ``docs/howto/python.md`` for ``howto/python.md``."""
    return page.removeprefix("files/") if page.startswith("files/") else join("docs", page)


def page_of(path: str) -> str:
    """Return the page of the site that shows this file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return join("files", path if path.endswith(".md") else f"{path}.md")


def targets(markdown: str, page: str) -> set[str]:
    """Return the files of the repository to which a page links."""
    folder = dirname(repository_path(page))
    return {normpath(join(folder, link)) for link in LINK.findall(markdown)}


def shown(file: Path) -> str:
    """Return the Markdown of the page of a file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    return f"# {file.name}\n\n````{file.suffix.removeprefix('.')}\n{text}````\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    try:
        address = repository(Path(config.config_file_path).parent)
    except ValueError as error:
        raise PluginError(str(error)) from error
    config.repo_url = address or None
    config.repo_name = "/".join(address.split("/")[3:]) or None
    return config


def on_post_page(output: str, **_: object) -> str:
    """Return the page without the mark with which Material asks the repository's host for stars."""
    return output.replace(' data-md-component="source"', "")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    wanted = set(ALWAYS)
    for file in files.documentation_pages():
        wanted |= targets(file.content_string, file.src_uri)
    for path in sorted(wanted):
        if not path.startswith("docs/") and (root / path).is_file():
            page = File.generated(config, page_of(path), content=shown(root / path))
            files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    if config.repo_url:
        page.edit_url = edit_address(config.repo_url, repository_path(here))
    internal = page.parent is not None and page.parent.title == "Internals"
    if internal or here.startswith("files/"):
        page.meta.setdefault("search", BEHIND)
    folder = dirname(repository_path(here))

    def rewritten(link: re.Match[str]) -> str:
        target = page_of(normpath(join(folder, link[1])))
        return f"]({relpath(target, dirname(here) or '.')}"

    return LINK.sub(rewritten, markdown)
