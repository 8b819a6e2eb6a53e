"""The fsdp engine: a model that FSDP2 shards, with one of slurmrl's optimizers.

The model is the built-in decoder or a model of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from math import inf, isfinite
from pathlib import Path

import torch
from torch import Tensor

from slurmrl.config.schema.roles import Model
from slurmrl.data.meta import EXPERTS
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import TOKENS, LossFn, OutputFn, Outputs, TrainEngine, Veto
from slurmrl.engines.fsdp import parameters
from slurmrl.engines.fsdp.parameters import (
    MergedWeights,
    attached,
    constant_specs,
    dropout_keys,
    file_fingerprint,
    fill,
    initial_matrix,
    is_transposed,
    new_model,
    split_of,
    tensor_split,
    trained_specs,
    whole_shapes,
)
from slurmrl.engines.fsdp.sharding import (
    ShardPlan,
    Shards,
    clip,
    global_norm,
    sum_copies,
    take_first_copies,
)
from slurmrl.engines.host import HostCopies, Offload, lock_sizes_as_they_are
from slurmrl.engines.microbatch import (
    MicrobatchSchedule,
    Sums,
    agree,
    in_order,
    longest,
    masks_of,
    replaying,
    shared_tokens,
    showing,
)
from slurmrl.engines.native_engine import GatheredGeneration
from slurmrl.engines.optimizers import OPTIMIZERS, ShardOptimizer
from slurmrl.engines.planned import Placing
from slurmrl.engines.role_weights import Fingerprint, initial_weights, model_config
from slurmrl.errors import UsageError
from slurmrl.models.adapters import adapted_weight
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.experts import Balance
from slurmrl.models.layer_parts import Pieces
from slurmrl.models.shapes import stored_shapes
from slurmrl.plan.estimates.pass_seconds import SMALL_BYTES
from slurmrl.tensors.checkpoint.shards import RoleSnapshot
from slurmrl.tensors.layout import Box, Layout
from slurmrl.tensors.ops import attention
from slurmrl.tensors.ops.arguments import OnHost
from slurmrl.tensors.ops.sampling import SamplingMasks
from slurmrl.tensors.parallel.groups import ParallelContext


class FSDPEngine(TrainEngine, GatheredGeneration):
    """One role's model on the data-parallel ranks of ``context``.

    The engine generates with all shards gathered.

    Trained models keep float32 weights and compute in ``model.dtype``; frozen models are stored in
    that dtype. Weights are read from the folder ``source``, or initialized at random for
    ``model.architecture``. ``total_steps`` counts optimizer steps. Models of up to ``small_bytes``
    use one collective for all parameters instead of one for each layer.

    With ``model.lora``, a trained model's weights are stored like weights of a frozen model, and
    its adapters are trained. ``layout`` and ``storages`` describe the weights with the adapters
    merged.
    """

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
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self.role = role
        self.head = head
        self.trained = trained
        self.context = context
        self.config = model_config(role, model, source)
        self._max_tokens = model.max_tokens_per_microbatch
        self._seed = seed
        lora = model.lora if trained else None
        self._dtype = model.dtype if lora is not None or not trained else "float32"
        sequence = model.model is not None and bool(model.model.sequence_parallel)
        self._split = split_of(role, self.config, context, sequence=sequence)
        decoder = new_model(
            self.config, head, self._split, source=source, seed=seed, dtype=self._dtype
        )
        decoder.use(model.recompute)
        decoder.requires_grad_(trained)
        self._adapters = None if lora is None else attached(role, decoder, lora, source, context)
        self._placing = Placing(
            whole_shapes(decoder),
            self._dtype,
            context.topology,
            context.rank,
            tensor_split(decoder, self._split),
            constant_specs(decoder, trained=trained and lora is None),
            still=parameters.frozen_tower(decoder, model) if trained else frozenset(),
        )
        self._trained_placing = self._placing
        if lora is not None:
            self._trained_placing = replace(
                self._placing, shapes=trained_specs(decoder, lora), dtype="float32", constants={}
            )
        mixed, offload = self._dtype != model.dtype, model.cpu_offload
        small = 4 * sum(p.numel() for p in decoder.parameters()) <= small_bytes
        plan = ShardPlan(self._spread or mixed or offload, small, mixed, offload)
        if plan.offload and context.device.type == "cuda":
            lock_sizes_as_they_are()
        self._shards = Shards(decoder, plan, context)
        local = self._shards.local()
        self._fill(local, source)
        self.frozen = None if lora is None else self._fingerprint(local, source)
        self._optimizer: ShardOptimizer | None = None
        if trained:
            kind = OPTIMIZERS[model.optimizer.name]
            own = self._shards.trained()
            matrices = {n for n, p in own.items() if p.dim() > 1 and not n.endswith("_bias")}
            self._optimizer = kind(model.optimizer, total_steps, own, matrices)
        self._host, self._offload = HostCopies(), Offload(role)

    def _fill(self, local: Mapping[str, Tensor], source: Path | None) -> None:
        """Write the initial weights and adapters into this rank's chunks.

        A model of transformers already has its weights.
        """
        weights = {n: chunk for n, chunk in local.items() if adapted_weight(n) is None}
        if isinstance(self.config, ModelConfig):
            with initial_weights(self.config, self.head, seed=self._seed, source=source) as read:
                fill(weights, self._placing.own_boxes(), read)
                constants = self._shards.decoder.constants()
                fill(constants, {n: Box.whole(c.shape) for n, c in constants.items()}, read)
        adapters = {n: chunk for n, chunk in local.items() if n not in weights}
        if adapters:
            placing, turned = self._trained_placing, is_transposed(self.config)
            read = partial(initial_matrix, placing.shapes, self._seed, turned)
            fill(adapters, placing.own_boxes(), read)

    def _fingerprint(self, local: Mapping[str, Tensor], source: Path | None) -> str:
        """Return the fingerprint of the frozen weights of all ranks. Collective.

        For a model of transformers, return the fingerprint of the files.
        """
        if not isinstance(self.config, ModelConfig):
            return file_fingerprint(source, self.context)
        found = Fingerprint(stored_shapes(self.config, self.head), self.context.device)
        local = {**local, **self._shards.decoder.constants()}
        for shard in self._placing.layout(copies=False).held_by(self.context.rank):
            if shard.name not in self._trained_placing.shapes:
                found.add(shard.name, shard.box, local[shard.storage])
        for axis in ("shard", "tp"):
            if axis in self.context.groups:
                found.add_up(self.context.group(axis))
        return str(found)

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
        schedule = self._schedule(sample, denominator)
        schedule.check(self.role)
        with self._shards.cleared_on_error():
            sums = self._backward(sample, loss_fn, schedule, temperature)
            stats = sums.over_ranks(self.context, some_empty=schedule.some_empty)
        stats["loss"] *= schedule.scale
        stats["denominator"] = schedule.denominator
        return {**stats, **self._step(self._optimizer, vetoed=self.vetoed(veto, stats))}

    def _schedule(self, sample: SequenceSample, denominator: float) -> MicrobatchSchedule:
        return agree(
            sample,
            self._max_tokens,
            denominator,
            self.context,
            rows=self._shards.decoder.rows,
            shared=self._shares(sample),
        )

    def _shares(self, sample: SequenceSample) -> bool:
        """Return whether the model processes shared prefixes of sequences only once."""
        if not self._may_share or not isinstance(self.config, ModelConfig):
            return False
        if EXPERTS in sample.keys:  # Rollouts may have routed equal tokens to different experts.
            return False
        seen = min((window for window in self.config.windows if window is not None), default=inf)
        return all(length <= seen for row in sample.lengths[TOKENS] for length in row)

    @property
    def _may_share(self) -> bool:
        """Whether the engine can process a prefix once for several sequences.

        Attention sinks are not supported. A load-balancing loss counts a token in each of its
        sequences, and dropout differs between sequences.
        """
        return (
            self.context.device.type == "cpu"
            and isinstance(self.config, ModelConfig)
            and self._split.whole
            and not self.config.family.sinks
            and self._shards.decoder.balance is None
            and not (self._adapters is not None and self._adapters.dropout)
            and attention.prefix_attention_works()
        )

    def _backward(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        schedule: MicrobatchSchedule,
        temperature: float,
    ) -> Sums:
        """Accumulate the gradients of all micro-batches; return the sums of the statistics."""
        sums = Sums(self.context.device)
        balance = self._shards.decoder.balance
        if balance is not None:
            self._count(balance, sample, schedule)
        for index in range(schedule.count):
            self.context.activity.phase("forward and backward", index + 1, schedule.count)
            self._shards.set_last_micro_batch(index == schedule.count - 1)
            part = schedule.part(index)
            if balance is not None:
                balance.now = "train" if part is not None else "other"
            if part is None:
                torch.autograd.backward(self._empty_micro_batch(temperature))
                continue
            micro = sample.take(part)
            with self._dropping(micro), replaying(self._shards.decoder, micro):
                outputs = self._outputs(micro, temperature)
                loss = sums.add_loss(self.role, micro, *loss_fn(outputs, micro))
                torch.autograd.backward(loss * schedule.scale)
        return sums

    def _dropping(self, sample: SequenceSample) -> AbstractContextManager[None]:
        """Apply the adapters' dropout in a micro-batch's forward and backward passes."""
        if self._adapters is None or not self._adapters.dropout:
            return nullcontext()
        keys = dropout_keys(sample, self.role, self._seed, self.steps)
        return self._adapters.dropping(keys.to(self.context.device))

    @torch.no_grad()
    def _count(
        self, balance: Balance, sample: SequenceSample, schedule: MicrobatchSchedule
    ) -> None:
        """Count the tokens that each expert gets over all micro-batches and ranks."""
        balance.begin(self.context.device)
        with self._shards.resharded():
            for index in range(schedule.count):
                part = schedule.part(index)
                balance.now = "count" if part is not None else "other"
                micro = None if part is None else sample.take(part)
                dropping = nullcontext() if micro is None else self._dropping(micro)
                with dropping, replaying(self._shards.decoder, micro):
                    self._features(*self._tokens(micro))
        balance.sum_counts([self.context.group("shard")] if self._spread else [])

    @property
    def _spread(self) -> bool:
        """Whether the tokens of a batch are spread over several ranks."""
        return self.context.axis_size("dp") * self.context.axis_size("cp") > 1

    def _step(self, optimizer: ShardOptimizer, *, vetoed: bool) -> dict[str, float]:
        self.context.activity.phase("optimizer step")
        gradients = self._shards.take_gradients()
        if self._placing.tensor is not None:
            split, tensor = self._placing.tensor, self._split.tensor
            sum_copies(gradients, split, tensor, self.context.device)
            whole_layers = not isinstance(self.config, ModelConfig)
            if whole_layers and not torch.are_deterministic_algorithms_enabled():
                take_first_copies(gradients, split, tensor, self.context.device)
        axes = [axis for axis in ("shard", "tp") if axis in self.context.groups]
        groups = [self.context.group(axis) for axis in axes]
        norm = global_norm(gradients, groups, self._placing.copies, self.context.device)
        stats = {"grad_norm": norm, "lr": optimizer.learning_rate, "vetoed": float(vetoed)}
        if vetoed or not isfinite(norm):
            return {**stats, "skipped": float(not isfinite(norm))}
        clip(gradients, norm, optimizer.options.gradient_clip)
        optimizer.step(self._shards.local(), gradients)
        return {**stats, "skipped": 0.0}

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
        schedule = self._schedule(sample, 0.0)
        results: list[Outputs] = []
        with self._shards.resharded():
            for index in range(schedule.count):
                self.context.activity.phase("forward", index + 1, schedule.count)
                part = schedule.part(index)
                if part is None:
                    self._empty_micro_batch(temperature)
                    continue
                micro = sample.take(part)
                with replaying(self._shards.decoder, micro):
                    outputs = self._outputs(micro, temperature)
                results.append(outputs if output_fn is None else output_fn(outputs, micro))
        return in_order(sample, schedule.parts, results, self.head, output_fn)

    def _outputs(self, sample: SequenceSample, temperature: float) -> Outputs:
        shared = shared_tokens(sample) if self._shares(sample) else None
        masks = masks_of(sample)
        if shared is None:
            with showing(self._shards.decoder, sample):
                return self._run(*self._tokens(sample), temperature, masks)
        ids = sample.tensor(TOKENS)[shared.taken]
        if masks is not None:  # Equal tokens may have had different sampling masks.
            hidden = self._features(ids, shared.pieces, longest(sample))[shared.places]
            whole = (sample.tensor(TOKENS), sample.cu_seqlens(TOKENS))
            return self._ends(hidden, *whole, temperature, masks)
        outputs = self._run(ids, shared.pieces, longest(sample), temperature)
        return {name: values[shared.places] for name, values in outputs.items()}

    def _tokens(self, sample: SequenceSample | None) -> tuple[Tensor, Tensor, int]:
        """Return the decoder's inputs for a micro-batch: tokens, ``cu_seqlens``, maximum length.

        Without a sample, return two tokens, with which a rank joins the collectives of the others.
        """
        if sample is not None:
            return sample.tensor(TOKENS), sample.cu_seqlens(TOKENS), longest(sample)
        ids = torch.zeros(2, dtype=torch.int64, device=self.context.device)
        return ids, torch.tensor([0, 2], dtype=torch.int32), 2

    def _run(
        self,
        ids: Tensor,
        cu_seqlens: Tensor | Pieces,
        longest: int,
        temperature: float,
        masks: SamplingMasks | None = None,
    ) -> Outputs:
        hidden = self._features(ids, cu_seqlens, longest)
        if isinstance(cu_seqlens, Pieces):
            cu_seqlens = cu_seqlens.cu_seqlens
        return self._ends(hidden, ids, cu_seqlens, temperature, masks)

    def _ends(
        self,
        hidden: Tensor,
        ids: Tensor,
        cu_seqlens: Tensor,
        temperature: float,
        masks: SamplingMasks | None,
    ) -> Outputs:
        """Return the outputs of the model's head."""
        decoder = self._shards.decoder
        if self.head == "value":
            return {"values": decoder.values(hidden, cu_seqlens)}
        logp, entropy = decoder.logprobs(hidden, ids, cu_seqlens, temperature, masks)
        return {"logp": logp, "entropy": entropy}

    def _features(self, ids: Tensor, cu_seqlens: Tensor | Pieces, longest: int) -> Tensor:
        packing = cu_seqlens if isinstance(cu_seqlens, Pieces) else OnHost(cu_seqlens)
        features: Tensor = self._shards.decoder(ids, packing, longest)
        return features

    def _empty_micro_batch(self, temperature: float) -> Tensor:
        """Return a zero loss for a rank that has no micro-batch left."""
        outputs = self._run(*self._tokens(None), temperature)
        return torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0

    def snapshot(self, *, copy: bool = True) -> RoleSnapshot | None:
        if self._optimizer is None:
            return None
        self._offload.check()
        layout = self._saved_layout
        own = {shard.name for shard in layout.held_by(self.context.rank)}
        tensors = {name: tensor for name, tensor in self._state().items() if name in own}
        return parameters.snapshot(
            self.role,
            self.context.rank,
            self._optimizer.steps,
            layout,
            self._host.copy(tensors) if copy else tensors,
            self.frozen,
        )

    def load(self, directory: Path) -> None:
        if self._optimizer is None:
            return
        self._offload.check()
        layout = self._trained_placing.layout(self._prefixes)
        self._optimizer.steps = parameters.load(
            directory, self.role, self.context.rank, layout, self._state(), self.frozen
        )

    @cached_property
    def _saved_layout(self) -> Layout:
        """The layout of trained tensors and moments in a checkpoint, without replicas."""
        return self._trained_placing.layout(self._prefixes, copies=False)

    @property
    def _prefixes(self) -> tuple[str, ...]:
        assert self._optimizer is not None
        return ("", *(f"{moment}/" for moment in self._optimizer.names))

    def _state(self) -> dict[str, Tensor]:
        """Return this rank's chunks of trained tensors and moments, and the model's constants."""
        assert self._optimizer is not None
        own = self._shards.local() if self._adapters is None else self._shards.trained()
        tensors = own | self._shards.decoder.constants()
        for moment, values in self._optimizer.moments.items():
            tensors |= {f"{moment}/{name}": value for name, value in values.items()}
        return tensors

    def base(self) -> AbstractContextManager[None]:
        if self._adapters is None:
            return super().base()
        return self._adapters.unused()

    def layout(self) -> Layout:
        return self._placing.layout()

    def storages(self) -> Mapping[str, Tensor]:
        self._offload.check()
        local = self._shards.local() | self._shards.decoder.constants()
        if self._adapters is not None:
            return MergedWeights(local, self._adapters, self.context)
        return local

    def trained_layout(self) -> Layout:
        return self._trained_placing.layout()

    def trained_storages(self) -> Mapping[str, Tensor]:
        if self._adapters is None:
            return self.storages()
        self._offload.check()
        return self._shards.trained()

    def updated(self, most: int) -> list[Tensor]:
        storages = self.storages()
        if isinstance(storages, MergedWeights):
            return storages.sample(most)
        return super().updated(most)

    def offload(self) -> None:
        if not self._shards.plan.offload:  # With cpu_offload, the state is in host memory already.
            parameters = {} if self._optimizer is None else self._state()
            self._offload.take([*self._shards.local().values(), *parameters.values()])

    def onload(self) -> None:
        self._offload.give()
