"""``slurmrl search``: the layouts and settings with which a step is fastest."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from slurmrl.cli import options
from slurmrl.cli.options import FiniteRange, common, examples, json_option, overrides_argument
from slurmrl.cli.sequence_lengths import (
    assumed_lengths,
    calibration,
    limit_key,
    limit_notes,
    limit_of_rows,
    mean_tokens,
)

if TYPE_CHECKING:
    from slurmrl.plan.estimates.hardware import Hardware
    from slurmrl.plan.estimates.step_seconds import StepSeconds
    from slurmrl.plan.settings import Settings
    from slurmrl.search.answers import Load, Searched
    from slurmrl.search.best_layouts import Answer, SearchRequest

ASSUMED_GPU = "h100"
"""Type of the GPUs if the configuration does not name one."""
DEFAULT_ENGINES = "fsdp,native"
FASTER = 1.2
"""Minimum speedup for which `slurmrl plan` names other layouts."""
MOST_GPUS_OF_PLAN = 64
MOST_GPUS = 65536
MOST_SIZES = 16
"""Maximum number of sizes in a range for which the search tries every size. In larger ranges, the
search tries only doublings and the last size."""


def _size_range(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, int] | None:
    """Parse ``8`` or ``8..64``; return the first and the last number."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", value)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last <= MOST_GPUS:
        raise click.BadParameter(
            f"'{value}' is not allowed: write a number or a range, such as 8 or 8..64, "
            f"up to {MOST_GPUS}",
            ctx,
            param,
        )
    return first, last


@click.command(
    epilog=examples(
        "slurmrl search ppo.yaml --gpus 8",
        "slurmrl search ppo.yaml --gpus 8..64 --objective cost",
        "slurmrl search ppo.yaml --nodes 4 --response-tokens 900 --write best.yaml",
        "slurmrl search ppo.yaml cluster.slurm.gpu_type=h100 --engines fsdp,megatron,vllm",
    )
)
@click.argument("config", metavar="CONFIG", shell_complete=options.complete_files)
@overrides_argument
@click.option(
    "--gpus",
    callback=_size_range,
    metavar="N[..M]",
    help="Number of GPUs of the trial, or a range. Default: the plan's number.",
)
@click.option(
    "--nodes", callback=_size_range, metavar="N[..M]", help="Number of nodes, instead of --gpus."
)
@click.option(
    "--objective",
    type=click.Choice(["time", "cost"]),
    default="time",
    help="Minimize the seconds of a step (time, the default) or its GPU hours (cost).",
)
@click.option(
    "--engines",
    metavar="NAME,...",
    default=DEFAULT_ENGINES,
    help="Engines to try, in addition to the engines of CONFIG. Default: fsdp,native.",
)
@click.option(
    "--prompt-tokens",
    type=FiniteRange(min=1),
    metavar="TOKENS",
    help="Mean length of a prompt. Default: half of the maximum.",
)
@click.option(
    "--response-tokens",
    type=FiniteRange(min=1),
    metavar="TOKENS",
    help="Mean length of a completion. Default: half of the maximum.",
)
@click.option(
    "--calibrate",
    metavar="EXPERIMENT/TRIAL",
    shell_complete=options.complete_trials,
    help="Take the mean lengths from this trial. Compare its measured seconds with predictions.",
)
@click.option(
    "--gpu-hours",
    type=FiniteRange(min=0, min_open=True),
    metavar="HOURS",
    help="Show only answers that need at most this number of GPU hours for total_steps.",
)
@click.option(
    "--allow",
    metavar="CHANGE,...",
    help="Allow settings that change the training result: staleness, precision (docs/search.md). "
    "Default: none.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write CONFIG with the settings of the best answer to FILE, in the same folder.",
)
@json_option
@common
def search(
    config: str,
    overrides: tuple[str, ...],
    gpus: tuple[int, int] | None,
    nodes: tuple[int, int] | None,
    objective: Literal["time", "cost"],
    engines: str,
    prompt_tokens: float | None,
    response_tokens: float | None,
    calibrate: str | None,
    gpu_hours: float | None,
    allow: str | None,
    write: Path | None,
    as_json: bool,
    root: str | None,
) -> int:
    """Search for the layouts and settings with which a step is fastest.

    The search changes layouts of all models, the engine that generates, micro-batches, activation
    checkpointing and offloading. The result of training stays the same: precision, batch sizes
    and the use of rollout tasks do not change, unless --allow names the change.

    The exit code is 2 if no combination fits.
    """
    from slurmrl.search import answers as presenting

    path = Path(config)
    if gpus and nodes:
        raise click.UsageError("--gpus and --nodes exclude each other")
    if write is not None and write.absolute().parent != path.absolute().parent:
        raise click.UsageError(
            f"--write {write}: must be in the folder of {path}, so that relative paths stay valid"
        )
    if write is not None and write.exists() and path.exists() and write.samefile(path):
        raise click.UsageError(f"--write {write}: is CONFIG itself; choose another name")
    compared = None
    if calibrate is not None:
        if prompt_tokens or response_tokens:
            raise click.UsageError("--calibrate excludes --prompt-tokens and --response-tokens")
        from slurmrl.desk.trials import chosen_root
        from slurmrl.plan.settings import load_settings

        where = chosen_root(root)
        given = load_settings(path, overrides, root=where, scheduler="slurm", planning=True)
        hardware = given.config.cluster.hardware
        prompt_tokens, response_tokens, compared = calibration(calibrate, root, hardware)
    wanted = _SearchOptions(
        gpus, nodes, objective, engines, prompt_tokens, response_tokens, gpu_hours, allow
    )
    found = _search(path, overrides, root, wanted)
    answers = found.searched.answers
    if not answers:
        raise _no_answer(found, gpu_hours)
    if write is not None:
        text = presenting.edited(path.read_text("utf-8"), found.overrides, answers[0], found.given)
        _write(write, text, found, answers[0])
    shown = (answers, found.given, found.request, found.hardware)
    facts: Any = {"fits": found.given_fits, "rejected": found.searched.rejected}
    facts["searched"] = found.searched if allow else None
    if as_json:
        values = presenting.values(*shown, **facts)
        click.echo(json.dumps({**values, "calibration": compared} if compared else values))
        return 0
    from slurmrl.display import terminal

    click.echo(terminal.as_text(presenting.document(*shown, **facts)))
    if compared:
        click.echo(f"\n{compared}")
    for line in found.assumed:
        click.echo(f"assumed: {line}, because the configuration does not set it", err=True)
    return 0


