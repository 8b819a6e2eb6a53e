"""A search that may also change the result of training, and the output of its answers.

The user allows named changes (`CHANGES`). Each set of allowed changes makes a new configuration,
which the plan checks and the search treats like the given configuration. Thus the answers include
defaults that follow from a change.

The output is a table, JSON values, or the edited configuration.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final, NamedTuple, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from slurmrl.config.schema import role_key
from slurmrl.config.source import dotted, flat
from slurmrl.display.terminal import Block, Document, Lines, Table
from slurmrl.errors import ConfigError, UsageError
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.engine_rules import can
from slurmrl.plan.estimates.call_costs import binary_size
from slurmrl.plan.estimates.hardware import Hardware
from slurmrl.plan.estimates.step_seconds import StepSeconds
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.settings import Settings
from slurmrl.registry import near
from slurmrl.search.best_layouts import Answer, SearchRequest
from slurmrl.search.best_layouts import search as search_layouts

STALENESS: Final = "staleness"
"""Name of the change by which rollout tasks generate during training. Completions may then be one
step old."""
PRECISION: Final = "precision"
"""Name of the change by which models in float32 compute in bfloat16."""
CHANGES: Final = (PRECISION, STALENESS)
MOST_REASONS: Final = 3
"""Maximum number of reasons shown for a change that no answer contains."""
BFLOAT16: Final = "bfloat16"
MAX_STALENESS: Final = "rollout.tasks.max_staleness"
Load: TypeAlias = Callable[[Mapping[str, Any]], Settings]
"""A function that loads the configuration with overrides (by dotted key), or raises ConfigError."""


def named_changes(text: str | None) -> list[str]:
    """Return the names in the value of ``--allow``, a list with commas. Raises UsageError."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise UsageError(f"--allow is empty; allowed changes: {', '.join(CHANGES)}")
    for name in names:
        if name not in CHANGES:
            raise UsageError(f"--allow: unknown change '{name}'; {near(name, list(CHANGES))}")
    return names


class LearnedChange(NamedTuple):
    """A change of a configuration that may change the result of training."""

    settings: Mapping[str, Any]
    """Mapping from dotted key to value, for all settings to change."""
    names: Mapping[str, str]
    """Mapping from settings that change the result of training to the name of their change."""

    @classmethod
    def together(cls, changes: Iterable[LearnedChange]) -> LearnedChange:
        """Return the change that combines all ``changes``."""
        settings, names = dict[str, Any](), dict[str, str]()
        for one in changes:
            settings |= one.settings
            names |= one.names
        return cls(settings, names)


@dataclass(frozen=True)
class Searched:
    """The best combinations of settings, and the allowed changes that none of them contains."""

    answers: Sequence[Answer]
    unchanged: Answer | None = None
    """The best answer that does not change the result of training; None if no combination fits."""
    refused: Sequence[str] = ()
    """Allowed changes that no answer contains, with the reasons."""
    rejected: Sequence[str] = ()
    """Reasons why a submission would reject combinations that may be faster than the answers."""


