"""Completions of the command line, ``slurmrl completion``, and options that commands share."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurmrl import env
from slurmrl.desk.trials import root_folder
from slurmrl.errors import SlurmrlError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from pydantic import BaseModel

    from slurmrl.config.key_facts import KeyFacts
    from slurmrl.run.paths import RunPaths


F = TypeVar("F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """Type of options for finite numbers in a range. Click's comparisons would accept NaN."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not allowed; expected a finite number", param, ctx)
        return number


def _remember_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.obj.debug = value


def _use_profile(ctx: click.Context, parameter: click.Parameter, name: str | None) -> None:
    if name is not None:
        ctx.obj.profile = name
        ctx.with_resource(env.PROFILE.given(name))


def examples(*lines: str) -> str:
    """Return examples of command lines for the end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def chosen_trial(root: str | None, trial: str | None) -> RunPaths:
    """Return the trial with this name. By default, return the newest trial and print its name."""
    from slurmrl.desk import trials

    folder = root_folder(root)
    if trial is not None:
        return trials.find(folder, trial)
    paths = trials.newest(folder)
    click.echo(f"{paths.full_name}, the newest trial", err=True)
    return paths


def again(root: Path) -> str:
    """Return the option with which another command uses ``root``; "" if ``root`` is the default."""
    if root_folder(None) != root:
        return f" --root {shlex.quote(str(root))}"
    profile = click.get_current_context().obj.profile
    return f" --profile {profile}" if profile and not env.ROOT.get() else ""


LINES = {
    "bash": 'eval "$(slurmrl completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(slurmrl completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "slurmrl completion fish | source    # in ~/.config/fish/config.fish",
}
"""Mapping from a shell to the line that enables completion."""

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
"""Replacements in Click's scripts, by shell, so that completion adds no space after ``.`` or ``=``.
fish needs no replacement."""
SEPARATOR = "="
NOT_CURVES = {"step", "time"}
STEPS = 200
"""Number of newest steps whose metrics completion offers."""
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


def complete_trials(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the trials EXPERIMENT/TRIAL that begin with ``typed``."""
    from slurmrl.desk.trials import names

    try:
        return completion_items(names(root_folder(ctx.params.get("root")), typed), typed)
    except (OSError, SlurmrlError):
        return []  # a message would break the command line that the user is typing


