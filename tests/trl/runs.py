"""A step of a case by slurmrl: the algorithm's calls on the fsdp engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from slurmrl.algorithms.base import CallContext
from slurmrl.config.schema import Config, Dataset, Logging, Model, Optimizer, Rollout
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.plan.algorithms import ALGORITHMS
from slurmrl.plan.dataflow import Method, RoleUse
from slurmrl.plan.model import ModelPlan
from slurmrl.plan.settings import Settings
from slurmrl.registry import resolve
from slurmrl.tensors.parallel.groups import ParallelContext, build
from slurmrl.tensors.parallel.topology import ProcessTopology
from tests.trl.cases import END, GROUP, LONGEST, Case, Values

MICROBATCH = 30
"""Tokens: several micro-batches for each step."""


def train(
    folder: Path, case: Case, save: Path, parts: Sequence[Sequence[int]] = ()
) -> dict[str, float]:
    """Train a step of a case with a learning rate of 0, and save the actor's checkpoint, whose
    first moments are the gradients. ``parts``: the items of each data-parallel rank; by default,
    one rank has all. Return the metrics of the training call.
    """
    batch = json.loads((folder / "batches.json").read_text())[case.batch]
    whole = sample_of(batch)
    settings = settings_of(case, len(batch))
    algorithm = cast(Any, settings.algorithm)
    roles = algorithm.roles()
    placed = contexts(roles, len(parts))
    engines = {
        use.role: FSDPEngine(
            use.role,
            settings.config.actor,
            head=use.head,
            trained=use.trained,
            context=placed[use.role],
            seed=1,
            total_steps=10,
            source=folder / source_of(use),
        )
        for use in roles
    }
    own = whole.take(parts[dist.get_rank()]) if parts else whole
    scalars = resolve(algorithm.controller())(algorithm).values()
    context = CallContext(1, 1, scalars, cast(Any, None), settings, (END,), whole.ids)
    stats: dict[str, float] = {}
    for call in algorithm.calls(settings.config):
        if call.role not in engines or call.method == Method.GENERATE:
            continue  # completions and rewards are given
        method = getattr(resolve(call.interface)(), call.method.value)
        result = method(engines[call.role], own.only(call.inputs), context)
        if result.sample is not None:
            own.update_(result.sample)
        stats = {name: total / count for name, (total, count) in result.stats.items()}
    save.mkdir(exist_ok=True)
    snapshot = engines["actor"].snapshot()
    assert snapshot is not None
    snapshot.write(save)
    return stats


def total_loss(stats: dict[str, float]) -> float:
    """Return the minimized loss."""
    return stats["actor/loss"] if "actor/loss" in stats else stats["loss"]


def source_of(use: RoleUse) -> str:
    if use.head == "value":
        return "reward"
    return "model" if use.role == "actor" else use.role


def settings_of(case: Case, batch_size: int) -> Settings:
    optimizer = Optimizer(lr=0.0, betas=(0.0, 0.95), gradient_clip=None)
    config = Config(
        experiment="trl",
        total_steps=1,
        algorithm={"name": case.ours["name"]},
        actor=Model(path="unused", optimizer=optimizer, max_tokens_per_microbatch=MICROBATCH),
        rollout=Rollout(n=GROUP, max_new_tokens=LONGEST, **case.rollout),
        dataset=Dataset(type="prompt", path="unused"),
        logging=Logging(samples=0),  # there is no tokenizer to show any with
    )
    schema = ALGORITHMS.load(case.ours["name"])
    return Settings(config, schema(batch_size=batch_size, **case.ours), cast(Any, None))


def contexts(roles: Sequence[RoleUse], size: int) -> dict[str, ParallelContext]:
    """Return the context of one rank without process groups, or of ``size`` data-parallel ranks."""
    cpu = torch.device("cpu")
    if not size:
        alone = ProcessTopology(("dp",), (1,))
        return {use.role: ParallelContext(use.role, cpu, 0, (0,), alone, {}) for use in roles}
    plans = [
        ModelPlan(
            role=use.role,
            backend=f"fsdp:d{size}",
            engine="fsdp",
            sizes={"dp": size},
            ranks=tuple(range(size)),
            trained=use.trained,
            head=use.head,
        )
        for use in roles
    ]
    return build(plans, rank=dist.get_rank(), device=cpu)


def sample_of(batch: list[Values]) -> SequenceSample:
    """Return a batch in the form of the dataset, or of generation and reward."""
    answers = [_answers(row) for row in batch]
    pairs = [
        (row["prompt"], answer) for row, own in zip(batch, answers, strict=True) for answer in own
    ]
    data = {
        "input_ids": torch.tensor([token for pair in pairs for token in chain(*pair)]),
        "prompt_mask": torch.tensor(
            [
                own
                for prompt, answer in pairs
                for own in [True] * len(prompt) + [False] * len(answer)
            ]
        ),
    }
    of_sequences: dict[str, torch.Tensor] = {}
    if "old" in batch[0]:
        old = chain.from_iterable(row["old"] for row in batch)
        aligned = [[0.0] * len(p) + own for (p, _), own in zip(pairs, old, strict=True)]
        data["logprobs"] = torch.tensor(list(chain(*aligned)))
        of_sequences["rewards"] = torch.tensor([r for row in batch for r in row["rewards"]])
        of_sequences["finished"] = torch.tensor([answer[-1] == END for _, answer in pairs])
    rows = [
        [len(row["prompt"]) + len(answer) for answer in own]
        for row, own in zip(batch, answers, strict=True)
    ]
    sample = SequenceSample.grouped(
        rows, list(map(str, range(len(batch)))), data, per_sequence=of_sequences
    )
    if "label" in batch[0]:
        labels = torch.tensor([row["label"] for row in batch])
        key = {"desirable": [[1] for _ in batch]}
        sample.update_(SequenceSample(sample.ids, key, data={"desirable": labels}))
    return sample


def _answers(row: Values) -> list[list[int]]:
    """Return the sequences of an item."""
    names = ("answer", "mismatched", "chosen", "rejected")
    return [*row.get("completions", []), *(row[name] for name in names if name in row)]