def search(
    checked: Settings,
    request: SearchRequest,
    plan: Load,
    submit: Load,
    allowed: Iterable[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Searched:
    """Return the best combinations with and without the allowed changes.

    ``plan`` and ``submit`` load the configuration with overrides and raise ConfigError if it is
    invalid. ``submit`` also rejects a trial that cannot be submitted, for example because it does
    not fit into memory. ``allowed`` has names of `CHANGES`.

    Raises UsageError if the seconds of a step cannot be predicted.
    """
    given = _CountingLoad(submit, {})
    answers = search_layouts(checked, request, given, progress)
    unchanged = answers[0] if answers else None
    refused: list[str] = []
    possible: dict[str, LearnedChange] = {}
    for name in CHANGES:
        if name not in allowed:
            continue
        change = _change(checked, name, request.engines)
        if isinstance(change, str):
            refused.append(f"{name}: {change}")
        else:
            possible[name] = change
    tried: list[tuple[tuple[str, ...], LearnedChange, _CountingLoad]] = []
    for names in _sets(possible):
        made = LearnedChange.together([possible[name] for name in names])
        loader = _CountingLoad(submit, made.settings)
        if (changed := _CountingLoad(plan, made.settings, loader.reasons)({})) is not None:
            known = answers
            found = search_layouts(changed, request, loader, progress, known)
            follows = tuple(_consequences(checked, changed))
            answers = [_marked(one, known, made, follows) for one in found]
        tried.append((names, made, loader))
    for names, made, loader in tried:
        if any(one.learned == made.names for one in answers):
            continue
        if loader.accepted or (answers and not loader.reasons):
            reasons = [f"not among the best {request.results}"]
        else:
            reasons = list(dict.fromkeys(loader.reasons))[:MOST_REASONS]
        refused += [
            f"{' and '.join(names)}: {reason}"
            for reason in reasons or ["no combination fits into the GPUs"]
        ]
    return Searched(answers, unchanged, refused, list(dict.fromkeys(given.reasons))[:MOST_REASONS])


def _marked(
    one: Answer, known: Sequence[Answer], made: LearnedChange, follows: tuple[str, ...]
) -> Answer:
    """Turn an answer for a changed configuration into an answer for the given configuration."""
    if any(one is other for other in known):
        return one
    overrides = {**made.settings, **one.overrides}
    return replace(one, overrides=overrides, learned=made.names, follows=follows)


def _sets(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield all sets of at least one name, the smaller sets first."""
    listed = list(names)
    for size in range(1, len(listed) + 1):
        yield from combinations(listed, size)


def _change(checked: Settings, name: str, engines: Iterable[str]) -> LearnedChange | str:
    """Return the change with a name, or the reason why it changes nothing.

    New rollout tasks use one of the ``engines``, unless the configuration names an engine.
    """
    config = checked.config
    if name == STALENESS:
        tasks = config.rollout.tasks
        if tasks is not None and tasks.max_staleness:
            return (
                f"rollout.tasks.max_staleness is {tasks.max_staleness} already, and a larger value "
                "changes no predicted seconds (slurmrl simulate shows its effect)"
            )
        made: dict[str, Any] = {MAX_STALENESS: 1}
        if tasks is None and config.rollout.gpus.strip():
            made["rollout.gpus"] = ""
        if tasks is None and config.rollout.offload is not None:
            made["rollout.offload"] = None
        serving = sorted(engine for engine in engines if can(engine, "rollouts"))
        if serving and not config.rollout.backend:
            made["rollout.backend"] = f"{serving[0]}:d1"
        return LearnedChange(made, {MAX_STALENESS: name})
    roles = dict.fromkeys(["actor", *(use.role for use in uses_of(config, checked.algorithm))])
    wide = [
        f"{dotted(role_key(role))}.dtype"
        for role in roles
        if config.model(role).dtype != BFLOAT16
        and (role == "actor" or checked.source.writes(*role_key(role), "dtype"))
    ]
    if not wide:
        return "all models compute in bfloat16 already"
    return LearnedChange(dict.fromkeys(wide, BFLOAT16), dict.fromkeys(wide, name))


class _CountingLoad:
    """Loads a configuration with overrides, counts successes and keeps reasons of rejections."""

    def __init__(
        self, load: Load, given: Mapping[str, Any], reasons: list[str] | None = None
    ) -> None:
        self._load, self._given = load, given
        self.accepted = 0
        self.reasons = [] if reasons is None else reasons

    def __call__(self, more: Mapping[str, Any]) -> Settings | None:
        try:
            found = self._load({**self._given, **more})
        except ConfigError as error:
            first = error.problems[0]
            self.reasons.append(f"{first.key}: {first.message}" if first.key else first.message)
            return None
        self.accepted += 1
        return found


def _consequences(before: Settings, after: Settings) -> Iterator[str]:
    """Describe the algorithm's settings whose defaults differ after a change."""
    old, new = flat(before.config.algorithm), flat(after.config.algorithm)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"algorithm.{key}={new.get(key)} instead of {old.get(key)}"


CAUSES: Final[Mapping[str, str]] = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise operations (memory bandwidth)",
    "communication": "communication of t, c and e",
    "weights": "gathering weights and reducing gradients",
    "bubble": "pipeline bubbles",
    "optimizer": "optimizer (memory bandwidth)",
    "host": "traffic with host memory",
    "prefill": "prefill (matrix products)",
    "decode": "decoding (memory bandwidth)",
}
SHOWN: Final = 3
"""Number of causes shown for an answer."""


def document(
    answers: Sequence[Answer],
    given: StepSeconds,
    request: SearchRequest,
    hardware: Hardware,
    *,
    fits: bool,
    searched: Searched | None = None,
    rejected: Sequence[str] = (),
) -> Document:
    """Return the answers as a table.

    ``given`` is the prediction of the given configuration. ``fits`` states whether this
    configuration fits into memory. ``searched`` has the allowed changes; None if no changes are
    allowed. ``rejected`` has reasons why a submission would reject faster combinations.
    """
    refusal = "a submission would reject other combinations, some of them faster:"
    return Document(
        f"the best {len(answers)}" if len(answers) > 1 else "the best",
        [
            *_blocks(answers, given, hardware, searched, fits=fits),
            *([Lines(refusal, list(rejected))] if rejected else []),
        ],
        subtitle=f"mean lengths: prompts {request.mean.prompt:g} tokens, "
        f"completions {request.mean.response:g} tokens",
    )


def _blocks(
    answers: Sequence[Answer],
    given: StepSeconds,
    hardware: Hardware,
    searched: Searched | None,
    *,
    fits: bool,
) -> Iterator[Block]:
    rows = [_row(number, one, given) for number, one in enumerate(answers, 1)]
    headings: tuple[str, ...] = (
        "",
        "GPUS",
        "SECONDS",
        "SPEEDUP",
        "ACTOR",
        "OTHERS",
        "GENERATION",
        "MICRO-BATCH",
        "CHECKPOINTING",
        "GPU MEMORY",
    )
    note = f"the given configuration: {given.total:.3g} s"
    note += "" if fits else ", but it does not fit into GPU memory"
    if searched is not None:
        headings = (*headings, "CHANGES")
        rows = [[*row, changes(one)] for row, one in zip(rows, answers, strict=True)]
    yield Table(headings, rows, note=note)
    best = answers[0]
    written = {key: "null" if value is None else value for key, value in best.overrides.items()}
    lines = [f"{key}={value}" for key, value in written.items()]
    yield Lines("settings of answer 1:", lines or ["as given"])
    if best.learned:
        learned = [f"{key} ({name})" for key, name in best.learned.items()]
        yield Lines("answer 1 changes the result of training:", [*learned, *best.follows])
    if searched is not None:
        yield from _without_changes(best, searched)
    lines = [f"{number}: {limits(one.step)}" for number, one in enumerate(answers, 1)]
    yield Lines("largest parts of a step, by answer:", lines)
    yield Lines(f"source of the predictions: formulas and {hardware.source}")
    yield Lines(f"error of the predictions: {hardware.error}")


def _row(number: int, answer: Answer, given: StepSeconds) -> list[str]:
    backends = dict(answer.backends)
    actor, generation = backends.pop("actor"), backends.pop(ROLLOUTS, "")
    generates = any("decode" in call for call in answer.step.calls.values())
    others = {
        backend: [n for n, each in backends.items() if each == backend]
        for backend in backends.values()
    }
    return [
        str(number),
        str(answer.gpus),
        f"{answer.step.total:.3g}",
        f"{given.total / answer.step.total:.2f}x",
        actor,
        ", ".join(f"{'+'.join(names)} {backend}" for backend, names in others.items()) or "-",
        generation or ("actor" if generates else "-"),
        str(answer.actor.max_tokens_per_microbatch),
        answer.actor.recompute,
        binary_size(answer.fullest.size),
    ]


def _without_changes(best: Answer, searched: Searched) -> Iterator[Block]:
    """Yield the best answer that contains no change, and the changes that no answer contains."""
    if searched.unchanged is None:
        yield Lines("no layout fits without a change of the training result")
    elif best.learned:
        seconds = searched.unchanged.step.total
        yield Lines(f"best with an unchanged result of training: {seconds:.3g} s")
    if searched.refused:
        yield Lines("allowed changes that gave no answer:", searched.refused)


def changes(answer: Answer) -> str:
    """Return the names of the allowed changes that an answer contains; ``-`` for none."""
    return "+".join(sorted(set(answer.learned.values()))) or "-"


def limits(step: StepSeconds) -> str:
    """Return the main causes of a step's seconds, with their shares."""
    total = sum(step.causes.values()) or 1.0
    first = list(step.causes.items())[:SHOWN]
    return ", ".join(f"{CAUSES.get(name, name)} {seconds / total:.0%}" for name, seconds in first)


def values(
    answers: Sequence[Answer],
    given: StepSeconds,
    request: SearchRequest,
    hardware: Hardware,
    *,
    fits: bool,
    searched: Searched | None = None,
    rejected: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the answers as JSON values; `document` explains the arguments."""
    found: dict[str, Any] = {}
    if searched is not None:
        least = searched.unchanged
        found["unchanged_seconds"] = None if least is None else least.step.total
        found["refused"] = list(searched.refused)
    return {
        "given_seconds": given.total,
        "given_fits": fits,
        "mean_prompt_tokens": request.mean.prompt,
        "mean_response_tokens": request.mean.response,
        "answers": [
            {
                "gpus": one.gpus,
                "seconds": one.step.total,
                "gpu_seconds": one.gpu_seconds,
                "backends": dict(one.backends),
                "settings": dict(one.overrides),
                "causes": {cause: round(value, 6) for cause, value in one.step.causes.items()},
                "gpu_bytes": one.fullest.size,
                "learned": dict(one.learned),
                "follows": list(one.follows),
            }
            for one in answers
        ],
        "source": hardware.source,
        "error": hardware.error,
        "rejected": list(rejected),
        "hardware": {name: list(number) for name, number in hardware.numbers.items()},
        **found,
    }


FOUND: Final = "set by slurmrl search"
GIVEN: Final = "set on the command line"


def edited(text: str, given: Mapping[str, Any], answer: Answer, seconds: StepSeconds) -> str:
    """Return the text of a configuration file with the settings of an answer.

    ``given`` has the overrides of the command line by dotted key, and ``seconds`` is the prediction
    with them. Keep the comments of the file, and add a comment to each changed line.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    root = yaml.load(text)
    for key, value in given.items():
        _set(root, key.split("."), value, GIVEN)
    for key, value in answer.overrides.items():
        name = answer.learned.get(key)
        reason = f"{FOUND}: changes the result of training ({name})" if name else FOUND
        _set(root, key.split("."), value, reason)
    out = io.StringIO()
    yaml.dump(root, out)
    head = (
        f"# slurmrl search: {answer.step.total:.3g} s for a step on {answer.gpus} GPUs "
        f"(as given: {seconds.total:.3g} s).\n# Largest parts: {limits(answer.step)}.\n"
    )
    if answer.follows:
        head += f"# With these changes, {', '.join(answer.follows)}.\n"
    return head + out.getvalue()


def _set(root: CommentedMap, keys: Sequence[str], value: object, reason: str) -> None:
    section = root
    for name in keys[:-1]:
        section.fa.set_block_style()  # A comment inside {…} would hide the rest of the line.
        if not isinstance(section.get(name), CommentedMap):
            section[name] = CommentedMap()
        section = section[name]
    section.fa.set_block_style()
    section[keys[-1]] = value
    comment = (section.ca.items.get(keys[-1]) or [None] * 3)[2]
    if comment is None:
        section.yaml_add_eol_comment(reason, keys[-1])
        return
    # The token also contains the comment lines below the key.
    line, end, below = comment.value.partition("\n")
    old = line.strip().removeprefix("#").strip().split("; ")
    parts = [*(part for part in old if part and not part.startswith((FOUND, GIVEN))), reason]
    comment.value = f"# {'; '.join(parts)}{end}{below}"
