"""Checks of the datasets, models, algorithms and servers that read images or videos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Dataset, Model
from slurmrl.config.source import KeyPath
from slurmrl.errors import AllocationError, Problem
from slurmrl.plan.algorithms import POLICY_GRADIENTS, uses_of
from slurmrl.plan.checks import Draft
from slurmrl.plan.checks.completion_checks import served
from slurmrl.plan.engine_rules import HF
from slurmrl.plan.estimates.shape import known_config
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.registry import resolve

REFUSAL: Final = "slurmrl.models.families:picture_refusal"
VIDEO_REFUSAL: Final = "slurmrl.models.families:video_refusal"
SERVED_REFUSAL: Final = "slurmrl.models.families:served_refusal"
"""Names of functions in a room that ``plan`` must not import."""
ALGORITHMS: Final = ("sft", *POLICY_GRADIENTS, "generate", "evaluate")
PATCHES: Final = ("patch_size", "temporal_patch_size", "spatial_merge_size", "image_size")
FORM: Final = ("model_type", *PATCHES)
"""Fields of a model and of its image encoder that determine the format of pixels."""
TYPES: Final = ("prompt", "prompt_answer", "messages")


def images(draft: Draft) -> Iterator[Problem]:
    """Check that models, algorithm and engines can read the images and videos of datasets."""
    yield from _towers(draft)
    sections = {w: each for w, each in draft.config.datasets().items() if each.media_keys}
    if not sections:
        return
    for where, dataset in sections.items():
        for medium in dataset.media_keys:
            yield from _section(draft, (*where, f"{medium}s_key"), dataset)
    where, first = next(iter(sections.items()))
    medium = next(iter(first.media_keys))
    key = (*where, f"{medium}s_key")
    if draft.algorithm.name not in ALGORITHMS:
        reason = f": {draft.algorithm.name} reads no {medium}s; allowed algorithms: "
        yield draft.reject(key, reason + ", ".join(ALGORITHMS))
    for use in uses_of(draft.config, draft.algorithm):
        if use.head == "value":
            reason = f": {use.role} is a value model, which reads no {medium}s"
            yield draft.reject(key, reason)
    videos = any(each.videos_key for each in sections.values())
    yield from _models(draft, VIDEO_REFUSAL if videos else REFUSAL)
    yield from _forms(draft)
    yield from _servers(draft)


def pillow(draft: Draft) -> Iterator[Problem]:
    """Check that Pillow is installed. Pillow reads images and the frames of videos."""
    for where, dataset in draft.config.datasets().items():
        for medium, key in dataset.media_keys.items():
            if find_spec("PIL") is None:
                reason = f": {medium}s need the package pillow: pip install pillow"
                yield draft.reject((*where, f"{medium}s_key"), reason, key)


def _towers(draft: Draft) -> Iterator[Problem]:
    for role, model in draft.models():
        name = "train_vision" if model.train_vision else "vision"
        if not model.train_vision and not (model.vision and draft.writes(role, "vision")):
            continue
        key = (role, name)
        if model.implementation != HF:
            yield draft.reject(key, f": only implementation {HF} has image encoders", value=True)
        elif model.lora is not None and model.train_vision:
            reason = " with lora, whose adapters are in the language model only"
            yield draft.reject(key, reason, value=True)
        elif (values := known_config(model)) and resolve(REFUSAL)(values):
            reason = f": slurmrl builds no image encoder for {values.get('model_type')} models"
            yield draft.reject(key, reason, value=True)


def _section(draft: Draft, key: KeyPath, dataset: Dataset) -> Iterator[Problem]:
    value = getattr(dataset, str(key[-1]))
    if dataset.kind not in TYPES:
        reason = f" with type {dataset.kind}; allowed types: {', '.join(TYPES)}"
        yield draft.reject(key, reason, value)
    elif not all(part.is_chat for part in dataset.parts.values()):
        reason = " without a chat template, which marks the places of images: set chat_template"
        yield draft.reject(key, reason, value)


def _models(draft: Draft, refusal: str) -> Iterator[Problem]:
    for role, model in draft.models():
        where = role if draft.writes(role, "implementation") else "actor"
        if model.implementation != HF:
            reason = f": the built-in decoder reads no images; allowed: {HF}"
            yield draft.reject((where, "implementation"), reason, model.implementation)
            return
        if (values := known_config(model)) and (reason := resolve(refusal)(values)):
            source = "path" if model.path is not None else "architecture"
            yield draft.reject((role, source), f": {reason}")
            return


def _forms(draft: Draft) -> Iterator[Problem]:
    """Check that all models read pixels of the same format, because one processor makes them."""
    (first, known), *others = ((role, _form(model)) for role, model in draft.models())
    for role, form in others:
        for name in [n for n in form if n in known and form[n] != known[n]][:1]:
            reason = f": {role} and {first} must read the same pixels, but {name} is "
            source = "path" if draft.writes(role, "path") else "architecture"
            yield draft.reject((role, source), f"{reason}{form[name]} and {known[name]}")


def _form(model: Model) -> dict[str, object]:
    """Return a model's known fields in `FORM`, mapped to their values."""
    values = known_config(model)
    parts = [part for part in (values.get("vision_config"), values) if isinstance(part, Mapping)]
    return {n: _side(part[n]) for part in parts for n in FORM if n in part}


def _side(value: Any) -> Any:
    """Return the number in a list of equal numbers. Return other values unchanged."""
    equal = isinstance(value, list) and value and value == value[:1] * len(value)
    return value[0] if equal else value


def _servers(draft: Draft) -> Iterator[Problem]:
    """Check that slurmrl starts the servers, and that they read the media of the actor's family."""
    config, remedy = draft.config, "leave out the key, so that transformers generates"
    videos = any(each.videos_key for each in config.datasets().values())
    if config.rollout.servers:
        reason = " with images: slurmrl must start the servers; set rollout.python instead"
        reason = " with videos, which servers do not get; leave out the key" if videos else reason
        yield draft.reject((ROLLOUTS, "servers"), reason)
    tasks = config.evaluation.tasks if config.evaluation is not None else None
    own = (ROLLOUTS, "backend"), config.rollout.backend if served(draft) else None
    for key, text in (own, (("evaluation", "tasks", "backend"), tasks and tasks.backend)):
        with suppress(AllocationError):  # The checks of layouts report the error.
            backend = parse(text).backend if text else ""
            serves = backend and BACKENDS[backend].serves
            values = known_config(config.actor) if serves and not videos else {}
            if serves and videos:
                yield draft.reject(key, f": {backend} servers get no videos; {remedy}", text)
            elif values and (reason := resolve(SERVED_REFUSAL)(values, backend)):
                yield draft.reject(key, f": {reason}; {remedy}", text)
