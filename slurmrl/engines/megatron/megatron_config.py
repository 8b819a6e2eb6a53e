"""Config, process groups and random states of megatron-core for a model on a rank.

None of these needs megatron's global state. megatron-core keeps named random states in one tracker
per process, so slurmrl swaps a model's own states in while the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from slurmrl.engines.megatron.parts import Place
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.recompute import Recompute
from slurmrl.tensors.ops.elementwise import ACTIVATIONS
from slurmrl.tensors.parallel.groups import ParallelContext

STATELESS = {"fp8_recipe": "tensorwise", "disable_parameter_transpose_cache": True}
"""FP8 settings with which a pass depends only on weights and inputs. Scales come from the current
tensors, not from earlier steps, and no FP8 copy of weights outlives a micro-batch."""
EXPERTS = {
    "ep": "ep",
    "expt_tp": "etp",
    "expt_dp": "edp",
    "tp_ep": "etp+ep",
    "tp_ep_pp": "etp+ep+pp",
}
WITHOUT_GRID = {"ep": "alone", "expt_tp": "tp", "expt_dp": "shard", "tp_ep": "tp"}


def transformer_config(
    config: ModelConfig,
    context: ParallelContext,
    dtype: str,
    recompute: Recompute,
    *,
    transformer_engine: bool,
    fp8: Literal["hybrid", "e4m3"] | None = None,
) -> TransformerConfig:
    """Return megatron-core's config of a model.

    Losses are sums that the engine divides, so megatron scales no gradient. Parameters are filled
    from shards, so megatron initializes none.
    """
    tp = context.axis_size("tp")
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        gated_linear_unit=True,
        # Without TransformerEngine, layers use `layers.GatedHalves` instead of this function, but
        # megatron requires a function that it knows.
        activation_func=ACTIVATIONS[config.activation].value if transformer_engine else F.silu,
        bias_activation_fusion=False,
        use_te_activation_func=not transformer_engine,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        layernorm_zero_centered_gamma=transformer_engine and config.family.norm_offset,
        add_bias_linear=config.mlp_bias
        or (config.moe is not None and config.moe.clamp is not None),
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        params_dtype=getattr(torch, dtype),
        bf16=dtype == "bfloat16",
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        sequence_parallel=context.sequence_parallel and tp > 1,
        context_parallel_size=context.axis_size("cp"),
        **_pipeline(context, dtype),
        **_experts(config, context),
        **_recompute(recompute, transformer_engine=transformer_engine),
        **({} if fp8 is None else {"fp8": fp8, **STATELESS}),
    )


def _pipeline(context: ParallelContext, dtype: str) -> dict[str, Any]:
    stages, virtual = context.axis_size("pp"), context.virtual_pipeline
    return {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "pipeline_dtype": getattr(torch, dtype),
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # The other dispatcher requires equal lengths.
        # Interleaved schedules are silently wrong without overlapped sends.
        "overlap_p2p_comm": virtual > 1,
        "batch_p2p_comm": virtual == 1,
    }


def _experts(config: ModelConfig, context: ParallelContext) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    grid = context.experts
    return {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.inner,
        "moe_shared_expert_intermediate_size": moe.shared or None,
        "moe_layer_freq": [int(layer in moe.layers) for layer in range(config.num_layers)],
        "moe_router_topk": moe.per_token,
        # A softmax before top-k gives probabilities over all experts, not over the chosen ones.
        "moe_router_pre_softmax": not moe.normalized,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": grid.size("ep") if grid else 1,
        "expert_tensor_parallel_size": grid.size("tp") if grid else context.axis_size("tp"),
    }


def _recompute(recompute: Recompute, *, transformer_engine: bool) -> dict[str, Any]:
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if recompute == "selective" and transformer_engine:
        # PyTorch cannot keep the matrix products inside TransformerEngine's modules: let megatron
        # recompute only these modules.
        modules = ["layernorm", "mlp", "moe"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def group_of(context: ParallelContext, name: str) -> dist.ProcessGroup:
    """Return this rank's group on axis ``name``; only this rank if the layout lacks the axis."""
    return context.groups.get(name, context.groups["alone"])


def collection(context: ParallelContext) -> ProcessGroupCollection:
    """Return all process groups that megatron-core requires."""
    names = {
        "tp": "tp",
        "pp": "pp",
        "cp": "cp",
        "dp": "dp",
        "mp": "tp+pp",
        "tp_cp": "tp+cp",
        "tp_dp_cp": "tp+dp+cp",
        "dp_cp": "shard",
        "intra_dp_cp": "shard",
        "intra_dist_opt": "all",
        "pos_embd": "alone",
        **(EXPERTS if context.experts else {**WITHOUT_GRID, "tp_ep_pp": "tp+pp"}),
    }
    groups = {field: group_of(context, name) for field, name in names.items()}
    groups["intra_expt_dp"] = groups["expt_dp"]
    # Stages between the first and the last have no word embeddings to add up.
    inner = context.axis_size("pp") > 1 and "ends" not in context.groups
    return ProcessGroupCollection(**groups, embd=None if inner else group_of(context, "ends"))


class RandomStates:
    """The named random states of one model."""

    def __init__(self, seed: int, place: Place) -> None:
        tracker = random.get_cuda_rng_tracker()
        others, default = tracker.get_states(), random._get_cuda_rng_state()
        tracker.reset()
        random.model_parallel_cuda_manual_seed(
            seed, tp_rank=place.tp_rank, ep_rank=place.ep_rank, etp_rank=place.etp_rank
        )
        self._own: dict[str, Any] = tracker.get_states()
        tracker.set_states(others)
        random._set_cuda_rng_state(default)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Swap in this model's states, and save their new values at the end."""
        tracker = random.get_cuda_rng_tracker()
        others = tracker.get_states()
        tracker.set_states(self._own)
        try:
            yield
        finally:
            self._own = tracker.get_states()
            tracker.set_states(others)
