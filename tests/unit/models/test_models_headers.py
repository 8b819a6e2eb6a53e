"""Headers of safetensors files are checked against the architecture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slurmrl.models.architecture import ModelConfig
from slurmrl.models.hf import Weights
from slurmrl.models.model_tensors import (
    SINGLE_FILE,
    implied_shapes,
    mismatches,
    other_projection,
    read_headers,
    small_not_finite,
    unused,
)
from slurmrl.tensors.checkpoint.export import INDEX_FILE
from slurmrl.tensors.layout import Box

VALUES = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}
KEY = "model.layers.1.self_attn.k_proj.weight"


def config(**changes: object) -> ModelConfig:
    return ModelConfig.from_hf({**VALUES, **changes})


def save(folder: Path, of: ModelConfig, **changes: np.ndarray) -> None:
    tensors = {
        name: np.zeros(shape, np.float32) for name, shape in implied_shapes(of, "lm").items()
    }
    save_file({**tensors, **changes}, folder / SINGLE_FILE)


def test_weights_matching_the_config_are_accepted(tmp_path: Path) -> None:
    for values in ({}, {"model_type": "mixtral", "num_local_experts": 2}):
        save(tmp_path, config(**values))
        headers, wrong = read_headers(tmp_path)
        for head in ("lm", "value"):
            assert [*wrong, *mismatches(headers, config(**values), head)] == []
        assert unused(headers, config(**values), "lm") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 48}, "model.embed_tokens.weight [32, 8] instead of [48, 8]"),
        ({"num_hidden_layers": 3}, "the files lack model.layers.2.self_attn.q_proj.weight"),
        ({"attention_bias": True}, "the files lack model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_missing_tensors_and_wrong_shapes_are_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    save(tmp_path, config())
    headers, wrong = read_headers(tmp_path)
    assert wrong == []
    assert message in " ".join(mismatches(headers, config(**changes), "lm"))


def test_quantized_weights_and_unused_tensors_are_named(tmp_path: Path) -> None:
    save(tmp_path, config(), **{KEY: np.zeros((8, 8), np.int8)})
    headers, _ = read_headers(tmp_path)
    assert (
        f"{KEY} (I8): quantized weights are not supported, only F64"
        in mismatches(headers, config(), "lm")[0]
    )
    assert unused(headers, config(num_hidden_layers=1), "lm")[0].startswith("model.layers.1.")


def test_unused_tensors_may_have_any_type(tmp_path: Path) -> None:
    masks = {"model.layers.0.attn.bias": np.ones((8, 8), np.bool_), "scales": np.ones(3, np.int8)}
    save(tmp_path, config(), **masks)
    assert small_not_finite(tmp_path, config(), "lm") is None
    weights = Weights(tmp_path, config(), "lm")
    assert not weights.read(KEY, Box.whole((8, 8))).any()


def test_missing_truncated_or_incomplete_files_are_named(tmp_path: Path) -> None:
    save(tmp_path, config())
    whole = (tmp_path / SINGLE_FILE).read_bytes()
    (tmp_path / SINGLE_FILE).write_bytes(whole[:-1])
    assert "damaged or truncated" in read_headers(tmp_path)[1][0]
    (tmp_path / SINGLE_FILE).write_bytes(whole)
    index = {"weight_map": {"a": "absent.safetensors", "b": SINGLE_FILE}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    missing, lacks = read_headers(tmp_path)[1]
    assert "absent.safetensors is missing" in missing
    assert f"{SINGLE_FILE} lacks b, which" in lacks
    (tmp_path / INDEX_FILE).write_text("[")
    assert "is not JSON" in read_headers(tmp_path)[1][0]
    (tmp_path / INDEX_FILE).unlink()
    (tmp_path / SINGLE_FILE).unlink()
    assert "has neither" in read_headers(tmp_path)[1][0]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_separate_output_projection_of_a_tied_model_is_rejected(
    tmp_path: Path, dtype: type
) -> None:
    """transformers uses it; a copy of the embedding, in whatever type, changes nothing."""
    tied = config(tie_word_embeddings=True)
    rows = np.arange(32 * 8, dtype=np.float32).reshape(32, 8)
    embedding = {"model.embed_tokens.weight": rows}
    save(tmp_path, tied, **embedding)
    assert other_projection(tmp_path, tied, "lm") is None
    save(tmp_path, tied, **embedding, **{"lm_head.weight": rows.astype(dtype)})
    assert other_projection(tmp_path, tied, "lm") is None
    changed = rows.astype(dtype)
    changed[-1, -1] += 1
    for other in (changed, changed[:-1]):
        save(tmp_path, tied, **embedding, **{"lm_head.weight": other})
        problem = other_projection(tmp_path, tied, "lm")
        assert problem is not None
        assert "set tie_word_embeddings to false" in problem
        assert other_projection(tmp_path, tied, "value") is None
        assert other_projection(tmp_path, config(), "lm") is None
