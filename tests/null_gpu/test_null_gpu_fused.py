"""Triton compiles the fused operators for a GPU, and its interpreter, which only CUDA builds of
torch contain, computes the right numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurmrl.tensors.ops import fused
from slurmrl.tensors.ops.elementwise import ACTIVATIONS
from slurmrl.tensors.ops.products import add_product
from tests.null_gpu import device

UNIT_TESTS = Path(__file__).parents[1] / "unit" / "ops" / "test_ops_fused.py"


@pytest.mark.parametrize("dtype", fused.DTYPES)
def test_fused_kernels_compile_and_run(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Each fused operator takes one launch."""
    monkeypatch.setenv("SLURMRL_OPS", "native")
    x, logits = torch.zeros((6, 2, 8), dtype=dtype).cuda(), torch.zeros((6, 16)).cuda()
    flat, targets = x.flatten(0, 1), torch.zeros(6, dtype=torch.int64).cuda()
    assert fused.fits(x)
    with device.counted() as counts:
        fused.rotate(x, x[:, :1], x[:, :1], 1.0)
        statistics = fused.softmax_statistics(logits, targets, 1.0)
        fused.logit_gradient(logits, (targets, *statistics, statistics[0]), 1.0, dtype)
        for activation in ACTIVATIONS:
            fused.gated_product(flat, flat, activation)
            fused.gated_gradient(flat, flat, flat, activation)
    copies = 2  # cos and sin are not contiguous here
    assert counts["launches"] == 3 + 2 * len(ACTIVATIONS) + copies


def test_fused_logprobs_accumulate_products_in_place() -> None:
    """The release of torch that is tested adds bfloat16 products to a float32 matrix."""
    total, a = torch.zeros((8, 16)).cuda(), torch.zeros((8, 8), dtype=torch.bfloat16).cuda()
    b = torch.zeros((8, 16), dtype=torch.bfloat16).cuda()
    add_product(total, a, b)  # the first call tests whether torch can do it
    with device.counted() as counts:
        add_product(total, a, b)
    assert (counts["products"], counts["launches"]) == (1, 0)


def test_fused_kernels_are_correct_in_the_triton_interpreter() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LD_")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    command += ["-W", "ignore:CUDA initialization"]
    done = subprocess.run(
        [*command, str(UNIT_TESTS)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
