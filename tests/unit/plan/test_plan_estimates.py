"""Memory and FLOPs against the decoder's parameters and FLOPs, and against published numbers."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.config.allocation import parse
from slurmrl.config.schema import Cluster, Lora, Model, Optimizer, Slurm
from slurmrl.models import inference
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.plan.dataflow import Method
from slurmrl.plan.estimates import call_costs, memory, worker_memory
from slurmrl.plan.estimates import shape as shapes
from slurmrl.plan.estimates.call_costs import call_flops
from slurmrl.plan.estimates.memory import (
    MemoryDemand,
    estimate,
    kv_bytes_per_token,
    layer_activations,
)
from slurmrl.plan.estimates.shape import Lengths, ModelShape, parameters, read
from slurmrl.plan.settings import Settings
from slurmrl.tensors.ops import logprobs
from tests.unit.plan.conftest import Load

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SEVEN_BILLION = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
TIED = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GLM_45_AIR = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
}
"""Other sizes are the family's defaults."""
MOONLIGHT_16B = {
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LENGTHS = Lengths(sequences=64, longest=1024, new_tokens=512, assumed=False)


def shape_of(values: dict[str, Any]) -> ModelShape:
    shape = read(values)
    assert shape is not None
    return shape


def job(values: dict[str, Any], backend: str, **changes: Any) -> MemoryDemand:
    options: dict[str, Any] = {
        "model": Model(dtype="bfloat16", max_tokens_per_microbatch=4096),
        "shape": shape_of(values),
        "allocation": parse(backend),
        "head": "lm",
        "trained": True,
        "computes": True,
        "generates": False,
        "lengths": LENGTHS,
    }
    return MemoryDemand(**(options | changes))


WIDE = replace(shape_of(LLAMA_8B), hidden=64, inner=64, heads=1, kv_heads=1, head_dim=64)
"""Almost nothing but a vocabulary."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(
    "family",
    [LLAMA_8B, GLM_45_AIR, {**DEEPSEEK_V3, "first_k_dense_replace": 1}, MOONLIGHT_16B],
    ids=["llama", "glm", "deepseek", "moonlight"],
)
def test_parameter_count_equals_the_decoder(tied: bool, head: Any, family: dict[str, Any]) -> None:
    values = {**family, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    with torch.device("meta"):
        decoder = Decoder(ModelConfig.from_hf(values), head=head)
    own = parameters(shape_of(values), parse("fsdp:d1"), head).total
    assert own == sum(one.numel() for one in decoder.parameters())


@pytest.mark.parametrize(
    ("values", "billions"),
    [
        *((LLAMA_8B, 8.030), (QWEN3_30B_A3B, 30.53), (GLM_45_AIR, 106.85)),
        *((DEEPSEEK_V3, 671.03), (MOONLIGHT_16B, 15.96)),
    ],
)
def test_parameter_count_equals_published_numbers(values: dict[str, Any], billions: float) -> None:
    own = parameters(shape_of(values), parse("fsdp:d1"), "lm").total
    assert own / 1e9 == pytest.approx(billions, rel=1e-3)


def test_prompt_is_prefilled_once_for_all_its_completions() -> None:
    """Each completion costs the forward pass of its sequence, without the prompt after the first
    completion. Other calls compute whole sequences.
    """
    shape = shape_of(LLAMA_8B)
    group, prompt = replace(LENGTHS, group=4), LENGTHS.longest - LENGTHS.new_tokens
    alone = call_flops(shape, "lm", Method.GENERATE, LENGTHS, passes=1)
    shared = 48 * call_costs.forward_flops(shape, "lm", prompt)
    assert call_flops(shape, "lm", Method.GENERATE, group, passes=1) == alone - shared
    inference = call_flops(shape, "lm", Method.INFERENCE, LENGTHS, passes=1)
    assert call_flops(shape, "lm", Method.INFERENCE, group, passes=1) == inference


def test_flops_count_only_active_experts() -> None:
    per_token = call_flops(
        shape_of(QWEN3_30B_A3B), "lm", Method.INFERENCE, Lengths(1, 1, 0, False), passes=1
    )
    assert per_token / 2 == pytest.approx(3.35e9 - 151936 * 2048, rel=0.02)  # "A3B", one embedding


@pytest.mark.parametrize(
    ("backend", "per_parameter"),
    [("megatron:d1", 18), ("megatron:d2", 6 + 12 / 2), ("megatron:d8", 6 + 12 / 8), ("fsdp:d8", 2)],
)
def test_model_state_takes_the_documented_bytes_per_parameter(
    backend: str, per_parameter: float
) -> None:
    """The expected bytes per parameter are Megatron-LM's for bfloat16 weights with float32
    gradients (18, or 6 + 12/d), and ZeRO's 16/d if everything is sharded.
    """
    found = estimate(job(LLAMA_8B, backend))
    count = parameters(shape_of(LLAMA_8B), parse("fsdp:d1"), "lm").total
    kept = found.weights + found.gradients + found.optimizer
    assert kept / count == pytest.approx(per_parameter, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"name": "adam"}, 2),
        ({"name": "sgd"}, 0),
        ({"name": "sgd", "momentum": 0.9}, 1),
    ],
)
def test_memory_counts_the_moments_of_each_optimizer(options: dict[str, Any], kept: int) -> None:
    model = Model(dtype="bfloat16", optimizer=Optimizer(**options))
    count = parameters(shape_of(LLAMA_8B), parse("fsdp:d1"), "lm").total
    for backend, each in (("fsdp:d8", 4 * kept), ("megatron:d8", 4 + 4 * kept)):
        found = estimate(job(LLAMA_8B, backend, model=model))
        assert found.optimizer / count == pytest.approx(each / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("architecture", "mode", "tokens", "measured_gib"),
    [
        (SEVEN_BILLION, "off", 4096, 27.77),
        (SEVEN_BILLION, "off", 16384, 67.96),
        (SEVEN_BILLION, "selective", 4096, 18.20),
        (SEVEN_BILLION, "selective", 16384, 30.85),
        (SEVEN_BILLION, "full", 4096, 17.42),
        (SEVEN_BILLION, "full", 16384, 21.21),
        (TIED, "off", 4096, 10.37),
        (TIED, "off", 16384, 28.22),
        (TIED, "selective", 4096, 5.89),
        (TIED, "selective", 16384, 10.77),
        (TIED, "full", 4096, 4.79),
        (TIED, "full", 16384, 6.73),
    ],
)
def test_estimated_peaks_equal_the_peaks_of_the_stub_gpu(
    architecture: dict[str, Any], mode: Any, tokens: int, measured_gib: float
) -> None:
    """Covers one of eight FSDP ranks with 7.6 or 1.5 billion parameters, for one micro-batch of
    sequences of 4,096 tokens, in bfloat16 with AdamW.
    """
    model = Model(dtype="bfloat16", max_tokens_per_microbatch=16384, gradient_checkpointing=mode)
    lengths = Lengths(sequences=8 * tokens // 4096, longest=4096, new_tokens=0, assumed=False)
    found = estimate(job(architecture, "fsdp:d8", model=model, lengths=lengths))
    assert found.together / 2**30 == pytest.approx(measured_gib, rel=0.05)


def test_logit_chunk_has_the_size_used_by_the_operator() -> None:
    assert memory.LOGITS == logprobs.CHUNK_ELEMENTS
    assert memory.LOGIT_TOKENS == logprobs.CHUNK_TOKENS


def test_gradients_and_activations_coexist_with_several_micro_batches() -> None:
    """Gradients of the first micro-batch exist while the second one computes."""
    one = Lengths(sequences=32, longest=4096, new_tokens=0, assumed=False)
    several = Lengths(sequences=64, longest=4096, new_tokens=0, assumed=False)
    model = Model(dtype="bfloat16", max_tokens_per_microbatch=16384)
    alone, added = (
        estimate(job(LLAMA_8B, "fsdp:d8", model=model, lengths=lengths))
        for lengths in (one, several)
    )
    assert added.together - alone.together == added.gradients
    split = estimate(job(LLAMA_8B, "fsdp:d8", model=model, lengths=several, minibatches=2))
    assert split == alone


def test_kv_cache_takes_the_known_bytes_per_token() -> None:
    """Llama 3 8B needs 128 KiB per token in 16 bits: 2 x 32 layers x 8 heads x 128 x 2 bytes."""
    shape = shape_of(LLAMA_8B)
    assert kv_bytes_per_token(shape, parse("sglang:d1"), "bfloat16") == 131072
    assert kv_bytes_per_token(shape, parse("sglang:t4"), "bfloat16") == 32768
    assert kv_bytes_per_token(shape, parse("sglang:t16"), "bfloat16") == 16384  # a head is copied
    latent = shape_of(DEEPSEEK_V3)  # servers cache 512 + 64 elements on every tensor rank
    assert kv_bytes_per_token(latent, parse("sglang:t8"), "bfloat16") == 61 * 576 * 2
    assert kv_bytes_per_token(latent, parse("native:t8"), "bfloat16") == 61 * 2 * 16 * 192 * 2
    found = estimate(job(LLAMA_8B, "sglang:d4", trained=False, computes=False, generates=True))
    assert found.kv_cache == 16 * 1024 * 131072


def test_limited_cache_counts_at_most_its_limit() -> None:
    """The estimate never exceeds the limit, nor the memory of all sequences."""
    whole = job(LLAMA_8B, "sglang:d4", trained=False, computes=False, generates=True)
    assert estimate(replace(whole, cache_bytes=2**30)).kv_cache == 2**30
    assert estimate(replace(whole, cache_bytes=2**40)) == estimate(whole)


def test_generation_peak_is_the_larger_of_prefill_and_logits() -> None:
    """Prompts are read ``max_tokens_per_microbatch`` at a time, or one longer prompt by itself."""

    def besides_cache_and_weights(tokens: int) -> float:
        model = Model(dtype="bfloat16", max_tokens_per_microbatch=tokens)
        demand = job(LLAMA_8B, "fsdp:d4", model=model, generates=True, computes=False)
        return estimate(demand).kv_cache - 16 * 1024 * 131072 - 2 * 8.03e9

    element = 2 * layer_activations(job(LLAMA_8B, "fsdp:d4"))
    assert besides_cache_and_weights(4096) == pytest.approx(4096 * element, rel=0.05)
    assert besides_cache_and_weights(10**6) == pytest.approx(16 * 512 * element, rel=0.05)
    assert besides_cache_and_weights(1) == pytest.approx(512 * element, rel=0.1)
    drawing = replace(job(LLAMA_8B, "fsdp:d1", generates=True, computes=False), shape=WIDE)
    narrow = replace(drawing, shape=replace(WIDE, vocabulary=1000))
    more = estimate(drawing).kv_cache - estimate(narrow).kv_cache
    weights = 2 * 2 * WIDE.hidden * (WIDE.vocabulary - 1000)
    assert more - weights > 0.9 * 64 * 22 * (WIDE.vocabulary - 1000)


def resident() -> int:
    """Return freed memory to the system, and then the resident bytes of this process."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("tied", "split"),
    [(False, False), (True, False), (False, True)],
    ids=["untied", "tied", "with adapters"],
)
def test_generation_copies_on_cpus_have_the_measured_size(tied: bool, split: bool) -> None:
    values = {
        "model_type": "llama",
        "vocab_size": 16384,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    decoder = Decoder(ModelConfig.from_hf(values))
    if not inference.packs(decoder):
        pytest.skip("the compiled operators are missing here")
    for parameter in decoder.parameters():
        parameter.data.normal_()
    began = resident()
    kept = [inference.head_product(decoder), None if split else inference.short_forward(decoder)]
    grown = resident() - began
    assert all(kept[: 1 if split else 2])
    model = Model(dtype="float32", lora=Lora(rank=1) if split else None)
    demand = job(values, "fsdp:d1", model=model, generates=True, computes=False, on_cpus=True)
    more = estimate(demand).kv_cache - estimate(replace(demand, on_cpus=False)).kv_cache
    assert more == pytest.approx(grown, rel=0.05)


def test_generation_copies_count_only_if_made() -> None:
    """There are no copies on GPUs, in bfloat16, for models of transformers, and above the limit."""
    assert memory.PACKED_BYTES == inference.PACKED_BYTES
    values = {**LLAMA_8B, "num_hidden_layers": 1, "vocab_size": 100}
    small = Model(dtype="float32")
    demand = job(values, "native:d1", model=small, trained=False, generates=True, on_cpus=True)
    assert memory.packed_bytes(demand) > 0.9 * estimate(demand).weights
    for change in (
        {"on_cpus": False},
        {"model": Model(dtype="bfloat16")},
        {"model": Model(dtype="float32", implementation="hf")},
        {"shape": replace(demand.shape, layers=2)},
    ):
        assert memory.packed_bytes(replace(demand, **change)) == 0
    halves = replace(demand, shape=replace(demand.shape, layers=2), allocation=parse("native:t2"))
    assert memory.packed_bytes(halves) > 0


def test_tensor_ranks_of_transformers_hold_some_tensors_whole() -> None:
    """The plan of olmo2 splits no attention. Each rank has rows for all experts of a token."""
    split = parse("fsdp:t8")

    def made(kind: str, layout: str = "fsdp:t8", **more: int) -> MemoryDemand:
        hf = Model(implementation="hf", architecture={**LLAMA_8B, "model_type": kind, **more})
        return job(LLAMA_8B, layout, model=hf, shape=shapes.shape_of(hf))

    heads, whole = made("llama").shape, made("olmo2").shape
    assert memory.kv_bytes_per_token(heads, split, "bfloat16") == 2 * 128 * 32 * 2
    assert memory.kv_bytes_per_token(whole, split, "bfloat16") == 2 * 8 * 128 * 32 * 2
    attention = 32 * 4096 * (2 * 4096 + 2 * 1024)
    more = parameters(whole, split, "lm").total - parameters(heads, split, "lm").total
    norms = 32 * (4096 + 1024)  # olmo2 has norms of queries and keys
    assert more == attention * 7 / 8 + norms
    one, eight = (made("mixtral", layout, num_local_experts=8) for layout in ("fsdp:t1", "fsdp:t8"))
    assert memory.layer_activations(eight) > 0.8 * memory.layer_activations(one)


@pytest.mark.parametrize(
    ("kind", "memory", "size"),
    [
        ("h100", None, 80 * 2**30),
        ("nvidia_h100_80gb_hbm3", None, 80 * 2**30),
        ("a100", None, None),
        ("a100_40gb", None, 40 * 2**30),
        ("gtx", None, None),
        (None, None, None),
        ("h100", "40G", 40 * 2**30),
        (None, "512", 512 * 2**20),
    ],
)
def test_gpu_memory_comes_from_setting_or_gpu_type(
    kind: str | None, memory: str | None, size: int | None
) -> None:
    cluster = Cluster(gpu_memory=memory, slurm=Slurm(gpu_type=kind))
    assert call_costs.memory_bytes(cluster) == size


def test_gpu_memory_is_all_model_states_plus_the_largest_call(plan_ppo: Load) -> None:
    settings = plan_ppo()
    found = call_costs.memories(settings)
    fullest = worker_memory.fullest_gpu(settings)
    passing = max(max(one.computing, one.kv_cache) for one in found.values())
    assert fullest.size == sum(one.standing for one in found.values()) + passing
    gradients = sum(one.gradients for one in found.values())
    assert passing > gradients - found["critic"].gradients, "each role's are freed after its step"
    assert fullest.models == ("actor", "critic", "ref")


def costs(settings: Settings) -> dict[str, call_costs.CallCost | None]:
    placed, calls = call_costs.placed_models(settings), settings.algorithm.calls(settings.config)
    return {call.name: call_costs.cost(settings, call, placed) for call in calls}


def test_step_seconds_are_reported_for_a_known_gpu(plan_ppo: Load) -> None:
    for kind, known in (("h100", True), ("unheard", False)):
        found = costs(plan_ppo(f"cluster.slurm.gpu_type={kind}"))
        assert found.pop("reward_inf") is None
        for cost in found.values():
            assert cost is not None
            assert (cost.seconds is not None) is known
            assert cost.flops > 0


def test_checkpointing_slows_only_training(plan_ppo: Load) -> None:
    """A repeated forward pass adds a third of the matrix products, and a smaller share of the whole
    step.
    """
    before: dict[str, float] = {}
    for mode, most in (("off", 1.0), ("selective", 1.2), ("full", 1.4)):
        found = costs(
            plan_ppo("cluster.slurm.gpu_type=h100", f"actor.gradient_checkpointing={mode}")
        )
        seconds = {name: each.seconds for name, each in found.items() if each and each.seconds}
        first = before or seconds
        for name, value in seconds.items():
            if name.endswith("_train"):
                assert first[name] * (most > 1.0) <= value <= first[name] * most
            else:
                assert value == pytest.approx(first[name])
        before = first


def test_architecture_without_sizes_is_not_estimated() -> None:
    assert read({"model_type": "llama", "hidden_size": 8}) is None
    assert read({"model_type": "new", **{k: v for k, v in LLAMA_8B.items() if k != "model_type"}})


def test_reference_without_export_uses_its_future_architecture(plan_ppo: Load, folder: Any) -> None:
    (folder / "start.yaml").write_text(
        "experiment: start\nactor:\n  architecture: {model_type: llama, vocab_size: 8, "
        "hidden_size: 8, intermediate_size: 8, num_hidden_layers: 3, num_attention_heads: 2}\n"
    )
    settings = plan_ppo("actor.architecture=", "actor.path=trial:start/1", "actor.tokenizer=model")
    assert "has no export yet" in settings.missing[0].message
    assert settings.config.actor.architecture is not None
    assert settings.config.actor.architecture["num_hidden_layers"] == 3
