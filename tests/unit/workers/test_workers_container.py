"""The command line of a worker in a container."""

from __future__ import annotations

import sys

import pytest
from pydantic import ValidationError

from slurmrl.config.schema.cluster import Slurm
from slurmrl.workers.agent.fork_environment import interpreter

ENVIRON = {
    "PATH": "/usr/bin",
    "HF_TOKEN": "secret",
    "PYTHONPATH": "/shared/my run/code",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "4",
    "CUDA_VISIBLE_DEVICES": "GPU-a",
    "SLURMRL_OPS": "torch",
    "NCCL_DEBUG": "INFO",
    "UCX_TLS": "rc",
}


def test_command_uses_the_current_python_without_a_container() -> None:
    assert interpreter(Slurm(), ENVIRON) == (sys.executable,)


@pytest.mark.parametrize(
    "container",
    ["apptainer exec --nv --bind '/shared/my data' image.sif", "enroot start --root 'my image'"],
)
def test_container_command_passes_required_variables(container: str) -> None:
    slurm = Slurm(container=container, container_python="python3")
    words = interpreter(slurm, ENVIRON, {"UCX_TLS": "rc"})
    assert words[-9:] == (
        "env",
        "CUDA_VISIBLE_DEVICES=GPU-a",
        "NCCL_DEBUG=INFO",
        "OMP_NUM_THREADS=4",
        "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONPATH=/shared/my run/code",
        "SLURMRL_OPS=torch",
        "UCX_TLS=rc",
        "python3",
    )
    if container.startswith("apptainer"):
        assert words[:-9] == (
            "apptainer",
            "exec",
            "--nv",
            "--bind",
            "/shared/my data",
            "image.sif",
        )
    else:
        assert words[:-9] == ("enroot", "start", "--root", "my image")
    assert not any("secret" in word for word in words)


@pytest.mark.parametrize("container", ["apptainer exec 'image.sif", "", "a\nb"])
def test_invalid_container_command_is_rejected(container: str) -> None:
    with pytest.raises(ValidationError, match="container"):
        Slurm(container=container)
