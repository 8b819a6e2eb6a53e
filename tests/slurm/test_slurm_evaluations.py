"""Separate jobs, which the trainers' job submits, evaluate checkpoints."""

from __future__ import annotations

import pytest

from slurmrl.run import metrics
from tests.support.rotation import EVALUATIONS, in_turn
from tests.support.trials import ADDITION, Site, sft_config


@pytest.mark.long
@in_turn(0, EVALUATIONS)
def test_job_submits_the_evaluation_of_its_checkpoint(site: Site) -> None:
    """The evaluation has its own layout and Slurm options.

    The metrics of the trial contain its result.
    """
    config = sft_config(
        total_steps=2,
        trial="1",
        cluster={
            "workers_per_host": 1,
            "gpus_per_worker": 0,
            "interface": "lo",
            "slurm": {"partition": "main", "time": "30"},
        },
        evaluation={
            "dataset": {"type": "prompt_answer", "path": str(ADDITION / "heldout.jsonl")},
            "samples": 16,
            "tasks": {"backend": "fsdp:d1", "slurm": {"partition": "low", "time": "20"}},
        },
    )
    file = site.write("sft.yaml", config)
    site.slurmrl("submit", str(file), "--scheduler", "slurm", "--wait", timeout_s=600)
    site.wait_for_step("sft-eval/sft-1-step-2", 1, timeout_s=600)
    assert site.wait_for_end("sft-eval/sft-1-step-2")["state"] == "COMPLETED"
    [line] = metrics.read_evaluated(site.paths("sft/1"))
    assert line["step"] == 2
    assert line["eval/loss/low"] < line["eval/loss"] < line["eval/loss/high"]
    script = site.paths("sft-eval/sft-1-step-2").submission_script(1, "trainer").read_text()
    assert "#SBATCH --time=20\n" in script
    assert "#SBATCH --partition=low\n" in script
