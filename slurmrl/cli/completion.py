"""``slurmrl completion``, and what the shells ask while a command line is typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmrl import env
from slurmrl.errors import SlurmrlError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from pydantic import BaseModel

LINES = {
    "bash": 'eval "$(slurmrl completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(slurmrl completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "slurmrl completion fish | source    # in ~/.config/fish/config.fish",
}
"""What turns completion on, by shell."""


@click.command(epilog="\b\n" + "\n".join(LINES.values()))
@click.argument("shell", type=click.Choice(list(LINES)))
def completion(shell: str) -> int:
    """Print the script that completes commands, options, files and trials in a shell."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root()
    click.echo(kind(root.command, {}, "slurmrl", env.COMPLETE.name).source())
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
    """As `files`, for folders."""
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
    from click.shell_completion import CompletionItem

    return [
        CompletionItem(f"{key}{end}", help=meaning)
        for key, meaning, is_section in _below(typed)
        for end in (("", ".") if is_section else ("",))
    ]


def _below(typed: str) -> list[tuple[str, str, bool]]:
    """Return keys that begin with ``typed``, their meanings, and whether each is a section."""
    from slurmrl.config.key_facts import children
    from slurmrl.config.problems import summary

    parent = tuple(typed.split(".")[:-1])
    return [
        (one.key, summary(one.meaning), one.section is not None)
        for one in children(parent, _algorithm_schemas())
        if one.key.startswith(typed)
    ]


def _algorithm_schemas() -> list[type[BaseModel]]:
    from slurmrl.plan.algorithms import ALGORITHMS

    return list({ALGORITHMS.load(name): None for name in ALGORITHMS})


def algorithms(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The values of ``algorithm.name`` that begin with ``typed``."""
    from click.shell_completion import CompletionItem

    from slurmrl.plan.algorithms import ALGORITHMS

    return [CompletionItem(name) for name in ALGORITHMS if name.startswith(typed)]
