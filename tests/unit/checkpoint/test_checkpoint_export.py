"""Exports from checkpoints of several ranks, without torch in the code under test."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import slurmrl.tensors.checkpoint.export as export_module
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import CheckpointError, EnvironmentFailure, UnreadableInputError
from slurmrl.fsio.calls import REAL
from slurmrl.tensors.checkpoint import shards
from slurmrl.tensors.checkpoint.export import TokenizerFiles, export
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot, ShardHeader
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout import Layout, Shard, TensorSpec, chunk
from tests.support.faulty import Faulty, KilledError

EXAMPLES = Path(__file__).parents[3] / "examples"
SHAPES = {"model.b": (5, 4), "model.a": (3,), "lm_head": (2, 2, 2)}
CONFIG = {"model_type": "llama", "eos_token_id": 2, "pad_token_id": None, "dtype": "float64"}
GENERATION = {"eos_token_id": [2, 7], "top_k": 4}


def exported(checkpoint: Path, target: Path, *, role: str = "actor", **options: Any) -> Path:
    weights = RoleCheckpoint(checkpoint, role)
    return export(weights, CONFIG, target, generation=GENERATION, **options)


def write_checkpoint(directory: Path, dtype: str, ranks: int) -> dict[str, np.ndarray]:
    """Write a role's files with random bits and zero moments. Return the whole weights."""
    random = np.random.default_rng(3)
    kind = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}[dtype]
    whole = {
        name: random.integers(0, 2**14, size=shape).astype(kind) for name, shape in SHAPES.items()
    }
    tensors = {name: TensorSpec(shape, dtype) for name, shape in SHAPES.items()}
    tensors |= {f"exp_avg/{name}": spec for name, spec in tensors.items()}
    rows: list[list[Shard]] = [[] for _ in range(ranks)]
    parts: list[list[TensorEntry]] = [[] for _ in range(ranks)]
    for rank, (row, entries) in enumerate(zip(rows, parts, strict=True)):
        for name, spec in tensors.items():
            box = chunk(spec.shape, ranks, rank)
            if not box.count:
                continue
            values = whole.get(name, np.zeros(spec.shape, dtype=kind))[box.slices].copy()
            row.append(Shard.contiguous(name, box))
            entries.append(TensorEntry(name, TensorSpec(box.size, dtype), lambda v=values: v))
    layout = Layout.of(tensors, rows)
    for rank, entries in enumerate(parts):
        RoleSnapshot(ShardHeader("actor", rank, ranks, 4), tuple(entries), layout).write(directory)
    return whole


def bits(tensor: torch.Tensor) -> np.ndarray:
    size = tensor.element_size()
    return tensor.view({2: torch.int16, 4: torch.int32}[size]).numpy()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    (folder / "model.safetensors").write_text("not of a tokenizer")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ rag }}")
    return folder


