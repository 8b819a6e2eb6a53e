"""Random configs of every family against transformers: logits, exported bytes, generation."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.models.families import FAMILIES
from slurmrl.models.hf import from_hf, to_hf
from slurmrl.rollouts.generation.base import GenerationOptions
from tests.support.generated import generate

CONFIGS = 6
"""Configs per family."""
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
]


def random_config(family: str, draw: random.Random) -> dict[str, Any]:
    kv_heads = draw.choice([1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 3])
    layers = draw.choice([1, 2, 3])
    values: dict[str, Any] = {
        "model_type": family,
        "vocab_size": draw.choice([31, 64]),
        "tie_word_embeddings": draw.random() < 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "gpt2":
        return values | {
            "n_embd": heads * draw.choice([3, 8]),
            "n_head": heads,
            "n_layer": layers,
            "n_inner": draw.choice([None, 20]),
            "n_positions": 64,
            "activation_function": draw.choice(["gelu_new", "relu", "gelu"]),
            "scale_attn_weights": draw.random() < 0.7,
            "scale_attn_by_inverse_layer_idx": draw.random() < 0.5,
        }
    window = draw.choice([None, 1, 3, 20])
    values |= {
        "hidden_size": heads * draw.choice([4, 7]),
        "intermediate_size": draw.choice([12, 40]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice([4, 10, 16]),
        "max_position_embeddings": 64,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "hidden_act": draw.choice(["silu", "gelu_pytorch_tanh"]),
        "rope_parameters": {"rope_theta": draw.choice([100.0, 1e4]), **draw.choice(ROPES)},
    }
    if "attention_bias" in FAMILIES[family].defaults:
        values["attention_bias"] = draw.random() < 0.5
    if FAMILIES[family].mlp_bias:
        values["mlp_bias"] = draw.random() < 0.5
    if FAMILIES[family].windows != "none":
        values["sliding_window"] = window
    if "use_sliding_window" in FAMILIES[family].defaults:
        values["use_sliding_window"] = window is not None
    if FAMILIES[family].windows == "chosen":
        values["max_window_layers"] = draw.choice([0, 1])
    if family == "mixtral":
        values |= {"num_local_experts": draw.choice([2, 5]), "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        values |= {
            "num_experts": draw.choice([3, 6]),
            "num_experts_per_tok": draw.choice([1, 3]),
            "moe_intermediate_size": draw.choice([8, 10]),
            "norm_topk_prob": draw.random() < 0.5,
            "decoder_sparse_step": draw.choice([1, 2]),
            "mlp_only_layers": draw.choice([[], [0]]),
        }
    return values


@pytest.mark.parametrize("number", range(CONFIGS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_random_configs_equal_transformers(
    family: str, number: int, tmp_path: Path, hf_model_of: Callable[..., Any]
) -> None:
    values = random_config(family, random.Random(f"{family} {number}"))
    model = hf_model_of(values, number)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs)
    decoder = from_hf(theirs)
    lengths = (1, 2, 9, 9, 40)
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, values["vocab_size"], (sum(lengths),), generator=generator)
    cu = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    with torch.no_grad():
        logits = decoder(ids, cu, max(lengths)) @ decoder.head_weight().t()
        expected = torch.cat([model(part[None]).logits[0] for part in ids.split(lengths)])
    assert (logits - expected).abs().max() < 1e-5, values
    ours.mkdir()
    to_hf(decoder, ours)
    name = "model.safetensors"
    assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    options = GenerationOptions(max_new_tokens=20)
    out = generate(decoder, ids, cu, options, seed=1, step=0, keys=torch.arange(len(lengths)))
    whole = torch.nn.functional.pad(out.lengths.cumsum(0), (1, 0)).to(torch.int32)
    with torch.no_grad():
        hidden = decoder(out.tokens, whole, int(out.lengths.max()))
        logp, _ = decoder.logprobs(hidden, out.tokens, whole, 1.0)
    new = out.logprobs != 0
    assert (logp - out.logprobs)[new].abs().max() < 1e-4
