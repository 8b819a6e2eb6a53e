"""Adapters of transformers' models, against PEFT on the same weights."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFTS
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slurmrl.config.schema.roles import Lora
from slurmrl.errors import UsageError
from slurmrl.models.adapters import LORA_A, LORA_B, write_adapter
from slurmrl.models.hf_adapters import (
    adapted_shapes,
    adapter_shapes,
    attach_to,
    refusal,
    require_as_stored,
)
from slurmrl.models.hf_config import MODULE, HFConfig, stored
from slurmrl.models.hf_merged import MergedFolder
from slurmrl.models.hf_model import HFModel
from slurmrl.models.hf_targets import DEFAULTS, TRANSPOSED, adapted_tensors, peft_targets
from slurmrl.models.model_tensors import open_folder
from slurmrl.models.packed import packed_rows
from slurmrl.models.shapes import file_form
from slurmrl.tensors.checkpoint.export import export
from slurmrl.tensors.layout import Array, Box, TensorSpec
from tests.support.families import VOCABULARY, tiny, tiny_model

FAMILIES = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "gemma2"),
    *("gemma3_text", "gpt_oss", "glm4", "glm4_moe", "deepseek_v3", "olmo2", "phi3", "phi"),
    *("nemotron_h", "falcon_h1", "mamba2", "gpt2", "opt", "bloom", "gpt_neox", "mixtral"),
    *("cohere2", "granitemoehybrid", "kimi_linear", "bailing_hybrid"),
)
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
LENGTHS = (5, 9, 1, 7)
LORA = Lora(rank=3, alpha=5.0, targets="all-linear")
KERNELS = {"mamba2", "falcon_h1", "nemotron_h", "granitemoehybrid"}
"""Families whose kernels read the weight of ``out_proj``."""


def read(folder: Path, family: str) -> HFModel:
    """Compute in float64, which products of stacked experts lack."""
    values = tiny(family)
    config = HFConfig.from_hf(values)
    dtype = torch.float32 if EXPERTS & values.keys() else torch.float64
    return HFModel(config, "lm", source=folder, seed=0, dtype=dtype)


@torch.no_grad()
def randomize(model: HFModel) -> dict[str, Tensor]:
    """Give the adapters random values in the model's type; return them by name."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data = values.to(next(model.parameters()).dtype)
            found[name] = parameter
    return found


def theirs(name: str, family: str, values: Tensor) -> tuple[str, Tensor]:
    """Return PEFT's name of a matrix, and its values in PEFT's form."""
    layer, _, matrix = name.removeprefix(MODULE).rpartition(".")
    if family in TRANSPOSED:
        matrix, values = LORA_A if matrix == LORA_B else LORA_B, values.t()
    return f"base_model.model.{layer}.{matrix}.default.weight", values


def total(logp: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, len(logp), dtype=logp.dtype)
    return (weights * logp).sum()


@dataclass
class Trained:
    """Adapters in the form of a checkpoint."""

    tensors: dict[str, Tensor]

    def weights(self) -> list[tuple[str, TensorSpec]]:
        return [(n, TensorSpec(tuple(v.shape), "float32")) for n, v in self.tensors.items()]

    def read(self, name: str, box: Box | None = None) -> Array:
        values: Array = self.tensors[name].detach().float().numpy()
        return values if box is None else values[box.slices]


