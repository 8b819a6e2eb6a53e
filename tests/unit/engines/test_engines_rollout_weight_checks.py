"""Checks that a server has the weights of a version."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.model_tensors import open_folder
from slurmrl.rollouts.generation.base import WeightVersion
from slurmrl.rollouts.generation.sglang import on_gpu
from slurmrl.rollouts.generation.weight_checks import (
    Held,
    ServerCheck,
    TensorPart,
    WeightChecks,
    parameter,
    sha256,
)
from slurmrl.tensors.layout import Array, Box, TensorSpec

CPU = torch.device("cpu")
LAYER = "model.layers.0"
VOCABULARY = 70
CONFIG = {"model_type": "qwen2", "num_key_value_heads": 2}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, 8),
        f"{LAYER}.self_attn.q_proj.weight": (16, 8),
        f"{LAYER}.self_attn.k_proj.weight": (4, 8),
        f"{LAYER}.self_attn.v_proj.weight": (4, 8),
        f"{LAYER}.self_attn.q_proj.bias": (16,),
        f"{LAYER}.self_attn.k_proj.bias": (4,),
        f"{LAYER}.self_attn.v_proj.bias": (4,),
        f"{LAYER}.self_attn.o_proj.weight": (8, 16),
        f"{LAYER}.mlp.gate_proj.weight": (12, 8),
        f"{LAYER}.mlp.up_proj.weight": (12, 8),
        f"{LAYER}.mlp.down_proj.weight": (8, 12),
        f"{LAYER}.input_layernorm.weight": (8,),
        f"{LAYER}.mlp.c_fc.weight": (8, 12),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def version(folder: Path, name: str = "1.1", seed: int = 0) -> WeightVersion:
    folder = folder / name
    folder.mkdir()
    save_file(tensors(seed), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return WeightVersion(name=name, folder=folder)


@pytest.mark.parametrize("stored", ["model.language_model.", "language_model.model.", "model."])
def test_language_model_is_compared_next_to_an_image_encoder(tmp_path: Path, stored: str) -> None:
    """Servers and files have other prefixes. The encoder is not compared: it may be frozen."""
    given = {name.replace("model.", stored, 1): each for name, each in tensors().items()}
    save_file({**given, "visual.norm.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    files, made = open_folder(tmp_path), tensors()
    config = {"model_type": "qwen3_vl", "text_config": CONFIG, "vision_config": {}}
    for own in ("model.", "language_model.model."):
        half = parameter(files, config, f"{own}layers.0.self_attn.qkv_proj.bias", TensorPart(1, 2))
        parts = [made[f"{LAYER}.self_attn.{each}_proj.bias"].chunk(2)[1] for each in "qkv"]
        assert half is not None
        assert torch.equal(half, torch.cat(parts))
    for name in ("visual.norm.bias", "model.visual.norm.bias", "lm_head.weight"):
        assert parameter(files, config, name, TensorPart()) is None


def test_parameters_are_not_compared_if_the_config_omits_their_heads(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    config: dict[str, Any] = {"model_type": "gemma3", "text_config": {}, "vision_config": {}}
    names = ("self_attn.qkv_proj.bias", "input_layernorm.weight", "mlp.gate_up_proj.weight")
    files, part = open_folder(tmp_path), TensorPart(1, 2)
    found = [parameter(files, config, f"{LAYER}.{name}", part) for name in names]
    assert [each is None for each in found] == [True, False, False]


@pytest.mark.parametrize("of", [1, 2, 4])
def test_parameters_are_merged_split_and_padded_as_in_servers(tmp_path: Path, of: int) -> None:
    """With 4 ranks, two of them hold each of the 2 key-value heads."""
    made = tensors()
    attention = [made[f"{LAYER}.self_attn.{name}_proj.weight"] for name in "qkv"]
    padded = torch.cat([made["model.embed_tokens.weight"], torch.zeros(128 - VOCABULARY, 8)])
    folder = version(tmp_path).folder
    assert folder is not None
    files = open_folder(folder)

    def held(name: str, rank: int) -> Tensor | None:
        return parameter(files, CONFIG, name, TensorPart(rank, of))

    for rank in range(of):
        query, key, value = (
            tensor.chunk(min(of, heads))[rank * min(of, heads) // of]
            for tensor, heads in zip(attention, (8, 2, 2), strict=True)
        )
        gate_up = [made[f"{LAYER}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        expected = {
            f"{LAYER}.self_attn.qkv_proj.weight": torch.cat([query, key, value]),
            f"{LAYER}.mlp.gate_up_proj.weight": torch.cat(
                [each.chunk(of)[rank] for each in gate_up]
            ),
            "model.embed_tokens.weight": padded.chunk(of)[rank],
            f"{LAYER}.input_layernorm.weight": made[f"{LAYER}.input_layernorm.weight"],
        }
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            columns = made[f"{LAYER}.{name}.weight"].chunk(of, dim=1)
            expected[f"{LAYER}.{name}.weight"] = columns[rank]
        for name, tensor in expected.items():
            assert torch.equal(held(name, rank), tensor), name
        assert len(held(f"{LAYER}.self_attn.qkv_proj.bias", rank)) == len(
            torch.cat([query, key, value])
        )
    assert held(f"{LAYER}.mlp.experts.w13_weight", 0) is None
    gemma = {**CONFIG, "model_type": "gemma"}
    assert parameter(files, gemma, f"{LAYER}.input_layernorm.weight", TensorPart()) is None
    transposed = held(f"{LAYER}.mlp.c_fc.weight", 0)
    assert (transposed is None) == (of > 1)
    if transposed is not None:
        assert torch.equal(transposed, made[f"{LAYER}.mlp.c_fc.weight"].T)


def test_tensor_rank_reads_only_its_part_of_matrices(tmp_path: Path) -> None:
    """A version may be larger than the memory of a rank's host."""
    folder = version(tmp_path).folder
    assert folder is not None
    files, read = open_folder(folder), list[int]()

    class Counting:
        def specs(self) -> Mapping[str, TensorSpec]:
            return files.specs()

        def read(self, name: str, box: Box) -> Array:
            read.append(box.count)
            return files.read(name, box)

    for name in ("self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.gate_up_proj.weight"):
        read.clear()
        part = parameter(Counting(), CONFIG, f"{LAYER}.{name}", TensorPart(1, 2))
        assert part is not None
        assert sum(read) == part.numel(), name


