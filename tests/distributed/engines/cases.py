"""Functions that ranks run in the tests of engines: they create and drive an engine by its
contract.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from slurmrl.config.schema.roles import Model
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.engines.base import GenerateEngine, Outputs, TrainEngine
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.parallel.groups import ParallelContext, build
from tests.support import megatron_cpu
from tests.support.generated import generated

ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 33,
    "hidden_size": 20,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "initializer_range": 0.2,
}
"""No size is divisible by 4, and the q and k norms leave the last of 4 ranks an empty chunk."""
LENGTHS = (5, 9, 1, 7, 3, 12, 2, 8, 4, 6)


@dataclass(frozen=True)
class Placed:
    role: str
    ranks: tuple[int, ...]
    sizes: dict[str, int]
    engine: str = "fsdp"
    expert_sizes: dict[str, int] = field(default_factory=dict)
    virtual_pipeline: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Setup:
    """An engine, and the items of each of its ranks."""

    engine: str = "fsdp"
    head: str = "lm"
    trained: bool = True
    model: dict[str, Any] = field(default_factory=dict)
    source: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the constructor."""
    total_steps: int = 10
    split: Sequence[Sequence[int]] = ()
    """Item indices of each data-parallel rank."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Axes of the layout, the outermost first; default: data parallelism over all ranks."""

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values()) if self.sizes else len(self.split)


def model(**changes: Any) -> dict[str, Any]:
    """Settings of a tiny model whose first moment after one step is the gradient itself."""
    optimizer = {
        "lr": 1e-2,
        "betas": (0.0, 0.95),
        "eps": 1e-3,
        "gradient_clip": None,
        **changes.pop("optimizer", {}),
    }
    return {"architecture": ARCHITECTURE, "optimizer": optimizer, **changes}


def context(setup: Setup) -> ParallelContext:
    """Return a context with all ranks of the job, by default as data-parallel ranks."""
    size = dist.get_world_size()
    sizes = setup.sizes or {"dp": size}
    placed = Placed("actor", tuple(range(size)), sizes, setup.engine)
    return build([placed], rank=dist.get_rank(), device=torch.device("cpu"))["actor"]


def make(setup: Setup) -> TrainEngine:
    if setup.engine == "megatron":
        megatron_cpu.install()
    engine: TrainEngine = ENGINES.load(setup.engine)(
        "actor",
        Model(**setup.model),
        head=setup.head,
        trained=setup.trained,
        context=context(setup),
        seed=7,
        total_steps=setup.total_steps,
        source=setup.source,
        **setup.options,
    )
    return engine


def batch(step: int = 0) -> SequenceSample:
    """Return random tokens, loss weights and returns. Each step has another batch."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = sum(LENGTHS)
    vocabulary = int(ARCHITECTURE["vocab_size"])  # type: ignore[call-overload]
    return SequenceSample.from_default(
        LENGTHS,
        [f"item{index}" for index in range(len(LENGTHS))],
        {
            "input_ids": torch.randint(vocabulary, (tokens,), generator=generator),
            "advantages": torch.randn(tokens, generator=generator),
            "returns": torch.randn(tokens, generator=generator),
        },
    )


def loss(outputs: Outputs, sample: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that depends on every output."""
    if "values" in outputs:
        error = (outputs["values"] - sample.tensor("returns")).square()
        return error.sum(), {"error": error.detach().sum()}
    weights = sample.tensor("advantages")
    total = -(weights * outputs["logp"]).sum() - 0.1 * (outputs["entropy"]).sum()
    return total, {"weight": weights.sum(), "logp": outputs["logp"].detach().sum()}


def denominator(sample: SequenceSample) -> float:
    return float(sum(map(sum, sample.lengths["input_ids"])))


