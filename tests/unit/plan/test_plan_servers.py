"""The share of GPU memory for a server on the GPUs of training models."""

from __future__ import annotations

import re

import pytest

from slurmrl.plan.build import lacking_gpus, make_plan
from slurmrl.plan.checks.fit import rejection
from slurmrl.plan.estimates.call_costs import margin
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.shape import least_context
from slurmrl.plan.estimates.worker_memory import (
    WORKER,
    computing,
    least,
    own_share,
    share_of_server,
    trainers_gpus,
    worker_bytes,
)
from slurmrl.plan.plan_values import report
from slurmrl.plan.precision import generating
from slurmrl.plan.settings import Settings
from slurmrl.rollouts.generation.sglang import SglangServer
from slurmrl.rollouts.generation.vllm import VllmServer
from tests.unit.plan.conftest import Load, memory_problems
from tests.unit.plan.test_plan_estimates import SEVEN_BILLION

GPU = 80 * GIB
LAYOUT = (
    "cluster.gpus_per_worker=1",
    "cluster.gpu_memory=80G",
    "actor.backend=fsdp:d16",
    "dataset.max_prompt_tokens=1792",
    "algorithm.n_minibatches=1",
    "actor.gradient_checkpointing=full",
    "critic.gradient_checkpointing=full",
    "rollout.python=/bin/sh",
)
SHARED = ("rollout.backend=sglang:d16", "rollout.gpus=0-15")
APART = ("rollout.backend=sglang:d16", "rollout.gpus=16-31")


def load(plan_ppo: Load, *overrides: str) -> Settings:
    return plan_ppo(*LAYOUT, *overrides, architecture=SEVEN_BILLION)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_models_with_sinks_are_rejected_for_servers_on_cpus(
    plan_ppo: Load, kind: str, family: str
) -> None:
    """SGLang's attention on CPUs knows no sinks, so its server would not start."""
    experts = {"model_type": family, "num_experts": 4, "num_experts_per_tok": 2}
    server = (f"rollout.backend={kind}:d16", "rollout.gpus=16-31")

    def messages(*more: str) -> list[str]:
        settings = plan_ppo(*LAYOUT, *server, *more, architecture=SEVEN_BILLION | experts)
        problems = lacking_gpus(settings, make_plan(settings, scheduler="slurm"))
        return [problem.message for problem in problems]

    cpus = ("cluster.gpus_per_worker=0", "cluster.gpu_memory=")
    native = "; on CPUs use native" if family == "gpt_oss" else "; on CPUs use native or sglang"
    found = messages(*cpus)
    assert bool(found) == (kind == "vllm" or family == "gpt_oss")
    assert all(message.endswith(native) for message in found)
    assert messages() == []
    if (kind, family) == ("sglang", "gpt_oss"):
        assert (
            "'sglang:d16' is not allowed: SGLang's default attention on CPUs does not" in found[0]
        )
        own = "rollout.server_args=[--attention-backend, intel_amx]"
        assert messages(*cpus, own) == []


def test_sleeping_server_gets_all_memory_not_kept_between_calls(
    plan_ppo: Load,
) -> None:
    """A server that shares GPUs sleeps by default, so activations and gradients leave their memory
    to it.
    """
    settings = load(plan_ppo, *SHARED)
    gpus = trainers_gpus(settings)
    assert gpus.server_sleeps
    assert make_plan(settings, scheduler="slurm").offloaded == {"rollout"}
    kept = sum(
        gpus.sizes[name].weights + gpus.sizes[name].optimizer for name in ("actor", "critic")
    )
    kept += gpus.sizes["ref"].weights
    assert gpus.server_bytes() == GPU - kept - margin(kept)
    assert share_of_server(settings, GPU) == gpus.server_bytes()
    fullest = gpus.fullest()
    assert fullest.size + fullest.margin == GPU
    long = (
        "rollout.max_new_tokens=4096",
        "actor.gradient_checkpointing=off",
        "actor.max_tokens_per_microbatch=65536",
    )
    (problem,) = memory_problems(load(plan_ppo, *SHARED, *long))
    assert re.search(r"activations of actor .*sleeping server 2\.0 GiB", problem.message)


def test_server_memory_leaves_room_for_largest_call_without_offload(plan_ppo: Load) -> None:
    """The call and the server fit together, to the byte, with the call's margin."""
    settings = load(plan_ppo, *SHARED, "rollout.offload=false")
    gpus = trainers_gpus(settings)
    assert not gpus.server_sleeps
    assert gpus.server_bytes() < trainers_gpus(load(plan_ppo, *SHARED)).server_bytes()
    fullest = gpus.fullest()
    assert "rollout" in fullest.models
    assert fullest.parts["server"] == gpus.server_bytes()
    assert fullest.size + fullest.margin == GPU


