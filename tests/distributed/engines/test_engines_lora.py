"""Low-rank adapters on the fsdp engine, against PEFT on the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slurmrl.config.schema.roles import Lora
from slurmrl.engines.base import Outputs
from slurmrl.models.adapters import trained_shapes, write_adapter
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.model_tensors import MergedCheckpoint
from slurmrl.models.shapes import file_form
from slurmrl.tensors.checkpoint.export import export
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.layout import Box
from tests.distributed.engines import cases
from tests.distributed.engines.cases import Setup, batch
from tests.distributed.engines.one_process import random_model
from tests.distributed.engines.test_engines_layouts import MODELS, setup_of
from tests.pool import RankError, RankPool

CASES = "tests.distributed.engines.cases"
HERE = "tests.distributed.engines.lora_cases"
LORA = {"rank": 3, "alpha": 5.0}
"""The ranks of A are fewer than those of a layout, so that some have none of its rows."""
BOUND = 1e-5
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "d1": ({"dp": 1}, {"gradient_checkpointing": "selective"}),
    "d2": ({"dp": 2}, {"layers": True, "gradient_checkpointing": "full"}),
    "t2": ({"tp": 2}, {}),
    "d2t2": ({"dp": 2, "tp": 2}, {"layers": True, "cpu_offload": True}),
    "c2t2": ({"cp": 2, "tp": 2}, {"sequence": True}),
    "t4": ({"tp": 4}, {"sequence": True}),
}


@dataclass(frozen=True)
class Reference:
    """A checkpoint of adapters after one step, and PEFT's results with the same adapters."""

    folder: Path
    lora: Lora
    head: Any
    outputs: dict[str, Tensor]
    base: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]
    family: str = "qwen3"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def setup(self, layout: str) -> Setup:
        sizes, options = LAYOUTS[layout]
        setup = setup_of(sizes, MODELS[self.family], head=self.head, **options)
        lora = self.lora.model_dump()
        settings = {**setup.model, "architecture": None, "lora": lora}
        return replace(setup, source=self.model, model=settings)


def made(ranks: RankPool, folder: Path, head: Any, lora: Lora, family: str = "qwen3") -> Reference:
    """Train adapters for one step in one process, and load their export with PEFT."""
    random_model(folder / "model", MODELS[family], head)
    (folder / "checkpoint").mkdir()
    empty = Reference(folder, lora, head, {}, {}, 0.0, {}, family)
    ranks(1, f"{CASES}:train", empty.setup("d1"), save=empty.checkpoint)
    trained = RoleCheckpoint(empty.checkpoint, "actor")
    write_adapter(trained, folder / "adapter", lora, head, base=str(empty.model))
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    base = auto.from_pretrained(empty.model, **options)
    # PEFT's own reading of the export
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        model = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    model = model.double().eval()
    frozen: Outputs = {}
    if head == "lm":  # (PEFT's critic without adapters has the head that it started with)
        with torch.no_grad(), model.disable_adapter():
            frozen = outputs_of(model, head)
    outputs = outputs_of(model, head)
    total = cases.loss(outputs, batch(1))[0] / cases.denominator(batch(1))
    torch.autograd.backward(total)
    gradients = {ours(n): p.grad for n, p in model.named_parameters() if p.requires_grad}
    found = {name: values.detach() for name, values in outputs.items()}
    return Reference(folder, lora, head, found, frozen, total.item(), gradients, family)


def ours(name: str) -> str:
    """Our name of a parameter that PEFT trains."""
    short = name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
    return short.removesuffix(".default.weight")


def outputs_of(model: Any, head: Any) -> Outputs:
    """The engine's outputs of the batch, one sequence at a time."""
    sample = batch(1)
    found: list[Outputs] = []
    for begin, end in pairwise(sample.cu_seqlens("input_ids").tolist()):
        ids = sample.tensor("input_ids")[begin:end]
        if head == "value":
            hidden = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
            found.append({"values": model.base_model.model.score(hidden).squeeze(-1)})
            continue
        logq = model(ids[None]).logits[0, :-1].log_softmax(-1)
        first = logq.new_zeros(1)
        logp = torch.cat([first, logq.gather(-1, ids[1:, None]).squeeze(-1)])
        entropy = torch.cat([first, -(logq.exp() * logq).sum(-1)])
        found.append({"logp": logp, "entropy": entropy})
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


