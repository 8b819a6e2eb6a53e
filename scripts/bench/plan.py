"""Time to plan a run of 1,024 GPUs: ``python scripts/bench/plan.py``.

The trial is PPO with a mixture-of-experts actor and critic on 512 GPUs each and a reference on all
1,024. From a configuration file, the script makes layouts, checks, plan, rank tables, process
groups and estimates. It prints one JSON object with seconds, each as [median, minimum, maximum].
The first four are the times of reading and checking, of planning, of the report and of all three in
a warm process. The others are the times of the command ``slurmrl plan`` and of bare Python.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from spread import Spread

from slurmrl.plan.build import make_plan
from slurmrl.plan.plan_values import report
from slurmrl.plan.settings import Settings, load_settings

CONFIG = """\
experiment: large
total_steps: 1
algorithm: {name: ppo, batch_size: 4096}
cluster: {gpus_per_worker: 1, gpu_memory: 80G, slurm: {gpu_type: h100}}
actor:
  backend: "megatron:(attn:d16t4p4c2|ffn:d4t1e32)"
  tokenizer: .
  dtype: bfloat16
  gradient_checkpointing: true
  architecture: {model_type: qwen3_moe, vocab_size: 151936, hidden_size: 2048,
    intermediate_size: 6144, moe_intermediate_size: 768, num_hidden_layers: 48,
    num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128, num_experts: 128,
    num_experts_per_tok: 8, max_position_embeddings: 32768}
critic: {gpus: 512-1023}
ref: {backend: "megatron:d64t4p4", gpus: 0-1023}
reward: {name: exact_match}
rollout: {backend: "sglang:d128t8", max_new_tokens: 3072}
dataset: {type: prompt, path: data.jsonl, max_prompt_tokens: 1024}
"""


def write_config(folder: Path) -> Path:
    (folder / "data.jsonl").write_text('{"id": "1", "prompt": "a", "answer": "b"}\n')
    (folder / "large.yaml").write_text(CONFIG)
    return folder / "large.yaml"


def measure(rounds: int) -> dict[str, Spread]:
    with tempfile.TemporaryDirectory() as name:
        config = write_config(Path(name))
        times: dict[str, list[float]] = {"check_s": [], "plan_s": [], "report_s": []}

        def timed(kind: str, work: Callable[[], object]) -> object:
            began = time.perf_counter()
            done = work()
            times[kind].append(time.perf_counter() - began)
            return done

        for _ in range(rounds + 1):
            settings = timed("check_s", lambda: load_settings(config, planning=True))
            assert isinstance(settings, Settings)
            plan = timed("plan_s", lambda: make_plan(settings, scheduler="slurm"))  # noqa: B023
            made = timed("report_s", lambda: report(settings, plan))  # type: ignore[arg-type]  # noqa: B023
        assert isinstance(made, dict)
        assert made["world_size"] == 1024
        warm = {kind: values[1:] for kind, values in times.items()}
        warm["all_s"] = [sum(parts) for parts in zip(*warm.values(), strict=True)]
        found = {kind: Spread.of(values, 4) for kind, values in warm.items()}
        slurmrl = [sys.executable, "-m", "slurmrl", "plan", str(config), "--json"]
        found["command_s"] = _command([*slurmrl, "--scheduler", "slurm"], rounds)
        found["bare_python_s"] = _command([sys.executable, "-c", "pass"], rounds)
    return found


def _command(command: list[str], rounds: int) -> Spread:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - began)
    return Spread.of(taken, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    print(json.dumps(measure(parser.parse_args().rounds), indent=2))


if __name__ == "__main__":
    main()
