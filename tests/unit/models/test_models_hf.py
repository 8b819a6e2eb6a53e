from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from slurmrl.errors import CorruptFileError, UnreadableInputError, UsageError
from slurmrl.models.decoder import build
from slurmrl.models.families import FAMILIES
from slurmrl.models.hf import Weights, as_tensor, read_values
from slurmrl.models.model_tensors import open_folder
from slurmrl.tensors.layout import Box
from tests.support.decoder_folders import from_hf, to_hf
from tests.support.trials import REPOSITORY
from tests.unit.models.conftest import ODD, hf_model, small_decoder


@pytest.fixture
def sharded(tmp_path: Path, pair: Callable[..., Any]) -> tuple[Path, dict[str, torch.Tensor]]:
    _, model = pair("qwen2-tied")
    folder = tmp_path / "sharded"
    model.save_pretrained(folder, max_shard_size="8KB")
    return folder, {n: v for n, v in model.state_dict().items() if n != "lm_head.weight"}


def test_boxes_are_read_from_sharded_files(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = sharded
    assert len(list(folder.glob("*.safetensors"))) > 2
    source = open_folder(folder)
    assert source.specs().keys() == state.keys()
    for name, value in state.items():
        start = (value.shape[0] // 2, *(index // 3 for index in value.shape[1:]))
        ends = zip(start, value.shape, strict=True)
        for box in (
            Box.whole(tuple(value.shape)),
            Box(start, tuple(end - first for first, end in ends)),
            Box(start, (0, *value.shape[1:])),
        ):
            found = as_tensor(source.read(name, box), source.specs()[name].dtype)
            assert torch.equal(found, value[box.slices]), name
            assert found.dtype == value.dtype


def test_files_of_a_model_without_head_lack_the_name_prefix(
    tmp_path: Path, pair: Callable[..., Any]
) -> None:
    for name in ("qwen2-tied", "gpt2"):
        decoder, model = pair(name)
        model.base_model.save_pretrained(tmp_path / "base" / name)
        other = from_hf(tmp_path / "base" / name)
        for (parameter_name, ours), theirs in zip(
            decoder.named_parameters(), other.parameters(), strict=True
        ):
            assert torch.equal(ours, theirs), parameter_name


def test_written_files_equal_transformers_and_load_there(
    odd_name: str, tmp_path: Path, pair: Callable[..., Any]
) -> None:
    decoder, model = pair(odd_name)
    theirs, whole, sharded = (tmp_path / name for name in ("theirs", "whole", "sharded"))
    model.save_pretrained(theirs, max_shard_size="8KB")
    for folder, shard_bytes in ((whole, 50 * 10**9), (sharded, 8000)):
        folder.mkdir()
        to_hf(decoder, folder, shard_bytes=shard_bytes)
        assert tensors(folder) == tensors(theirs)
    name = "model.safetensors"
    assert (whole / name).read_bytes() == (tmp_path / odd_name / name).read_bytes()
    loaded, report = AutoModelForCausalLM.from_pretrained(
        sharded, output_loading_info=True, experts_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert decoder.config.to_hf()["architectures"] == [type(loaded).__name__]
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_bfloat16_files_equal_transformers(name: str, tmp_path: Path) -> None:
    hf_model(ODD[name], 4).save_pretrained(tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    folders = [tmp_path / which for which in ("theirs", "ours")]
    model.save_pretrained(folders[0])
    folders[1].mkdir()
    to_hf(from_hf(folders[0], dtype=torch.bfloat16), folders[1])
    theirs, ours = (folder / "model.safetensors" for folder in folders)
    assert ours.read_bytes() == theirs.read_bytes()


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of all tensors of a folder's files, by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, value in load_file(path).items():
            data = value.contiguous().view(torch.uint8).numpy().tobytes()
            found[name] = (str(value.dtype), tuple(value.shape), data)
    return found


@pytest.mark.parametrize(
    "name", sorted(FAMILIES.keys() & MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.keys())
)
def test_value_models_round_trip_through_transformers(name: str, tmp_path: Path) -> None:
    decoder = build(small_decoder(name).config, "value")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    to_hf(decoder, tmp_path)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, experts_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.arange(11)
    with torch.no_grad():
        values = decoder.values(decoder(ids, torch.tensor([0, 11], dtype=torch.int32), 11))
        score = model(ids[None], attention_mask=torch.ones(1, 11).long()).logits
    # What a reward model gives.
    assert (values[-1] - score.squeeze()).abs() < 1e-5 * max(1.0, values.abs().max().item())
    (tmp_path / "again").mkdir()
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (folder / "model.safetensors" for folder in (tmp_path, tmp_path / "again"))
    assert ours.read_bytes() == theirs.read_bytes()
    again = from_hf(tmp_path / "again", "value")
    for parameter, same in zip(decoder.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, same)


def test_critic_started_from_an_actor_predicts_zero(
    tmp_path: Path, pair: Callable[..., Any]
) -> None:
    actor, _ = pair("mixtral")
    critic = from_hf(tmp_path / "mixtral", "value")
    assert not critic.score.weight.any()
    for name, parameter in critic.named_parameters():
        if name != "score.weight":
            assert torch.equal(parameter, actor.get_parameter(name)), name


def test_actor_cannot_start_from_a_value_model(tmp_path: Path) -> None:
    to_hf(build(small_decoder("llama").config, "value"), tmp_path)
    with pytest.raises(UsageError, match=r"the files lack lm_head.weight"):
        from_hf(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_only_the_requested_boxes_are_read(
    name: str, tmp_path: Path, pair: Callable[..., Any]
) -> None:
    decoder, _ = pair(name)
    weights = Weights(tmp_path / name, decoder.config, "lm")
    for parameter_name, parameter in decoder.named_parameters():
        shape = tuple(parameter.shape)
        start = tuple(n // 2 for n in shape)
        box = Box(start, tuple(n - s for n, s in zip(shape, start, strict=True)))
        assert torch.equal(weights.read(parameter_name, box), parameter[box.slices])
        nothing = Box((shape[0], *start[1:]), (0, *box.size[1:]))
        assert weights.read(parameter_name, nothing).shape == nothing.size


MEMORY = """
import sys
from pathlib import Path
import torch
from tests.support import decoder_folders as hf

torch.set_num_threads(1)
folder, size = Path(sys.argv[1]), int(sys.argv[2])
seen = []

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watched(function):
    # What is held while a tensor is, after each one that is read or written.
    def call(*args):
        result = function(*args)
        seen.append(own_bytes())
        return result
    return call

with torch.device("meta"):
    torch.nn.Embedding(2, 2)  # what torch imports for it is not the model's
before = own_bytes()
hf.Weights.read, hf.as_array = watched(hf.Weights.read), watched(hf.as_array)
decoder = hf.from_hf(folder)
read = len(seen)
(folder / "again").mkdir()
hf.to_hf(decoder, folder / "again", shard_bytes=size // 4)
assert 0 < read < len(seen)
print((max(seen) - before) / size)
copy = [p.detach().clone() for p in decoder.parameters()]
print((own_bytes() - before) / size)
"""


def test_model_is_never_in_memory_twice(tmp_path: Path) -> None:
    """Pages of mapped files do not count."""
    changes = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 2}
    decoder = small_decoder("mixtral", **changes, num_local_experts=8)
    size = 4 * sum(p.numel() for p in decoder.parameters())
    to_hf(decoder, tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(size)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        # What malloc gets back goes back to the system, however large.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert result.returncode == 0, result.stderr
    once, twice = map(float, result.stdout.split())
    assert 0.95 < once < 1.3
    assert twice > 1.8
    assert tensors(tmp_path / "again") == tensors(tmp_path)


def test_damaged_files_are_named(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder = sharded[0]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = index["weight_map"]
    first, last = files["model.embed_tokens.weight"], files["model.norm.weight"]
    assert first != last
    content = (folder / first).read_bytes()
    for damaged in (content[:-1], content + b"x", (folder / last).read_bytes()):
        (folder / first).write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=first):
            open_folder(folder)
    (folder / first).unlink()
    with pytest.raises(UnreadableInputError, match="be read"):
        open_folder(folder)


def test_directories_without_a_model_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no config.json"):
        read_values(tmp_path)
    with pytest.raises(UsageError, match=r"neither model.safetensors nor"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json is not JSON"):
        read_values(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match="weight_map"):
        open_folder(tmp_path)