def test_server_on_its_own_gpus_reserves_memory_for_incoming_weights(plan_ppo: Load) -> None:
    gpus = trainers_gpus(load(plan_ppo, *APART))
    assert not gpus.server_sleeps
    weights = gpus.sizes["rollout"].weights
    moving = weights + gpus.config.transfer.staging_mib * 2**20
    assert gpus.server_bytes() == GPU - moving - margin(moving)


def test_memory_share_set_by_the_user_is_kept_and_counted(plan_ppo: Load) -> None:
    """slurmrl then sets no share, and rejects a share that leaves too little memory for
    training.
    """
    small = load(plan_ppo, *SHARED, "rollout.server_args=[--mem-fraction-static, '0.4']")
    assert trainers_gpus(small).server_bytes() == round(0.4 * GPU)
    assert share_of_server(small, GPU) is None
    most = load(plan_ppo, *SHARED, "rollout.server_args=[--mem-fraction-static=0.95]")
    (problem,) = memory_problems(most)
    assert "server 76.0 GiB" in problem.message


def test_too_little_server_memory_is_rejected_with_the_remedy(plan_ppo: Load) -> None:
    """The check runs at submission if the GPU's size is known, else in the worker before anything
    starts.
    """
    tight = ("actor.backend=fsdp:d8", "rollout.backend=vllm:d8", "rollout.gpus=0-7")
    known = load(plan_ppo, *tight, "rollout.offload=false", "cluster.gpu_memory=48G")
    (problem,) = memory_problems(known)
    assert re.search(r"server .* GiB.*set rollout.offload to true", problem.message)
    unknown = load(plan_ppo, *tight, "rollout.offload=false", "cluster.gpu_memory=")
    said = rejection(unknown, "NVIDIA A40", 48 * GIB)
    assert said is not None
    assert "server" in said


def test_assumed_lengths_do_not_reduce_the_server_share(plan_ppo: Load) -> None:
    """Without a limit on prompts, the model's longest sequence would leave no memory."""
    settings = load(plan_ppo, *SHARED, "rollout.offload=false", "cluster.gpu_memory=")
    unbounded = plan_ppo(
        *(*LAYOUT, *SHARED, "rollout.offload=false"),
        *("cluster.gpu_memory=", "dataset.max_prompt_tokens="),
        architecture={**SEVEN_BILLION, "max_position_embeddings": 1_000_000},
    )
    share = share_of_server(unbounded, GPU)
    bounded = share_of_server(settings, GPU)
    assert share is not None
    assert bounded is not None
    assert share >= bounded
    needed = least(trainers_gpus(settings, limit=GPU).sizes["rollout"], GPU)
    assert bounded >= needed >= computing(GPU)


def test_host_of_a_sleeping_server_holds_one_version(plan_ppo: Load) -> None:
    """Otherwise the host holds two versions while a server reads one. All parts of a split model
    are on the leader's host.
    """
    settings = {
        offload: load(plan_ppo, *SHARED, f"rollout.offload={offload}")
        for offload in ("true", "false")
    }
    weights = trainers_gpus(settings["true"]).sizes["rollout"].weights
    sizes = {offload: worker_bytes(each) or 0 for offload, each in settings.items()}
    assert sizes["false"] - sizes["true"] == weights
    assert sizes["true"] > WORKER + weights
    split = load(plan_ppo, "rollout.backend=sglang:d8t2", "rollout.gpus=0-15")
    assert worker_bytes(split) == pytest.approx(sizes["true"], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        ((), None),
        (("--dtype", "half"), None),
        (("--gpu-memory-utilization", "0.5"), 0.5),
        (("--mem-fraction-static=0.25", "--x"), 0.25),
        (("--mem-fraction-static", "0.25", "--mem-fraction-static=0.5"), 0.5),
        (("--mem-fraction-static", "much"), None),
        (("--mem-fraction-static",), None),
    ],
)
def test_memory_share_is_found_in_server_arguments(
    arguments: tuple[str, ...], share: float | None
) -> None:
    assert own_share(arguments) == share


def test_memory_share_is_converted_to_each_servers_fraction() -> None:
    """vLLM's fraction is of the whole GPU. SGLang's is of the free memory at its start, for weights
    and caches. The server's memory is the same for any memory of the other models at that time.
    """
    share = 40 * GIB
    assert VllmServer.memory_flags(share, GPU, GPU) == ("--gpu-memory-utilization", "0.5000")
    for free in (45 * GIB, 70 * GIB):
        flag, fraction = SglangServer.memory_flags(share, free, GPU)
        assert flag == "--mem-fraction-static"
        assert float(fraction) * free == pytest.approx(share - computing(GPU), rel=1e-3)
    assert SglangServer.memory_flags(share, 10 * GIB, GPU)[1] == "0.9800"


