"""The operators whose results selective checkpointing keeps."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from slurmrl.models.recompute import _kept_operators
print(*(str(operator) for operator in _kept_operators()), sep="\\n")
"""


def test_the_packed_kernels_are_known_before_the_first_attention() -> None:
    """The packed attention kernels are kept even before the first attention call, whose import
    registers them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    found = done.stdout.split()
    assert "torch_attn._varlen_attn.default" in found
    assert "aten.mm.default" in found
