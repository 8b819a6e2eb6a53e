"""A whole trial on the megatron engine has the numbers of one fsdp rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_local_elastic import assert_close, config_of
from tests.support.hooks import ROOT, hooked, write_hook
from tests.support.rotation import in_turn, rotating
from tests.support.trials import ARCHITECTURE, REPOSITORY, Site

EXAMPLE = REPOSITORY / "examples" / "megatron_moe.yaml"
REWARDED = {"reward_bias": 1.0, "mask_no_eos_with_zero": True}
"""A random model never answers correctly; all numbers would be rounding errors."""


CORRECTED = {
    **ARCHITECTURE,
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {
    **CORRECTED,
    "model_type": "deepseek_v3",
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
SINKS = {
    **ARCHITECTURE,
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 16,
    "sliding_window": 4,
}


def let_megatron_compute_here(site: Site, folder: Path, trial: str) -> list[str]:
    """Return ``code`` that lets megatron-core run on a CPU. Commands of ``site`` then accept it."""
    accept, install = (f"tests.support.megatron_cpu:{name}" for name in ("accept", "install"))
    write_hook(folder / f"{trial}.submit", "slurmrl.plan.build", accept)
    site.environment["PYTHONPATH"] = f"{folder / f'{trial}.submit'}:{ROOT}"
    return hooked(folder, trial, "slurmrl.engines.megatron", install)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "architecture"),
    rotating(
        pytest.param("t2", ARCHITECTURE),
        pytest.param("p2", CORRECTED),
        pytest.param("t2", LATENT),
        pytest.param("p2", SINKS),
        pytest.param("p2", ARCHITECTURE),
        shares=8,
    ),
)
def test_trial_learns_the_same_weights_on_megatron(
    tmp_path: Path, layout: str, architecture: dict[str, Any]
) -> None:
    """The trial resumes from its own checkpoint, then on another engine.

    Its export equals the exports of others.
    """
    site = Site(tmp_path)
    config = config_of("sft", trial="one", total_steps=6)
    config["actor"]["architecture"] = architecture
    one = site.write("one.yaml", config)
    site.slurmrl("submit", str(one), "--scheduler", "local", "--wait")
    config = config_of("sft", trial="many", total_steps=4)
    config["actor"]["architecture"] = architecture
    sizes = {"make_vocab_size_divisible_by": 1, "sequence_parallel": layout == "t2"}
    config["actor"] |= {"backend": f"megatron:{layout}", "model": sizes}
    config["code"] = let_megatron_compute_here(site, tmp_path, "many")
    many = site.write("many.yaml", config)
    site.slurmrl("submit", str(many), "--scheduler", "local", "--wait")
    site.slurmrl("resume", "sft/many", "total_steps=6", "--wait")
    assert_close(site.metrics("sft/many"), site.metrics("sft/one"))
    other = ("actor.backend=fsdp:d1", "actor.model=null", "total_steps=7")
    site.slurmrl("resume", "sft/many", *other, "--wait")
    assert site.metrics("sft/many")[-1]["step"] == 7
    assert site.paths("sft/many").export(7).is_dir()


@pytest.mark.long
@pytest.mark.parametrize("layout", rotating("c2", "p2", first=5, shares=8))
def test_archon_trial_learns_the_same_weights_on_either_engine(tmp_path: Path, layout: str) -> None:
    site = Site(tmp_path)
    one = site.write("one.yaml", config_of("sft", trial="one", total_steps=3))
    site.slurmrl("submit", str(one), "--scheduler", "local", "--wait")
    config = config_of("sft", trial="many", total_steps=3)
    config["actor"]["backend"] = f"archon:{layout}"
    if layout == "p2":
        config["actor"]["model"] = {"make_vocab_size_divisible_by": 1}
        config["code"] = let_megatron_compute_here(site, tmp_path, "many")
    many = site.write("many.yaml", config)
    plan = site.slurmrl("plan", str(many)).stdout
    assert f"'archon:{layout}' runs as {'megatron' if layout == 'p2' else 'fsdp'}:" in plan
    site.slurmrl("submit", str(many), "--scheduler", "local", "--wait")
    assert_close(site.metrics("sft/many"), site.metrics("sft/one"))


@pytest.mark.long
@in_turn(7, 8)
def test_example_with_experts_has_the_losses_of_one_rank(tmp_path: Path) -> None:
    """Tensor, pipeline and expert ranks compute the losses of one fsdp rank.

    Generation ranks give the same answers.
    """
    site, trial = Site(tmp_path), "addition-megatron-moe"
    short = ("total_steps=6", "algorithm.batch_size=16", "evaluation.samples=16")
    one_rank = ("actor.backend=fsdp:d1", "actor.model=null", "rollout.backend=native:d1")
    submit = ("submit", str(EXAMPLE), "--scheduler", "local", "--wait", *short)
    site.slurmrl(*submit, "trial=one", *one_rank)
    code = let_megatron_compute_here(site, tmp_path, "1")
    site.slurmrl(*submit, f"code={json.dumps(code)}")
    found, expected = site.metrics(f"{trial}/1"), site.metrics(f"{trial}/one")
    assert_close(found, expected)
    assert found[-1]["loss"] < 0.9 * found[1]["loss"]
    assert found[-1]["eval/response_length"] > 0
