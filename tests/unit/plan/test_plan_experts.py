"""The memory of recorded experts in engines that replay them and in servers that record them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slurmrl.config.allocation import parse
from slurmrl.display import terminal
from slurmrl.models.experts import Replayed
from slurmrl.models.parallel.split import WHOLE
from slurmrl.plan.build import make_plan
from slurmrl.plan.estimates.added_sizes import replayed
from slurmrl.plan.estimates.call_costs import memories
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.memory import estimate
from slurmrl.plan.estimates.worker_memory import (
    server_experts_bytes,
    task_bytes,
    trainers_gpus,
    worker_bytes,
)
from slurmrl.plan.plan_document import document
from slurmrl.plan.plan_values import report
from slurmrl.plan.settings import Settings
from tests.unit.plan.conftest import EXPERTS, Load
from tests.unit.plan.test_plan_estimates import LENGTHS, QWEN3_30B_A3B, job, shape_of

LAYERS, EACH = 48, 8
KV = 2 * 4 * 128 * 2 * LAYERS
"""Bytes of a token's keys and values in bfloat16."""


def test_estimate_counts_expert_records_held_by_engines() -> None:
    """For a micro-batch of 8 tokens, this is the whole batch."""
    routers = pytest.importorskip("slurmrl.engines.megatron.routers")
    shape, tokens = shape_of({**QWEN3_30B_A3B, "num_hidden_layers": 3}), 8
    sample = torch.arange(EACH, dtype=torch.int16).expand(tokens, 3, EACH).contiguous()
    mask = routers.marks(torch.ones(tokens, dtype=torch.bool), sample, 128)
    record = Replayed(sample)
    record.arrange(torch.arange(tokens).flip(0), WHOLE)
    samples = 2 * sample.nbytes
    built_in = [record._experts, record._own]
    for backend, held in (("megatron", [mask[:, 1:].contiguous()]), ("fsdp", built_in)):
        found = replayed(shape, parse(f"{backend}:d1"), batch=8, micro=8, layers=3)
        assert found == samples + sum(tensor.nbytes for tensor in held), backend


def test_expert_masks_dominate_replay_memory_on_megatron() -> None:
    """The masks take 100 MB at 16,384 tokens. A pipeline stage has masks of only its layers, but of
    several micro-batches at a time.
    """
    bare = estimate(job(QWEN3_30B_A3B, "megatron:d1"))
    for backend in ("megatron:d1", "megatron:d1p2"):
        asked = job(QWEN3_30B_A3B, backend, replays_experts=True)
        found = estimate(replace(asked, lengths=replace(LENGTHS, sequences=16, longest=16384)))
        assert found.experts == 16384 * (LAYERS * 128 + 2 * LAYERS * EACH * (16 + 16 + 1))
    assert (bare.experts, estimate(replace(asked, computes=False)).experts) == (0, 0)
    split = replace(asked, lengths=replace(LENGTHS, sequences=16, longest=16384), minibatches=4)
    assert estimate(split).experts == found.experts - 16384 * 2 * LAYERS * EACH * 12
    assert found.together == found.standing + found.activations + found.experts


def test_built_in_engine_keeps_expert_records_with_the_kv_cache() -> None:
    sizes = [
        estimate(
            job(QWEN3_30B_A3B, "native:d1", generates=True, trained=False, replays_experts=asked)
        ).sequence
        for asked in (False, True)
    ]
    assert sizes == [1024 * KV, 1024 * (KV + 2 * LAYERS * EACH)]


def served(plan_ppo: Load, *overrides: str) -> Settings:
    return plan_ppo(
        *("rollout.replay_experts=true", "rollout.python=/bin/sh", "cluster.gpus_per_worker=1"),
        *("actor.backend=megatron:d8e8", "critic.backend=fsdp:d8", "cluster.gpu_memory=640G"),
        *("actor.dtype=bfloat16", "algorithm.n_minibatches=1", *overrides),
        architecture=QWEN3_30B_A3B,
    )


def test_expert_records_of_a_server_count_as_its_host_memory(plan_ppo: Load) -> None:
    """SGLang stores a 32-bit number for each layer and expert of each token that fits into its
    cache.
    """
    beside = ("rollout.backend=sglang:d8", "rollout.gpus=0-7")
    settings, plain = (
        served(plan_ppo, *beside, *more) for more in ((), ("rollout.replay_experts=false",))
    )
    gpus = trainers_gpus(settings)
    cache = gpus.server_bytes() - gpus.sizes["rollout"].weights
    recorded = round(cache / KV * 4 * LAYERS * EACH)
    assert server_experts_bytes(settings) == recorded > GIB
    assert (worker_bytes(settings) or 0) - (worker_bytes(plain) or 0) >= recorded * 0.99
    assert server_experts_bytes(plain) == 0
    tasks = ("rollout.backend=sglang:d2t2", "rollout.tasks={}")
    apart, without = (
        served(plan_ppo, *tasks, *more) for more in ((), ("rollout.replay_experts=false",))
    )
    two = 2 * server_experts_bytes(apart)
    assert (task_bytes(apart) or 0) - (task_bytes(without) or 0) == two > 0


def test_plan_shows_expert_records_on_gpu_and_host(plan_ppo: Load) -> None:
    settings = served(plan_ppo, "rollout.backend=sglang:d8", "rollout.gpus=0-7")
    shown = report(settings, make_plan(settings, scheduler="slurm"))
    actor = shown["models"]["actor"]["memory"]
    assert actor["experts_bytes"] == memories(settings)["actor"].experts > 0
    assert shown["experts_host_bytes"] == server_experts_bytes(settings)
    lines = terminal.as_text(document(shown))
    assert "ACTIVATIONS  KV_CACHE  EXPERTS" in lines
    assert "expert ids recorded by a server" in lines
    plain = plan_ppo(architecture=EXPERTS)
    lines = terminal.as_text(document(report(plain, make_plan(plain, scheduler="slurm"))))
    assert ("EXPERTS" in lines, "recorded experts" in lines) == (False, False)


@pytest.mark.parametrize("layout", ["fsdp:d2t2", "megatron:d2p2e2"])
def test_every_training_engine_replays_experts(layout: str, plan_ppo: Load) -> None:
    layouts = (f"actor.backend={layout}", "rollout.backend=native:d4")
    found = plan_ppo("rollout.replay_experts=true", *layouts, architecture=EXPERTS)
    calls = {call.name: call for call in found.algorithm.calls(found.config)}
    assert "experts" in calls["actor_train"].inputs
