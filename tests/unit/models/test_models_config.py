from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slurmrl.errors import UnknownNameError, UsageError
from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.families import COMMON_DEFAULTS, FAMILIES, Family

LLAMA = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def refusal(**changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        ModelConfig.from_hf({**LLAMA, **changes}, strict=True)
    return str(caught.value)


def test_defaults_are_those_of_transformers() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (4, 6, 2048)
    assert config.rope.theta == 10000.0
    assert ModelConfig.from_hf({**LLAMA, "model_type": "qwen3"}).head_dim == 128


def test_what_is_read_is_written(small_decoder: Any, odd_name: str) -> None:
    config = small_decoder(odd_name).config
    values = config.to_hf()
    assert ModelConfig.from_hf(values, strict=True) == config
    assert ModelConfig.from_hf(values).to_hf() == values


def test_transformers_loads_what_is_written(
    tmp_path: Path, small_decoder: Any, odd_name: str
) -> None:
    decoder: Decoder = small_decoder(odd_name)
    write_model(tmp_path, decoder, "lm")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.arange(30)
    cu = torch.tensor([0, 30], dtype=torch.int32)
    with torch.no_grad():
        logits = decoder(ids, cu, 30) @ decoder.head_weight().T
        expected = model(ids[None]).logits[0]
    assert (logits - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())


def test_transformers_loads_a_value_model(tmp_path: Path, small_decoder: Any) -> None:
    decoder = Decoder(small_decoder("llama").config, "value")
    write_model(tmp_path, decoder, "value")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert torch.equal(model.score.weight, decoder.score.weight)


def write_model(folder: Path, decoder: Decoder, head: Any) -> None:
    (folder / "config.json").write_text(json.dumps(decoder.config.to_hf(head=head)))
    state = {name: value.detach() for name, value in decoder.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_unknown_families_and_fields_are_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'llama'"):
        ModelConfig.from_hf({**LLAMA, "model_type": "lama"})
    assert "did you mean 'hidden_size'" in refusal(hiden_size=24)
    assert "unknown field" in refusal(qk_norm=True)
    ModelConfig.from_hf({**LLAMA, "some_new_field": 1})


def test_missing_fields_are_all_named() -> None:
    with pytest.raises(UsageError, match=r"'vocab_size' is missing.*'hidden_size' is missing"):
        ModelConfig.from_hf({"model_type": "llama", "intermediate_size": 4})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not"),
        ({"rope_scaling": {"type": "linear"}}, "needs the field 'factor'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "has no field 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "big"}}, "'factor' is 'big'"),
        ({"rope_theta": "big"}, "rope_theta is 'big', must be a number"),
        ({"hidden_size": "24"}, "hidden_size is '24', must be a whole number"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5, must be a whole number"),
        ({"hidden_act": "swish9"}, "hidden_act 'swish9'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "layer_types other"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_fields_of_a_checkpoint_that_matter_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ModelConfig.from_hf({**LLAMA, **changes})


def test_null_means_the_default() -> None:
    values = {**LLAMA, "rms_norm_eps": None, "num_key_value_heads": None, "eos_token_id": None}
    config = ModelConfig.from_hf(values)
    assert (config.norm_eps, config.num_kv_heads) == (1e-6, 4)
    assert config.to_hf()["eos_token_id"] is None  # no token, unlike an absent field


def test_a_new_family_is_one_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoder_of: Any
) -> None:
    defaults = {**COMMON_DEFAULTS, "max_position_embeddings": 4096, "sliding_window": None}
    entry = Family(model_type="mistral", class_prefix="Mistral", defaults=defaults)
    monkeypatch.setitem(FAMILIES, "mistral", entry)
    config = ModelConfig.from_hf({**LLAMA, "model_type": "mistral"}, strict=True)
    decoder = decoder_of(config)
    write_model(tmp_path, decoder, "lm")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "MistralForCausalLM"
    ids = torch.arange(20)
    logits = decoder(ids, torch.tensor([0, 20], dtype=torch.int32), 20) @ decoder.head_weight().T
    assert (logits - model(ids[None]).logits[0]).abs().max() < 1e-4
