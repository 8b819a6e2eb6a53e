"""Tests of the number of files that a submission uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples"

MOST_RUN = 90
"""Files of which a function runs, without the checks that ``--no-check`` skips."""
MOST_LOADED = 150
"""Files that are imported, packages included."""

WALK = """
import json, os, sys

package, target = sys.argv[1:3]
ran = set()


def record(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_flags & 2 or not code.co_filename.startswith(package):
        return  # a body of a module or class only defines
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_code.co_filename.startswith(package):
            return  # the module is being imported
        caller = caller.f_back
    ran.add(code.co_filename)


os.posix_spawn = lambda *arguments, **options: os.getpid()  # the chain, which would run the trial
sys.argv = ["slurmrl", *sys.argv[3:]]
from slurmrl.__main__ import main

sys.setprofile(record)
code = main()
sys.setprofile(None)
loaded = {
    module.__file__
    for name, module in sys.modules.items()
    if name.partition(".")[0] == "slurmrl" and getattr(module, "__file__", None)
}
with open(target, "w") as file:
    json.dump({"ran": sorted(ran), "loaded": sorted(loaded)}, file)
sys.exit(code)
"""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the files that a submission of the example opens, up to the start of its chain."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    target = folder / "walk.json"
    command = [sys.executable, "-c", WALK, str(REPOSITORY / "slurmrl"), str(target), "submit"]
    command += [str(EXAMPLES / "grpo.yaml"), f"actor.path={folder / 'model'}"]
    command += [f"actor.tokenizer={EXAMPLES / 'addition' / 'tokenizer'}", "--no-check", "--detach"]
    command += ["--scheduler", "local", "--root", str(folder / "root"), "--profile", "none"]
    environ = {name: value for name, value in os.environ.items() if "SLURMRL" not in name}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=folder, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "submitted to local" in done.stdout
    found: dict[str, list[str]] = json.loads(target.read_text())
    return found


def test_submission_runs_functions_of_few_files(walk: dict[str, list[str]]) -> None:
    ran = {str(Path(name).relative_to(REPOSITORY / "slurmrl")) for name in walk["ran"]}
    assert {"cli/submit.py", "desk/submitting.py", "scheduler/local_chain.py"} <= ran
    assert len(ran) <= MOST_RUN, sorted(ran)


def test_submission_loads_no_views_sinks_and_tokenizers(walk: dict[str, list[str]]) -> None:
    loaded = {str(Path(name).relative_to(REPOSITORY / "slurmrl")) for name in walk["loaded"]}
    for unused in ("watch/status.py", "watch/sinks/wandb.py", "data/rows.py", "workers/link.py"):
        assert (REPOSITORY / "slurmrl" / unused).exists()
        assert unused not in loaded
    assert len(loaded) <= MOST_LOADED, sorted(loaded)
