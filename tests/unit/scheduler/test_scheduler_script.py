"""Batch scripts as text."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import UsageError
from slurmrl.paths import RunPaths
from slurmrl.scheduler import directives, render
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest
from slurmrl.scheduler.local import LocalScheduler
from slurmrl.scheduler.slurm import SlurmScheduler

GOLDEN = """\
#!/bin/bash

# Parameters
#SBATCH --account='a b'
#SBATCH --array=0-7%1
#SBATCH --chdir='/shared/it'"'"'s 100% mine'
#SBATCH --cpus-per-task=8
#SBATCH --export=ALL
#SBATCH --gres=gpu:h100:2
#SBATCH --job-name=slurmrl-01234567-3-trainer
#SBATCH --mem=32G
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/shared/it'"'"'s 100%% mine/logs/trainer/slurm-%A_%a.out'
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=1:00:00

# setup
#SBATCH --exclusive
trap '' USR1 USR2
module load cuda
export PYTHONPATH='/shared/it'"'"'s 100% mine/code'"${PYTHONPATH:+:$PYTHONPATH}"

# command
export SUBMITIT_EXECUTOR=slurm
exec '/opt/my python' -m slurmrl.workers.supervisor --run '/shared/it'"'"'s 100% mine' \
--submission 3 --group trainer --launcher srun
"""

OPTIONS: dict[str, Any] = {
    "mem_per_worker": "16G",
    "slurm": {
        "account": "a b",
        "partition": None,
        "time": "1:00:00",
        "signal_lead_s": 120,
        "extra_lines": ["--exclusive"],
        "setup": ["module load cuda"],
        "gpu_directive": "gres",
        "gpu_type": "h100",
    },
}
GROUP = GroupRequest(
    name="trainer", hosts=2, workers_per_host=2, gpus_per_worker=1, cpus_per_worker=4, links=8
)


def request(options: dict[str, Any] | None = None, **slurm: Any) -> SubmissionRequest:
    options = options or {}
    return SubmissionRequest(
        number=3,
        uuid="0123456789abcdef",
        trial="experiment/trial",
        run=RunPaths(Path("/shared/it's 100% mine")),
        python="/opt/my python",
        groups=(GROUP,),
        options={**options, "slurm": {**options.get("slurm", {}), **slurm}},
    )


def test_golden_script() -> None:
    assert SlurmScheduler().scripts(request(OPTIONS)) == {"trainer": GOLDEN}


def test_the_local_script_differs_in_its_launcher_alone() -> None:
    local = LocalScheduler().scripts(request(OPTIONS))["trainer"]
    assert local == GOLDEN.replace("--launcher srun", "--launcher direct")


def test_the_script_is_valid_shell(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(GOLDEN)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("how", "kind", "expected"),
    [
        ("gres", None, {"gres": "gpu:2"}),
        ("gres", "a100", {"gres": "gpu:a100:2"}),
        ("gpus-per-node", None, {"gpus-per-node": "2"}),
        ("gpus-per-node", "a100", {"gpus-per-node": "a100:2"}),
        ("none", "a100", {}),
    ],
)
def test_gpus(how: str, kind: str | None, expected: dict[str, str]) -> None:
    table = directives.table(request(gpu_directive=how, gpu_type=kind), GROUP)
    assert {key: value for key, value in table.items() if "g" in key[:1]} == expected


def test_no_gpus_no_directive() -> None:
    table = directives.table(request(), dataclasses.replace(GROUP, gpus_per_worker=0))
    assert not {"gres", "gpus-per-node"} & set(table)


def test_an_elastic_group_is_an_array_of_single_hosts() -> None:
    elastic = dataclasses.replace(GROUP, elastic=True, hosts=4, links=9)
    table = directives.table(request(), elastic)
    assert (table["array"], table["nodes"]) == ("0-8%4", "1")


@pytest.mark.parametrize("key", directives.PASSED)
@pytest.mark.parametrize("value", ["a\n#SBATCH --wrap=x", "back\\slash", "nul\0"])
def test_values_that_no_directive_can_hold_are_refused(key: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"--{key}="):
        render.script(request(**{key: value}), GROUP, "srun")


@pytest.mark.parametrize(
    "line",
    [
        "--array=0-9",
        "#SBATCH --job-name=x",
        "-J x",
        "-Jx",
        "--export=ALL,TOKEN",
        "--no-requeue",
        "-N 4",
        "#SBATCH --signal=B:TERM@5",
    ],
)
def test_extra_lines_cannot_change_the_protocol(line: str) -> None:
    with pytest.raises(UsageError, match="slurmrl itself sets"):
        render.script(request(extra_lines=[line]), GROUP, "srun")


@pytest.mark.parametrize("line", ["rm -rf /", "--x\nrm -rf /", ""])
def test_extra_lines_are_directives(line: str) -> None:
    with pytest.raises(UsageError, match="not a directive"):
        render.script(request(extra_lines=[line]), GROUP, "srun")


def test_memory_needs_a_unit_that_slurm_knows() -> None:
    with pytest.raises(UsageError, match="16 apples"):
        render.script(request({"mem_per_worker": "16 apples"}), GROUP, "srun")


def test_memory_is_asked_for_all_workers_of_a_host() -> None:
    assert directives.table(request({"mem_per_worker": "500MB"}), GROUP)["mem"] == "1000M"
