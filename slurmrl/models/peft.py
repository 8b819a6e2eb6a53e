"""Adapters in the format of PEFT (huggingface/peft): ``adapter_config.json`` and
``adapter_model.safetensors``. Torch-free."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from slurmrl.config.schema.model import TARGETS, Lora
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.models.adapters import LORA_A, LORA_B
from slurmrl.models.config import Head
from slurmrl.models.shapes import VALUE_HEAD
from slurmrl.tensors.checkpoint.export import TokenizerFiles, write_folder, write_json
from slurmrl.tensors.checkpoint.precision import AS_STORED, Precision
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.checkpoint.tensors import TensorEntry, write_tensors

PREFIX = "base_model.model."
"""Of the wrapped model's names."""
TASKS: dict[Head, str] = {"lm": "CAUSAL_LM", "value": "SEQ_CLS"}


def write_adapter(
    trained: RoleCheckpoint,
    target: Path,
    lora: Lora,
    head: Head,
    *,
    base: str,
    tokenizer: TokenizerFiles | None = None,
    precision: Precision = AS_STORED,
    calls: SystemCalls = REAL,
) -> Path:
    """Write the adapters of a checkpoint as a folder that PEFT loads onto the model ``base``. The
    folder is complete or absent; an existing one is replaced."""
    entries = [
        precision.apply(TensorEntry(_theirs(name), spec, partial(trained.read, name)))
        for name, spec in trained.weights()
    ]

    def fill(folder: Path) -> None:
        write_tensors(folder / "adapter_model.safetensors", entries, {"format": "pt"}, calls=calls)
        names = {name.split(".")[-2] for name, _ in trained.weights() if name != VALUE_HEAD}
        values = _config(lora, head, base, [name for name in TARGETS if name in names])
        write_json(folder / "adapter_config.json", values, calls)
        if tokenizer is not None:
            tokenizer.copy(folder, calls)

    return write_folder(target, fill, calls)


def _theirs(name: str) -> str:
    """PEFT's name of a trained tensor."""
    return f"{PREFIX}{name}.weight" if name.endswith((LORA_A, LORA_B)) else PREFIX + name


def _config(lora: Lora, head: Head, base: str, targets: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": TASKS[head],
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": targets,
        "modules_to_save": ["score"] if head == "value" else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
