"""A whole trial on the megatron engine: the numbers are those of one fsdp rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_local_elastic import assert_close, config_of
from tests.support.trials import Site, kill_one

STEPS = 40
"""Enough for one of them to be interrupted."""
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
"""In front of the engine's import: megatron-core works on a CPU."""


def let_megatron_compute_here(site: Site, folder: Path, trial: str) -> dict[str, str]:
    """The part of ``cluster`` that brings the hook into the trial's processes."""
    hook, variables = folder / "hook", folder / f"{trial}.variables"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK)
    code = site.paths(f"sft/{trial}").code
    variables.write_text(f"PYTHONPATH={code}:{hook}:{ROOT}\n")
    variables.chmod(0o600)
    return {"variables_file": str(variables)}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["t2", "p2", "d2"])
def test_a_trial_learns_the_same_on_megatron(tmp_path: Path, layout: str) -> None:
    """And its checkpoints, the one after a worker's death too, go on and out as all others do."""
    site = Site(tmp_path)
    one = site.write("one.yaml", config_of("sft", trial="one", total_steps=STEPS))
    site.slurmrl("submit", str(one), "--scheduler", "local", "--wait")
    config = config_of("sft", trial="many", total_steps=STEPS)
    sizes = {"make_vocab_size_divisible_by": 1, "sequence_parallel": layout == "t2"}
    config["actor"] |= {"backend": f"megatron:{layout}", "model": sizes}
    config["cluster"] |= let_megatron_compute_here(site, tmp_path, "many")
    many = site.write("many.yaml", config)
    site.slurmrl("submit", str(many), "--scheduler", "local")
    site.wait_for_step("sft/many", 2)
    kill_one(site.paths("sft/many").run, "worker")
    site.wait_for_end("sft/many")
    assert_close(site.metrics("sft/many"), site.metrics("sft/one"))
    site.slurmrl(
        "resume",
        "sft/many",
        "actor.backend=fsdp:d1",
        "actor.model=null",
        f"total_steps={STEPS + 2}",
        "--wait",
    )
    assert site.metrics("sft/many")[-1]["step"] == STEPS + 2
    assert site.paths("sft/many").export(STEPS + 2).is_dir()