BESIDE = ("rollout.backend=sglang:d2", "rollout.gpus=0-1", "rollout.python=/bin/sh")
IN_TASKS = ("rollout.backend=sglang:d2", "rollout.tasks={}", "rollout.python=/bin/sh")
RUNNING = ("rollout.backend=sglang", "rollout.servers=[http://host:30000]")
LONG = ("evaluation.dataset.max_prompt_tokens=100", "evaluation.max_new_tokens=1500")
OWN_TRIALS = ("evaluation.every_steps=null", "evaluation.tasks={}")
PROMPTS = ("dataset.max_prompt_tokens=100",)
DPO = ("algorithm.name=dpo", "dataset.type=preference", "dataset.max_tokens=2000")
SFT = ("algorithm.name=sft", "dataset.type=prompt_answer", "dataset.max_tokens=2000")
SHORT = ("evaluation.dataset.max_prompt_tokens=10", "evaluation.max_new_tokens=10")


@pytest.mark.parametrize(
    ("overrides", "context"),
    [
        ((*PROMPTS, *BESIDE, *LONG), 1600),
        ((*PROMPTS, *RUNNING, *LONG), 1600),
        ((*PROMPTS, *IN_TASKS, *LONG), 200),
        ((*PROMPTS, *BESIDE, *LONG, *OWN_TRIALS), 200),
        ((*PROMPTS, *RUNNING, *LONG, *OWN_TRIALS), 200),
        ((*PROMPTS, *BESIDE, "evaluation=null"), 200),
        ((*DPO, *BESIDE, *SHORT), 20),
        ((*SFT, *RUNNING, *SHORT), 20),
    ],
)
def test_server_context_covers_only_sequences_that_it_generates(
    load_ppo: Load, overrides: tuple[str, ...], context: int
) -> None:
    """The context does not include sequences that trainers or separate trials generate."""
    config = load_ppo("rollout.max_new_tokens=100", *overrides).config
    for assumed in (False, True):
        assert least_context(config, assumed=assumed) == context


VLLM_APART = ("rollout.backend=vllm:d16", *APART[1:])


@pytest.mark.parametrize(
    ("arguments", "shown", "source"),
    [
        ("[]", "bfloat16", "default on GPUs"),
        ("[--dtype, bfloat16]", "bfloat16", "rollout.server_args --dtype"),
        ("[--dtype=half]", "float16", "rollout.server_args --dtype"),
        ("[--dtype, half, --dty, float]", "float32", "rollout.server_args --dtype"),
        ("[--quantization, fp8]", "bfloat16 --quantization fp8", "rollout.server_args"),
        (
            "[--kv_cache_dtype=fp8_e5m2]",
            "bfloat16 --kv-cache-dtype fp8_e5m2",
            "rollout.server_args",
        ),
        ("[--kv-cache-dtype, auto]", "bfloat16", "default on GPUs"),
        ("[--kv-cache-dtype, bfloat16]", "bfloat16", "default on GPUs"),
        ("[--kv-cache-dtype, bf16]", "bfloat16", "default on GPUs"),
        ("[-qfp8]", "bfloat16 --quantization fp8", "rollout.server_args"),
        ("[--quantization-config, x]", "bfloat16 --quantization x", "rollout.server_args"),
        ("[--modelopt-quant, fp8]", "bfloat16 --modelopt-quant fp8", "rollout.server_args"),
        ("[--rl-quant-profile, x]", "bfloat16 --rl-quant-profile x", "rollout.server_args"),
        ("[--mamba-ssm-dtype=half]", "bfloat16 --mamba-ssm-dtype half", "rollout.server_args"),
        ("[--mamba-ssm-dtype, float32]", "bfloat16", "default on GPUs"),
    ],
)
def test_plan_shows_precision_of_server_from_its_arguments(
    plan_ppo: Load, arguments: str, shown: str, source: str
) -> None:
    settings = load(plan_ppo, *VLLM_APART, f"rollout.server_args={arguments}")
    rollout = report(settings, make_plan(settings, scheduler="slurm"))["models"]["rollout"]
    assert (rollout["dtype"], rollout["dtype_from"]) == (shown, source)
    differs = shown != "bfloat16"
    assert any("algorithm.correction truncate" in note for note in settings.notes) == differs


@pytest.mark.parametrize(("kind", "narrowed"), [("sglang", "float16"), ("vllm", "bfloat16")])
def test_server_with_automatic_dtype_rounds_float32(
    plan_ppo: Load, kind: str, narrowed: str
) -> None:
    choice = (f"rollout.backend={kind}:d16", "rollout.server_args=[--dtype, auto]")
    found = [
        generating(load(plan_ppo, *APART, *choice, f"actor.dtype={dtype}").config).dtype
        for dtype in ("float32", "bfloat16")
    ]
    assert found == [narrowed, "bfloat16"]