def _no_answer(found: _Searched, gpu_hours: float | None) -> click.UsageError:
    """Return the error of a search without an answer, with the reasons."""
    text = "a submission would reject each combination that was found:"
    if not found.searched.rejected:
        text = (
            "no combination of layouts and settings fits: use more GPUs or a range of them "
            "(--gpus 4..8), other engines (--engines)"
        ) + (" or a larger --gpu-hours" if gpu_hours else "")
    reasons = [f"  {reason}" for reason in found.obstacles]
    reasons += [f"--allow {reason}" for reason in found.searched.refused]
    return click.UsageError("\n".join([text, *reasons]))


class _SearchOptions(NamedTuple):
    """The options that define the search."""

    gpus: tuple[int, int] | None
    nodes: tuple[int, int] | None
    objective: Literal["time", "cost"]
    engines: str
    prompt_tokens: float | None
    response_tokens: float | None
    gpu_hours: float | None
    allow: str | None


class _Searched(NamedTuple):
    request: SearchRequest
    hardware: Hardware
    given: StepSeconds
    given_fits: bool
    """Whether the given configuration fits into the memory of its GPUs."""
    searched: Searched
    assumed: Sequence[str]
    """Assumed values of settings that the configuration lacks."""
    obstacles: Sequence[str]
    """Reasons why nothing fits; empty if there is an answer."""
    overrides: Mapping[str, Any]
    """Mapping from dotted keys to the settings of the command line."""
    load: Load
    load_file: Callable[[Path], Settings]
    """Load a file that the search writes, without the settings of the command line."""


