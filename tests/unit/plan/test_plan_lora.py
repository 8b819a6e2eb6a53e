"""Adapters in plans: the reference without a model of its own, estimates, refusals."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slurmrl.config.allocation import parse
from slurmrl.desk.trial_checks import checkpoint_bytes, version_bytes
from slurmrl.engines.planned import planned_layout
from slurmrl.env import user_name
from slurmrl.errors import ConfigError
from slurmrl.models.adapters import trained_shapes
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.shapes import parameter_shapes
from slurmrl.plan.build import make_plan
from slurmrl.plan.estimates.added_sizes import adapted_parameters, adapter_parameters
from slurmrl.plan.estimates.call_costs import memories
from slurmrl.plan.estimates.memory import BYTES
from slurmrl.plan.estimates.shape import (
    parameters,
    read,
)
from slurmrl.plan.estimates.worker_memory import WORKER, task_bytes, worker_bytes
from slurmrl.plan.model import Plan
from slurmrl.plan.plan_document import document
from slurmrl.plan.plan_values import report
from slurmrl.plan.settings import Settings
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin
from slurmrl.run.paths import RunPaths
from tests.unit.plan.conftest import LARGE, Load

GPT2 = {"model_type": "gpt2", "vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
SHARED = {
    **LARGE,
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT = {
    **SHARED,
    "model_type": "deepseek_v3",
    "num_key_value_heads": LARGE["num_attention_heads"],
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}
OF_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "up_proj"]
LORA = "actor.lora={rank: 4}"


@pytest.fixture
def load(folder: Path, load_ppo: Load) -> Load:
    """The configuration with adapters of the actor, on a larger model than its folder's."""

    def loaded(*overrides: str, architecture: dict[str, Any] = LARGE) -> Settings:
        (folder / "model" / "config.json").write_text(json.dumps(architecture))
        return load_ppo("dataset.max_prompt_tokens=64", *overrides)

    return loaded


def planned(settings: Settings) -> Plan:
    return make_plan(settings, scheduler="slurm")


def test_reference_is_the_actor_without_adapters(load: Load) -> None:
    """The plan has no model for the reference. Its call runs on the actor's ranks."""
    settings = load(LORA, "actor.offload=true")
    plan = planned(settings)
    assert set(plan.models) == {"actor", "critic"}
    call = next(call for call in plan.calls if call.role == "ref")
    assert (call.layout, call.base, call.ranks) == ("actor", True, plan.models["actor"].ranks)
    assert [str(hook) for hook in call.post_hooks] == ["offload actor"]
    assert [other.base for other in plan.calls if other.role != "ref"].count(True) == 0
    assert Plan.from_json(plan.to_json()) == plan
    shown = report(settings, plan)
    assert next(row for row in shown["calls"] if row["name"] == "ref_inf")["base"]
    assert "ref" not in memories(settings)


@pytest.mark.parametrize(
    "own",
    [
        "ref.backend=fsdp:t2",
        "ref.gpus=2-3",
        "ref.dtype=bfloat16",
        "ref.max_tokens_per_microbatch=128",
        "ref.path=other",
        "ref.ema=0.5",
    ],
)
def test_differing_reference_is_a_separate_model(load: Load, folder: Path, own: str) -> None:
    """The reference's setting applies."""
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text(json.dumps(LARGE))
    own = own.replace("=other", f"={folder / 'other'}")
    plan = planned(load(LORA, "actor.dtype=float32", own))
    assert "ref" in plan.models
    assert not any(call.base for call in plan.calls)


