"""megatron-core's GPTModel with slurmrl's outputs (no logits, value heads), and its pipeline.

T is the number of packed tokens, c the number of context-parallel ranks, h the hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
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
from slurmrl.engines.megatron.layers import (
    Micro,
    Modules,
    PackedAttention,
    WholeExpertRow,
    block_spec,
)
from slurmrl.engines.megatron.parts import Place, Stage
from slurmrl.engines.megatron.routers import Router, marks
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.packed import predictions
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.collectives import (
    own_to_partial,
    own_to_whole,
    partial_to_whole,
    whole_to_partial,
)
from slurmrl.tensors.ops.logprobs import (
    Rows,
    logprobs_and_entropy,
    vocab_parallel_logprobs_and_entropy,
)
from slurmrl.tensors.ops.products import wide_linear

SPLIT = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


class Chunk(GPTModel):  # type: ignore[misc]
    """One chunk of a pipeline stage. The attention, not the embedding, applies the rotation."""

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
        """Set the attributes that megatron sets only when it initializes parameters itself."""
        for module in self.modules():
            if isinstance(module, SPLIT):
                _mark(module.weight, 1 if isinstance(module, RowParallelLinear) else 0)
            if isinstance(module, ColumnParallelLinear) and module.bias is not None:
                _mark(module.bias, 0)
            if isinstance(module, PackedAttention):
                _mark(module.sinks, 0)
            if isinstance(module, WholeExpertRow):
                _mark(module.bias, 0)
        for name, parameter in self.named_parameters():
            if ".mlp.experts." in name:
                # Tell megatron that experts are replicated along their own data axis.
                vars(parameter)["allreduce"] = False

    def share(self, micro: Micro) -> dict[str, Tensor | None]:
        """Return the forward arguments for this context-parallel rank's tokens of a micro-batch."""
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
        """Split the mask [1, T/c, …] like the tokens, because megatron would use global groups."""
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
        """Return hidden states [T/c, 1, h], which sequence parallelism splits further."""
        return hidden_states

    def outputs(self, hidden: Tensor, micro: Micro, temperature: float) -> Outputs:
        """Return outputs [T] in the sample's order, equal on all ranks with the same sample."""
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
        """Compute each token's outputs on the rank that has the hidden state before the token."""
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        first = hidden.shape[0] * cp.rank()
        found = predictions(micro.cu_seqlens, micro.places, first, first + hidden.shape[0])
        before, rest = upload(found, hidden.device)
        states = hidden.index_select(0, before)
        weight = self._head_weight()[: self.kept_rows]
        targets = micro.ids[rest]
        masks = None if micro.masks is None else micro.masks.at(rest)
        if tp.size() > 1:
            logp, entropy = vocab_parallel_logprobs_and_entropy(
                states, weight, targets, self.rows, temperature, masks=masks
            )
        else:
            logp, entropy = logprobs_and_entropy(states, weight, targets, temperature, masks=masks)
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
    """Mark a parameter as split along ``dim``, so that the norm counts its part on every rank."""
    if parameter is not None and not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, dim, 1)


def _forget(experts: MoELayer, *_: Any) -> None:
    """Free the dispatcher's routing weights, which keep the last micro-batch's graph alive.

    Through megatron's hooks, nodes of the graph keep the model until the process exits.
    """
    experts.token_dispatcher.probs = None


Use = Callable[[int, Tensor, Micro, Chunk], Tensor]
"""Function from (number of the micro-batch, hidden states, micro-batch, chunk) to a loss, which the
last stage calls."""


class PipelineSchedule:
    """The pipeline of one model: 1F1B, interleaved, or (one stage) one micro-batch at a time."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        settings: TransformerConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        self.groups = groups
        self._chunks = list(chunks)
        self._virtual = settings.virtual_pipeline_model_parallel_size
        settings.finalize_model_grads_func = _finalize
        self._run = get_forward_backward_func(groups.pp.size(), self._virtual)
        self._peers = P2PCommunicator(groups.pp, settings)
        self._hidden = settings.hidden_size

    def micro_batches(self, wanted: int) -> int:
        """Return ``wanted``, rounded up to whole groups of micro-batches for interleaving."""
        group = self.groups.pp.size() if self._virtual else 1
        return -(-wanted // group) * group

    def run(self, count: int, micro: Callable[[int], Micro], use: Use, *, backward: bool) -> None:
        """Run the forward and optionally the backward passes of ``count`` micro-batches.

        Then reduce the gradients over ranks.
        """
        self._run(
            forward_step_func=partial(self._step, micro=micro, use=use),
            data_iterator=[iter(range(count)) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=count,
            seq_length=0,  # This value is unused, because ranks send sizes before tensors.
            micro_batch_size=1,
            forward_only=not backward,
            p2p_communicator=self._peers,
            pg_collection=self.groups,
        )

    def _step(
        self,
        numbers: Iterator[int],
        model: nn.Module,
        *,
        micro: Callable[[int], Micro],
        use: Use,
    ) -> tuple[Tensor, Any]:
        number = next(numbers)
        batch = micro(number)
        chunk: Any = getattr(model, "module", model)
        hidden = model(
            **chunk.share(batch),
            position_ids=None,
            attention_mask=None,
            packed_seq_params=batch.params,
        )

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            # megatron would divide by this number of tokens, but the engine has divided already.
            counted = torch.zeros((), dtype=torch.int, device=hidden.device)
            return use(number, hidden, batch, chunk), counted, None

        return hidden, loss

    @property
    def is_last(self) -> bool:
        """Whether this rank computes outputs."""
        return bool(self.groups.pp.rank() == self.groups.pp.size() - 1)

    def broadcast_from_last(self, tensor: Tensor) -> Tensor:
        """Return the last stage's tensor on all stages; every stage passes the same shape."""
        if self.groups.pp.size() > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=self.groups.pp, group_src=self.groups.pp.size() - 1)
        return tensor

    def broadcast_stats(self, values: dict[str, float], device: torch.device) -> dict[str, float]:
        """Return the last stage's statistics on all stages."""
        if self.groups.pp.size() == 1:
            return values
        text = json.dumps(values).encode()
        size = self.broadcast_from_last(torch.tensor(len(text), device=device))
        own = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if self.is_last:
            own = torch.tensor(list(text), dtype=torch.uint8, device=device)
        stats: dict[str, float] = json.loads(bytes(self.broadcast_from_last(own).tolist()))
        return stats


def _finalize(
    chunks: list[nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    **_: Any,
) -> None:
    """Reduce gradients without scaling, because the engine has divided the losses already."""
    finalize_model_grads(chunks, None, pg_collection=pg_collection)
