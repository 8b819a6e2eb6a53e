"""Predicted seconds: against published measurements, and in cases with a known result."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.allocation import parse
from slurmrl.plan.estimates.hardware import Machine, shipped
from slurmrl.plan.estimates.pass_seconds import (
    DecodeJob,
    LengthDistribution,
    PassJob,
    generation,
    inference,
    token_seconds,
    training,
)
from slurmrl.plan.estimates.shape import read
from tests.unit.plan.test_plan_estimates import DEEPSEEK_V3

PREDICTIONS = Path(__file__).parents[3] / "scripts" / "bench" / "predictions.py"
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
H100 = Machine(shipped("h100").gpu, 8, shipped("h100").efficiency)


def job(layout: str = "fsdp:d8", values: Any = None, **settings: Any) -> PassJob:
    shape = read(values or LLAMA_8B)
    assert shape is not None
    usual: dict[str, Any] = {"tokens": 65536, "length": 2048, "microbatch": 16384}
    return PassJob(
        shape=shape,
        allocation=parse(layout),
        head="lm",
        **{**usual, "sharded": layout.startswith("fsdp"), **settings},
    )


def step(one: PassJob, machine: Machine = H100) -> float:
    return sum(training(one, machine).values())


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return runpy.run_path(str(PREDICTIONS))


@pytest.mark.parametrize(("kind", "error"), [("training", 0.15), ("rl", 0.25)])
def test_published_step_times_are_predicted(
    published: dict[str, Any], kind: str, error: float
) -> None:
    """The rows with even numbers were not used for fits."""
    rows = [row for row in published["compare"]() if row.kind == kind]
    assert published["median_error"](rows, first=1) <= error
    right, pairs = published["ordered_pairs"](rows)
    assert right >= 0.9 * pairs > 30


def test_predicted_speed_is_between_a_tenth_of_the_peak_and_the_peak() -> None:
    one = job()
    assert one.shape is not None
    flops = 6 * 7.5e9 * one.tokens
    assert flops / H100.gpu.flops_per_s < step(one) < 10 * flops / H100.gpu.flops_per_s


def test_predicted_parts_grow_with_their_causes() -> None:
    plain = training(job(), H100)
    assert plain["bubble"] == plain["communication"] == 0
    far = training(job("fsdp:d64", tokens=8192, microbatch=2048), H100)
    near = training(job("fsdp:d8", tokens=8192, microbatch=2048), H100)
    assert far["weights"] > near["weights"], "small micro-batches wait for weights between hosts"
    stages = training(job("megatron:p4"), H100)
    assert stages["bubble"] == pytest.approx(
        3 * sum(value for name, value in stages.items() if name not in ("bubble", "optimizer")) / 4,
        rel=0.01,
    ), "four micro-batches: three of seven slots are empty"
    assert training(job("megatron:p4", virtual=2), H100)["bubble"] == pytest.approx(
        stages["bubble"] / 2
    )
    inside = training(job("megatron:t8"), H100)["communication"]
    across = training(job("megatron:t8"), replace(H100, gpus_per_host=4))["communication"]
    assert across > inside > 0
    assert training(job("megatron:d8e8", MOE), H100)["communication"] > 0


def test_tensor_ranks_repeat_norms_and_split_the_work_on_heads() -> None:
    """With sequence parallelism, the ranks split all work."""
    whole, split, parallel = (
        inference(job(layout, sharded=False, sequence_parallel=sequence), H100)["elementwise"]
        for layout, sequence in (("fsdp:d1", False), ("fsdp:t8", False), ("fsdp:t8", True))
    )
    assert parallel == pytest.approx(whole / 8, rel=0.02)
    assert 0.3 * whole < split < 0.65 * whole


def test_frozen_weights_need_no_gradient_or_optimizer_time() -> None:
    assert step(job(frozen=True)) < 0.8 * step(job())
    assert "optimizer" not in training(job(frozen=True), H100)
    assert sum(inference(job(), H100).values()) < 0.4 * step(job())
    assert step(job(offloaded=True)) > step(job())


@pytest.mark.parametrize("mean", [3, 100, 500, 900])
def test_length_distribution_has_the_given_mean(mean: float) -> None:
    lengths = LengthDistribution(mean, 1000)
    shares = [lengths.longer(tokens) for tokens in range(1000)]
    assert sum(shares) == pytest.approx(mean, abs=0.6)
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)


def decode(
    layout: str = "vllm:d1", values: Any = None, shaped: Any = None, **settings: Any
) -> float:
    """Return the decoding seconds of a model with ``values`` and changed fields of its shape
    (``shaped``).
    """
    found = read(values or LLAMA_8B)
    assert found is not None
    shape = replace(found, **(shaped or {}))
    usual: dict[str, Any] = {
        "sequences": 64,
        "prompt": 256,
        "group": 8,
        "cache_tokens": 1e6,
        "lengths": LengthDistribution(512, 1024),
    }
    one = DecodeJob(shape=shape, allocation=parse(layout), **{**usual, **settings})
    return sum(generation(one, H100).values())


def test_decoding_reads_all_weights_for_each_token_of_the_longest_completion() -> None:
    floor = 1024 * 2 * 7.5e9 / H100.gpu.bytes_per_s
    assert floor < decode(sequences=1, lengths=LengthDistribution(1023, 1024)) < 4 * floor
    assert decode(sequences=64) < 3 * decode(sequences=1), "they share the weights"
    assert decode(sequences=64, cache_tokens=8 * 768) > 2 * decode(sequences=64)
    assert decode("vllm:t8") < decode()
    many, few = decode(values=MOE, sequences=256), decode(values=MOE, sequences=1)
    assert many > 3 * few, "few tokens choose few experts"


def test_servers_read_latent_vectors_and_the_built_in_engine_whole_keys() -> None:
    """Elements per token and layer that DeepSeek-V3 has cached: 512 + 64, or keys and values."""
    shape = read({**DEEPSEEK_V3})
    assert shape is not None

    def more_s(layout: str) -> float:
        """Return the additional seconds per token for 1,000 more tokens of context."""
        one = DecodeJob(
            shape=shape,
            allocation=parse(layout),
            sequences=8,
            prompt=100,
            group=1,
            lengths=LengthDistribution(512, 1024),
            cache_tokens=1e6,
        )
        long, short = (token_seconds(one, H100, 8, context) for context in (3000, 2000))
        return long - short

    streamed = H100.gpu.bytes_per_s * H100.efficiency.decoding
    read_s = 8 * 1000 * 61 * 2 / streamed
    assert more_s("vllm:t8") == pytest.approx(read_s * 576)
    assert more_s("native:t8") == pytest.approx(read_s * 2 * 16 * 192)


def test_ranks_with_the_whole_vocabulary_read_the_whole_head_but_no_embedding() -> None:
    """Ranks of a model of transformers have the whole vocabulary if t does not divide it."""
    one: dict[str, Any] = {"sequences": 1, "prompt": 1, "lengths": LengthDistribution(1024, 1024)}
    equal = {"equal_vocabulary": True}
    assert decode("native:t8", shaped=equal, **one) == decode("native:t8", **one)
    odd: dict[str, Any] = {**LLAMA_8B, "vocab_size": LLAMA_8B["vocab_size"] - 1}
    more = decode("native:t8", odd, equal, **one) - decode("native:t8", odd, **one)
    head = 2 * odd["vocab_size"] * LLAMA_8B["hidden_size"]
    streamed = H100.gpu.bytes_per_s * H100.efficiency.decoding
    assert more == pytest.approx(1024 * 7 / 8 * head / streamed, rel=0.01)


def test_ranks_with_whole_attention_compute_all_of_it() -> None:
    """Matrix products limit prefill, and decoding of many sequences."""
    many: dict[str, Any] = {"sequences": 8192, "prompt": 4096, "cache_tokens": 1e9}
    whole = {"whole_attention": True}
    flops = [decode("native:t8", shaped=each, **many) for each in (None, whole)]
    assert flops[1] > 1.5 * flops[0]
    assert decode("native:t1", shaped=whole, **many) == decode("native:t1", **many)
    one = job("fsdp:t8", sharded=False)
    repeated = inference(replace(one, shape=replace(one.shape, whole_attention=True)), H100)[
        "elementwise"
    ]
    inner = 4 * LLAMA_8B["intermediate_size"] * 7 / 8 * one.tokens * one.width * 32
    alone = inference(job("fsdp:d1", sharded=False), H100)["elementwise"]
    head = 10 * LLAMA_8B["vocab_size"] * 7 / 8 * one.tokens
    assert alone - repeated == pytest.approx((inner + head) / H100.streamed), "norms and heads"


def test_pipeline_stages_do_not_speed_up_a_single_sequence() -> None:
    """Each token passes the stages one after the other, which read all weights."""
    one = {"sequences": 1, "lengths": LengthDistribution(1023, 1024)}
    alone, stages = decode("vllm:d1", **one), decode("vllm:d1p4", **one)
    assert alone <= stages < 1.5 * alone
    many = {"sequences": 2048, "cache_tokens": 1e9}
    assert decode("vllm:d1", **many) / 4 < decode("vllm:d1p4", **many) < decode("vllm:d1", **many)
    assert decode("vllm:d1p4", values=MOE, **one) > decode("vllm:d1", values=MOE, **one)


def test_small_model_gathers_its_weights_once_a_step() -> None:
    """More micro-batches gather a large model again, layer by layer."""
    few, many = ({"microbatch": tokens, "tokens": 65536} for tokens in (65536, 8192))
    once, again = (training(job("fsdp:d8", small=True, **one), H100) for one in (few, many))
    assert once["weights"] == pytest.approx(again["weights"])
    layers = [training(job("fsdp:d8", **one), H100)["weights"] for one in (few, many)]
    assert layers[1] > layers[0]
    alone = training(job("fsdp:d1", small=True, **few), H100)
    assert alone["weights"] == 0


def test_cpu_pays_for_gathers_and_launches_that_a_gpu_hides() -> None:
    rates = replace(H100.efficiency, gathers=1e-3, launches=1e-3)
    gpu = Machine(H100.gpu, 8, rates)
    cpu = Machine(replace(H100.gpu, asynchronous=False), 8, rates)
    free = Machine(cpu.gpu, 8, replace(rates, gathers=0.0, launches=1e-9))
    one = {"tokens": 65536, "microbatch": 65536}
    for small, gathers in ((True, 33), (False, 32)):
        given = job("fsdp:d8", small=small, **one)
        more = sum(inference(given, cpu).values()) - sum(inference(given, free).values())
        assert more == pytest.approx((gathers + 32) * 1e-3)
    large = job("fsdp:d8", **one)
    hidden = sum(inference(large, gpu).values())
    assert hidden == pytest.approx(sum(inference(large, H100).values()), rel=0.01)


def test_matrix_multiplication_efficiency_grows_with_its_smallest_side() -> None:
    rates = H100.efficiency
    assert rates.of_product(128, 8192) < rates.of_product(4096, 8192) < rates.products
