from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slurmrl.errors import UnknownNameError, UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.families import COMMON_DEFAULTS, FAMILIES, family_of
from slurmrl.models.family_rules import PARTIAL, Family
from slurmrl.models.layer_parts import frequencies
from tests.support.decoder_folders import to_hf
from tests.unit.models.conftest import random_decoder, small_decoder

PAGE = Path(__file__).parents[3] / "docs/models.md"
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


def test_default_fields_equal_transformers() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (4, 6, 2048)
    assert config.rope.theta == 10000.0
    assert ModelConfig.from_hf({**LLAMA, "model_type": "qwen3"}).head_dim == 128


def test_config_survives_a_round_trip(odd_name: str) -> None:
    config = small_decoder(odd_name).config
    values = config.to_hf()
    assert ModelConfig.from_hf(values, strict=True) == config
    assert ModelConfig.from_hf(values).to_hf() == values


@pytest.mark.parametrize("name", FAMILIES)
def test_exports_name_transformers_classes(name: str) -> None:
    family = FAMILIES[name]
    assert family.class_name("lm") == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    if name in (
        "glm4_moe",
        "glm4_moe_lite",
        "solar_open",
    ):  # transformers has no such class; slurmrl reads such an export
        assert name not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        return
    assert family.class_name("value") == MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[name]


@pytest.mark.parametrize("factor", [1, 1.0, None])
def test_full_rotary_dimension_may_be_stated(factor: float | None) -> None:
    """Covers the spellings of transformers and of users."""
    theta = {"rope_type": "default", "rope_theta": 500.0}
    plain = ModelConfig.from_hf({**LLAMA, "rope_parameters": theta}, strict=True)
    for changes in (
        {"rope_parameters": {**theta, "partial_rotary_factor": factor}},
        {"rope_parameters": theta, "partial_rotary_factor": factor},
        {"rope_theta": 500.0, "partial_rotary_factor": factor},
    ):
        found = ModelConfig.from_hf({**LLAMA, **changes}, strict=True)
        assert found == plain
        assert found.to_hf() == plain.to_hf()
    assert "partial_rotary_factor 0.5 is not supported" in refusal(
        rope_parameters={**theta, "partial_rotary_factor": 0.5}
    )


def test_unknown_families_and_fields_are_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'llama'"):
        ModelConfig.from_hf({**LLAMA, "model_type": "lama"})
    assert "did you mean 'hidden_size'" in refusal(hiden_size=24)
    assert "unknown field" in refusal(qk_norm=True)
    ModelConfig.from_hf({**LLAMA, "some_new_field": 1})


def test_all_missing_fields_are_named() -> None:
    with pytest.raises(UsageError, match=r"'vocab_size' is missing.*'hidden_size' is missing"):
        ModelConfig.from_hf({"model_type": "llama", "intermediate_size": 4})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "cached keys would have to be rotated again",
        ),
        ({"rope_scaling": {"rope_type": "wavy", "factor": 2.0}}, "rope_type 'wavy' is not"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "needs the field 'factor'"),
        ({"rope_scaling": {"type": "linear"}}, "needs the field 'factor'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "has no field 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "big"}}, "'factor' is 'big'"),
        ({"rope_theta": "big"}, "rope_theta is 'big', must be a number"),
        ({"hidden_size": "24"}, "hidden_size is '24', must be an integer"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5, must be an integer"),
        ({"hidden_act": "swish9"}, "hidden_act 'swish9'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"layer_types": ["sliding_attention"]}, "unknown field 'layer_types'"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, "layer_types must be"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 2}, "has 2 of 1 layers"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0, must be at least"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "but there are 8 experts"),
        ({"model_type": "mixtral", "num_local_experts": "8"}, "num_local_experts is '8'"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 0}, "inner size of the experts is 0"),
        ({"model_type": "gpt2", "num_key_value_heads": 2}, "unknown field 'num_key_value_heads'"),
        ({"model_type": "gpt2", "hidden_size": 26}, "hidden_size 26 is not a multiple"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention is not supp"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_att"),
    ],
)
def test_unsupported_features_are_rejected(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must be a list of full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"is_causal": False}, "is_causal is false"),
    ],
)
def test_unsupported_checkpoint_fields_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelConfig.from_hf({**LLAMA, **changes})


def test_config_field_with_null_gets_the_default() -> None:
    values = {**LLAMA, "rms_norm_eps": None, "num_key_value_heads": None, "eos_token_id": None}
    config = ModelConfig.from_hf(values)
    assert (config.norm_eps, config.num_kv_heads) == (1e-6, 4)
    assert config.to_hf()["eos_token_id"] is None  # no token, unlike an absent field


def test_unsupported_family_is_rejected_with_the_reason() -> None:
    with pytest.raises(UnknownNameError, match=r"caps scores and logits softly.*implementation"):
        ModelConfig.from_hf({**LLAMA, "model_type": "gemma2"})


