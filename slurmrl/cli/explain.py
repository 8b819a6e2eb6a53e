"""``slurmrl explain`` and ``slurmrl docs``: the reference of a key, and the pages of the manual."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slurmrl.cli.options import (
    complete_algorithms,
    complete_keys,
    completion_items,
    examples,
    json_option,
)
from slurmrl.display import terminal
from slurmrl.display.terminal import table, width
from slurmrl.errors import SlurmrlError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from pydantic import BaseModel

    from slurmrl.config.key_facts import KeyFacts
    from slurmrl.config.source import KeyPath

PIPE_WIDTH = 100
"""Width of the output in columns without a terminal."""
ALGORITHM = "algorithm"


class Explanation(NamedTuple):
    """A meaning of a key, and the algorithms that share it (none outside ``algorithm``)."""

    facts: KeyFacts
    algorithms: tuple[str, ...] = ()


@click.command(
    epilog=examples(
        "slurmrl explain",
        "slurmrl explain actor.optimizer",
        "slurmrl explain algorithm.clip_ratio --algorithm gspo",
    )
)
@click.argument("key", required=False, shell_complete=complete_keys)
@click.option(
    "--algorithm",
    metavar="NAME",
    shell_complete=complete_algorithms,
    help="Show the keys and defaults for this value of algorithm.name.",
)
@json_option
def explain(key: str | None, algorithm: str | None, as_json: bool) -> int:
    """Explain a key of the configuration: type, default, unit, meaning and example.

    KEY is dotted, such as actor.optimizer.lr. For a section, the command lists its keys. Without
    KEY, the command lists the sections.
    """
    # Completion offers a section with a dot too, because its keys may follow.
    path = tuple(key.removesuffix(".").split(".")) if key else ()
    entries = _entries(path, algorithm) if path else [Explanation(each) for each in _top()]
    if not path or (path == (ALGORITHM,) and algorithm is None):
        blocks = [_algorithms() if path else _index()]
    else:
        blocks = ["\n".join(_lines(each, path == (ALGORITHM,))) for each in entries]
    if as_json:
        click.echo(json.dumps([_object(each) for each in entries], indent=2))
    else:
        click.echo("\n\n".join(blocks))
    return 0


def _top() -> list[KeyFacts]:
    from slurmrl.config.key_facts import facts_of
    from slurmrl.config.schema import Config

    return facts_of(Config)


def _schemas(algorithm: str | None) -> dict[type[BaseModel], list[str]]:
    """Return algorithm names by schema; ``algorithm`` selects a single algorithm."""
    from slurmrl.config.describe import by_schema
    from slurmrl.plan.algorithms import ALGORITHMS

    names = [algorithm] if algorithm else list(ALGORITHMS)
    return by_schema({name: ALGORITHMS.load(name) for name in names})


def _entries(path: KeyPath, algorithm: str | None) -> list[Explanation]:
    """Return the entries of a key's path, one for each meaning of the key.

    Raises UnknownNameError with the nearest names, and UsageError.
    """
    from slurmrl.config.key_facts import find
    from slurmrl.config.schema import Config
    from slurmrl.errors import UnknownNameError, UsageError

    if path[0] == ALGORITHM:
        return _of_algorithms(path, algorithm)
    facts = find(Config, path)
    if facts is None:
        raise UnknownNameError(_unknown(Config, path, ()))
    if algorithm:
        if path != ("rollout", "n"):
            raise UsageError(
                f"--algorithm is not allowed with '{facts.key}', whose default does not depend on "
                "algorithm.name; allowed with: keys of algorithm, rollout.n"
            )
        facts = replace(facts, default=f"`{_settings(algorithm).completions}`")
    return [Explanation(facts)]


def _settings(algorithm: str) -> Any:
    """Return the default settings of an algorithm."""
    from slurmrl.config.key_facts import preset_settings

    schema = next(iter(_schemas(algorithm)))
    return preset_settings(schema, [algorithm])[algorithm]


def _of_algorithms(path: KeyPath, algorithm: str | None) -> list[Explanation]:
    from slurmrl.config.key_facts import find, preset_settings
    from slurmrl.errors import UnknownNameError

    schemas = _schemas(algorithm)
    if len(path) == 1:
        whole = next(each for each in _top() if each.name == ALGORITHM)
        sections = [(replace(whole, section=schema), names) for schema, names in schemas.items()]
        return [Explanation(facts, tuple(names)) for facts, names in sections]
    found: dict[str, Explanation] = {}
    for schema, names in schemas.items():
        facts = find(schema, path[1:], (ALGORITHM,), preset_settings(schema, names))
        if facts is None:
            continue
        if algorithm:
            own = facts.presets.get(algorithm, facts.default)
            example = own.strip("`") if algorithm in facts.presets else facts.example
            facts = replace(facts, default=own, example=example, presets={})
        same = found.get(repr(facts), Explanation(facts))
        found[repr(facts)] = Explanation(facts, (*same.algorithms, *names))
    if not found:
        raise UnknownNameError(_unknown_of_algorithms(path, schemas))
    return list(found.values())


def _unknown(schema: type[BaseModel], path: KeyPath, prefix: KeyPath) -> str:
    """Return the message about a key that a schema lacks."""
    from slurmrl.config.key_facts import find
    from slurmrl.config.problems import unknown_key

    for length in range(1, len(path)):
        facts = find(schema, path[:length], prefix)
        if facts is None:
            path = path[:length]
            break
        if facts.section is None:
            return f"the reference lists no keys of '{facts.key}' ({facts.brief})"
    key = ".".join(map(str, (*prefix, *path)))
    return f"'{key}': {unknown_key(schema, path, prefix)}"


def _unknown_of_algorithms(path: KeyPath, schemas: Mapping[type[BaseModel], list[str]]) -> str:
    from slurmrl.config.problems import keys

    known = sorted({name for schema in schemas for name, _ in keys(schema)})
    if str(path[1]) not in known:
        close = [name for name in known if path[1] in name.split("_")]
        close += difflib.get_close_matches(str(path[1]), known, n=3)
        if close:
            names = " or ".join(f"{ALGORITHM}.{name}" for name in dict.fromkeys(close))
            return f"'{ALGORITHM}.{path[1]}': unknown key; did you mean {names}?"
    own = [schema for schema in schemas if path[1] in dict(keys(schema))] or list(schemas)
    return _unknown(own[0], path[1:], (ALGORITHM,))


def _index() -> str:
    """Return the list of all sections, keys outside of sections, and algorithms."""
    from slurmrl.config.problems import summary

    facts = _top()
    sections = [(each.name, summary(each.meaning)) for each in facts if each.section is not None]
    plain = [
        (f"{each.name} <{each.brief}>", summary(each.meaning))
        for each in facts
        if each.section is None and each.name != ALGORITHM
    ]
    parts = (("Sections", sections), ("Top-level keys", plain))
    blocks = ["\n".join([f"{title}:", *_columns(rows)]) for title, rows in parts]
    return "\n\n".join([*blocks, _algorithms(), "slurmrl explain KEY explains a section or a key."])


def _algorithms() -> str:
    """Return the list of all algorithms."""
    from slurmrl.config.key_facts import parts_of
    from slurmrl.config.problems import summary

    methods = [
        (", ".join(names), summary(parts_of(schema.__doc__ or "")[0]))
        for schema, names in _schemas(None).items()
    ]
    hint = "slurmrl explain algorithm --algorithm NAME lists the keys of an algorithm."
    return "\n".join([f"{ALGORITHM}.name:", *_columns(methods), "", hint])


def _lines(entry: Explanation, whole: bool) -> Iterator[str]:
    """Yield the lines about an entry; ``whole`` marks the entry of an algorithm's whole section."""
    from slurmrl.config.key_facts import OF_KEYS, facts_of, nested, parts_of, preset_settings
    from slurmrl.config.problems import summary

    facts, names = entry
    own, _, example = parts_of((facts.section.__doc__ or "") if facts.section else "")
    yield f"{facts.key}: {'section' if whole else facts.kind.replace('`', '')}"
    yield ""
    if not whole:
        yield from _wrapped(facts.meaning)
    if own and own != facts.meaning:
        yield from ([] if whole else [""])
        yield from _wrapped(own)
    default = "" if whole or facts.default == OF_KEYS else facts.defaults
    rows = [("Default", default.replace("`", ""))] if default else []
    rows += [("Unit", facts.unit)] if facts.unit else []
    rows += [("Algorithms", ", ".join(names))] if names else []
    yield from [""] if rows else []
    for label, text in rows:
        yield from textwrap.wrap(
            text, _width(), initial_indent=f"{label + ':':<12}", subsequent_indent=" " * 12
        )
    if example or facts.example:
        yield from ("", "Example:")
        yield textwrap.indent(nested(facts.inside, facts.example or example), "  ")
    if facts.section is not None:
        settings = preset_settings(facts.section, names) if whole else {}
        keys = facts_of(facts.section, facts.inside, settings)
        yield from ("", "Keys:")
        yield from _columns([(f"{one.name} <{one.brief}>", summary(one.meaning)) for one in keys])


