"""A whole trial on the megatron engine has the numbers of one fsdp rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_local_elastic import assert_close, config_of
from tests.distributed.test_local_layouts import REWARDED
from tests.support.hooks import ROOT, hooked, write_hook
from tests.support.trials import Site


def let_megatron_compute_here(
    site: Site, folder: Path, trial: str, kind: str = "sft"
) -> dict[str, str]:
    """The part of ``cluster`` with which megatron-core works on a CPU; commands of ``site`` accept
    it there.
    """
    accept, install = (f"tests.support.megatron_cpu:{name}" for name in ("accept", "install"))
    write_hook(folder / f"{trial}.submit", "slurmrl.plan.resources", accept)
    site.environment["PYTHONPATH"] = f"{folder / f'{trial}.submit'}:{ROOT}"
    return hooked(site, folder, f"{kind}.{trial}", "slurmrl.engines.megatron", install)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["t2", pytest.param("p2", marks=pytest.mark.soak)])
def test_a_trial_learns_the_same_on_megatron(tmp_path: Path, layout: str) -> None:
    """It resumes from its own checkpoint, and then on another engine; its export equals those of
    others.
    """
    site = Site(tmp_path)
    one = site.write("one.yaml", config_of("sft", trial="one", total_steps=6))
    site.slurmrl("submit", str(one), "--scheduler", "local", "--wait")
    config = config_of("sft", trial="many", total_steps=4)
    sizes = {"make_vocab_size_divisible_by": 1, "sequence_parallel": layout == "t2"}
    config["actor"] |= {"backend": f"megatron:{layout}", "model": sizes}
    config["cluster"] |= let_megatron_compute_here(site, tmp_path, "many")
    many = site.write("many.yaml", config)
    site.slurmrl("submit", str(many), "--scheduler", "local", "--wait")
    site.slurmrl("resume", "sft/many", "total_steps=6", "--wait")
    assert_close(site.metrics("sft/many"), site.metrics("sft/one"))
    other = ("actor.backend=fsdp:d1", "actor.model=null", "total_steps=7")
    site.slurmrl("resume", "sft/many", *other, "--wait")
    assert site.metrics("sft/many")[-1]["step"] == 7
    assert site.paths("sft/many").export(7).is_dir()


@pytest.mark.long
def test_models_with_engines_of_their_own(tmp_path: Path) -> None:
    """The actor on fsdp, the critic on two pipeline stages and the reference on two tensor ranks of
    megatron: the numbers are those of one fsdp rank.
    """
    site = Site(tmp_path)
    for trial in ("one", "mixed"):
        config = config_of("ppo", trial=trial, total_steps=3)
        config["algorithm"] |= REWARDED
        if trial == "mixed":
            config["actor"]["backend"] = "fsdp:d2"
            sizes = {"make_vocab_size_divisible_by": 1}
            config["critic"] = config.get("critic", {}) | {"backend": "megatron:p2", "model": sizes}
            config["ref"] = config.get("ref", {}) | {"backend": "megatron:t2", "model": sizes}
            config["cluster"] |= let_megatron_compute_here(site, tmp_path, trial, "ppo")
        file = site.write(f"{trial}.yaml", config)
        site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
    assert_close(site.metrics("ppo/mixed"), site.metrics("ppo/one"))
