"""Every engine's GPU code runs with all tensors on the right device. A tensor on a wrong device is
an error of torch, as on a real GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurmrl.algorithms.rollout_calls import add_experts
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import Outputs, TrainEngine
from slurmrl.models.architecture import Head
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.parallel.groups import ParallelContext
from tests.distributed.engines.cases import Placed
from tests.distributed.engines.megatron_cases import placed
from tests.null_gpu import cases
from tests.null_gpu.values import SmallValues
from tests.support.generated import GenerationOutput, generated

LENGTHS = (33, 64, 64, 20)
NEW_TOKENS = 12
ENGINES = {
    "fsdp": {},
    "fsdp, weights on the host": {"cpu_offload": True},
    "hf": {"implementation": "hf"},
    "megatron": {},
}
MODES = ("off", "selective", "full")
pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core warns of its own settings


def make(kind: str, experts: bool, **settings: Any) -> TrainEngine:
    name = kind.partition(",")[0]
    return cases.engine(
        cases.TINY_EXPERTS if experts else cases.TINY,
        name="fsdp" if name == "hf" else name,
        max_tokens_per_microbatch=128,
        **ENGINES[kind],
        **settings,
    )


def loss(outputs: Outputs, sample: SequenceSample) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    picked = torch.cat([values[sample.tensor("response_mask")] for values in outputs.values()])
    return picked.sum(), {"largest": picked.detach().max()}


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", ENGINES)
def test_engine_calls_use_only_the_right_device(
    kind: str, experts: bool, head: Head, tmp_path: Path
) -> None:
    """Covers training in every mode of recomputation, inference, generation, checkpoints and
    offloading, with recorded experts if the model has experts and can replay them.
    """
    sample = cases.batch(LENGTHS)
    if experts and kind != "hf":
        recorded = np.array([2, 1] * 2, np.int16)  # of the two layers
        add_experts(sample, [np.tile(recorded, length) for length in LENGTHS])
    with cases.first_of(1), SmallValues():
        for mode in MODES:
            if (kind, mode) == ("hf", "selective"):
                continue  # refused
            engine = make(kind, experts, head=head, gradient_checkpointing=mode)
            stats = engine.train_batch(sample, loss, float(sum(LENGTHS)))
            assert stats["tokens"] == sum(LENGTHS)
            outputs = engine.forward(sample.only(["input_ids"]))
            assert all(values.is_cuda for values in outputs.values())
        assert engine.snapshot() is not None
        engine.save(tmp_path)
        engine.load(tmp_path)
        engine.offload()
        engine.onload()
        stats = engine.train_batch(sample, loss, float(sum(LENGTHS)))
        assert stats["skipped"] == 0.0  # else the optimizer did nothing
        if head == "lm" and kind != "megatron":
            found = made(engine, sample)
            assert found.lengths.tolist() == [length + NEW_TOKENS for length in LENGTHS]


@pytest.mark.parametrize("kind", ENGINES)
def test_engine_on_two_ranks_uses_only_the_right_device(kind: str) -> None:
    sample = cases.batch(LENGTHS)
    with cases.first_of(2), SmallValues():
        engine = make(kind, experts=False, head="lm")
        stats = engine.train_batch(sample, loss, float(sum(LENGTHS)))
        assert stats["denominator"] == 2 * sum(LENGTHS)
        engine.forward(sample.only(["input_ids"]))
        if kind != "megatron":
            made(engine, sample)


PAIR = (0, 1)
SHARED = {
    "fsdp t2": (Placed("actor", PAIR, {"dp": 1, "tp": 2}), {}),
    "fsdp t2 sp": (
        Placed("actor", PAIR, {"dp": 1, "tp": 2}),
        {"model": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    ),
    "fsdp c2": (Placed("actor", PAIR, {"dp": 1, "cp": 2}), {}),
    "megatron t2": (placed(tp=2), {}),
    "megatron t2 sp": (placed(tp=2, sp=True), {}),
    "megatron c2": (placed(cp=2), {}),
    "megatron p2": (placed(pp=2), {}),
    "megatron d2 e2": (placed(dp=2, experts={"pp": 1, "dp": 1, "ep": 2, "tp": 1}), {}),
}
"""Layouts whose first rank shares matrices, sequences, stages or experts with another one."""


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", SHARED)
def test_tensor_parallel_engine_uses_only_the_right_device(
    kind: str, experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences have one length, because the gradients from the other stage have the shape that
    was sent last.
    """
    if ("e2" in kind) > experts or (kind == "megatron t2" and experts):
        pytest.skip("refused")
    answer_for_others(monkeypatch)
    name, (where, settings) = kind.split()[0], SHARED[kind]
    lengths = (64,) * 4
    sample = cases.batch(lengths)
    architecture = cases.TINY_EXPERTS if experts else cases.TINY
    with cases.first_of(2), SmallValues():
        for mode in MODES:
            engine = cases.engine(
                architecture,
                name=name,
                placed=where,
                max_tokens_per_microbatch=128,
                gradient_checkpointing=mode,
                **settings,
            )
            stats = engine.train_batch(sample, loss, float(sum(lengths)))
            assert stats["skipped"] == 0.0
            outputs = engine.forward(sample.only(["input_ids"]))
            assert all(values.is_cuda for values in outputs.values())
            assert outputs or kind == "megatron p2"
            assert engine.snapshot() is not None
        if name == "fsdp":
            found = made(engine, sample)
            assert found.lengths.tolist() == [length + NEW_TOKENS for length in lengths]


def answer_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the data that other ranks of megatron would send: statistics of the last stage, and
    the shards that each rank saves.
    """
    schedule = "slurmrl.engines.megatron.gpt.PipelineSchedule"
    monkeypatch.setattr(f"{schedule}.broadcast_stats", lambda _, stats, device: stats)
    from slurmrl.engines.megatron import rank_state  # its import of megatron-core warns

    gathered = rank_state._gathered

    def renumbered(content: bytes, context: ParallelContext) -> list[bytes] | None:
        texts = gathered(content, context)
        if texts is None:
            return None
        return [json.dumps([n, json.loads(text)[1]]).encode() for n, text in enumerate(texts)]

    monkeypatch.setattr(rank_state, "_gathered", renumbered)


def made(engine: TrainEngine, sample: SequenceSample) -> GenerationOutput:
    prompts = SequenceSample(
        sample.ids,
        {"prompt_ids": sample.lengths["input_ids"]},
        data={"prompt_ids": sample.tensor("input_ids")},
    )
    options = GenerationOptions(max_new_tokens=NEW_TOKENS)
    keys = torch.arange(sample.bs)
    return generated(engine, prompts, options, seed=1, step=1, keys=keys)