@pytest.mark.parametrize("method", ["noaux_tc", "greedy"])
def test_fields_of_published_deepseek_files_are_read(method: str) -> None:
    """DeepSeek-V3 and Kimi K2 state fields that transformers does not read."""
    scaling = {"type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    values = {
        **LLAMA,
        **MLA,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": method,
        "rope_theta": 50000.0,
        "rope_scaling": {**scaling, "original_max_position_embeddings": 4096},
    }
    config = ModelConfig.from_hf(values)
    assert config.moe is not None
    assert (config.moe.groups, config.moe.chosen_groups) == (8, 4)
    assert config.score_scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert config.to_hf()["topk_method"] == method


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_family_table_has_the_transformers_defaults(name: str) -> None:
    family = FAMILIES[name]
    theirs = AutoConfig.for_model(name)
    for field, value in family.defaults.items():
        computed = {"layer_types", "mlp_layer_types", "sliding_window", "intermediate_size"}
        if field in computed | family.without:
            continue  # transformers fills these in by the values of others
        if field == "rope_theta":
            theirs.rope_theta = theirs.rope_parameters["rope_theta"]
        if field == "rope_parameters" and value:
            value = {**value, "rope_theta": family.defaults["rope_theta"]}
        if field == "partial_rotary_factor":
            assert theirs.rope_parameters.get(field, 1.0) == value
            continue
        assert getattr(theirs, family.fields.get(field, field)) == value, field


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "mistral", "use_sliding_window": False}, (4096, 4096, 4096)),
        ({"model_type": "qwen2"}, (None, None, None)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, (0, 1, 1)),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, (4096, 4096, 4096)),
        ({"model_type": "llama", "sliding_window": 3}, (None, None, None)),
    ],
)
def test_layers_get_their_attention_windows(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    expected = tuple(4096 if one == 1 else one or None for one in windows)
    config = ModelConfig.from_hf(
        {**LLAMA, "num_key_value_heads": 4, "num_hidden_layers": 3} | changes
    )
    assert config.windows == expected


MLA = {"model_type": "deepseek_v3", "num_key_value_heads": 4}
GLM = {**LLAMA, "model_type": "glm4_moe", "num_key_value_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group 3 does not divide 128 experts into groups of 2 or more"),
        ({"n_group": 4, "topk_group": 5}, "topk_group is 5, but n_group is 4"),
        ({"n_group": 32}, "num_experts_per_tok is 8, but topk_group 1 leaves only 4 experts"),
        ({"topk_group": -1}, "topk_group is -1, must be at least 1"),
        ({"n_shared_experts": -1}, "n_shared_experts is negative"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor rotates 3 dims of a head"),
        ({"rope_parameters": {"partial_rotary_factor": "x"}}, "partial_rotary_factor is 'x'"),
        ({"routed_scaling_factor": True}, "routed_scaling_factor is True, must be a number"),
        ({**MLA, "kv_lora_rank": 0}, "kv_lora_rank is 0, must be at least 1"),
        ({**MLA, "qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({**MLA, "head_dim": 12}, "head_dim is 12, but the sizes of the heads imply 64"),
        ({**MLA, "qk_head_dim": 12}, "qk_head_dim is 12, but the sizes of the heads imply 192"),
        ({**MLA, "num_key_value_heads": 2}, "num_key_value_heads is 2, must be num_attention"),
        ({**MLA, "model_type": "deepseek_v2"}, "'num_experts_per_tok' is missing"),
        (
            {**MLA, "model_type": "deepseek_v2", "topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc', must be greedy or group_limited_greedy",
        ),
        (
            {**MLA, "model_type": "glm4_moe_lite", "mlp_layer_types": ["moe", "dense"]},
            "mlp_layer_types must list dense or sparse for each of 1 layers",
        ),
        ({"model_type": "gpt_oss", "swiglu_limit": 0}, "swiglu_limit is 0, must be above 0"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "dequantize the model with transformers (for MXFP4: Mxfp4Config(dequantize=True))",
        ),
        (
            {"model_type": "gpt_oss", "layer_types": ["chunked_attention"] * 2},
            "layer_types must be a list of full_attention or sliding_attention",
        ),
        ({"routed_scaling_factor": None}, "routed_scaling_factor is null, must be a number"),
    ],
)
def test_config_with_impossible_expert_settings_is_rejected(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        ModelConfig.from_hf({**GLM, **changes})


def test_null_fields_of_experts_change_nothing_without_experts() -> None:
    """Tools write such fields into the `config.json` of dense models too."""
    null = {"num_experts_per_tok": None, "routed_scaling_factor": None, "swiglu_limit": None}
    assert ModelConfig.from_hf({**LLAMA, **null}).moe is None


def test_null_number_without_a_default_is_missing() -> None:
    without = {**LLAMA, "model_type": "deepseek_v2", "num_experts_per_tok": None}
    with pytest.raises(UsageError, match=r"config: 'num_experts_per_tok' is missing$"):
        ModelConfig.from_hf(without)


def test_share_of_rotated_dims_is_read_from_either_place() -> None:
    for place in ({"partial_rotary_factor": 0.25}, {"rope_parameters": {PARTIAL: 0.25}}):
        config = ModelConfig.from_hf({**GLM, **place})
        assert config.rotary_dims == 4
        assert config.to_hf()["rope_parameters"][PARTIAL] == 0.25
    assert ModelConfig.from_hf(GLM).rotary_dims == 8


def test_both_names_of_the_number_of_experts_are_accepted() -> None:
    plain = {**LLAMA, "model_type": "qwen3_moe", "num_key_value_heads": 4}
    for name in ("num_experts", "num_local_experts"):
        config = ModelConfig.from_hf({**plain, name: 16}, strict=True)
        assert config.moe is not None
        assert config.moe.experts == 16
        assert config.to_hf()["num_experts"] == 16
        assert "num_local_experts" not in config.to_hf()


def test_documented_family_entry_adds_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.read_text().partition("## Add a family")[2]
    block = section.partition("```python\n")[2].partition("```")[0]
    made: dict[str, Any] = {"Family": Family, "COMMON_DEFAULTS": COMMON_DEFAULTS}
    exec(block, made)
    entry: Family = made["SEED_OSS"]
    assert entry.model_type not in FAMILIES
    monkeypatch.setitem(FAMILIES, entry.model_type, entry)
    config = ModelConfig.from_hf(
        {**LLAMA, "model_type": "seed_oss", "num_key_value_heads": 2, "head_dim": 10}, strict=True
    )
    decoder = random_decoder(config)
    with torch.no_grad():
        decoder.get_parameter("model.layers.0.self_attn.q_proj.bias").normal_()
    to_hf(decoder, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "SeedOssForCausalLM"
    ids = torch.arange(20)
    logits = decoder(ids, torch.tensor([0, 20], dtype=torch.int32), 20) @ decoder.head_weight().T
    assert (logits - model(ids[None]).logits[0]).abs().max() < 1e-5
    model.save_pretrained(tmp_path / "theirs")
    files = [folder / "model.safetensors" for folder in (tmp_path, tmp_path / "theirs")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_unknown_model_type_is_not_mistaken_for_another_architecture() -> None:
    with pytest.raises(UnknownNameError) as caught:
        family_of("qwen3_5_text")
    assert "did you mean" not in str(caught.value)
    assert "allowed: deepseek_v2, deepseek_v3, gemma, glm4_moe, glm4_moe_lite, gpt2" in str(
        caught.value
    )


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
THETA = {"rope_type": "default", "rope_theta": 5e5}
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "stated",
    [
        {"rope_scaling": LINEAR, "rope_parameters": THETA},
        {"rope_scaling": LINEAR, "rope_parameters": THETA, "rope_theta": 7e5},
        {"rope_scaling": {}, "rope_parameters": THETA, "rope_theta": 7e5},
        {"rope_scaling": {"type": "default"}, "rope_parameters": LINEAR},
        {"rope_scaling": YARN, ORIGINAL: 16},
        {"rope_scaling": {**YARN, ORIGINAL: 32}, ORIGINAL: 16},
        {"rope_parameters": {**YARN, ORIGINAL: 32}},
        {"rope_parameters": {**LLAMA3, ORIGINAL: 32}, ORIGINAL: 16},
        {"rope_parameters": LINEAR, ORIGINAL: 16},
    ],
)
def test_rotary_frequencies_equal_transformers(stated: dict[str, Any]) -> None:
    """Covers both forms of the rotary fields in one file, with lengths, and an export."""
    values = {**LLAMA, "max_position_embeddings": 64, **stated}
    ours = ModelConfig.from_hf(values)
    assert ours.rope is not None
    found, scale = frequencies(ours.rope, ours.head_dim)
    for each in (values, ours.to_hf()):
        theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy(each)))
        torch.testing.assert_close(found, theirs.inv_freq)
        assert scale == pytest.approx(theirs.attention_scaling)


def test_stated_base_of_rotations_overrides_the_default_scaling() -> None:
    values = {**LLAMA, "model_type": "gpt_oss", "num_key_value_heads": 4, "rope_theta": 777.0}
    rope, theirs = ModelConfig.from_hf(values).rope, AutoConfig.for_model(**values)
    assert rope is not None
    assert rope.theta == theirs.rope_parameters["rope_theta"] == 777.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**400),
        ("hidden_size", 10**12),
        ("rms_norm_eps", 10**400),
        ("rope_theta", float("inf")),
    ],
)
def test_huge_numbers_are_rejected(name: str, value: Any) -> None:
    message = refusal(**{name: value})
    assert f"{name} is" in message
    assert "must be at most" in message
    assert len(message) < 300
