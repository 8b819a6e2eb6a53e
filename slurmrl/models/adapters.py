"""Names and shapes of low-rank adapters (Hu et al. 2021). Torch-free.

The weight ``<module>.weight`` [o, i] has the matrices ``<module>.lora_A`` [r, i] and
``<module>.lora_B`` [o, r].
"""

from __future__ import annotations

from collections.abc import Iterator

from slurmrl.config.schema.model import ALL_LINEAR, TARGETS, Lora
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.shapes import VALUE_HEAD, Shapes, parameter_shapes

LORA_A = "lora_A"
LORA_B = "lora_B"
OWN_FILES = "slurmrl.models.storage:gpt2"


def matrix_name(weight: str, matrix: str) -> str:
    """The name of a weight's adapter matrix."""
    return f"{weight.removesuffix('.weight')}.{matrix}"


def adapted_weight(name: str) -> str | None:
    """The weight that an adapter matrix belongs to; None if ``name`` is another parameter's."""
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last in (LORA_A, LORA_B) else None


def adapted_weights(config: ModelConfig, lora: Lora) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and shape of each weight that has an adapter, in the decoder's order."""
    for name, shape in parameter_shapes(config, "lm").items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 2 and lora.adapts(module.rpartition(".")[2]):
            yield name, (shape[0], shape[1])


def trained_shapes(config: ModelConfig, head: Head, lora: Lora) -> Shapes:
    """Shape of every tensor that is trained: the adapters, and a value model's head."""
    shapes: Shapes = {}
    for name, (outputs, inputs) in adapted_weights(config, lora):
        shapes[matrix_name(name, LORA_A)] = (lora.rank, inputs)
        shapes[matrix_name(name, LORA_B)] = (outputs, lora.rank)
    if head == "value":
        shapes[VALUE_HEAD] = parameter_shapes(config, head)[VALUE_HEAD]
    return shapes


def refusal(config: ModelConfig, lora: Lora) -> str | None:
    """Why a model cannot have these adapters; None if it can."""
    if config.family.files == OWN_FILES:
        return (
            f"{config.model_type} stores queries, keys and values as one matrix, for which PEFT's "
            "format has one adapter; train its weights, or another family"
        )
    modules = {name.split(".")[-2] for name in parameter_shapes(config, "lm")}
    able = ", ".join(name for name in TARGETS if name in modules)
    if lora.targets == ALL_LINEAR and config.moe is not None:
        return f"'{ALL_LINEAR}' includes the experts, which have no adapters; list some of {able}"
    missing = [n for n in lora.targets if n not in modules] if lora.targets != ALL_LINEAR else []
    if missing:
        return f"this {config.model_type} model has no linear layer '{missing[0]}'; it has {able}"
    return None
