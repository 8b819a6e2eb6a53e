from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.errors import CorruptFileError, UsageError
from slurmrl.models.hf import TensorSource, read_config


@pytest.fixture
def sharded(tmp_path: Path, pair: Callable[..., Any]) -> tuple[Path, dict[str, torch.Tensor]]:
    _, model = pair("qwen2-tied")
    folder = tmp_path / "sharded"
    model.save_pretrained(folder, max_shard_size="8KB")
    return folder, dict(model.state_dict())


def test_boxes_of_sharded_files(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = sharded
    assert len(list(folder.glob("*.safetensors"))) > 2
    with TensorSource(folder) as source:
        for name, value in state.items():
            assert source.shape(name) == tuple(value.shape)
            assert torch.equal(source.read(name), value)
            rows = value.shape[0] // 2
            rest = tuple(value.shape[1:])
            start = (rows, *(0 for _ in rest))
            box = source.read(name, start, (value.shape[0] - rows, *rest))
            assert torch.equal(box, value[rows:])
        weight = state["model.layers.1.mlp.up_proj.weight"]
        box = source.read("model.layers.1.mlp.up_proj.weight", (3, 5), (7, 2))
        assert torch.equal(box, weight[3:10, 5:7])


def test_empty_boxes_keep_their_dtype(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with TensorSource(sharded[0]) as source:
        box = source.read("model.norm.weight", (24,), (0,))
    assert (box.shape, box.dtype) == ((0,), torch.float32)


def test_a_tied_head_is_read_from_the_embedding(
    sharded: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, state = sharded
    with TensorSource(folder) as source:
        assert "lm_head.weight" not in source
        assert "model.norm.weight" in source
        assert source.names() == sorted(n for n in state if n != "lm_head.weight")
        head = source.read("lm_head.weight", (2, 0), (1, 24))
    assert torch.equal(head, state["model.embed_tokens.weight"][2:3])


def test_wrong_boxes_and_names(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with TensorSource(sharded[0]) as source:
        for start, size in [((0,), (1,)), ((0, 0), (38, 1)), ((36, 0), (2, 1)), ((-1, 0), (1, 1))]:
            with pytest.raises(UsageError, match="no box of"):
                source.read("model.embed_tokens.weight", start, size)
        with pytest.raises(UsageError, match=r"no tensor 'score.weight'"):
            source.read("score.weight")


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no config.json"):
        read_config(tmp_path)
    with pytest.raises(UsageError, match=r"neither model.safetensors nor"):
        TensorSource(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"config.json"):
        read_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="weight_map"):
        TensorSource(tmp_path)
