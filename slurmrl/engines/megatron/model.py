"""megatron-core's GPTModel with outputs of our own: no logits, and value heads.

T packed tokens, c ranks along the context axis, h hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slurmrl.engines.base import Outputs
from slurmrl.engines.megatron.layers import Micro, Modules, block_spec
from slurmrl.engines.megatron.parts import Place, Stage
from slurmrl.engines.megatron.routing import Router, marks
from slurmrl.models.config import Head, ModelConfig
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.collectives import (
    own_to_partial,
    own_to_whole,
    partial_to_whole,
    whole_to_partial,
)
from slurmrl.tensors.ops.logprobs import (
    Rows,
    following_tokens,
    logprobs_and_entropy,
    vocab_parallel_logprobs_and_entropy,
)
from slurmrl.tensors.ops.products import wide_linear

SPLIT = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


class Chunk(GPTModel):  # type: ignore[misc]
    """One chunk of a pipeline stage. Attention applies the rotation."""

    def __init__(
        self,
        config: ModelConfig,
        head: Head,
        place: Place,
        stage: Stage,
        vocabulary: int,
        settings: TransformerConfig,
        modules: Modules,
        groups: ProcessGroupCollection,
        device: torch.device,
    ) -> None:
        self.model_config, self.head = config, head
        super().__init__(
            settings,
            block_spec(config, stage, modules),
            vocabulary,
            config.max_positions,
            pre_process=stage.embeds,
            post_process=stage.ends,
            share_embeddings_and_output_weights=head == "lm" and config.tie_embeddings,
            position_embedding_type="none",
            pg_collection=groups,
            vp_stage=stage.index if place.virtual > 1 else None,
        )
        self.rows = Rows(groups.tp, vocabulary // place.tp)
        self.kept_rows = min(self.rows.each, config.vocab_size - self.rows.first)
        if head == "value" and stage.ends:
            self.output_layer = nn.Linear(
                config.hidden_size, 1, bias=False, device=device, dtype=settings.params_dtype
            )
        self._mark_parameters()
        self.blocks = stage.blocks(config)
        routers = (module for module in self.modules() if isinstance(module, Router))
        for block, router in enumerate(routers):
            router.block = block
        for module in self.modules():
            if isinstance(module, MoELayer):
                module.register_forward_hook(_forget)

    def _mark_parameters(self) -> None:
        """Set the attributes that megatron sets only when it initialises parameters itself."""
        for module in self.modules():
            if isinstance(module, SPLIT):
                _mark(module.weight, 1 if isinstance(module, RowParallelLinear) else 0)
            if isinstance(module, ColumnParallelLinear) and module.bias is not None:
                _mark(module.bias, 0)
        for name, parameter in self.named_parameters():
            if ".mlp.experts." in name:
                # They are replicated along the experts' own data axis, whatever the sizes are.
                vars(parameter)["allreduce"] = False

    def share(self, micro: Micro) -> dict[str, Tensor | None]:
        """The arguments for this context-parallel rank's tokens of a micro-batch."""
        cp, moe = self.pg_collection.cp, self.model_config.moe

        def own(tokens: Tensor) -> Tensor:
            part: Tensor = tokens.chunk(cp.size())[cp.rank()]
            return part

        mask = None
        if micro.real is not None and moe is not None:
            recorded = None if micro.experts is None else own(micro.experts)[:, self.blocks]
            mask = marks(own(micro.real), recorded, moe.experts)[None]
        return {"input_ids": own(micro.ids)[None], "padding_mask": mask}

    def _preprocess(
        self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Split the mask [1, T/c, …] as tokens are split; megatron would use its global groups."""
        hidden, *more, _ = super()._preprocess(*args, **kwargs)
        if self.pre_process and self.model_config.family.scaled_embedding:
            scale = torch.tensor(
                self.model_config.hidden_size**0.5, dtype=self.config.params_dtype, device="cpu"
            )
            hidden = hidden * scale.item()
        if padding_mask is not None and self.config.sequence_parallel:
            tp = self.pg_collection.tp
            padding_mask = padding_mask.chunk(tp.size(), 1)[tp.rank()]
        return hidden, *more, padding_mask

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return hidden states [T/c, 1, h] as the last layer of the chunk left them.

        Sequence parallelism splits them further.
        """
        return hidden_states

    def outputs(self, hidden: Tensor, micro: Micro, temperature: float) -> Outputs:
        """Per-token outputs [T] in the sample's order, the same on ranks that share a sample."""
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        hidden = hidden.squeeze(1)
        if self.head == "value":
            if self.config.sequence_parallel:
                hidden = own_to_whole(hidden, tp)
            values = wide_linear(hidden, self.output_layer.weight).squeeze(-1)
            whole = own_to_whole(values, cp) if cp.size() > 1 else values
            return {"values": whole[micro.back]}
        if tp.size() > 1:
            gather = own_to_partial if self.config.sequence_parallel else whole_to_partial
            hidden = gather(hidden, tp)
        return self._logprobs(hidden, micro, temperature)

    def _logprobs(self, hidden: Tensor, micro: Micro, temperature: float) -> Outputs:
        """The rank that has the hidden state before a token computes the token's outputs."""
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        first = hidden.shape[0] * cp.rank()
        rest = following_tokens(micro.cu_seqlens)
        rest = rest[(rest > first) & (rest <= first + hidden.shape[0])]
        before, rest = upload((rest - 1 - first, rest), hidden.device)
        states = hidden.index_select(0, before)
        weight = self._head_weight()[: self.kept_rows]
        targets = micro.ids[rest]
        support = None if micro.support is None else micro.support.at(rest)
        if tp.size() > 1:
            logp, entropy = vocab_parallel_logprobs_and_entropy(
                states, weight, targets, self.rows, temperature, support=support
            )
        else:
            logp, entropy = logprobs_and_entropy(
                states, weight, targets, temperature, support=support
            )
        zeros = logp.new_zeros(2, micro.ids.shape[0])
        own = zeros.index_copy(1, rest, torch.stack((logp, entropy)))
        whole = partial_to_whole(own, cp) if cp.size() > 1 else own
        logp, entropy = whole[:, micro.back].unbind()
        return {"logp": logp, "entropy": entropy}

    def _head_weight(self) -> Tensor:
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = (
            self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        )
        return weight


def _mark(parameter: nn.Parameter | None, dim: int) -> None:
    """Mark the parameter as split along ``dim``, so that the norm counts it on every rank."""
    if parameter is not None and not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, dim, 1)


def _forget(experts: MoELayer, *_: Any) -> None:
    """Free the dispatcher's routing weights, which keep the graph of the last micro-batch.

    Through megatron's hooks, the nodes of that graph hold the model until the process exits.
    """
    experts.token_dispatcher.probs = None
