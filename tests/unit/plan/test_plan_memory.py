"""Layouts that do not fit into a GPU's memory are refused with the estimate."""

from __future__ import annotations

import re

import pytest

from slurmrl.display import terminal
from slurmrl.plan.build import make_plan
from slurmrl.plan.checks.fit import rejection
from slurmrl.plan.estimates.call_costs import margin, memories
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.worker_memory import fullest_gpu, worker_bytes
from slurmrl.plan.plan_document import document
from slurmrl.plan.plan_values import report
from slurmrl.plan.settings import Settings
from tests.unit.plan.conftest import Load, memory_problems
from tests.unit.plan.test_plan_estimates import SEVEN_BILLION

LAYOUT = (
    "cluster.gpus_per_worker=1",
    "actor.backend=fsdp:d16",
    "dataset.max_prompt_tokens=3840",
    "algorithm.n_minibatches=1",
)


def messages(settings: Settings) -> list[str]:
    return [problem.message for problem in memory_problems(settings)]


def message_of(plan_ppo: Load, *overrides: str) -> str:
    (message,) = messages(plan_ppo(*LAYOUT, *overrides, architecture=SEVEN_BILLION))
    return message


def test_memory_margin_is_included(plan_ppo: Load) -> None:
    """The margin for CUDA, NCCL and fragmentation is 3 GiB plus a tenth of the estimate."""
    needed = fullest_gpu(plan_ppo(*LAYOUT, architecture=SEVEN_BILLION)).size
    assert margin(needed) == 3 * GIB + needed // 10
    enough = -(-(needed + margin(needed)) // 2**20)
    room = plan_ppo(*LAYOUT, f"cluster.gpu_memory={enough}M", architecture=SEVEN_BILLION)
    assert messages(room) == []
    assert "and a margin of" in message_of(plan_ppo, f"cluster.gpu_memory={enough - 1}M")


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_least_checkpointing_that_fits_is_suggested(plan_ppo: Load, mode: str) -> None:
    """A layout with the suggested mode is accepted. The next weaker mode is rejected."""
    key = f"[actor,critic].gradient_checkpointing={mode}"
    modes = [f"{role}.gradient_checkpointing={mode}" for role in ("actor", "critic")]
    needed = fullest_gpu(plan_ppo(*LAYOUT, *modes, architecture=SEVEN_BILLION)).size
    limit = f"cluster.gpu_memory={(needed + margin(needed)) // 2**20 + 1}M"
    said = message_of(plan_ppo, limit)
    assert (
        f"set actor.gradient_checkpointing and critic.gradient_checkpointing to {mode}" in said
    ), key
    assert "weights" in said
    assert "activations of" in said
    assert messages(plan_ppo(*LAYOUT, *modes, limit, architecture=SEVEN_BILLION)) == []


def test_checkpointing_is_not_suggested_if_none_fits(plan_ppo: Load) -> None:
    said = message_of(plan_ppo, "cluster.gpu_memory=4G")
    assert "gradient_checkpointing" not in said
    assert "lower max_tokens_per_microbatch, or split the models over more GPUs" in said


def test_assumed_length_is_named_as_the_cause(plan_ppo: Load) -> None:
    """Without a limit on prompts, the model's positions are the limit, and the message names
    them.
    """
    architecture = {**SEVEN_BILLION, "max_position_embeddings": 131072}
    settings = plan_ppo(
        "cluster.gpus_per_worker=1",
        "cluster.gpu_memory=80G",
        "dataset.max_prompt_tokens=",
        architecture=architecture,
    )
    (said,) = messages(settings)
    assert re.search(r"set dataset.max_prompt_tokens .*131072 tokens", said)


def test_smallest_layout_that_fits_is_suggested(plan_ppo: Load) -> None:
    """The suggested layout is accepted, and the plan marks the parts that exceed the memory."""
    batch = ("algorithm.batch_size=256", "cluster.gpu_memory=40G")
    few = (*LAYOUT, *batch, "actor.gradient_checkpointing=full", "actor.backend=fsdp:d4")
    settings = plan_ppo(*few, architecture=SEVEN_BILLION)
    (said,) = messages(settings)
    found = re.search(r"actor.backend=fsdp:d(\d+) needs", said)
    assert found is not None, said
    fits = int(found.group(1))
    for size in (fits, fits // 2):
        wider = plan_ppo(*few, f"actor.backend=fsdp:d{size}", architecture=SEVEN_BILLION)
        assert bool(messages(wider)) == (size < fits)
    shown = terminal.as_text(document(report(settings, make_plan(settings, scheduler="slurm"))))
    assert "of 40 GiB: " in shown
    assert " TOO MUCH" in shown


def test_worker_rejects_models_that_exceed_its_gpu(plan_ppo: Load) -> None:
    """The rejection names models, parts, the GPU and what to change.

    It counts neither a margin nor assumed lengths, and ``cluster.gpu_memory`` takes precedence.
    """
    settings = plan_ppo(*LAYOUT, architecture=SEVEN_BILLION)
    needed = fullest_gpu(settings).size
    assert rejection(settings, "NVIDIA H100", needed) is None
    said = rejection(settings, "NVIDIA H100", needed - 1)
    assert said is not None
    for part in (
        "actor, critic, ref",
        "weights",
        "activations of",
        "the NVIDIA H100 has",
        "set actor",
    ):
        assert part in said
    given = plan_ppo(*LAYOUT, "cluster.gpu_memory=800G", architecture=SEVEN_BILLION)
    assert rejection(given, "NVIDIA H100", needed - 1) is None
    positions = {**SEVEN_BILLION, "max_position_embeddings": 1_000_000}
    unbounded = plan_ppo(*LAYOUT, "dataset.max_prompt_tokens=", architecture=positions)
    assert fullest_gpu(unbounded).size > 2 * needed
    assert rejection(unbounded, "NVIDIA H100", needed - 1) is None


GENERATION = ("actor.backend=fsdp:d8", "rollout.backend=native:d8", "rollout.gpus=0-7")


def test_separate_generation_layout_adds_its_weights(plan_ppo: Load) -> None:
    """With ``offload: false``, both copies of the weights count in every call."""
    sizes = {
        offload: fullest_gpu(
            plan_ppo(*LAYOUT, *GENERATION, f"rollout.offload={offload}", architecture=SEVEN_BILLION)
        )
        for offload in ("", "true", "false")
    }
    assert sizes[""] == sizes["true"]
    assert "rollout" not in sizes["true"].models
    assert "rollout" in sizes["false"].models
    weights = memories(plan_ppo(*LAYOUT, *GENERATION, architecture=SEVEN_BILLION))[
        "rollout"
    ].weights
    assert weights > 12 * GIB
    assert sizes["false"].size == sizes["true"].size + weights


def test_offloaded_model_uses_gpu_memory_only_during_its_calls(plan_ppo: Load) -> None:
    """Between calls the model needs host memory, which a worker requests."""
    kept = plan_ppo(*LAYOUT, architecture=SEVEN_BILLION)
    away = plan_ppo(*LAYOUT, "ref.offload=true", architecture=SEVEN_BILLION)
    ref = memories(kept)["ref"].standing
    assert fullest_gpu(away).models == ("actor", "critic")
    assert fullest_gpu(away).size == fullest_gpu(kept).size - ref
    assert worker_bytes(away) == (worker_bytes(kept) or 0) + ref
