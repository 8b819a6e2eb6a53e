"""Versions of adapters are merged on the host of a rollout task with the folder of
``actor.path``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slurmrl.config.schema import Lora
from slurmrl.engines.role_weights import Fingerprint
from slurmrl.errors import UnreadableInputError, UsageError, WeightVersionError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.models.adapters import trained_shapes
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.model_tensors import MergedCheckpoint, SafetensorsFolder
from slurmrl.models.shapes import parameter_shapes, storage_of
from slurmrl.rollouts.generation.native.native_rollout import read_weights
from slurmrl.tensors.checkpoint.export import Precision
from slurmrl.tensors.checkpoint.tensors import TensorFile, file_entries
from slurmrl.tensors.layout import Array, Box, Index, TensorSpec
from slurmrl.tensors.weights.format import VersionId, VersionManifest, part_file, read_manifest
from slurmrl.tensors.weights.writer import PartWriter, VersionBits, publish
from slurmrl.workers.rollout.task_weights import ADAPTED, SHARED, MergingHost, TaskWeights
from tests.distributed.engines.one_process import random_model
from tests.distributed.engines.test_engines_layouts import MODELS
from tests.support.decoder_folders import from_hf, to_hf

LORA = Lora(rank=3, alpha=5.0, targets=("q_proj", "o_proj"))
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
CPU = torch.device("cpu")
NAME = "model.layers.0.self_attn.q_proj.lora_A"
FIRST, SECOND, THIRD = VersionId(1, 1), VersionId(2, 1), VersionId(3, 1)
Bits = dict[str, tuple[str, tuple[int, ...], bytes]]


class RandomAdapters:
    """Random adapters, as `TrainedTensors`."""

    def __init__(self, shapes: Mapping[str, Index], seed: int) -> None:
        chance = np.random.default_rng(seed)
        self.tensors: dict[str, Array] = {
            name: chance.normal(size=shape).astype("<f4") for name, shape in shapes.items()
        }

    def weights(self) -> list[tuple[str, TensorSpec]]:
        return [(n, TensorSpec(values.shape, "float32")) for n, values in self.tensors.items()]

    def read(self, name: str, box: Box) -> Array:
        return self.tensors[name][box.slices]


def publish_adapters(
    folder: Path,
    adapters: RandomAdapters,
    frozen: str,
    version: VersionId,
    *,
    base: VersionId | None = None,
    against: VersionBits | None = None,
) -> tuple[VersionManifest, VersionBits]:
    """Publish a version of adapters, whole or as the difference to ``against``."""
    bits = {n: v.reshape(-1).view(np.uint8) for n, v in adapters.tensors.items()}
    with PartWriter(folder / version.name, 0, against, frozen=frozen) as writer:
        for name, values in adapters.tensors.items():
            writer.add(name, "float32", values.shape, bits[name])
        parts = [writer.finish()]
    return publish(folder / version.name, parts, version, base), VersionBits(version, bits)


def adapters_of(config: ModelConfig, seed: int, lora: Lora = LORA) -> RandomAdapters:
    return RandomAdapters(trained_shapes(config, "lm", lora), seed)


class Trial:
    """A model folder, the versions of its trainers, and a task on a host."""

    def __init__(self, folder: Path, family: str, dtype: str) -> None:
        self.folder, self.source, self.versions = folder, folder / "model", folder / "versions"
        self.family, self.dtype = family, dtype
        self.config = ModelConfig.from_hf(MODELS[family])
        self.decoder = random_model(self.source, MODELS[family])
        self.frozen = self.fingerprint()
        self._last: VersionBits | None = None

    def rounded(self) -> Decoder:
        """Return the model in the dtype of the trainers."""
        return self.decoder.to(getattr(torch, self.dtype))

    def fingerprint(self) -> str:
        parameters = dict(self.rounded().named_parameters()) | self.decoder.constants()
        found = Fingerprint({n: tuple(p.shape) for n, p in parameters.items()}, CPU)
        for name, values in parameters.items():
            found.add(name, Box.whole(tuple(values.shape)), values.detach())
        return str(found)

    def publish(
        self, version: VersionId, adapters: RandomAdapters, base: VersionId | None = None
    ) -> VersionManifest:
        against = None if base is None else self._last
        manifest, self._last = publish_adapters(
            self.versions, adapters, self.frozen, version, base=base, against=against
        )
        return manifest

    def task(self, name: str = "host", **options: Any) -> TaskWeights:
        folder = self.folder / name
        host = MergingHost(
            self.source, folder / "frozen", self.config, self.dtype, LORA, CPU, **options
        )
        return TaskWeights(self.versions, folder, MODELS[self.family], host)

    def expected(self, adapters: RandomAdapters) -> Bits:
        """Return the content of an export whose files have the type of the frozen weights."""
        folder = self.folder / "rounded"
        folder.mkdir(exist_ok=True)
        to_hf(self.rounded(), folder)
        merged = MergedCheckpoint(adapters, folder, self.config, "lm", LORA)
        entries = file_entries(merged.weights(), merged.read, storage_of(self.config))
        converted = map(Precision(self.dtype).apply, entries)
        return {e.name: (e.spec.dtype, e.spec.shape, e.data().tobytes()) for e in converted}


def tensors(folder: Path | None) -> Bits:
    assert folder is not None
    files = SafetensorsFolder(folder)
    return {
        name: (spec.dtype, spec.shape, files.read(name, Box.whole(spec.shape)).tobytes())
        for name, spec in files.specs().items()
    }


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path, "qwen3", "bfloat16")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "float32"),
        ("glm4_moe", "bfloat16"),
        ("deepseek_v3", "float32"),
        ("gpt_oss", "bfloat16"),
        ("qwen2", "float16"),
    ],
)
def test_merged_task_weights_equal_an_export(tmp_path: Path, family: str, dtype: str) -> None:
    """The frozen weights are read once, and all versions link those without adapters.

    An engine reads the folder in place.
    """
    trial = Trial(tmp_path, family, dtype)
    first, second = adapters_of(trial.config, 1), adapters_of(trial.config, 2)
    trial.publish(FIRST, first)
    task = trial.task()
    taken = task.newer()
    assert taken is not None
    assert tensors(taken.folder) == trial.expected(first)
    trial.publish(SECOND, second, FIRST)
    shutil.rmtree(trial.source)
    later = task.newer()
    assert later is not None
    assert tensors(later.folder) == trial.expected(second)
    assert tensors(taken.folder) == trial.expected(first), "it stays until the engine has the next"
    task.drop_others(later)
    assert taken.folder is not None
    assert not taken.folder.exists()
    assert later.folder is not None
    assert (later.folder / SHARED).samefile(tmp_path / "host" / "frozen" / SHARED)

    served, wanted = trial.decoder.float(), from_hf(later.folder)
    read_weights(served, later.folder)
    for (name, values), (_, other) in zip(
        served.state_dict().items(), wanted.state_dict().items(), strict=True
    ):
        assert torch.equal(values, other), name


def test_servers_load_the_merged_directory(trial: Trial) -> None:
    """The two files and the index form a model folder that transformers can load too."""
    trial.publish(FIRST, adapters_of(trial.config, 1))
    taken = trial.task().newer()
    assert taken is not None
    assert taken.folder is not None
    loaded = AutoModelForCausalLM.from_pretrained(taken.folder, dtype=torch.bfloat16)
    found, expected = loaded.state_dict(), from_hf(taken.folder, dtype=torch.bfloat16)
    for name, values in expected.named_parameters():
        assert torch.equal(found[name], values), name


def test_lora_versions_contain_only_adapters(trial: Trial) -> None:
    """A version has 4 bytes per element of the adapters: 1/94 of Qwen3-8B with rank 16
    (docs/lora.md).
    """
    adapters = adapters_of(trial.config, 1)
    manifest = trial.publish(FIRST, adapters)
    assert manifest.bytes == 4 * sum(values.size for values in adapters.tensors.values())
    assert read_manifest(trial.versions / FIRST.name).frozen == trial.frozen
    large = ModelConfig.from_hf(QWEN3_8B)
    weights = 2 * sum(map(prod, parameter_shapes(large, "lm").values()))
    of_adapters = 4 * sum(map(prod, trained_shapes(large, "lm", Lora(rank=16)).values()))
    assert (weights, of_adapters) == (16_381_470_720, 174_587_904)


def test_version_for_other_frozen_weights_is_rejected(trial: Trial) -> None:
    """One bit of an element in the folder has changed. The task fails with a message. A later task
    with the right folder serves.
    """
    adapters = adapters_of(trial.config, 1)
    trial.publish(FIRST, adapters)
    path = trial.source / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    task = trial.task()
    with pytest.raises(UsageError, match="does not hold the weights that the trainers") as said:
        task.newer()
    assert str(trial.source) in str(said.value)
    assert trial.frozen in str(said.value)
    assert task.unreadable == [], "the trainers cannot help by publishing it again"
    path.write_bytes(whole)
    taken = trial.task("another").newer()
    assert taken is not None
    assert tensors(taken.folder) == trial.expected(adapters)


def test_missing_base_model_directory_is_rejected(trial: Trial) -> None:
    trial.publish(FIRST, adapters_of(trial.config, 1))
    shutil.rmtree(trial.source)
    with pytest.raises(UnreadableInputError, match="model"):
        trial.task().newer()


def test_damaged_version_is_never_merged(trial: Trial) -> None:
    """Versions that depend on the damaged one are not merged either. The next full version is."""
    first, second, third = (adapters_of(trial.config, seed) for seed in (1, 1, 3))
    second.tensors[NAME][0, 0] += 1.0
    trial.publish(FIRST, first)
    part = trial.versions / FIRST.name / part_file(0)
    data = part.read_bytes()
    part.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    task = trial.task()
    assert task.newer() is None
    trial.publish(SECOND, second, FIRST)
    assert task.newer() is None
    assert [version for version, _ in task.unreadable] == [FIRST, SECOND]
    trial.publish(THIRD, third)
    taken = task.newer()
    assert taken is not None
    assert tensors(taken.folder) == trial.expected(third)


def test_adapters_with_other_settings_are_rejected(trial: Trial) -> None:
    trial.publish(FIRST, adapters_of(trial.config, 1, Lora(rank=4, alpha=5.0)))
    task = trial.task()
    assert task.newer() is None
    ((version, why),) = task.unreadable
    assert version == FIRST
    assert "do not fit actor.lora" in why
    plain = TaskWeights(trial.versions, trial.folder / "plain", {})
    assert plain.newer() is None
    assert "actor.lora is not set" in plain.unreadable[0][1]


def test_full_versions_of_an_earlier_incarnation_are_served_unchanged(trial: Trial) -> None:
    """A trial that began with merged weights in its versions continues with adapters."""
    folder = trial.versions / FIRST.name
    with PartWriter(folder, 0, None) as writer:
        whole = TensorFile(trial.source / "model.safetensors")
        for name, spec in whole.specs.items():
            writer.add(name, spec.dtype, spec.shape, whole.flat(name).view(np.uint8))
        publish(folder, [writer.finish()], FIRST, None)
    task = trial.task()
    taken = task.newer()
    assert taken is not None
    assert tensors(taken.folder) == tensors(trial.source)
    adapters, next_one = adapters_of(trial.config, 1), VersionId(1, 2)
    trial.publish(next_one, adapters)
    later = task.newer()
    assert later is not None
    assert tensors(later.folder) == trial.expected(adapters)


def test_delta_with_other_frozen_weights_is_rejected(trial: Trial) -> None:
    trial.publish(FIRST, adapters_of(trial.config, 1))
    trial.frozen = "0" * 16
    with pytest.raises(WeightVersionError, match="different frozen weights"):
        trial.publish(SECOND, adapters_of(trial.config, 2), FIRST)


def test_full_disk_of_a_host_keeps_the_served_version(trial: Trial) -> None:
    """Covers each write that may fail. When there is enough space, the new version is served."""

    class Full(SystemCalls):
        left = 0

        def write(self, descriptor: int, data: Any) -> int:
            self.left -= 1
            if self.left < 0:
                raise OSError(28, os.strerror(28))
            return super().write(descriptor, data)

    adapters = adapters_of(trial.config, 1)
    trial.publish(FIRST, adapters)
    calls, failed = Full(), 0
    task = trial.task(calls=calls)
    while True:
        calls.left = failed
        try:
            taken = task.newer()
        except OSError:
            failed += 1
            continue
        break
    assert failed > 4
    assert taken is not None
    assert tensors(taken.folder) == trial.expected(adapters)
    assert (trial.folder / "host" / "frozen" / ADAPTED).exists()


def test_fingerprint_depends_on_every_element_and_its_position() -> None:
    shapes = {"a": (3, 5), "b": (3, 5)}
    values = torch.arange(15.0).reshape(3, 5)

    def of(name: str, tensor: torch.Tensor, parts: list[Box]) -> str:
        found = Fingerprint(shapes, CPU)
        for box in parts:
            found.add(name, box, tensor[box.slices])
        return str(found)

    whole = [Box((0, 0), (3, 5))]
    one = of("a", values, whole)
    assert of("a", values, [Box((1, 0), (2, 3)), Box((1, 3), (2, 2)), Box((0, 0), (1, 5))]) == one
    other = {
        of("b", values, whole),
        of("a", values.bfloat16(), whole),
        of("a", values.flip(0), whole),
        of("a", values.flip(1), whole),
        of("a", values + torch.nn.functional.one_hot(torch.tensor([0] * 3), 5), whole),
    }
    assert len(other | {one}) == 6
