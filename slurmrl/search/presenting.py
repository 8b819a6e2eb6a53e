"""The answers of a search for people: a table, JSON values, and the edited configuration."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from slurmrl.display.terminal import Block, Document, Lines, Table
from slurmrl.plan.estimates.call_costs import binary_size
from slurmrl.plan.estimates.hardware import Hardware
from slurmrl.plan.estimates.pass_seconds import Seconds
from slurmrl.plan.estimates.step_seconds import StepSeconds
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.search.allowed_changes import Searched
from slurmrl.search.best_layouts import Answer, SearchRequest

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
"""Causes that are named of an answer."""


def document(
    answers: Sequence[Answer],
    given: StepSeconds,
    request: SearchRequest,
    hardware: Hardware,
    *,
    fits: bool,
    searched: Searched | None = None,
) -> Document:
    """Return the answers as a table.

    ``given`` is the prediction of the given configuration, which ``fits`` into memory or not.
    ``searched`` has the allowed changes; None if none are allowed.
    """
    return Document(
        f"the best {len(answers)}" if len(answers) > 1 else "the best",
        list(_blocks(answers, given, hardware, searched, fits=fits)),
        subtitle=f"mean lengths: {request.mean.prompt:g} tokens of prompt, "
        f"{request.mean.response:g} of completion",
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
    lines = [f"{key}={_shown(value)}" for key, value in best.overrides.items()]
    yield Lines("settings of 1:", lines or ["as given"])
    if best.learned:
        learned = [f"{key} ({name})" for key, name in best.learned.items()]
        yield Lines("1 changes the result of training:", [*learned, *best.follows])
    if searched is not None:
        yield from _without_changes(best, searched)
    lines = [f"{number}: {limits(one.step)}" for number, one in enumerate(answers, 1)]
    yield Lines("most of the time of each:", lines)
    yield Lines(f"predictions: formulas and {hardware.source}")
    yield Lines(f"their error: {hardware.error}")


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
    """Yield the best answer that changes nothing, and the changes without an answer."""
    if searched.unchanged is None:
        yield Lines("with the same result of training, no combination fits")
    elif best.learned:
        seconds = searched.unchanged.step.total
        yield Lines(f"best with the same result of training: {seconds:.3g} s")
    if searched.refused:
        yield Lines("allowed changes without an answer:", searched.refused)


def changes(answer: Answer) -> str:
    """The allowed changes that an answer makes."""
    return "+".join(sorted(set(answer.learned.values()))) or "-"


def limits(step: StepSeconds) -> str:
    """The causes that take most of a step's seconds, with their shares."""
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
) -> dict[str, Any]:
    """The answers as JSON values."""
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
                "causes": _rounded(one.step.causes),
                "gpu_bytes": one.fullest.size,
                "learned": dict(one.learned),
                "follows": list(one.follows),
            }
            for one in answers
        ],
        "source": hardware.source,
        "error": hardware.error,
        "hardware": {name: list(number) for name, number in hardware.numbers.items()},
        **found,
    }


def _rounded(seconds: Seconds) -> dict[str, float]:
    return {cause: round(value, 6) for cause, value in seconds.items()}


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


FOUND: Final = "set by slurmrl search"
GIVEN: Final = "set on the command line"


def edited(text: str, given: Mapping[str, Any], answer: Answer, seconds: StepSeconds) -> str:
    """Return a configuration file with the settings of an answer.

    ``given`` are the overrides of the command line, by dotted key; ``seconds``, the prediction with
    these. Comments stay, and each changed line gets one.
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
        f"(as given: {seconds.total:.3g} s).\n# Most time: {limits(answer.step)}.\n"
    )
    if answer.follows:
        head += f"# With these changes, {', '.join(answer.follows)}.\n"
    return head + out.getvalue()


def _set(root: CommentedMap, keys: Sequence[str], value: object, reason: str) -> None:
    section = root
    for name in keys[:-1]:
        section.fa.set_block_style()  # a comment inside {…} would end the line
        if not isinstance(section.get(name), CommentedMap):
            section[name] = CommentedMap()
        section = section[name]
    section.fa.set_block_style()
    section[keys[-1]] = value
    comment = (section.ca.items.get(keys[-1]) or [None] * 3)[2]
    if comment is None:
        section.yaml_add_eol_comment(reason, keys[-1])
        return
    line, end, below = comment.value.partition("\n")  # the comments below belong to this token
    old = line.strip().removeprefix("#").strip().split("; ")
    parts = [*(part for part in old if part and not part.startswith((FOUND, GIVEN))), reason]
    comment.value = f"# {'; '.join(parts)}{end}{below}"