def test_estimates_count_frozen_weights_and_trained_adapters(load: Load) -> None:
    """The plan shows how much less memory the fullest GPU needs. Checkpoints contain only the
    adapters.
    """
    plain, adapted = load(), load(LORA, "critic.lora={rank: 4}")
    before, after = memories(plain)["actor"], memories(adapted)["actor"]
    assert after.optimizer < before.optimizer / 10
    assert after.gradients < before.gradients / 10
    assert checkpoint_bytes(adapted) < checkpoint_bytes(plain) / 10
    shown = report(adapted, planned(adapted))
    full = report(plain, planned(plain))
    assert shown["memory"]["without_adapters_bytes"] == full["memory"]["bytes"]
    assert full["memory"]["without_adapters_bytes"] is None
    text = str(document(shown))
    assert "with all weights trained" in text
    assert "adapters of rank 4" in text


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "o_proj", "up_proj"]])
def test_number_of_trained_parameters_is_exact(load: Load, head: Any, targets: Any) -> None:
    settings = load(f"actor.lora={{rank: 4, targets: {json.dumps(targets)}}}")
    lora, shape = settings.config.actor.lora, read(LARGE)
    assert lora is not None
    assert shape is not None
    tensors = trained_shapes(ModelConfig.from_hf(LARGE), head, lora)
    total = sum(rows * columns for rows, columns in tensors.values())
    assert adapter_parameters(settings.config.actor, shape, parse("fsdp:d1"), head) == total
    weights = parameter_shapes(ModelConfig.from_hf(LARGE), head)
    adapted = sum(
        prod(weights[f"{name.removesuffix('.lora_A')}.weight"])
        for name in tensors
        if name.endswith(".lora_A")
    )
    assert adapted_parameters(settings.config.actor, shape) == adapted


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(
    ("architecture", "targets"),
    [(SHARED, ["q_proj", "gate_proj", "down_proj"]), (LATENT, OF_LATENT)],
    ids=["shared experts", "latent attention"],
)
def test_number_of_trained_parameters_counts_layers_of_the_family(
    load: Load, head: Any, architecture: dict[str, Any], targets: list[str]
) -> None:
    """The first layer is dense. In the others, the layers of shared experts have the same names as
    its layers.
    """
    chosen = f"actor.lora={{rank: 4, targets: {json.dumps(targets)}}}"
    settings = load(chosen, architecture=architecture)
    lora, shape = settings.config.actor.lora, read(architecture)
    assert lora is not None
    assert shape is not None
    tensors = trained_shapes(ModelConfig.from_hf(architecture), head, lora)
    assert any("shared_experts" in name for name in tensors)
    total = sum(prod(size) for size in tensors.values())
    assert adapter_parameters(settings.config.actor, shape, parse("fsdp:d1"), head) == total


def test_rollout_hosts_have_space_for_adapters_and_merged_weights(load: Load) -> None:
    """Trainers keep copies of only the adapters. A task keeps the frozen weights, and two copies of
    the merged weights: almost all weights with all-linear, few with one target.
    """
    tasks = "rollout.tasks={max: 1}"
    plain, adapted = load(tasks), load(tasks, LORA)
    few = load(tasks, "actor.lora={rank: 4, targets: [q_proj]}")
    shape = read(LARGE)
    assert shape is not None
    dtype = BYTES[plain.config.actor.dtype]
    weights = dtype * parameters(shape, parse("fsdp:d1"), "lm").total
    copies = []
    for settings in (plain, adapted, few):
        size = task_bytes(settings)
        assert size is not None
        copies.append((size - WORKER) / weights)
    assert copies[0] == pytest.approx(2)
    assert 1 < copies[2] < 1.2 < 1.8 < copies[1] < 3
    saved = [
        (worker_bytes(one) or 0) - (worker_bytes(load(*more)) or 0)
        for one, more in ((plain, ()), (adapted, (LORA,)))
    ]
    on_disk = version_bytes(adapted)
    assert adapted.config.actor.lora is not None
    assert adapted.config.rollout.publish is not None
    of_adapters = 4 * adapter_parameters(adapted.config.actor, shape, parse("fsdp:d1"), "lm")
    assert on_disk == (adapted.config.rollout.publish.keep_whole + 1) * of_adapters
    assert 0 < saved[1] < saved[0] / 20


def test_planned_layout_has_the_dtype_of_the_role(load: Load) -> None:
    """The merged weights move to generation in that type."""
    settings = load(LORA, "actor.dtype=bfloat16")
    model = planned(settings).models["actor"]
    layout = planned_layout(model, settings.config.actor, ModelConfig.from_hf(LARGE))
    assert {spec.dtype for spec in layout.tensors.values()} == {"bfloat16"}