def _write(path: Path, text: str, found: _Searched, answer: Answer) -> None:
    """Write a configuration after checking that it loads with the settings of the answer.

    Without the check, relative paths of the command line could be wrong in the file, and an alias
    could change two sections.
    """
    from slurmrl.errors import ConfigError, UsageError

    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    wanted = found.load(answer.overrides)
    try:
        draft.write_text(text, "utf-8")
        try:
            same = found.load_file(draft).config == wanted.config
        except ConfigError:
            same = False
        if not same:
            raise UsageError(
                f"--write {path}: the file would load with other settings than the best answer: "
                "replace aliases (*name) and write the overrides into CONFIG first"
            )
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _search(
    path: Path, overrides: Sequence[str], root: str | None, wanted: _SearchOptions
) -> _Searched:
    from slurmrl.config.source import value_at
    from slurmrl.desk.trials import chosen_root
    from slurmrl.errors import UsageError
    from slurmrl.plan.estimates.hardware import hardware_of
    from slurmrl.plan.estimates.step_seconds import predict_step
    from slurmrl.plan.settings import load_settings
    from slurmrl.search.answers import named_changes
    from slurmrl.search.answers import search as best
    from slurmrl.search.best_layouts import fits_into_memory
    from slurmrl.search.no_answer import reasons

    allowed = named_changes(wanted.allow)
    where, assumed = chosen_root(root), list[str]()
    limit: dict[str, int] = {}

    def load(*more: str) -> Settings:
        given = (*overrides, *assumed, *_written(limit), *more)
        return load_settings(path, given, root=where, scheduler="slurm", planning=True)

    settings = load()
    if hardware_of(settings.config.cluster) is None and not settings.config.cluster.slurm.gpu_type:
        assumed.append(f"cluster.slurm.gpu_type={ASSUMED_GPU}")
        settings = load()
    if limit := limit_of_rows(settings):
        settings = load()
    if settings.source.writes("allocation_mode"):
        raise UsageError(
            f"{path}: search writes the layout of each role: replace allocation_mode by "
            "<role>.backend (slurmrl plan explains the string)"
        )
    request = _request(settings, wanted)
    loaders = _loaders(settings, load)
    progress = ProgressLine()
    try:
        searched = best(settings, request, *loaders, allowed, progress.show)
    finally:
        progress.clear()
    given = predict_step(settings, request.mean)
    hardware = hardware_of(settings.config.cluster)
    assert given is not None, "the search has predicted this step"
    assert hardware is not None

    def load_file(other: Path) -> Settings:
        return load_settings(other, assumed, root=where, scheduler="slurm", planning=True)

    limited = [replace(one, overrides={**limit, **one.overrides}) for one in searched.answers]
    notes = [*assumed, *limit_notes(settings, limit)]
    keys = (text.partition("=")[0].strip() for text in overrides)
    changed = {key: value_at(settings.source.values, tuple(key.split("."))) for key in keys}
    fits = fits_into_memory(settings)
    searched = replace(searched, answers=limited)
    obstacles = [] if limited else reasons(settings, request, searched.rejected)
    obstacles += [] if limited or not (text := assumed_lengths(settings)) else [text]
    return _Searched(
        request, hardware, given, fits, searched, notes, obstacles, changed, loaders[1], load_file
    )


def _loaders(settings: Settings, load: Callable[..., Settings]) -> tuple[Load, Load]:
    """Return two functions that load settings with other overrides.

    The second function raises ConfigError for problems of a submission that ``settings`` do not
    have.
    """
    from slurmrl.errors import ConfigError

    known = {str(problem) for problem in settings.missing}

    def plan(changes: Mapping[str, Any]) -> Settings:
        return load(*_written(changes))

    def submit(changes: Mapping[str, Any]) -> Settings:
        found = plan(changes)
        if more := [problem for problem in found.missing if str(problem) not in known]:
            raise ConfigError(tuple(more))
        return found

    return plan, submit


