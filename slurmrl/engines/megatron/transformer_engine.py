"""TransformerEngine's linear layers, norms and grouped experts in megatron's layers.

Attention stays ours: sequences are packed, and along the context axis heads are exchanged.
"""

from __future__ import annotations

import warnings

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_te_version, is_te_min_version

from slurmrl.engines.megatron.layers import Modules
from slurmrl.errors import UsageError

FIRST, END = "2.9.0a0", "2.12"
"""Releases that megatron-core 0.16.1 supports: the first, and the one after the last."""
HINT = f"pip install --no-build-isolation 'transformer_engine[pytorch]>={FIRST},<{END}'"


def chosen(wanted: bool | None, device: torch.device, dtype: str) -> bool:
    """Whether layers use TransformerEngine's modules. If ``wanted`` is None, they do if it is
    installed, on GPUs in half precision (its float32 products use TF32). Raises UsageError if they
    are wanted and missing."""
    if wanted is None:
        return device.type == "cuda" and dtype != "float32" and te.HAVE_TE and _suits()
    if wanted and not te.HAVE_TE:
        raise UsageError(f"transformer_engine: true needs TransformerEngine: {HINT}")
    return wanted


def _suits() -> bool:
    if is_te_min_version(FIRST) and not is_te_min_version(END):
        return True
    warnings.warn(
        f"TransformerEngine {get_te_version()} is not used: megatron-core supports "
        f">={FIRST},<{END}; set transformer_engine: true to use it anyway",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def modules() -> Modules:
    """TransformerEngine's module classes for layers."""
    norm = ModuleSpec(te.TENorm)
    grouped = MLPSubmodules(
        linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear
    )
    return Modules(
        layer=TransformerLayer,
        norm=norm,
        head_norm=norm,
        column=te.TEColumnParallelLinear,
        row=te.TERowParallelLinear,
        experts=ModuleSpec(TEGroupedMLP, submodules=grouped),
    )