def train(
    setup: Setup,
    steps: range = range(1),
    load: Path | None = None,
    save: Path | None = None,
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Train; returns the statistics of each step and the files that were saved."""
    engine = make(setup)
    torch.manual_seed(dist.get_rank() if load is None else 99)
    if load is not None:
        engine.load(load)
        assert engine.steps == steps.start
    share = setup.split[engine.context.dp_rank]
    stats = []
    for step in steps:
        torch.rand(3)  # other code uses the process's random generator
        sample = batch(step).take(share)
        stats.append(engine.train_batch(sample, loss, denominator(sample)))
    if save is None:
        return stats, []
    return stats, [vars(file) for file in engine.save(save)]


def start_values(setup: Setup) -> list[tuple[str, tuple[int, ...], Tensor]]:
    """Return this rank's chunks of the weights, with name, start of the box and values."""
    engine = make(setup)
    shards = engine.layout().held_by(dist.get_rank())
    local = engine._shards.local()  # type: ignore[attr-defined]
    return [(shard.name, shard.box.start, local[shard.name].clone()) for shard in shards]


def frozen(setup: Setup, folder: Path) -> tuple[list[Any], str]:
    """The files that a frozen engine saves, and its error about training."""
    engine = make(setup)
    engine.load(folder)
    try:
        engine.train_batch(batch(), loss, 1.0)
    except UsageError as error:
        return engine.save(folder), str(error)
    return [], "trained"


def outputs_around_training(setup: Setup) -> list[dict[str, Tensor]]:
    """Return outputs before and after a training step, and outputs of an engine that only
    trained.
    """
    engine, fresh = make(setup), make(setup)
    sample = batch().take(setup.split[engine.context.dp_rank])
    before = engine.forward(sample)
    engine.offload()
    engine.onload()
    engine.train_batch(sample, loss, denominator(sample))
    after = engine.forward(sample, temperature=0.7)
    fresh.train_batch(sample, loss, denominator(sample))
    return [before, after, fresh.forward(sample, temperature=0.7)]


def offloaded(setup: Setup) -> tuple[int, int, list[dict[str, float]], list[dict[str, float]]]:
    """Return the bytes of this rank's weights and moments before and during offloading, and the
    statistics of steps with and without offloading between them.
    """
    engine, kept = make(setup), make(setup)
    sample = batch().take(setup.split[engine.context.dp_rank])

    def step(of: TrainEngine) -> dict[str, float]:
        return of.train_batch(sample, loss, denominator(sample))

    def held() -> int:
        state = engine._state().values()  # type: ignore[attr-defined]
        storages = [tensor.untyped_storage() for tensor in state]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    first, before = [step(engine)], held()
    engine.offload()
    engine.offload()
    during = held()
    engine.onload()
    first.append(step(engine))
    return before, during, first, [step(kept), step(kept)]


def forward_with_function(setup: Setup) -> dict[str, Tensor]:
    """Per-token results of a function of outputs and sample."""
    engine = make(setup)
    sample = batch().take(setup.split[engine.context.dp_rank])
    return engine.forward(
        sample, lambda outputs, part: {"sum": outputs["logp"] + part.tensor("advantages")}
    )


def row_tokens(setup: Setup) -> tuple[list[int], list[int]]:
    """Tokens and padding that a model of transformers reads in each micro-batch.

    The first list is from outputs, the second from training.
    """
    engine = make(setup)
    sample = batch().take(setup.split[engine.context.dp_rank])
    found: list[int] = []

    def watch(_: Any, inputs: tuple[Tensor]) -> None:
        found.append(inputs[0].numel())

    embedding = engine._shards.decoder.inner.get_input_embeddings()  # type: ignore[attr-defined]
    embedding.register_forward_pre_hook(watch)
    engine.forward(sample)
    outputs = found.copy()
    found.clear()
    engine.train_batch(sample, loss, denominator(sample))
    return outputs, found


def prompts(sample: SequenceSample) -> SequenceSample:
    """Return the same sequences as prompts."""
    data: dict[str, Tensor | None] = {"prompt_ids": sample.tensor("input_ids")}
    return SequenceSample(sample.ids, {"prompt_ids": sample.lengths["input_ids"]}, {}, data)


def completions(setup: Setup, options: GenerationOptions) -> dict[str, list[Any]]:
    """The completed sequence of each item by id: tokens and log-probabilities."""
    engine: Any = make(setup)
    return completed(engine, setup.split[engine.context.dp_rank], options)


def completed(
    engine: GenerateEngine, share: Sequence[int], options: GenerationOptions
) -> dict[str, list[Any]]:
    sample = prompts(batch().take(share))
    found: dict[str, list[Any]] = {}
    for step in range(2):
        keys = torch.tensor(share, dtype=torch.int64)
        out = generated(engine, sample, options, seed=3, step=step, keys=keys)
        lengths = out.lengths.tolist()
        for name, tokens, logp in zip(
            sample.ids, out.tokens.split(lengths), out.logprobs.split(lengths), strict=True
        ):
            found.setdefault(name, []).append((tokens.tolist(), logp.tolist()))
    return found


def saved_after_failed_training(setup: Setup, folder: Path) -> tuple[str, bool, str, str]:
    """Let a loss fail in the last of several rounds. Return its error, whether all weights are
    sharded afterwards, and the checksums of two checkpoints after one more step: of this engine and
    of a new one.
    """
    engine, fresh = make(setup), make(setup)
    sample = batch().take(setup.split[engine.context.dp_rank])
    calls: list[int] = []

    def failing(outputs: Outputs, part: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(part.bs)
        if sum(calls) == sample.bs:
            raise RuntimeError(f"in round {len(calls)}")
        return loss(outputs, part)

    shards = engine._shards  # type: ignore[attr-defined]
    with contextlib.suppress(KeyError), shards.cleared_on_error():
        raise KeyError("before anything has been computed")
    message = ""
    try:
        engine.train_batch(sample, failing, denominator(sample))
    except RuntimeError as error:
        message = str(error)
    sharded = all(isinstance(p, DTensor) for p in shards.decoder.parameters())
    found = []
    for one in (engine, fresh):
        one.train_batch(sample, loss, denominator(sample))
        found.append(one.save(folder)[0].checksum)
    return message, sharded, found[0], found[1]


def refused_after_failed_training(setup: Setup) -> str:
    """Return the error of a step after a failed step, with a torch that cannot reset FSDP."""
    engine, sample = make(setup), batch().take(setup.split[0])

    def failing(outputs: Outputs, part: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
        raise KeyError

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        with contextlib.suppress(KeyError):
            engine.train_batch(sample, failing, denominator(sample))
        try:
            engine.train_batch(sample, loss, denominator(sample))
        except RunFailedError as error:
            return str(error)
    return ""


def saved_after_failed_generation(setup: Setup, folder: Path) -> tuple[str, str, str]:
    """Return the error, the checksums of a checkpoint right after it, and those of a new engine."""
    engine, fresh = make(setup), make(setup)
    sample = prompts(batch().take(setup.split[engine.context.dp_rank]))
    keys = torch.zeros(sample.bs, dtype=torch.int64)
    unusable = GenerationOptions(max_new_tokens=2, min_new_tokens=1, stop_token_ids=(10**6,))
    message = ""
    try:
        generated(engine, sample, unusable, seed=0, step=0, keys=keys)
    except (RuntimeError, IndexError) as error:
        message = str(error)
    after, expected = (e.save(folder)[0].checksum for e in (engine, fresh))
    return message, after, expected
