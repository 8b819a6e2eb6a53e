"""Results of transformers' models for a sequence do not depend on the rest of the batch."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from slurmrl.errors import UsageError
from slurmrl.models.hf_config import TABLE, HFConfig, length_limit
from slurmrl.models.hf_loading import tensor_specs
from slurmrl.models.hf_model import HFModel
from slurmrl.rollouts.generation.base import GenerationOptions
from tests.support.families import tiny
from tests.support.generated import generate

ORIGINAL = 16
"""The original context length of the models."""
SMALL = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
LLAMA3 = {
    **LINEAR,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {**LINEAR, "rope_type": "yarn", "original_max_position_embeddings": ORIGINAL}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [5.0] * 4,
}
GEMMA3 = {
    **SMALL,
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}


def by_layer(full: dict[str, Any]) -> dict[str, Any]:
    return {**GEMMA3, "rope_parameters": {"sliding_attention": PLAIN, "full_attention": full}}


ALIKE = {
    "default": {**SMALL, "rope_parameters": PLAIN},
    "linear": {**SMALL, "rope_parameters": LINEAR},
    "llama3": {**SMALL, "rope_parameters": LLAMA3},
    "yarn": {**SMALL, "rope_parameters": YARN},
    "by-layer": by_layer(LINEAR),
    "by-layer-yarn": by_layer(YARN),
}
LIMITED = {
    "dynamic": {**SMALL, "max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC},
    "dynamic-old-fields": {
        **SMALL,
        "max_position_embeddings": ORIGINAL,
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
    },
    "longrope": {
        **SMALL,
        "rope_parameters": {**LONG, "original_max_position_embeddings": ORIGINAL},
    },
    "phi3": {
        **SMALL,
        "model_type": "phi3",
        "original_max_position_embeddings": ORIGINAL,
        "rope_parameters": LONG,
    },
    "phi3-old-fields": {
        **SMALL,
        "model_type": "phi3",
        "original_max_position_embeddings": ORIGINAL,
        "rope_scaling": {
            **{name: value for name, value in LONG.items() if name != "rope_type"},
            "type": "su",
            "original_max_position_embeddings": ORIGINAL,
        },
    },
    "by-layer-dynamic": {**by_layer(DYNAMIC), "max_position_embeddings": ORIGINAL},
    "by-layer-longrope": by_layer({**LONG, "original_max_position_embeddings": ORIGINAL}),
    "doge": {**SMALL, "model_type": "doge", "keep_window_size": ORIGINAL},
}


def made(values: dict[str, Any]) -> HFModel:
    config = HFConfig.from_hf(values)
    return HFModel(config, "lm", source=None, seed=3, dtype=torch.float32)


def sequence(length: int) -> Tensor:
    return torch.randint(1, 37, (length,), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def logprobs(model: HFModel, *lengths: int) -> Tensor:
    """Log-probabilities of the first of several sequences of one batch."""
    ids = torch.cat([sequence(length) for length in lengths])
    cu = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    return model.logprobs(model(ids, cu, max(lengths)), ids, cu, 1.0)[0][: lengths[0]]


@pytest.mark.parametrize("name", [*ALIKE, *LIMITED])
def test_sequence_outputs_do_not_depend_on_other_sequences(name: str) -> None:
    values = (ALIKE | LIMITED)[name]
    model = made(values)
    alone = logprobs(model, 12)
    limit = length_limit(values)
    assert (limit is not None) == (name in LIMITED)
    partners = [ORIGINAL] if limit else [ORIGINAL, ORIGINAL + 1, 50]
    for partner in partners:
        assert (logprobs(model, 12, partner) - alone).abs().max() < 1e-5
        assert (logprobs(model, 12) - alone).abs().max() < 1e-5
    if limit:
        assert limit[0] == ORIGINAL
        with pytest.raises(
            UsageError, match=f"depend on other sequences .* more than {ORIGINAL} tokens"
        ):
            logprobs(model, 12, ORIGINAL + 1)
        with pytest.raises(UsageError, match="a sequence of 17 tokens"):
            write(model, 12, 5)
        assert (logprobs(model, 12) - alone).abs().max() < 1e-5
    write(model, 12, 4)


@pytest.mark.parametrize(
    ("model_type", "known"),
    [("gpt2", True), ("opt", True), ("codegen", True), ("mpt", True), ("roberta", False)],
)
def test_sequence_beyond_the_position_table_is_rejected(model_type: str, known: bool) -> None:
    """One message for every form of table: reserved rows, buffers, masks."""
    sizes = dict.fromkeys(("num_layers", "n_layer", "n_layers", "num_hidden_layers"), 1)
    sizes |= dict.fromkeys(("num_heads", "n_head", "n_heads", "num_attention_heads"), 4)
    sizes |= dict.fromkeys(
        ("n_embd", "d_model", "hidden_size", "ffn_dim", "word_embed_proj_dim"), 32
    )
    tables = dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), ORIGINAL)
    options = {"vocab_size": 37, "intermediate_size": 40, "rotary_dim": 4, "is_decoder": True}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 1}
    values = {**sizes, **tables, **options, **ends, "model_type": model_type}
    limit = length_limit(values)
    assert (limit == (ORIGINAL, TABLE)) == known
    most = ORIGINAL - 2 if model_type == "roberta" else ORIGINAL  # its first position is 2
    model = made(values)
    logprobs(model, most)
    with pytest.raises(UsageError, match=f"{most + 1} tokens .* has positions for {most} tokens"):
        logprobs(model, most + 1)
    ids, cu = sequence(most), torch.tensor([0, most], dtype=torch.int32)
    with pytest.raises(UsageError, match=f"has positions for {most} tokens"):
        generate(model, ids, cu, GenerationOptions(max_new_tokens=1), seed=1, step=1, keys=cu[:1])


def write(model: HFModel, prompt: int, new: int) -> None:
    """Completions of a prompt and of another one in the same batch."""
    ids = torch.cat([sequence(prompt), sequence(3)])
    cu = torch.tensor([0, prompt, prompt + 3], dtype=torch.int32)
    options = GenerationOptions(max_new_tokens=new)
    keys = torch.arange(2)
    output = generate(model, ids, cu, options, seed=1, step=1, keys=keys)
    whole = torch.nn.functional.pad(output.lengths.cumsum(0), (1, 0)).to(torch.int32)
    features = model(output.tokens, whole, int(output.lengths.max()))
    logp = model.logprobs(features, output.tokens, whole, 1.0)[0]
    drawn = output.logprobs != 0
    assert (logp - output.logprobs)[drawn].abs().max() < 1e-4


def test_length_limit_comes_from_transformers_defaults() -> None:
    """Limits that a config omits are read from the loaded model."""
    values = {k: v for k, v in SMALL.items() if k != "max_position_embeddings"}
    values |= {"model_type": "phi3", "rope_parameters": LONG}
    assert length_limit(values) is None
    with pytest.raises(UsageError, match="more than 4096 tokens"):
        made(values)(torch.zeros(4097, dtype=torch.int64), torch.tensor([0, 4097]), 4097)


def test_length_limit_comes_from_the_text_models_rotation() -> None:
    text = LIMITED["longrope"]
    assert length_limit({"model_type": "x", "text_config": text}) == (ORIGINAL, "longrope")
    assert length_limit({"model_type": "x", "vision_config": text}) is None
    assert length_limit({**SMALL, "text_config": ALIKE["yarn"], "rope_scaling": None}) is None


def test_shapes_are_known_even_if_the_config_has_an_infinite_number(tmp_path: Path) -> None:
    AutoConfig.for_model(**tiny("nemotron_h")).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    shapes, _ = tensor_specs(HFConfig.from_hf(values), "lm")
    assert "inner.model.layers.0.mixer.A_log" in shapes


def test_generation_is_unchanged_if_the_cache_argument_is_renamed() -> None:
    config = HFConfig.from_hf(tiny("llama"))
    model = HFModel(config, "lm", source=None, seed=3, dtype=torch.float32)
    ids, ends = torch.arange(1, 9), torch.tensor([0, 3, 8], dtype=torch.int32)
    options = GenerationOptions(max_new_tokens=6, stop_token_ids=())
    asked: dict[str, Any] = {"seed": 1, "step": 2, "keys": torch.arange(2)}
    wanted = generate(model, ids, ends, options, **asked)
    whole, used = model.inner.forward, []

    def forward(**arguments: Any) -> Any:
        cache = arguments.pop("cache", None)
        used.append(cache is not None)
        return whole(past_key_values=cache, **arguments)

    names = inspect.signature(whole).parameters.values()
    renamed = [
        each.replace(name="cache") if each.name == "past_key_values" else each for each in names
    ]
    forward.__signature__ = inspect.Signature(renamed)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.inner, "forward", forward)
        found = generate(model, ids, ends, options, **asked)
    assert all(used)
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.logprobs, wanted.logprobs)