def logprobs_of(model: Any, ids: Tensor, rows: Tensor) -> Tensor:
    """The log-probability of each token, by one sequence at a time."""
    parts = []
    for row in range(len(LENGTHS)):
        tokens = ids[rows == row]
        logq = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        parts += [logq.new_zeros(1), logq.gather(-1, tokens[1:, None]).squeeze(-1)]
    return torch.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_gradients_and_exports_equal_peft(family: str, tmp_path: Path) -> None:
    """PEFT loads the exported adapters of all linear layers, and computes the same with them.

    So does transformers with the merged export.
    """
    tiny_model(family, tmp_path / "base")
    model = read(tmp_path / "base", family)
    adapters = attach_to(model, LORA)
    require_as_stored(model, tmp_path / "base", 0, 1)
    own = randomize(model)
    assert own.keys() == adapter_shapes(tiny(family), "lm", LORA).keys(), "as planned"
    trained: Any = Trained(own)
    base = read(tmp_path / "base", family).inner
    dtype = base.dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PEFT's own
        folder = write_adapter(
            trained, tmp_path / "adapter", LORA, "lm", base="base", theirs=tiny(family)
        )
        expected = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    expected = expected.to(dtype).eval()
    state = {name: p for name, p in expected.named_parameters() if p.requires_grad}
    of_peft = {name: theirs(name, family, values) for name, values in own.items()}
    assert {name for name, _ in of_peft.values()} == state.keys()

    ids = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    rows = packed_rows(cu_seqlens, len(ids))

    def computed() -> Tensor:
        features = model(ids, cu_seqlens, max(LENGTHS))
        return model.logprobs(features, ids, cu_seqlens, 1.0)[0]

    logp, found = computed(), logprobs_of(expected, ids, rows)
    bound = 1e-4 if dtype == torch.float32 else 1e-6  # state-space layers compute in float32
    torch.testing.assert_close(logp, found, rtol=bound, atol=bound)
    torch.autograd.backward(total(logp))
    torch.autograd.backward(total(found))
    for name, parameter in own.items():
        assert parameter.grad is not None
        named, gradient = theirs(name, family, parameter.grad)
        same = state[named].grad
        assert same is not None
        most = bound * max(float(same.abs().max()), 1e-3)
        torch.testing.assert_close(gradient, same, rtol=0, atol=most, msg=name)
    with adapters.unused(), torch.no_grad(), expected.disable_adapter():
        plain = computed()
        assert (plain - logp).abs().max() > 1e-3
        torch.testing.assert_close(plain, logprobs_of(expected, ids, rows), rtol=bound, atol=bound)

    merged = MergedFolder(trained, open_folder(tmp_path / "base"), model.config, "lm", LORA.scale)
    values, _ = file_form(tiny(family), "hf", "lm")
    export(merged, values, tmp_path / "merged", generation={}, storage=stored)
    whole = read(tmp_path / "merged", family).inner
    with torch.no_grad():
        again = logprobs_of(whole, ids, rows)
    torch.testing.assert_close(again, found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_default_targets_equal_peft(family: str) -> None:
    found = adapted_shapes(tiny(family), "lm", Lora())
    model = tiny_model(family)
    if family in PEFTS:
        settings = peft.LoraConfig(target_modules=PEFTS[family], task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about GPT-2's transposed weights, and PEFT's own
            model = peft.get_peft_model(model, settings).base_model.model
        expected = {
            name.removesuffix(".lora_A.default.weight")
            for name, _ in model.named_parameters()
            if ".lora_A." in name
        }
    else:
        linear = {n: each for n, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
        expected = {n for n, each in linear.items() if each is not model.get_output_embeddings()}
        if family in KERNELS:
            expected = {name for name in expected if not name.endswith("out_proj")}
    assert {name.removeprefix(MODULE).removesuffix(".weight") for name in found} == expected


def test_table_of_defaults_equals_peft() -> None:
    """The table has PEFT's families that transformers has as causal models."""
    known = {name: tuple(PEFTS[name]) for name in PEFTS if name in DEFAULTS}
    assert known == DEFAULTS
    causal = {name for name in PEFTS if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    others = {
        "bart",
        "bert",
        "electra",
        "roberta",
        "xlm-roberta",
        "gemma4",
    }  # encoders, and a pattern
    assert causal - others <= DEFAULTS.keys()


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("llama", ["qkv"], "no linear layer 'qkv'; it has down_proj, gate_proj, k_proj"),
        ("llama", ["embed_tokens"], "no linear layer 'embed_tokens'"),
        ("llama", ["lm_head"], "'lm_head' is the output layer"),
        ("gpt_oss", ["gate_up_proj"], "stores 'gate_up_proj' of all experts as one tensor"),
        ("qwen3_moe", ["q_proj", "experts"], "stores 'experts' of all experts as one tensor"),
        ("falcon_h1", ["out_proj"], "'out_proj' of .* is read by a kernel that does not call"),
        ("zamba2", ["q_proj"], "'q_proj' of .* shares its weight with another layer"),
        ("llama4_text", ["router"], "'router' of .* computes more than the product"),
        ("deepseek_v4", ["o_a_proj"], "'o_a_proj' of .* computes more than the product"),
        ("llama", ["self_attn.q_proj", "mlp.up_proj"], None),
        ("llama", ["model.layers.1.self_attn.q_proj"], None),
    ],
)
def test_targets_are_matched_as_in_peft(
    family: str, targets: list[str], message: str | None
) -> None:
    lora = Lora(targets=tuple(targets))
    reason = refusal(tiny(family), "lm", lora)
    if message is not None:
        assert reason is not None
        assert re.search(message, reason), reason
        return
    assert reason is None
    names = adapted_shapes(tiny(family), "lm", lora)
    assert len(names) == (1 if "layers" in targets[0] else 4)
    assert len(adapter_shapes(tiny(family), "lm", lora)) == 2 * len(names)


@pytest.mark.parametrize("part", [None, "text_config"])
def test_layers_named_like_stacked_experts_are_target_parameters(part: str | None) -> None:
    sizes = {"n_routed_experts": 4}
    values = {"model_type": "glm4v_moe", **({part: sizes} if part else sizes)}
    names = ["mlp.shared_experts.up_proj", "self_attn.q_proj"]
    found = peft_targets(values, Lora(rank=2), [f"{MODULE}{name}" for name in names])
    assert found == (["self_attn.q_proj"], ["mlp.shared_experts.up_proj.weight"])


def test_adapter_files_of_another_model_are_rejected(tmp_path: Path) -> None:
    """An export would merge the adapters with them."""
    tiny_model("llama", tmp_path)
    model = read(tmp_path, "llama")
    attach_to(model, Lora(targets=("v_proj",)))
    require_as_stored(model, tmp_path, 0, 1)
    tiny_model("llama", tmp_path, seed=1)
    with pytest.raises(UsageError, match=r"changes model.layers.\d.self_attn.v_proj.weight"):
        require_as_stored(model, tmp_path, 0, 1)
    specs = open_folder(tmp_path).specs()
    for name, shape, message in (
        ("inner.model.layers.0.self_attn.v_proj.weight", (3, 3), "in another form"),
        ("inner.model.layers.7.self_attn.v_proj.weight", (16, 24), "in another form"),
    ):
        with pytest.raises(UsageError, match=message):
            adapted_tensors({name: shape}, specs, tmp_path, model.config, "lm")
    shape = specs["model.layers.0.self_attn.v_proj.weight"].shape
    names = (f"inner.model.layers.0.{each}.v_proj.weight" for each in ("self_attn", "cross_attn"))
    with pytest.raises(UsageError, match=r"cross_attn.v_proj.weight ambiguously \(model.layers.0"):
        adapted_tensors(dict.fromkeys(names, shape), specs, tmp_path, model.config, "lm")