@pytest.fixture(scope="module")
def reference(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return made(ranks, tmp_path_factory.mktemp("lora"), "lm", Lora(**LORA))


def leaders(setup: Setup) -> Iterator[tuple[int, list[int]]]:
    """A rank of each share of the batch, and the share's items."""
    others = setup.ranks // len(setup.split)
    return ((index * others, list(items)) for index, items in enumerate(setup.split))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapter_step_equals_peft(
    ranks: RankPool, reference: Reference, tmp_path: Path, layout: str
) -> None:
    """Covers outputs with and without adapters, the loss and every gradient. All layouts load the
    same checkpoint.
    """
    assert_step(ranks, reference, tmp_path, layout)


def test_critic_with_adapters_also_trains_its_value_head(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    lora = Lora(rank=2, targets=("q_proj", "v_proj", "down_proj"), rslora=True)
    value = made(ranks, tmp_path_factory.mktemp("value"), "value", lora)
    assert "score.weight" in value.gradients
    assert_step(ranks, value, tmp_path, "d2t2")


def test_adapters_of_latent_attention_equal_peft(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Each tensor rank has the whole adapters of latent vectors and a part of their gradients."""
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    lora = Lora(rank=3, alpha=5.0, targets=targets)
    latent = made(ranks, tmp_path_factory.mktemp("latent"), "lm", lora, "deepseek_v3")
    assert_step(ranks, latent, tmp_path, "c2t2")


def assert_step(ranks: RankPool, reference: Reference, folder: Path, layout: str) -> None:
    setup = reference.setup(layout)
    results = ranks(setup.ranks, f"{HERE}:loaded", setup, reference.checkpoint)
    for rank, items in leaders(setup):
        for found, expected in zip(
            results[rank], (reference.outputs, reference.base), strict=False
        ):
            for name in expected:
                values, whole = found[name], batch(1)
                whole.data["returns"] = expected[name]
                torch.testing.assert_close(
                    values.double(), whole.take(items).tensor("returns"), rtol=BOUND, atol=BOUND
                )
    trained = ranks(
        setup.ranks, f"{CASES}:train", setup, range(1, 2), load=reference.checkpoint, save=folder
    )
    ((stats,), _) = trained[0]
    assert stats["loss"] == pytest.approx(reference.loss, rel=BOUND)
    saved = RoleCheckpoint(folder, "actor")
    assert {name for name, _ in saved.weights()} == set(reference.gradients)
    for name, gradient in reference.gradients.items():
        found = torch.from_numpy(saved.read(f"exp_avg/{name}")).double()
        bound = BOUND * gradient.abs().max().item()
        torch.testing.assert_close(found, gradient, rtol=0, atol=bound, msg=name)


def test_merged_weights_equal_peft(ranks: RankPool, reference: Reference, tmp_path: Path) -> None:
    """The weights that the engine moves equal the export bit for bit. transformers computes PEFT's
    logits from the export.
    """
    config = ModelConfig.from_hf(MODELS["qwen3"])
    trained = RoleCheckpoint(reference.checkpoint, "actor")
    weights = MergedCheckpoint(trained, reference.model, config, "lm", reference.lora)
    values, storage = file_form(MODELS["qwen3"], "builtin", "lm")
    target = export(weights, values, tmp_path / "export", generation={}, storage=storage)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    with torch.no_grad():
        for name, found in outputs_of(loaded, "lm").items():
            torch.testing.assert_close(found, reference.outputs[name], rtol=BOUND, atol=BOUND)
    setup = reference.setup("d2t2")
    whole = {name: weights.read(name, Box.whole(spec.shape)) for name, spec in weights.weights()}
    for _, _, chunks in ranks(setup.ranks, f"{HERE}:loaded", setup, reference.checkpoint):
        for name, begin, chunk in chunks:
            expected = whole[name][Box(begin, tuple(chunk.shape)).slices]
            np.testing.assert_array_equal(chunk.numpy(), expected)


def test_resume_with_other_frozen_weights_is_rejected(
    ranks: RankPool, reference: Reference, tmp_path: Path
) -> None:
    """The fingerprint is the same on every layout. Checkpoints of older versions have none."""
    kept = RoleCheckpoint(reference.checkpoint, "actor").frozen
    assert kept is not None
    other = tmp_path / "model"
    random_model(other, MODELS["qwen3"], seed=8)
    setup = reference.setup("t2")
    with pytest.raises(RankError, match=f"weights in actor.path have changed.*was {kept} and is"):
        ranks(2, f"{HERE}:loaded", replace(setup, source=other), reference.checkpoint)
    older = tmp_path / "older"
    shutil.copytree(reference.checkpoint, older)
    path = older / "actor.layout.json"
    values = json.loads(path.read_bytes())
    del values["frozen"]
    path.write_text(json.dumps(values))
    ranks(2, f"{HERE}:loaded", replace(setup, source=other), older)


@pytest.mark.parametrize("layout", ["d1", "d2", "d2t2"])
def test_only_adapters_are_trained_and_committed(
    ranks: RankPool, reference: Reference, tmp_path: Path, layout: str
) -> None:
    """In bfloat16, frozen weights have that type. Adapters, moments and files are float32."""
    setup = reference.setup(layout)
    setup = replace(setup, model={**setup.model, "dtype": "bfloat16"})
    losses = set()
    trained = trained_shapes(ModelConfig.from_hf(MODELS["qwen3"]), "lm", reference.lora)
    for dtypes, frozen, loss in ranks(setup.ranks, f"{HERE}:stored", setup):
        assert frozen
        for name, dtype in dtypes.items():
            assert dtype == (torch.float32 if name in trained else torch.bfloat16), name
        losses.add(loss)
    assert len(losses) == 1
    ranks(setup.ranks, f"{CASES}:train", setup, save=tmp_path)
    saved = RoleCheckpoint(tmp_path, "actor").layout.tensors
    moments = ("", "exp_avg/", "exp_avg_sq/")
    assert set(saved) == {f"{moment}{name}" for moment in moments for name in trained}
    assert {spec.dtype for spec in saved.values()} == {"float32"}


def test_offload_includes_frozen_weights(ranks: RankPool, reference: Reference) -> None:
    for during, offloaded, kept in ranks(2, f"{HERE}:offloaded", reference.setup("d2")):
        assert during == 0
        assert offloaded == kept


def test_dropout_does_not_depend_on_the_layout(
    ranks: RankPool, reference: Reference, tmp_path: Path
) -> None:
    """Losses of several steps are equal in all layouts and after a restart, and differ from losses
    without dropout. Outputs without gradients have no dropout.
    """
    lora = reference.lora.model_copy(update={"dropout": 0.4})
    dropping = replace(reference, lora=lora)
    found = {}
    for layout in ("d1", "d2", "c2t2"):
        setup = dropping.setup(layout)
        (found[layout], _), *_ = ranks(setup.ranks, f"{CASES}:train", setup, range(3))
    losses = {layout: [step["loss"] for step in stats] for layout, stats in found.items()}
    assert losses["d2"] == pytest.approx(losses["d1"], rel=BOUND)
    assert losses["c2t2"] == pytest.approx(losses["d1"], rel=BOUND)
    setup = dropping.setup("d2")
    ranks(2, f"{CASES}:train", setup, range(2), save=tmp_path)
    (rest, _), *_ = ranks(2, f"{CASES}:train", setup, range(2, 3), load=tmp_path)
    assert rest == found["d2"][2:]
    (without, _), *_ = ranks(2, f"{CASES}:train", reference.setup("d2"), range(3))
    assert abs(without[2]["loss"] - losses["d2"][2]) > 1e-3
    (outputs, _, _), *_ = ranks(1, f"{HERE}:loaded", dropping.setup("d1"), reference.checkpoint)
    expected = reference.outputs["logp"].float()
    torch.testing.assert_close(outputs["logp"], expected, rtol=BOUND, atol=BOUND)
