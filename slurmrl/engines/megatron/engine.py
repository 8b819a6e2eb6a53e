"""The megatron engine: megatron-core with any combination of its axes.

The engine uses megatron-core's layers, schedules, gradient buffers and distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn

from slurmrl.config.schema.roles import Model, ParallelSizes
from slurmrl.data.meta import EXPERTS
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import (
    OUTPUTS,
    TOKENS,
    LossFn,
    OutputFn,
    Outputs,
    TrainEngine,
    Veto,
    spaced,
)
from slurmrl.engines.host import HostCopies, Offload
from slurmrl.engines.megatron.gpt import Chunk, PipelineSchedule, Use
from slurmrl.engines.megatron.layers import (
    Micro,
    micro_batch,
    own_modules,
    te_modules,
    uses_te,
)
from slurmrl.engines.megatron.megatron_config import RandomStates, collection, transformer_config
from slurmrl.engines.megatron.parts import (
    Place,
    check,
    layout_of,
    misfits,
    padded,
    parts_of,
    place_of,
)
from slurmrl.engines.megatron.rank_state import ModelState, ShardedOptimizer
from slurmrl.engines.megatron.routers import Router, balance_of
from slurmrl.engines.microbatch import (
    MicrobatchSchedule,
    Sums,
    agree,
    experts_of,
    in_order,
    longest,
    masks_of,
)
from slurmrl.engines.role_weights import initial_weights, model_config, restore_random
from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.experts import Balance
from slurmrl.models.layer_parts import RotaryTable
from slurmrl.models.parallel.split import Axis
from slurmrl.plan.estimates.server_types import ALIGNMENT
from slurmrl.rollouts.generation.fp8_weights import require_fp8
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot
from slurmrl.tensors.layout import Layout
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.parallel.groups import ParallelContext
from slurmrl.tensors.parallel.topology import exchanges_heads

FUSED = 4
"""Number of tensors to cache: at least as many as megatron interleaves in one parameter."""


class MegatronEngine(TrainEngine):
    """One role's model on the ranks of ``context``; see ``FSDPEngine`` for the arguments."""

    config: ModelConfig

    def __init__(
        self,
        role: str,
        model: Model,
        *,
        head: Head,
        trained: bool,
        context: ParallelContext,
        seed: int,
        total_steps: int,
        source: Path | None,
    ) -> None:
        self.role = role
        self.head = head
        self.trained = trained
        self.context = context
        config = model_config(role, model, source)
        assert isinstance(config, ModelConfig), "checked at submission"
        check(config)
        self.config = config
        self._max_tokens = model.max_tokens_per_microbatch
        self._dtype = model.dtype
        multiple = (model.model or ParallelSizes()).make_vocab_size_divisible_by
        self._vocabulary = padded(config.vocab_size, context.axis_size("tp") * multiple)
        self._place = self._place_of(context.rank)
        trains_whole = trained and not context.sequence_parallel
        problems = misfits(config, self._place, self._vocabulary, trains_whole=trains_whole)
        if text := "; ".join(problems):
            raise UsageError(f"{role}: {text}")
        self._groups = collection(context)
        self._ring = None
        ranks = context.axis_size("cp")
        if not exchanges_heads(config.num_heads, config.num_kv_heads, self._place.tp, ranks):
            self._ring = Axis(context.axis_rank("cp"), ranks)
        wanted = model.transformer_engine if model.fp8 is None else True
        self._te = uses_te(wanted, context.device, model.dtype, config.moe)
        if model.fp8 is not None:
            require_fp8(f"{role}.fp8", context.device)
        self._settings = transformer_config(
            config,
            context,
            model.dtype,
            model.recompute,
            transformer_engine=self._te,
            fp8=model.fp8,
        )
        self._modules = (
            te_modules() if self._te else own_modules(config, context.device, model.recompute)
        )
        self._balance = balance_of(config) if trained else None
        if self._balance is not None:
            router = partial(Router, balance=self._balance)
            self._modules = replace(self._modules, router=router)
        self._random = RandomStates(seed, self._place)
        assert config.rope is not None, "checked"
        self._rotary = RotaryTable(config.rope, config.rotary_dims)
        self._parts = parts_of(config, head, self._place, self._vocabulary, grouped=self._te)
        self._host, self._offload = HostCopies(), Offload(role)
        with self._random.used():  # TransformerEngine reads random states while it makes modules.
            self._chunks: list[Any] = [*self._new_chunks()]
        """Model chunks, which megatron's gradient buffers wrap if the model is trained."""
        self._optimizer: ShardedOptimizer | None = None
        if trained:
            self._chunks = [self._with_buffers(chunk) for chunk in self._chunks]
            self._optimizer = ShardedOptimizer(
                model.optimizer, total_steps, self._chunks, self._groups, model.dtype
            )
        self._state = ModelState(config, head, context, self._parts, self._chunks, self._optimizer)
        with initial_weights(config, head, seed=seed, source=source, keep=FUSED) as read:
            self._state.fill(read)
        self._pipeline = PipelineSchedule(self._chunks, self._settings, self._groups)

    def _place_of(self, rank: int) -> Place:
        context = self.context
        return place_of(context.topology, context.experts, context.virtual_pipeline, rank)

    def _new_chunks(self) -> Iterator[Chunk]:
        for stage in self._place.stages(self.config.num_layers):
            chunk = Chunk(
                self.config,
                self.head,
                self._place,
                stage,
                self._vocabulary,
                self._settings,
                self._modules,
                self._groups,
                self.context.device,
            )
            chunk.to(self.context.device).requires_grad_(self.trained)
            yield chunk.train(self.trained)

    def _with_buffers(self, chunk: nn.Module) -> DistributedDataParallel:
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        return DistributedDataParallel(self._settings, options, chunk, pg_collection=self._groups)

    @property
    def steps(self) -> int:
        return self._optimizer.steps if self._optimizer is not None else 0

    def train_batch(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        denominator: float,
        *,
        temperature: float = 1.0,
        veto: Veto | None = None,
    ) -> dict[str, float]:
        if self._optimizer is None:
            raise UsageError(f"{self.role} is frozen and cannot be trained")
        self._offload.check()
        sample = sample.to(self.context.device)
        schedule = agree(sample, self._budget(sample), denominator, self.context)
        schedule.check(self.role)
        sums = Sums(self.context.device)

        def use(number: int, hidden: Tensor, micro: Micro, chunk: Chunk) -> Tensor:
            outputs = chunk.outputs(hidden, micro, temperature)
            part = schedule.part(number)
            if part is None:
                return _nothing(outputs)
            items = sample.take(part)
            return sums.add_loss(self.role, items, *loss_fn(outputs, items)) * schedule.scale

        if self._balance is not None:
            self._count(self._balance, sample, schedule)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._run(sample, schedule, use, backward=True)
        stats: dict[str, float] = {}
        if self._pipeline.is_last:
            stats = sums.over_ranks(self.context, some_empty=schedule.some_empty)
            stats["loss"] *= schedule.scale
            stats["denominator"] = schedule.denominator
        stats = self._pipeline.broadcast_stats(stats, self.context.device)
        self.context.activity.phase("optimizer step")
        return {**stats, **self._optimizer.step(vetoed=self.vetoed(veto, stats))}

    @torch.no_grad()
    def _count(
        self, balance: Balance, sample: SequenceSample, schedule: MicrobatchSchedule
    ) -> None:
        """Count the tokens that each expert gets over all micro-batches and ranks."""
        balance.begin(self.context.device)
        balance.now = "count"
        self._run(sample, schedule, lambda _, hidden, *__: hidden.new_zeros(()), backward=False)
        balance.sum_counts([self._groups.tp_dp_cp])
        balance.now = "train"

    @torch.no_grad()
    def forward(
        self,
        sample: SequenceSample,
        output_fn: OutputFn | None = None,
        *,
        temperature: float = 1.0,
    ) -> Outputs:
        self._offload.check()
        sample = sample.sequences().to(self.context.device)
        schedule = agree(sample, self._budget(sample), 0.0, self.context)
        made: dict[int, Outputs] = {}

        def use(number: int, hidden: Tensor, micro: Micro, chunk: Chunk) -> Tensor:
            made[number] = chunk.outputs(hidden, micro, temperature)
            return hidden.new_zeros(())

        if schedule.count:
            self._run(sample, schedule, use, backward=False)
        results = []
        for number, part in enumerate(schedule.parts):
            items = sample.take(part)
            outputs = self._everywhere(made.get(number), items)
            results.append(outputs if output_fn is None else output_fn(outputs, items))
        return in_order(sample, schedule.parts, results, self.head, output_fn)

    def _everywhere(self, outputs: Outputs | None, items: SequenceSample) -> Outputs:
        """Return the last stage's outputs on all stages."""
        tokens = items.tensor(TOKENS).shape[0]
        names = OUTPUTS[self.head]
        empty = torch.empty(len(names), tokens, device=self.context.device)
        rows = empty if outputs is None else torch.stack([outputs[name] for name in names])
        return dict(zip(names, self._pipeline.broadcast_from_last(rows).unbind(), strict=True))

    def _budget(self, sample: SequenceSample) -> int:
        """Return the token budget of a micro-batch that gives the pipeline enough micro-batches."""
        tokens = sum(map(sum, sample.lengths[TOKENS]))
        return max(1, min(self._max_tokens, -(-tokens // self._place.pp)))

    def _run(
        self, sample: SequenceSample, schedule: MicrobatchSchedule, use: Use, *, backward: bool
    ) -> None:
        phase = "forward and backward" if backward else "forward"

        def micro(number: int) -> Micro:
            self.context.activity.phase(phase, number + 1, schedule.count)
            part = schedule.part(number)
            return self._micro(None if part is None else sample.take(part))

        with self._random.used():
            count = self._pipeline.micro_batches(schedule.count)
            self._pipeline.run(count, micro, use, backward=backward)

    def _micro(self, sample: SequenceSample | None) -> Micro:
        """Return a micro-batch.

        Without a sample, return two tokens, with which a rank joins the collectives of the others.
        """
        device = self.context.device
        if sample is None:
            ids = torch.zeros(2, dtype=torch.int64, device=device)
            cu_seqlens, most = torch.tensor([0, 2], dtype=torch.int32), 2
        else:
            ids, cu_seqlens = sample.tensor(TOKENS), sample.cu_seqlens(TOKENS)
            most = longest(sample)
            self.config.check_length(most)
        split = self._place.tp if self._settings.sequence_parallel else 1
        multiple = self.context.axis_size("cp") * split * (ALIGNMENT if self._settings.fp8 else 1)
        dtype = self._settings.params_dtype
        masks, experts = masks_of(sample), None
        if sample is not None and EXPERTS in sample.keys:
            experts = experts_of(sample, self.config)
        micro = micro_batch(
            ids, cu_seqlens, most, multiple, self._rotary, dtype, masks, experts, self._ring
        )
        if self._balance is None and experts is None:
            return micro
        tokens = 0 if sample is None else ids.shape[0]
        (places,) = upload([micro.places], device)
        return replace(micro, real=places < tokens)

    def snapshot(self, *, copy: bool = True) -> RoleSnapshot | None:
        if self._optimizer is None:
            return None
        self._offload.check()
        return self._state.snapshot(self.role, self.steps, self._host if copy else None)

    def load(self, directory: Path) -> None:
        if self._optimizer is None:
            return
        self._offload.check()
        checkpoint = RoleCheckpoint(directory, self.role)
        self._state.load(checkpoint)
        self._optimizer.continue_from(checkpoint.step)
        restore_random(checkpoint, self.context.rank, self.context.size)

    def layout(self) -> Layout:
        places = [self._place_of(rank) for rank in range(self.context.size)]
        return layout_of(
            self.config, self.head, self._dtype, places, self._vocabulary, grouped=self._te
        )

    def storages(self) -> Mapping[str, Tensor]:
        self._offload.check()
        return {name: tensor for name, (tensor, _) in self._state.weights().items()}

    def updated(self, most: int) -> list[Tensor]:
        self._offload.check()
        return spaced([each for each, _ in self._state.shards(moments=False).values()], most)

    def offload(self) -> None:
        self._offload.take(self._state.tensors(), self._state.gradients())

    def onload(self) -> None:
        self._offload.give()


def _nothing(outputs: Outputs) -> Tensor:
    """Return a zero loss that depends on all outputs."""
    return torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
