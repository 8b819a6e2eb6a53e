"""The engines and their rules. A new engine is a file under ``slurmrl/engines`` and one line here.

The allocation grammar knows more backends than there are engines. A backend that is not in this
table parses, and is then refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import AXIS_OF, BACKENDS
from slurmrl.errors import AllocationError


@dataclass(frozen=True)
class EngineRules:
    """What an engine supports: the dimensions of its layouts, and ``module:Class`` of the
    torch-free class whose ``from_hf`` refuses architectures that it cannot run."""

    dimensions: str
    architectures: str
    hf_architectures: str | None = None
    """The same for ``implementation: hf``; None where the engine does not have it."""
    generates: bool = True
    copies_heads: bool = True
    """Whether key and value heads are replicated when there are more tensor-parallel ranks."""
    own_experts: bool = True
    """Whether experts may have a layout of their own."""
    cpu_offload: bool = False
    adapters: bool = False
    """Whether it trains low-rank adapters of the built-in decoder."""
    transformer_engine: bool = False
    """Whether it can build its layers from TransformerEngine's modules."""
    context_heads: bool = False
    """Whether context-parallel ranks share the attention heads, which must then divide evenly."""
    records_support: bool = True
    """Whether generation can report the tokens that each one was drawn from."""
    records_experts: bool = False
    """Whether generation can report the experts that read each token."""
    records_no_experts_of: tuple[str, ...] = ()
    """Kinds of models (``model_type``) of which it cannot."""
    dense_layers: bool = True
    """Whether some layers of a model with experts may be dense."""
    experts_of_whole_sequences: bool = True
    """Whether it trains experts on several tensor ranks without sequence parallelism."""
    module: str = ""
    """Module that it needs beside slurmrl's own dependencies; of servers, in their own Python."""
    install: str = ""
    """Command that installs the module."""
    needs_gpu: bool = False

    def records_experts_of(self, kind: object) -> bool:
        """Whether generation can report the experts of models with this ``model_type``."""
        return self.records_experts and kind not in self.records_no_experts_of


FSDP: Final = EngineRules(
    "dtc",
    "slurmrl.models.config:ModelConfig",
    hf_architectures="slurmrl.models.hf_config:HFConfig",
    own_experts=False,
    cpu_offload=True,
    adapters=True,
    context_heads=True,
    records_experts=True,
)
"""FSDP2 around the built-in decoder; ``archon`` is another name for it."""
EXPERTS_NEED: Final[Mapping[str, object]] = {
    "disaggregation_mode": "null",
    "enable_flexkv": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_two_batch_overlap": False,
    "enable_unified_cache_external_linker": False,
    "pp_size": 1,
    "radix_cache_backend": None,
    "speculative_algorithm": None,
}
"""What settings of SGLang must be where it reports experts. Other values bring keys and values into
the cache, or move them, without the experts beside them, or leave out layers: the server would
report those of other tokens."""
SERVERS: Final = EngineRules("dt", "slurmrl.models.config:ModelConfig", own_experts=False)
"""The leader of each data-parallel copy keeps a server on the GPUs of its tensor ranks."""
ENGINES: Final = {
    "fsdp": FSDP,
    "archon": FSDP,
    "megatron": EngineRules(
        "dtpce",
        "slurmrl.engines.megatron.schema:MegatronModel",
        generates=False,
        copies_heads=False,
        transformer_engine=True,
        context_heads=True,
        experts_of_whole_sequences=False,
        module="megatron.core",
        install="pip install megatron-core==0.16.1",
        needs_gpu=True,
    ),
    "sglang": replace(
        SERVERS,
        records_experts=True,
        records_no_experts_of=("mixtral",),
        dense_layers=False,
        module="sglang",
    ),
    "vllm": replace(
        SERVERS,
        records_support=False,
        module="vllm",
    ),
    "native": EngineRules(
        "dt",
        "slurmrl.models.config:ModelConfig",
        hf_architectures="slurmrl.models.hf_config:HFConfig",
        own_experts=False,
        records_experts=True,
    ),
}


def rules_of(allocation: Allocation) -> EngineRules:
    """The rules of an allocation's engine. Raises AllocationError for a backend or a dimension
    without an engine."""
    rules = ENGINES.get(allocation.backend)
    if rules is None:
        trains = BACKENDS[allocation.backend].trains
        able = [name for name in ENGINES if BACKENDS[name].trains == trains]
        raise AllocationError(
            f"'{allocation}': there is no engine for {allocation.backend} in this version; "
            f"allowed: {', '.join(able)}"
        )
    for letter, axis in AXIS_OF.items():
        if allocation.sizes[axis] > 1 and letter not in rules.dimensions:
            able = [name for name, other in ENGINES.items() if letter in other.dimensions]
            hint = f" ({', '.join(able)} does)" if able else ""
            raise AllocationError(
                f"'{allocation}': the {allocation.backend} engine of this version does not split "
                f"'{letter}'{hint}; allowed: {', '.join(rules.dimensions)}"
            )
    if allocation.experts is not None and not rules.own_experts:
        raise AllocationError(
            f"'{allocation}': with {allocation.backend}, experts have the layout of the rest of "
            "the model; write one layout instead of (attn:…|ffn:…)"
        )
    return rules