HF = "actor.implementation=hf"
DEEPSEEK = {
    **LARGE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize("targets", ["null", "all-linear", "[q_proj, o_proj, up_proj]"])
@pytest.mark.parametrize("architecture", [LARGE, DEEPSEEK])
def test_adapters_of_transformers_models_are_counted(
    load: Load, targets: str, architecture: dict[str, Any]
) -> None:
    """The number is exact for a family whose layers the estimates of weights do not know."""
    if architecture is DEEPSEEK:
        targets = targets.replace("q_proj", "q_b_proj")
    setting = f"actor.lora={{rank: 4, targets: {targets}}}"
    settings = load(setting, HF, architecture=architecture)
    plan = planned(settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    names = targets.strip("[]").split(", ")
    if targets == "null" and architecture is LARGE:
        names = ["q_proj", "v_proj"]
    every = names[0] in ("null", "all-linear")
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
        if every or name.rpartition(".")[2] in names
    ]
    expected = sum(4 * (layer.in_features + layer.out_features) for layer in layers)
    shown = report(settings, plan)["models"]["actor"]["lora"]
    assert shown["trained_parameters"] == expected
    actor, full = memories(settings)["actor"], memories(load(HF, architecture=architecture))
    assert actor.optimizer == pytest.approx(
        8 * expected / plan.models["actor"].sizes["dp"], rel=0.1
    )
    assert actor.optimizer < full["actor"].optimizer


@pytest.mark.parametrize(
    ("setting", "architecture", "message"),
    [
        ("targets: [qkv]", LARGE, "this llama model has no linear layer 'qkv'; it has down_proj"),
        ("targets: [lm_head]", LARGE, "'lm_head' is the output layer"),
        ("targets: [gate_up_proj]", DEEPSEEK, "of all experts as one tensor"),
        ("rank: 4", {**LARGE, "hidden_act": "no"}, "cannot build a llama model: 'no'"),
    ],
)
def test_wrong_adapter_targets_of_transformers_models_are_rejected(
    load: Load, setting: str, architecture: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(f"actor.lora={{{setting}}}", HF, architecture=architecture)
    (problem,) = [each for each in refused.value.problems if each.key == "actor.lora"]
    assert message in problem.message, problem.message


def test_wrong_adapter_targets_of_the_decoder_are_rejected(load: Load) -> None:
    for name in ("qkv", "lm_head", "embed_tokens", "input_layernorm"):
        with pytest.raises(ConfigError, match=f"no linear layer '{name}'; it has q_proj, k_proj"):
            load(f"actor.lora={{targets: [{name}]}}")


def committed(folder: Path, *steps: int) -> RunPaths:
    """A trial with checkpoints of these steps."""
    paths = RunPaths.of(folder / "runs", user_name(), "other", "1")
    paths.history.mkdir(parents=True)
    writer = begin(History(paths.history), {})
    for step in steps:
        writer.append(Kind.COMMIT, {"step": step, "directory": f"step-{step:08d}.1"})
    return paths


MERGE = r"slurmrl export other/1 --step {} --form merged"


@pytest.mark.parametrize(
    ("names", "reference", "message"),
    [
        (["3-adapter"], "", rf"newest export .* \(step 3\) is an adapter; .*: {MERGE.format(3)}$"),
        (["3-adapter"], "@3", rf"\(exports in .*: 3 \(adapter\)\), .*: {MERGE.format(3)}$"),
        (["3-adapter"], "@2", rf"{MERGE.format(2)}$"),
        (["2", "3-adapter"], "", rf"{MERGE.format(3)}, or name an older export: trial:other/1@2$"),
        (["1", "3-adapter"], "@2", rf"in .*: 1, 3 \(adapter\)\), .*: {MERGE.format(2)}$"),
        (["4-critic-adapter"], "", r"first let that trial finish: slurmrl submit <.*>$"),
    ],
)
def test_adapter_directory_is_rejected_as_start_model(
    load: Load, folder: Path, names: list[str], reference: str, message: str
) -> None:
    """The message has a working command that exports the whole model of this step. An older whole
    model never silently replaces a newer adapter.
    """
    paths = committed(folder, 2, 3)
    for name in names:
        step, _, rest = name.partition("-")
        (paths.exports / f"step-{int(step):08d}{rest and '-'}{rest}").mkdir(parents=True)
    with pytest.raises(ConfigError) as refused:
        load(f"actor.path=trial:other/1{reference}")
    (problem,) = [each for each in refused.value.problems if each.key == "actor.path"]
    assert re.search(message, problem.message), problem.message


@pytest.mark.parametrize(
    ("values", "merges"),
    [
        ("{actor: {lora: {rank: 2}}, checkpoint: {export_form: adapter}}", True),
        ("{actor: {lora: null}, checkpoint: {export_form: adapter}}", False),
        ("{actor: null}", False),
        ("actor: [", False),
    ],
)
def test_trial_that_exports_an_adapter_is_rejected_as_start_model(
    load: Load, folder: Path, values: str, merges: bool
) -> None:
    """The configuration shows this before the trial has an export."""
    committed(folder, 2).config.write_text(values)
    for reference, command in (
        ("", "slurmrl export other/1"),
        ("@2", "slurmrl export other/1 --step 2"),
    ):
        with pytest.raises(ConfigError) as refused:
            load(f"actor.path=trial:other/1{reference}")
        (problem,) = [each for each in refused.value.problems if each.key == "actor.path"]
        assert problem.message.endswith(f"{command} --form merged") == merges, problem.message
