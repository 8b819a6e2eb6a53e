"""A whole trial on the megatron engine has the numbers of one fsdp rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_local_elastic import assert_close, config_of
from tests.support.trials import Site

ROOT = Path(__file__).resolve().parents[2]
HOOK = """
import sys

class Hook:
    def find_spec(self, name, path, target=None):
        if name == "slurmrl.engines.megatron.entry":
            sys.meta_path.remove(self)
            from tests.support.megatron_cpu import install
            install()

sys.meta_path.insert(0, Hook())
"""
"""Installed before the engine's import, so that megatron-core works on a CPU."""


def let_megatron_compute_here(site: Site, folder: Path, trial: str) -> dict[str, str]:
    """The part of ``cluster`` that installs the hook in the trial's processes."""
    hook, variables = folder / "hook", folder / f"{trial}.variables"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK)
    code = site.paths(f"sft/{trial}").code
    variables.write_text(f"PYTHONPATH={code}:{hook}:{ROOT}\n")
    variables.chmod(0o600)
    return {"variables_file": str(variables)}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["t2", "p2"])
def test_a_trial_learns_the_same_on_megatron(tmp_path: Path, layout: str) -> None:
    """It resumes from its own checkpoint, and then on another engine; its export equals those of
    others."""
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
