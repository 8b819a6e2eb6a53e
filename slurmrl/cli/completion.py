"""``slurmrl completion``, and the requests of the shells while a command line is typed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from slurmrl import env
from slurmrl.errors import SlurmrlError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from pydantic import BaseModel

    from slurmrl.config.key_facts import KeyFacts
    from slurmrl.run.paths import RunPaths

LINES = {
    "bash": 'eval "$(slurmrl completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(slurmrl completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "slurmrl completion fish | source    # in ~/.config/fish/config.fish",
}
"""Command that turns completion on, by shell."""

UNFINISHED: Mapping[str, Mapping[str, str]] = {
    "bash": {
        "    return 0\n": "    [[ ${COMPREPLY[0]-} == *[.=] ]] && compopt -o nospace 2>/dev/null\n"
        "    return 0\n"
    },
    "zsh": {
        "    local -a response\n": "    local -a response suffix\n",
        "    for type key descr in ${response}; do\n": "    for type key descr in ${response}; do\n"
        "        [[ $key == *[.=] ]] && suffix=(-S '')\n",
        "completions_with_descriptions -U\n": 'completions_with_descriptions -U "${suffix[@]}"\n',
        "unsorted -a completions": 'unsorted "${suffix[@]}" -a completions',
    },
}
"""Additions to Click's scripts: no space after a key that a dot or a value continues.

fish adds none.
"""
SEPARATOR = "="
NOT_CURVES = {"step", "time"}
STEPS = 200
"""Newest steps whose metrics are offered."""
COMMIT = re.compile(r"step-([0-9]+)\.[0-9]+")


@click.command(epilog="\b\n" + "\n".join(LINES.values()))
@click.argument("shell", type=click.Choice(list(LINES)))
def completion(shell: str) -> int:
    """Print the script that completes commands, options, keys, trials and files in a shell."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root()
    script = kind(root.command, {}, "slurmrl", env.COMPLETE.name).source()
    for place, addition in UNFINISHED.get(shell, {}).items():
        script = script.replace(place, addition)
    click.echo(script)
    return 0