def _written(changes: Mapping[str, Any]) -> list[str]:
    """Return settings in the form of the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def faster_layout(settings: Settings, load: Callable[..., Settings]) -> list[str]:
    """Return lines about layouts that make a step much faster; none without such layouts.

    ``load`` reads the configuration with additional overrides. Only trials with at most
    `MOST_GPUS_OF_PLAN` GPUs are searched, which takes less than a second.
    """
    from slurmrl.errors import UsageError
    from slurmrl.plan.estimates.call_costs import placed_models
    from slurmrl.plan.estimates.hardware import hardware_of
    from slurmrl.plan.estimates.step_seconds import predict_step
    from slurmrl.search.answers import search as best

    hardware = hardware_of(settings.config.cluster)
    if hardware is None or settings.source.writes("allocation_mode"):
        return []
    wanted = _SearchOptions(None, None, "time", DEFAULT_ENGINES, None, None, None, None)
    try:
        request = replace(_request(settings, wanted), results=1)
        if request.gpus[0] > MOST_GPUS_OF_PLAN:
            return []
        answers = best(settings, request, *_loaders(settings, load)).answers
    except UsageError:
        return []
    given = predict_step(settings, request.mean)
    if not answers or given is None or given.total < FASTER * answers[0].step.total:
        return []
    before = {name: str(one.allocation) for name, one in placed_models(settings).items()}
    after = answers[0].backends
    changed = [
        f"{layout} instead of {before.get(name, before['actor'])} ({name})"
        for name, layout in after.items()
        if layout != before.get(name)
    ]
    if before.keys() - after.keys():
        changed.append("the actor generates")
    gain = given.total / answers[0].step.total
    return [
        f"{', '.join(changed) or 'other micro-batches or checkpointing'}: {gain:.1f}x",
        f"{answers[0].step.total:.3g} s instead of {given.total:.3g} s a step, with half of the "
        "maximum lengths; slurmrl search prints all settings",
        f"predicted by {hardware.source}",
        f"its error: {hardware.error}",
    ]


def _request(settings: Settings, wanted: _SearchOptions) -> SearchRequest:
    from slurmrl.errors import UsageError
    from slurmrl.plan.build import make_plan
    from slurmrl.plan.engine_rules import ENGINES
    from slurmrl.plan.placement import LARGEST_HOST
    from slurmrl.registry import near
    from slurmrl.search.best_layouts import SearchRequest

    engines = frozenset(name.strip() for name in wanted.engines.split(",") if name.strip())
    if not engines:
        raise click.UsageError(f"--engines names no engine; allowed: {', '.join(sorted(ENGINES))}")
    for name in sorted(engines - ENGINES.keys()):
        raise click.UsageError(f"--engines: no engine '{name}'; {near(name, list(ENGINES))}")
    config = settings.config
    of_host = config.cluster.workers_per_host or LARGEST_HOST
    if wanted.nodes is not None:
        sizes = tuple(number * of_host for number in _sizes(*wanted.nodes, 1))
    elif wanted.gpus is not None:
        sizes = _sizes(*wanted.gpus, of_host)
    else:
        planned = make_plan(settings, scheduler="slurm")
        number = sum(group.workers * group.gpus_per_worker for group in planned.groups)
        sizes = (max(number, 1),)
    mean = mean_tokens(settings, wanted.prompt_tokens, wanted.response_tokens)
    if mean is None:
        said = (
            "the seconds of a step cannot be predicted: neither "
            f"{limit_key(settings)} nor the model limits the lengths"
        )
        raise UsageError("\n  ".join([said, *map(str, settings.missing)]))
    most = _most_gpu_seconds(settings, wanted.gpu_hours)
    return SearchRequest(sizes, mean, engines, wanted.objective, gpu_seconds=most)


def _sizes(first: int, last: int, step: int) -> tuple[int, ...]:
    """Return the numbers of GPUs to try: numbers from ``first`` to ``last`` that fill hosts.

    ``step`` is the number of GPUs of a host. With more than `MOST_SIZES` numbers, return only
    doublings and the last number. If no number fills hosts, return ``first``.
    """
    whole = [number for number in range(first, last + 1) if number % step == 0 or number < step]
    if len(whole) <= MOST_SIZES:
        return tuple(whole) or (first,)
    tried = {whole[-1]}
    for number, end in ((first, step), (-(-max(first, step) // step) * step, last + 1)):
        while number < end:
            tried.add(number)
            number *= 2
    return tuple(sorted(tried))


def _most_gpu_seconds(settings: Settings, gpu_hours: float | None) -> float:
    """Return the maximum GPU seconds of a step with which all steps fit into the GPU hours."""
    from slurmrl.errors import UsageError

    if gpu_hours is None:
        return math.inf
    steps = settings.config.total_steps
    if steps is None:
        raise UsageError("--gpu-hours needs total_steps in the configuration")
    return gpu_hours * 3600 / steps


class ProgressLine:
    """A line on the terminal that shows the progress of a search."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()

    def show(self, line: str) -> None:
        if self._shows:
            click.echo(f"\r\x1b[K{line[:100]}", nl=False, err=True)

    def clear(self) -> None:
        if self._shows:
            click.echo("\r\x1b[K", nl=False, err=True)