def _width() -> int:
    return terminal.width() or PIPE_WIDTH


def _wrapped(text: str) -> Iterator[str]:
    """Yield wrapped lines of a Markdown text that has only paragraphs and lists."""
    for place, block in enumerate(text.split("\n\n")):
        if place:
            yield ""
        items = [item.replace("\n", " ") for item in block.removeprefix("- ").split("\n- ")]
        first, rest = ("- ", "  ") if block.startswith("- ") else ("", "")
        for item in items:
            yield from textwrap.wrap(
                item, _width(), initial_indent=first, subsequent_indent=rest,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip


def _columns(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each row; cut the last column at the width of the terminal."""
    left = max((len(name) for name, _ in rows if len(name) <= _width() // 2), default=0)
    for name, text in rows:
        if len(name) > left:
            yield f"  {name}"
            name = ""
        line = f"  {name:<{left}}  {text.replace('`', '')}"
        yield line if len(line) <= _width() else f"{line[: _width() - 1]}…"


def _object(entry: Explanation) -> dict[str, Any]:
    from slurmrl.config.key_facts import REQUIRED, facts_of

    facts, names = entry
    return {
        "key": facts.key,
        "algorithms": list(names),
        "type": facts.kind.replace("`", ""),
        "required": facts.default == REQUIRED,
        "default": None if facts.default == REQUIRED else facts.default.replace("`", ""),
        "presets": {name: value.strip("`") for name, value in facts.presets.items()},
        "unit": facts.unit,
        "values": list(facts.values),
        "meaning": facts.meaning,
        "example": facts.example,
        "keys": [one.name for one in facts_of(facts.section)] if facts.section else [],
    }


WIDEST = 100
"""Maximum number of columns of a rendered page."""
MOST_FOUND = 20
"""Maximum number of sections that a search lists."""


def _topics(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the topics that begin with ``typed``."""
    from slurmrl.desk import manual

    try:
        return completion_items(manual.topics(), typed)
    except (OSError, SlurmrlError):
        return []


@click.command(
    epilog=examples(
        "slurmrl docs",
        "slurmrl docs tutorial",
        "slurmrl docs stop a run",
        "slurmrl docs --search preemption",
        "slurmrl docs install --path",
    )
)
@click.argument("topic", nargs=-1, shell_complete=_topics)
@click.option("--search", metavar="WORDS", help="List the sections that contain all WORDS.")
@click.option("--path", "as_path", is_flag=True, help="Print the path of the page's file.")
@click.option(
    "--browser",
    is_flag=True,
    help="Open the page in a browser. Needs a clone in which scripts/make-docs --site was run.",
)
def docs(topic: tuple[str, ...], search: str | None, as_path: bool, browser: bool) -> int:
    """List the pages of the documentation, or show one of them.

    A terminal shows the page in a pager. Without a terminal, the command prints its Markdown.
    If no page has the name TOPIC, the command lists the sections that contain its words.
    """
    from slurmrl.desk import manual

    chosen = [search is not None, as_path, browser]
    if sum(chosen) > 1 or (search is not None and topic):
        raise UsageError(
            "--search, --path and --browser exclude each other; --search takes no topic"
        )
    if search is not None:
        return _search(search)
    words = " ".join(topic)
    try:
        name = manual.find(words) if words.strip() else None
    except UnknownNameError as unknown:
        if as_path or browser:
            raise
        return _search(words, unknown)
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


def _search(words: str, unknown: UsageError | None = None) -> int:
    from slurmrl.desk import manual

    found = manual.search(words)
    if not found:
        message = f"no section has all of the words '{words}'; slurmrl docs lists the pages"
        raise unknown or UsageError(message)
    for match in found[:MOST_FOUND]:
        click.echo(f"{match.topic}: {match.heading}\n    {match.line[: (width() or 1000) - 4]}")
    if len(found) > MOST_FOUND:
        click.echo(f"{len(found) - MOST_FOUND} more; add a word")
    return 0