def trials(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The trials EXPERIMENT/TRIAL that begin with ``typed``."""
    from click.shell_completion import CompletionItem

    from slurmrl.desk.trials import names, root_folder

    try:
        found = names(root_folder(ctx.params.get("root")), typed)
    except (OSError, SlurmrlError):
        return []  # a message here would land in the middle of a command line
    return [CompletionItem(name) for name in found]


def profiles(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The site profiles that begin with ``typed``."""
    from click.shell_completion import CompletionItem

    from slurmrl.config.profiles import NONE, names

    try:
        return [CompletionItem(name) for name in (*names(), NONE) if name.startswith(typed)]
    except OSError:
        return []


def files(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Leave it to the shell, which knows files best."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="file")]


def folders(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the name of a folder."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="dir")]


def trials_or_files(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Trials, or files where no trial begins like this."""
    return trials(ctx, parameter, typed) or files(ctx, parameter, typed)


def keys(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The keys of the configuration that begin with ``typed``, up to its last part.

    A section is offered with and without a dot, because its keys may follow.
    """
    return [
        _item(f"{one.key}{end}", one)
        for one in _below(typed)
        for end in (("", ".") if one.section is not None else ("",))
    ]


def overrides(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The keys, or the values of a key, with which an override may go on."""
    key, separator, _ = typed.partition(SEPARATOR)
    if not separator and (split := _key_before(ctx.params.get("overrides") or ())):
        return _plain(_values(split), typed)
    if separator:
        return _plain((f"{key}={each}" for each in _values(key)), typed)
    return [
        _item(f"{one.key}{SEPARATOR if one.section is None else '.'}", one) for one in _below(typed)
    ]


def _key_before(words: Sequence[str]) -> str:
    """Return the key whose value is typed, in a shell that splits words at ``=``; else empty.

    bash gives ``key``, ``=`` and the value as three words, and leaves out a last ``=``.
    """
    if words[-1:] == (SEPARATOR,):
        return "".join(words[-2:-1])
    is_key = bool(words) and SEPARATOR not in words[-1] and words[-2:-1] != (SEPARATOR,)
    return words[-1] if is_key else ""


def _values(key: str) -> Iterable[str]:
    """Return the values of a key that has few."""
    if key == "algorithm.name":
        from slurmrl.plan.algorithms import ALGORITHMS

        return ALGORITHMS
    return next((one.values for one in _below(key) if one.key == key), ())


def _below(typed: str) -> list[KeyFacts]:
    """Return the keys that begin with ``typed``, up to its last part."""
    from slurmrl.config.key_facts import children

    parent = tuple(typed.split(".")[:-1])
    schemas = _algorithm_schemas() if parent[:1] == ("algorithm",) else []
    return [one for one in children(parent, schemas) if one.key.startswith(typed)]


def _item(text: str, one: KeyFacts) -> CompletionItem:
    from click.shell_completion import CompletionItem

    from slurmrl.config.problems import summary

    return CompletionItem(text, help=summary(one.meaning))


def _plain(texts: Iterable[str], typed: str) -> list[CompletionItem]:
    """Return the texts that begin with ``typed``."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(text) for text in texts if text.startswith(typed)]


def _algorithm_schemas() -> list[type[BaseModel]]:
    from slurmrl.plan.algorithms import ALGORITHMS

    return list({ALGORITHMS.load(name): None for name in ALGORITHMS})


def algorithms(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The values of ``algorithm.name`` that begin with ``typed``."""
    return _plain(_values("algorithm.name"), typed)


def trials_or_metrics(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Trials, and after a trial the metrics of its newest steps."""
    words = ctx.params.get("words") or ()
    return [*trials(ctx, parameter, typed), *_plain(_metrics(ctx, words[:1]), typed)]


def _metrics(ctx: click.Context, names: Sequence[str]) -> list[str]:
    from slurmrl.run import metrics

    found: dict[str, None] = {}
    for name in names:
        with suppress(OSError, SlurmrlError):
            for line in metrics.read_latest(_paths(ctx, name).metrics, STEPS):
                found |= dict.fromkeys(line)
    return sorted(found.keys() - NOT_CURVES)


def _paths(ctx: click.Context, name: str) -> RunPaths:
    """Return the trial of a name. Raises SlurmrlError, OSError."""
    from slurmrl.desk.trials import find, root_folder

    return find(root_folder(ctx.params.get("root")), name)


def commits(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The steps of the checkpoints of the trial that the command line names."""
    return _plain(_steps(ctx, _trial(ctx)), typed)


def checkpoints(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Trials or files, and after ``TRIAL@`` the steps of its checkpoints."""
    name, at, _ = typed.partition("@")
    if not at:
        return trials_or_files(ctx, parameter, typed)
    return _plain((f"{name}@{step}" for step in _steps(ctx, name)), typed)


def _trial(ctx: click.Context) -> str:
    """Return the trial that the command line names before an option without its value.

    Click leaves it in ``args``, because it stops at such an option. Empty if there is none.
    """
    return ctx.params.get("trial") or next(iter(ctx.args), "")


def _steps(ctx: click.Context, trial: str) -> list[str]:
    """Return the steps of a trial's checkpoints, by the names of their directories."""
    try:
        names = [path.name for path in _paths(ctx, trial).checkpoints.iterdir()]
    except (OSError, SlurmrlError):
        return []
    return list(
        map(str, sorted({int(found[1]) for found in map(COMMIT.fullmatch, names) if found}))
    )


def sampled_steps(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """The steps with samples of the trial that the command line names."""
    from slurmrl.run.samples import places

    try:
        folder = _paths(ctx, _trial(ctx)).samples
        steps = list(places(folder, evaluation=bool(ctx.params.get("evaluation"))))
    except (OSError, SlurmrlError):
        return []
    return _plain(map(str, steps), typed)
