"""FP8 in generation: memory and speed of servers, the correction of losses, and rejections."""

from __future__ import annotations

import pytest

from slurmrl.errors import ConfigError
from slurmrl.plan.build import lacking_gpus, make_plan
from slurmrl.plan.estimates.call_costs import generating as generated
from slurmrl.plan.estimates.call_costs import memories
from slurmrl.plan.estimates.worker_memory import task_bytes, trainers_gpus, worker_bytes
from slurmrl.plan.plan_values import report
from slurmrl.plan.settings import Settings
from tests.unit.plan.conftest import Load, refused_settings
from tests.unit.plan.test_plan_estimates import SEVEN_BILLION
from tests.unit.plan.test_plan_servers import APART, LAYOUT, SHARED

FP8 = "rollout.quantization=fp8"
CACHE = "rollout.kv_cache_dtype=fp8_e4m3"
H100 = "cluster.slurm.gpu_type=h100"
ELEMENTS_IN_BFLOAT16 = (2 * 152064 + 2 * 28 + 1) * 3584
"""Embedding, output layer and norms of `SEVEN_BILLION`."""


def load(plan_ppo: Load, *overrides: str, **architecture: object) -> Settings:
    return plan_ppo(*LAYOUT, *overrides, architecture={**SEVEN_BILLION, **architecture})


def test_server_has_matrices_in_one_byte_and_blocks_with_factors(plan_ppo: Load) -> None:
    usual, fp8 = (memories(load(plan_ppo, *APART, *more))["rollout"] for more in ((), (FP8,)))
    elements = usual.weights // 2
    matrices = elements - ELEMENTS_IN_BFLOAT16
    assert fp8.weights == pytest.approx(2 * ELEMENTS_IN_BFLOAT16 + matrices * (1 + 4 / 128**2))
    assert fp8.kv_cache == usual.kv_cache
    cache = memories(load(plan_ppo, *APART, CACHE))["rollout"]
    assert (cache.weights, 2 * cache.kv_cache) == (usual.weights, usual.kv_cache)
    assert 2 * cache.sequence == usual.sequence


def test_weights_arrive_at_the_server_in_the_type_of_training(plan_ppo: Load) -> None:
    """The weights are staged on the GPU, and in host memory next to the FP8 files."""
    settings = {more: load(plan_ppo, *SHARED, *more) for more in ((), (FP8,))}
    sizes = {more: memories(each)["rollout"].weights for more, each in settings.items()}
    hosts = {more: worker_bytes(each) or 0 for more, each in settings.items()}
    assert hosts[(FP8,)] - hosts[()] == pytest.approx(sizes[(FP8,)], rel=1e-6)
    moving = [trainers_gpus(each)._moving(memories(each))["weights"] for each in settings.values()]
    assert moving[1] - moving[0] == sizes[(FP8,)] - sizes[()]  # of the server's own
    in_tasks = ("rollout.backend=sglang:d2", "rollout.tasks={max: 2}")
    tasks = {more: task_bytes(load(plan_ppo, *in_tasks, *more)) or 0 for more in settings}
    assert tasks[(FP8,)] - tasks[()] == pytest.approx(sizes[(FP8,)], rel=1e-6)


def test_fp8_tokens_take_less_time(plan_ppo: Load) -> None:
    """Decoding reads fewer bytes, and a server's cache holds more sequences."""
    jobs = {
        more: generated(load(plan_ppo, *APART, H100, *more), "rollout")
        for more in ((), (FP8,), (CACHE,))
    }
    assert all(jobs.values())
    usual, fp8, cache = (each.job for each in jobs.values() if each)
    assert fp8.narrower.weights == pytest.approx(0.57, abs=0.01)
    assert (fp8.narrower.rate, cache.narrower.rate) == (1.6, 1.0)
    assert fp8.cache_tokens > usual.cache_tokens
    assert cache.cache_tokens == 2 * usual.cache_tokens


@pytest.mark.parametrize("setting", [FP8, CACHE])
def test_losses_correct_for_fp8_by_default(plan_ppo: Load, setting: str) -> None:
    name = setting.removeprefix("rollout.").replace("=", " ")
    key = setting.partition("=")[0]
    settings = load(plan_ppo, *APART, setting)
    assert vars(settings.algorithm)["correction"] == "truncate"
    assert any(
        f"algorithm.correction truncate: importance weights correct for the policy that sampled "
        f"the tokens, because completions are generated with {name} ({key})" in note
        for note in settings.notes
    )
    rollout = report(settings, make_plan(settings, scheduler="slurm"))["models"]["rollout"]
    assert (rollout["dtype"], rollout["dtype_from"]) == (f"bfloat16 {name}", key)
    off = load(
        plan_ppo, *APART, setting, "algorithm.correction=none", "algorithm.recompute_logprobs=true"
    )
    assert any(note.startswith("wrong gradients: ") for note in off.notes)


CPUS = ("cluster.gpus_per_worker=0", "cluster.gpu_memory=")


@pytest.mark.parametrize(("key", "message", "overrides"), refused_settings("refused_fp8.txt"))
def test_fp8_is_rejected_where_it_could_not_run(
    plan_ppo: Load, key: str, message: str, overrides: list[str]
) -> None:
    try:
        found = load(plan_ppo, *overrides).missing
    except ConfigError as error:
        found = error.problems
    (ours,) = (problem for problem in found if problem.key.startswith(key))
    assert message in ours.message


@pytest.mark.parametrize("setting", [FP8, CACHE])
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_fp8_is_rejected_without_gpus(plan_ppo: Load, kind: str, setting: str) -> None:
    settings = load(plan_ppo, *APART, f"rollout.backend={kind}:d16", setting, *CPUS)
    problems = lacking_gpus(settings, make_plan(settings, scheduler="slurm"))
    key = setting.partition("=")[0]
    (message,) = (problem.message for problem in problems if problem.key == key)
    assert message.endswith("servers compute in FP8 on GPUs only, and cluster.gpus_per_worker is 0")
    allowed = load(plan_ppo, *APART, "rollout.backend=vllm:d16", setting)
    assert lacking_gpus(allowed, make_plan(allowed, scheduler="slurm")) == []
    assert not [problem for problem in allowed.missing if problem.key == key]


MEGATRON = (
    "actor.backend=megatron:d16",
    "actor.fp8=hybrid",
    "rollout.backend=native:d16",
    "rollout.python=",
    "cluster.slurm.gpu_type=h100",
)


def test_fp8_of_training_speeds_up_products_and_corrects_losses(plan_ppo: Load) -> None:
    settings = load(plan_ppo, *MEGATRON)
    assert not [problem for problem in settings.missing if problem.key.endswith("fp8")]
    assert settings.config.model("ref").fp8 == "hybrid"  # KL compares equal computations
    assert vars(settings.algorithm)["correction"] == "truncate"
    assert any("without the FP8 of training (actor.fp8)" in note for note in settings.notes)
    seconds = []
    for fp8 in ("null", "e4m3"):
        calls = load(plan_ppo, *MEGATRON, f"actor.fp8={fp8}")
        rows = report(calls, make_plan(calls, scheduler="slurm"))["calls"]
        seconds.append({row["name"]: row["seconds"] for row in rows})
    usual, fp8 = seconds
    assert fp8["actor_train"] < usual["actor_train"]
    assert fp8["actor_gen"] == usual["actor_gen"]
