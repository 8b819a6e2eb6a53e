"""Names of the layers of transformers' models that get adapters. Torch-free.

PEFT uses the names of transformers' modules. Default targets are PEFT's defaults.

GPT-2's layers store their weight W as [i, o]: i inputs, o outputs. Adapters have the matrices
``lora_B`` [i, r] and ``lora_A`` [r, o], the transposes of PEFT's A and B. W + scale * B A therefore
has the shape of W in every family, and the rows of ``lora_B`` are the rows of W.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slurmrl.config.schema.roles import ALL_LINEAR, Lora
from slurmrl.errors import UsageError
from slurmrl.models import hf_form
from slurmrl.models.architecture import Head
from slurmrl.models.hf_config import MODULE, HFConfig
from slurmrl.tensors.layout import Index, TensorSpec

QUERY_VALUE: Final = ("q_proj", "v_proj")
DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "gemma",
            "gemma2",
            "gemma3_text",
            "gpt_neo",
            "gptj",
            "llama",
            "llama4",
            "mistral",
            "mixtral",
            "opt",
            "qwen2",
            "qwen3",
            "stablelm",
        ),
        QUERY_VALUE,
    ),
    **dict.fromkeys(("bloom", "falcon", "gpt_neox"), ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "codegen": ("qkv_proj",),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": (*QUERY_VALUE, "fc1", "fc2"),
    "rwkv": ("key", "value", "receptance", "output"),
}
"""Mapping from a model type to PEFT's default targets; other families have none."""
TRANSPOSED: Final = frozenset(("gpt2", "openai-gpt"))
"""Model types whose linear layers store the transposed weight [i, o]."""

EXPERT_FIELDS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERT_NAMES: Final = frozenset(("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
"""Names in ``target_modules`` that PEFT mistakes for stacked experts in families with experts.
Linear layers with these names are listed as ``target_parameters``."""


def targets_of(model_type: str, lora: Lora) -> str | tuple[str, ...]:
    """Return ``all-linear`` or the names of the targets."""
    if lora.targets is not None:
        return lora.targets if isinstance(lora.targets, str) else tuple(lora.targets)
    return DEFAULTS.get(model_type, ALL_LINEAR)


def matches(name: str, target: str) -> bool:
    """Return whether a target is a module's name or the end of the name, as in PEFT."""
    return name == target or name.endswith(f".{target}")


def peft_targets(
    values: Mapping[str, Any], lora: Lora, adapted: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Return PEFT's ``target_modules`` and ``target_parameters`` for the ``adapted`` modules.

    ``values`` is the model's ``config.json`` object.
    """
    targets = targets_of(values["model_type"], lora)
    names = [name.removeprefix(MODULE) for name in adapted]
    fields = {**values, **(values.get("text_config") or {})}
    renamed = EXPERT_NAMES if any(fields.get(field) for field in EXPERT_FIELDS) else ()
    modules = [name for name in names if name.rpartition(".")[2] not in renamed]
    parameters = [f"{name}.weight" for name in names if name not in modules]
    if targets == ALL_LINEAR:
        return sorted(modules), sorted(parameters)
    return [each for each in targets if any(matches(name, each) for name in modules)], sorted(
        parameters
    )


def adapted_tensors(
    shapes: Mapping[str, Index],
    specs: Mapping[str, TensorSpec],
    folder: Path,
    config: HFConfig,
    head: Head,
) -> dict[str, str]:
    """Return the name in the files of each adapted weight of ``shapes``.

    ``specs`` are the tensors of the model's files, which may name the modules around a layer
    differently. A weight is the tensor of its layer number whose name has the longest end in common
    with the weight's name, of at least two parts, such as ``q_proj.weight``. If this rule does not
    find every weight, apply it to the names that transformers writes for these weights. Raises
    UsageError if the files do not store a weight as one tensor of its shape.
    """
    try:
        return _found({name: name.removeprefix(MODULE) for name in shapes}, shapes, specs, folder)
    except UsageError:
        slices = hf_form.file_form(config, head).slices
        written = {name: slices[name][0].tensor for name in shapes if name in slices}
        if written.keys() != shapes.keys():
            raise
        return _found(written, shapes, specs, folder)


def _found(
    names: Mapping[str, str],
    shapes: Mapping[str, Index],
    specs: Mapping[str, TensorSpec],
    folder: Path,
) -> dict[str, str]:
    stored: dict[str, list[str]] = {}
    for name in specs:
        stored.setdefault(_of_layer(name)[0], []).append(name)
    found: dict[str, str] = {}
    taken = set()
    for weight, shape in shapes.items():
        name = names[weight]
        same = [name] if name in specs else _nearest(name, stored.get(_of_layer(name)[0], []))
        fitting = [each for each in same if specs[each].shape == tuple(shape)]
        if len(fitting) != 1 or fitting[0] in taken:
            problem = "in another form" if not fitting else f"ambiguously ({', '.join(fitting)})"
            raise UsageError(
                f"{folder} stores {weight.removeprefix(MODULE)} {problem}, so that its adapter "
                "cannot be merged; leave it out of lora.targets"
            )
        (found[weight],) = fitting
        taken.add(found[weight])
    return found


def _nearest(name: str, others: Iterable[str]) -> list[str]:
    """Return the names whose ends have the most parts in common with ``name``, at least two."""
    lengths = {each: _common(_of_layer(name)[::-1], _of_layer(each)[::-1]) for each in others}
    most = max(lengths.values(), default=0)
    return [each for each, length in lengths.items() if length == most >= 2]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of equal parts at the beginning of two names."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _of_layer(name: str) -> list[str]:
    """Return the parts of a tensor's name from its layer's number on; all without a number."""
    parts = name.split(".")
    return parts[next((index for index, part in enumerate(parts) if part.isdigit()), 0) :]