@pytest.mark.parametrize("given", ["config", "several", "file", "legacy", "none"])
def test_export_has_the_training_template_even_if_source_has_another(
    tmp_path: Path, given: str
) -> None:
    trained, tools = "trained: {{ messages[0].content }}\n", [{"name": "add"}]
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(EXAMPLES / "addition" / "tokenizer", source)
    own = [{"name": name, "template": name} for name in ("default", "tool_use")]
    if given in ("config", "several"):
        file = source / "tokenizer_config.json"
        values = json.loads(file.read_text())
        values["chat_template"] = own if given == "several" else "of the config"
        file.write_text(json.dumps(values))
    elif given == "file":
        (source / "chat_template.jinja").write_text("of the file")
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool_use.jinja").write_text("of tools")
    elif given == "legacy":
        (source / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    out.mkdir()
    TokenizerFiles(source, trained).copy(out, REAL)
    exported = load_tokenizer(out)
    assert exported.chat_template == trained
    for some in (None, tools):
        said = [{"role": "user", "content": "Hi."}]
        text = exported.apply_chat_template(said, tools=some, tokenize=False)
        assert text == "trained: Hi."
    assert exported("1+2=").input_ids == load_tokenizer(source)("1+2=").input_ids
    assert not (out / "chat_template.json").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_export_holds_weights_without_optimizer_moments(
    tmp_path: Path, tokenizer: Path, dtype: str, ranks: int
) -> None:
    whole = write_checkpoint(tmp_path, dtype, ranks)
    folder = exported(tmp_path, tmp_path / "out", tokenizer=TokenizerFiles(tokenizer))
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == whole.keys()
    assert all(np.array_equal(bits(loaded[name]), whole[name]) for name in whole)
    assert {str(value.dtype) for value in loaded.values()} == {f"torch.{dtype}"}
    assert json.loads((folder / "config.json").read_text()) == {**CONFIG, "dtype": dtype}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == GENERATION
    assert (folder / "tokenizer_config.json").read_text() == '{"eos_token": "<e>"}'
    template = folder / "additional_chat_templates" / "rag.jinja"
    assert template.read_text() == "{{ rag }}"
    assert sorted(path.name for path in folder.iterdir()) == [
        "additional_chat_templates",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_export_prefers_trained_tensors_to_added_tensors(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path, "float32", 1)
    added = [
        TensorEntry(name, TensorSpec((2,), "float32"), lambda: np.full(2, 7, "<f4"))
        for name in ("model.a", "mtp.norm")
    ]
    loaded = load_file(exported(tmp_path, tmp_path / "export", more=added) / "model.safetensors")
    assert loaded.keys() == whole.keys() | {"mtp.norm"}
    assert np.array_equal(bits(loaded["model.a"]), whole["model.a"])


def test_export_keeps_one_tensor_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SHAPES", {f"model.{n}": (512, 512) for n in range(12)})
    tensor_bytes = 4 * 512 * 512
    write_checkpoint(tmp_path, "float32", 3)
    for module, name in ((shards, "BLOCK_BYTES"), (export_module, "BLOCK")):
        monkeypatch.setattr(module, name, 2**14)
    tracemalloc.start()
    try:
        exported(tmp_path, tmp_path / "out", precision=export_module.Precision(default="bfloat16"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * tensor_bytes


def test_large_weights_are_split_into_several_files(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path, "float32", 2)
    folder = exported(tmp_path, tmp_path / "out", shard_bytes=92)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * (20 + 3 + 8)}
    assert index["weight_map"] == {
        "model.b": "model-00001-of-00002.safetensors",
        "model.a": "model-00001-of-00002.safetensors",
        "lm_head": "model-00002-of-00002.safetensors",
    }
    for name, file in index["weight_map"].items():
        assert np.array_equal(bits(load_file(folder / file)[name]), whole[name])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_killed_export_is_complete_or_absent(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "float32", 2)
    sound = Faulty()
    whole = contents(exported(tmp_path, tmp_path / "sound", calls=sound))
    found = set()
    for at in range(sound.count):
        out = tmp_path / f"out-{at}"
        with pytest.raises(KilledError):
            exported(tmp_path, out, calls=Faulty(at, killed=True))
        found.add(out.exists())
        assert not out.exists() or contents(out) == whole
        assert contents(exported(tmp_path, out)) == whole
    assert found == {False, True}, "the last operation makes the new name durable"


def test_export_replaces_an_older_export(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "float32", 1)
    exported(tmp_path, tmp_path / "out")
    (tmp_path / "out" / "old").write_text("")
    exported(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / "old").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


def test_export_errors_name_the_cause(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "float32", 2)
    with pytest.raises(CheckpointError, match=r"critic\.0\.safetensors does not exist"):
        exported(tmp_path, tmp_path / "out", role="critic")
    with pytest.raises(UnreadableInputError, match="has no tokenizer files"):
        exported(tmp_path, tmp_path / "out", tokenizer=TokenizerFiles(tmp_path))
    with pytest.raises(EnvironmentFailure, match="nowhere"):
        exported(tmp_path, tmp_path / "nowhere" / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_different_checkpoints_are_rejected(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "float32", 2)
    first, second = (tmp_path / f"actor.{rank}.safetensors" for rank in range(2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"actor\.1\.safetensors belongs to actor rank 0"):
        RoleCheckpoint(tmp_path, "actor").read("model.b")
