"""``slurmrl docs``: the documentation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import examples
from slurmrl.display.terminal import table, width
from slurmrl.errors import SlurmrlError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

WIDEST = 100
"""Columns of a rendered page."""


def _topics(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the topics that begin with ``typed``."""
    from click.shell_completion import CompletionItem

    from slurmrl.desk import manual

    try:
        return [CompletionItem(name) for name in manual.topics() if name.startswith(typed)]
    except (OSError, SlurmrlError):
        return []


@click.command(
    epilog=examples(
        "slurmrl docs",
        "slurmrl docs tutorial",
        "slurmrl docs --search preemption",
        "slurmrl docs install --path",
    )
)
@click.argument("topic", required=False, shell_complete=_topics)
@click.option("--search", metavar="WORDS", help="List the sections that have all of these words.")
@click.option("--path", "as_path", is_flag=True, help="Print the path of the page's file.")
@click.option(
    "--browser",
    is_flag=True,
    help="Open the page in a browser. Needs a clone in which scripts/make-docs --site was run.",
)
def docs(topic: str | None, search: str | None, as_path: bool, browser: bool) -> int:
    """List the pages of the documentation, or show one of them.

    A terminal shows the page in a pager. Without a terminal the command prints its Markdown.
    """
    from slurmrl.desk import manual

    chosen = [search is not None, as_path, browser]
    if sum(chosen) > 1 or (search is not None and topic):
        raise UsageError(
            "--search, --path and --browser exclude each other; --search takes no topic"
        )
    if search is not None:
        return _search(search)
    name = manual.find(topic) if topic else None
    if browser:
        return click.launch(manual.site_page(name).as_uri())
    if as_path:
        click.echo((manual.topics()[name] if name else manual.PAGES).resolve())
        return 0
    if name is None:
        rows = [(name, manual.title(path)) for name, path in manual.topics().items()]
        click.echo("\n".join(table(rows, width())))
        click.echo("\nslurmrl docs TOPIC shows a page, slurmrl docs --search WORDS finds pages")
        return 0
    _show(name, manual.topics()[name])
    return 0


def _show(topic: str, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    columns = width()
    if columns is None:
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    from slurmrl.desk import manual

    console = Console(width=min(columns, WIDEST), force_terminal=True)
    with console.capture() as shown:
        console.print(Markdown(manual.for_terminal(topic, text), hyperlinks=False))
    click.echo_via_pager(shown.get())


def _search(words: str) -> int:
    from slurmrl.desk import manual

    found = list(manual.search(words)) if words.strip() else []
    if not found:
        raise UsageError(f"no section has all of the words '{words}'; slurmrl docs lists the pages")
    for match in found:
        click.echo(f"{match.topic}: {match.heading}\n    {match.line[: (width() or 1000) - 4]}")
    return 0