@pytest.mark.parametrize(
    ("count", "dtype", "expected"),
    [
        (1, torch.float32, "a0db759edbf1dfed"),
        (3, torch.bfloat16, "4c02bbdf1a6072f7"),
        (8192, torch.float32, "767b62ce6307acbc"),
        (300_001, torch.bfloat16, "a0857a5b773495c9"),
    ],
)
def test_checksums_of_gpu_parameters_equal_sglang(
    count: int, dtype: torch.dtype, expected: str
) -> None:
    """The expected values come from SGLang's kernel."""
    assert on_gpu((torch.arange(count) % 1000 - 300).to(dtype), CPU) == expected


@pytest.mark.parametrize("of", [1, 2, 4])
@pytest.mark.parametrize(
    ("block", "names"),
    [("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))],
)
def test_experts_are_stacked_and_split_as_in_servers(
    tmp_path: Path,
    block: str,
    names: tuple[str, ...],
    of: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each tensor rank reads a part of the inner units of every expert. Five ranks cannot."""
    prefix = f"{LAYER}.{block}.experts"
    shapes = dict(zip(names, ((12, 8), (12, 8), (8, 12)), strict=True))
    made = {
        f"{prefix}.{expert}.{name}.weight": torch.randn(shape)
        for expert in range(11)
        for name, shape in shapes.items()
    }
    save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    files = open_folder(tmp_path)
    read, sizes = files.read, set()

    def counted(name: str, box: Box) -> Any:
        sizes.add(box.count)
        return read(name, box)

    monkeypatch.setattr(files, "read", counted)
    for rank in range(of):
        part = TensorPart(rank, of)
        both = parameter(files, CONFIG, f"{prefix}.w13_weight", part)
        down = parameter(files, CONFIG, f"{prefix}.w2_weight", part)
        assert both is not None
        assert down is not None
        assert both.shape == (11, 24 // of, 8)
        assert down.shape == (11, 8, 12 // of)
        for expert in range(11):
            gate, up = (made[f"{prefix}.{expert}.{name}.weight"] for name in names[:2])
            rows = torch.cat([gate.chunk(of)[rank], up.chunk(of)[rank]])
            assert torch.equal(both[expert], rows)
            columns = made[f"{prefix}.{expert}.{names[2]}.weight"].chunk(of, dim=1)[rank]
            assert torch.equal(down[expert], columns)
    assert sizes == {8 * 12 // of}
    assert parameter(files, CONFIG, f"{prefix}.w2_weight", TensorPart(0, 5)) is None


def report(made: dict[str, Tensor]) -> list[Held]:
    """Return the report of a server that holds these weights in the form of the files."""
    names = ("self_attn.o_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight")
    held = {f"{LAYER}.{name}": sha256(made[f"{LAYER}.{name}"]) for name in names}
    return [Held(TensorPart(), {**held, f"{LAYER}.mlp.experts.w2_weight": "0"})]


def digest(tensor: Tensor, device: torch.device) -> str:
    return sha256(tensor)


def check(
    checks: WeightChecks,
    held: Sequence[Held],
    loaded: WeightVersion,
    replaced: Sequence[Held] = (),
) -> None:
    asyncio.run(checks.check("server", loaded, held, digest, replaced=replaced))


def test_server_with_wrong_weights_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One wrong tensor is enough. A message lists tensors that cannot be compared, once."""
    first, second = version(tmp_path), version(tmp_path, "2.1", seed=1)
    checks = WeightChecks()
    held = report(tensors())
    check(checks, held, first)
    check(checks, held, first)
    assert caplog.text.count("1 of its 4 parameters cannot be compared") == 1
    assert "another form: model.layers.0.mlp.experts.w2_weight\n" in caplog.text
    wrong = {**tensors(), f"{LAYER}.mlp.down_proj.weight": torch.zeros(8, 12)}
    with pytest.raises(RunFailedError, match=r"server: .* 1\.1: 1 of 4 .*mlp\.down_proj\.weight\)"):
        check(checks, report(wrong), first)
    with pytest.raises(RunFailedError, match=r"are not version 2\.1: 3 of 4 parameters"):
        check(checks, held, second)  # a server that ignored the update
    check(checks, report(tensors(1)), second)


def test_parameters_in_another_format_are_compared_only_between_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel may have reordered them."""
    first, second = version(tmp_path), version(tmp_path, "2.1", seed=1)
    checks, dummy = WeightChecks(own=True), report(tensors(6))
    name = f"{LAYER}.mlp.down_proj.weight"
    check(checks, report({**tensors(), name: tensors()[name].flip(0)}), first, dummy)
    assert f"another form: {name}, " in caplog.text
    check(checks, report({**tensors(1), name: tensors(1)[name].flip(0)}), second)
    with pytest.raises(RunFailedError, match="differ from its earlier weights of this version"):
        check(checks, report({**tensors(1), name: tensors()[name]}), second)
    with pytest.raises(RunFailedError, match="2 of 4 parameters differ"):
        check(checks, report(tensors()), second)


def test_server_may_be_restarted_on_fewer_gpus(tmp_path: Path) -> None:
    """The user of the server may change its number of GPUs. Later checks use the new number."""
    loaded, checks = version(tmp_path), WeightChecks()
    check(checks, report(tensors()) * 2, loaded)
    check(checks, report(tensors()), loaded)
    with pytest.raises(RunFailedError, match="3 of 4 parameters differ"):
        check(checks, report(tensors(1)), loaded)


@pytest.mark.parametrize("server", ["bfloat16", "torch.bfloat16", "half", "float16"])
def test_server_of_another_dtype_is_compared_after_rounding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, server: str
) -> None:
    """The server rounds the weights, so all of its known parameters are still compared."""
    first, second = version(tmp_path), version(tmp_path, "2.1", seed=1)
    dtype = torch.bfloat16 if "bf" in server else torch.float16
    checks = WeightChecks()
    rounded = checks.digest("server", digest, "float32", server)
    assert not isinstance(rounded, str)
    for seed, loaded in ((0, first), (1, second)):
        held = report({name: tensor.to(dtype) for name, tensor in tensors(seed).items()})
        asyncio.run(checks.check("server", loaded, held, rounded))
    assert "1 of its 4 parameters cannot be compared" in caplog.text
    assert f"computes in {str(dtype)[6:]}; training computes in float32" in caplog.text
    with pytest.raises(RunFailedError, match="3 of 4 parameters differ"):
        asyncio.run(checks.check("server", first, held, rounded))


@pytest.mark.parametrize("server", ["float32", "torch.float32", "auto", None])
def test_server_of_the_same_dtype_is_compared_bit_by_bit(server: str | None) -> None:
    assert WeightChecks().digest("server", digest, "float32", server) is digest


def test_checksums_are_computed_on_the_cpu_if_the_gpu_is_full(tmp_path: Path) -> None:
    devices = []

    def full(tensor: Tensor, device: torch.device) -> str:
        devices.append(device.type)
        if device.type != "cpu":
            raise torch.OutOfMemoryError("no memory")
        return sha256(tensor)

    checks = WeightChecks(torch.device("cuda"))
    asyncio.run(checks.check("server", version(tmp_path), report(tensors()), full))
    assert devices == ["cuda", "cpu"] * 3


@pytest.mark.parametrize("first_only", [False, True])
def test_server_is_checked_after_each_version_or_only_the_first(
    tmp_path: Path, first_only: bool
) -> None:
    """At first, it also reports the checksums of the weights that it replaces."""
    asked = 0

    async def ask() -> list[Held]:
        nonlocal asked
        asked += 1
        return report(tensors(5 if asked == 1 else 0))

    async def work() -> None:
        loaded = version(tmp_path)
        checks = WeightChecks(own=True)
        each = ServerCheck(checks, "server", digest, ask, first_only=first_only)
        for _ in range(3):
            await each.before_load(loaded)
            await each.after_load(loaded)

    asyncio.run(work())
    assert asked == (2 if first_only else 4)


def test_server_without_checksums_is_not_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log reports this. If the server reported checksums before, a refusal is an error."""
    checks = WeightChecks()
    refuses = False

    async def ask() -> list[Held]:
        if refuses:
            raise UsageError("HTTP status 404")
        return report(tensors())

    async def work() -> None:
        nonlocal refuses
        loaded = version(tmp_path)
        refuses = True
        for _ in range(2):
            await ServerCheck(checks, "old", digest, ask).after_load(loaded)
        await ServerCheck(checks, "other", "it quantizes weights", ask).after_load(loaded)
        refuses = False
        await ServerCheck(checks, "new", digest, ask).after_load(loaded)
        refuses = True
        with pytest.raises(UsageError, match="404"):
            await ServerCheck(checks, "new", digest, ask).after_load(loaded)

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert caplog.text.count("old: its weights are not checked: HTTP status 404") == 1
    assert "other: its weights are not checked: it quantizes weights" in caplog.text


@pytest.mark.parametrize("own", [True, False])
def test_server_with_an_output_layer_missing_in_the_files_is_rejected(
    tmp_path: Path, own: bool
) -> None:
    """SGLang does so for qwen3_moe, and would keep random values."""
    made = version(tmp_path)
    name = "model.embed_tokens.weight"
    held = {name: "1", "lm_head.weight": "2"}

    async def check() -> None:
        checks = WeightChecks(own=own)
        await checks.check("server", made, [Held(TensorPart(), held)], lambda *_: "1")

    if own:
        with pytest.raises(UsageError, match="needs the output layer as a separate tensor"):
            asyncio.run(check())
    else:
        asyncio.run(check())