def complete_profiles(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the site profiles that begin with ``typed``."""
    from slurmrl.config.profiles import NONE, names

    try:
        return completion_items((*names(), NONE), typed)
    except OSError:
        return []


def complete_files(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Let the shell complete names of files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="file")]


def complete_folders(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Let the shell complete names of folders."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="dir")]


def complete_trials_or_files(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the trials that begin with ``typed``; without such trials, request names of files."""
    return complete_trials(ctx, parameter, typed) or complete_files(ctx, parameter, typed)


def complete_keys(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the keys that begin with ``typed`` and have the same number of parts.

    A section is offered with and without a dot, because its keys may follow.
    """
    return [
        _item(f"{one.key}{end}", one)
        for one in _below(typed)
        for end in (("", ".") if one.section is not None else ("",))
    ]


def complete_overrides(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the keys, or the values of a key, that may continue an override."""
    key, separator, _ = typed.partition(SEPARATOR)
    if not separator and (split := _key_before(ctx.params.get("overrides") or ())):
        return completion_items(_values(split), typed)
    if separator:
        return completion_items((f"{key}={each}" for each in _values(key)), typed)
    return [
        _item(f"{one.key}{SEPARATOR if one.section is None else '.'}", one) for one in _below(typed)
    ]


def _key_before(words: Sequence[str]) -> str:
    """Return the key whose value is typed, if the shell splits words at ``=``; else "".

    bash passes ``key``, ``=`` and the value as three words, and omits ``=`` at the end.
    """
    if words[-1:] == (SEPARATOR,):
        return "".join(words[-2:-1])
    is_key = bool(words) and SEPARATOR not in words[-1] and words[-2:-1] != (SEPARATOR,)
    return words[-1] if is_key else ""


def _values(key: str) -> Iterable[str]:
    """Return the possible values of a key; none if they are too many to list."""
    if key == "algorithm.name":
        from slurmrl.plan.algorithms import ALGORITHMS

        return ALGORITHMS
    if key.endswith("reward.name"):
        from slurmrl.config.schema.reward import BINARY

        return (*BINARY, "model")
    return next((one.values for one in _below(key) if one.key == key), ())


def _below(typed: str) -> list[KeyFacts]:
    """Return the keys that begin with ``typed`` and have the same number of parts."""
    from slurmrl.config.key_facts import children

    parent = tuple(typed.split(".")[:-1])
    schemas = _algorithm_schemas() if parent[:1] == ("algorithm",) else []
    return [one for one in children(parent, schemas) if one.key.startswith(typed)]


def _item(text: str, one: KeyFacts) -> CompletionItem:
    from click.shell_completion import CompletionItem

    from slurmrl.config.problems import summary

    return CompletionItem(text, help=summary(one.meaning))


def completion_items(texts: Iterable[str], typed: str) -> list[CompletionItem]:
    """Return the strings that begin with ``typed`` as completions."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(text) for text in texts if text.startswith(typed)]


def _algorithm_schemas() -> list[type[BaseModel]]:
    from slurmrl.plan.algorithms import ALGORITHMS

    return list({ALGORITHMS.load(name): None for name in ALGORITHMS})


def complete_algorithms(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the values of ``algorithm.name`` that begin with ``typed``."""
    return completion_items(_values("algorithm.name"), typed)


def complete_trials_or_metrics(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return trials, and the metrics of the first trial that the command line names."""
    words = ctx.params.get("words") or ()
    return [
        *complete_trials(ctx, parameter, typed),
        *completion_items(_metrics(ctx, words[:1]), typed),
    ]


def _metrics(ctx: click.Context, names: Sequence[str]) -> list[str]:
    from slurmrl.run import metrics

    found: dict[str, None] = {}
    for name in names:
        with suppress(OSError, SlurmrlError):
            for line in metrics.read_latest(_paths(ctx, name).metrics, STEPS):
                found |= dict.fromkeys(line)
    return sorted(found.keys() - NOT_CURVES)


def _paths(ctx: click.Context, name: str) -> RunPaths:
    """Return the trial with this name. Raises SlurmrlError, OSError."""
    from slurmrl.desk.trials import find

    return find(root_folder(ctx.params.get("root")), name)


def complete_commits(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the steps of the checkpoints of the trial that the command line names."""
    return completion_items(_steps(ctx, _trial(ctx)), typed)


def complete_checkpoints(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return trials or request files; after ``TRIAL@``, return the steps of its checkpoints."""
    name, at, _ = typed.partition("@")
    if not at:
        return complete_trials_or_files(ctx, parameter, typed)
    return completion_items((f"{name}@{step}" for step in _steps(ctx, name)), typed)


def _trial(ctx: click.Context) -> str:
    """Return the trial that the command line names before the incomplete option, or "".

    Click leaves the trial in ``args``, because it stops parsing at an option without a value.
    """
    return ctx.params.get("trial") or next(iter(ctx.args), "")


def _steps(ctx: click.Context, trial: str) -> list[str]:
    """Return the steps of a trial's checkpoints, read from the names of their directories."""
    try:
        names = [path.name for path in _paths(ctx, trial).checkpoints.iterdir()]
    except (OSError, SlurmrlError):
        return []
    return list(
        map(str, sorted({int(found[1]) for found in map(COMMIT.fullmatch, names) if found}))
    )


def complete_sampled_steps(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the steps with samples of the trial that the command line names."""
    from slurmrl.run.samples import places

    try:
        folder = _paths(ctx, _trial(ctx)).samples
        steps = list(places(folder, evaluation=bool(ctx.params.get("evaluation"))))
    except (OSError, SlurmrlError):
        return []
    return completion_items(map(str, steps), typed)


trial_argument = click.argument("trial", metavar="EXPERIMENT/TRIAL", shell_complete=complete_trials)
trials_argument = click.argument(
    "names", nargs=-1, required=True, metavar="EXPERIMENT/TRIAL...", shell_complete=complete_trials
)
newest_trial_argument = click.argument(
    "trial", metavar="[EXPERIMENT/TRIAL]", required=False, shell_complete=complete_trials
)
"""Optional argument TRIAL of commands that only read; see `chosen_trial` for the default."""
overrides_argument = click.argument(
    "overrides", nargs=-1, metavar="[dotted.key=value]...", shell_complete=complete_overrides
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def common(command: F) -> F:
    """Add ``--root``, ``--profile`` and ``--debug``."""
    root = click.option(
        "--root",
        metavar="DIR",
        shell_complete=complete_folders,
        help="Root folder of all runs. Default: SLURMRL_ROOT, then root of the configuration or "
        "of the site profile, then ./runs.",
    )
    debug = click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=_remember_debug,
        help="Print the traceback of an error.",
    )
    profile = click.option(
        "--profile",
        metavar="NAME",
        expose_value=False,
        is_eager=True,
        callback=_use_profile,
        shell_complete=complete_profiles,
        help="Name of the site profile, or none for no profile. Default: SLURMRL_PROFILE, then the "
        "profile named default, then the only profile.",
    )
    return root(profile(debug(command)))


def submitting(command: F) -> F:
    """Add the arguments and options of ``submit`` and ``resume``."""
    scheduler = click.option(
        "--scheduler",
        type=click.Choice(["auto", "local", "slurm"]),
        help="Where to run. Default: cluster.scheduler; auto selects Slurm on a cluster.",
    )
    wait = click.option(
        "--wait/--detach",
        default=None,
        help="Watch the run until it ends, or return at once. --wait exits with 1 if the run "
        "fails. Default: --wait with the local scheduler, --detach with Slurm.",
    )
    dry_run = click.option(
        "--dry-run",
        is_flag=True,
        help="Print the jobs, files and batch scripts that would be made (with --json also the "
        "plan); write and submit nothing.",
    )
    return overrides_argument(scheduler(wait(json_option(dry_run(checking(command))))))


def short_job(timeout_s: float) -> Callable[[F], F]:
    """Add the options of a command that waits ``timeout_s`` seconds for a short job."""
    timeout = click.option(
        "--timeout",
        type=click.FloatRange(min=1),
        default=timeout_s,
        show_default=True,
        metavar="SECONDS",
        help="Maximum wait for the job to start.",
    )
    scheduler = click.option(
        "--scheduler",
        type=click.Choice(["auto", "local", "slurm"]),
        help="Where to run the job. Default: cluster.scheduler; auto selects Slurm on a cluster.",
    )
    return lambda command: timeout(scheduler(command))


def checking(command: F) -> F:
    """Add the options of commands that check a trial's files."""
    no_check = click.option(
        "--no-check",
        is_flag=True,
        help="Skip the checks of data, weights, tokenizer, reward and disk, for a login node that "
        "cannot run them. Errors then appear only when the run starts.",
    )
    timeout = click.option(
        "--check-timeout",
        type=click.FloatRange(min=0.1),
        default=120.0,
        show_default=True,
        metavar="SECONDS",
        help="Time limit of the checks that --no-check skips. Unfinished checks are listed.",
    )
    return no_check(timeout(command))
