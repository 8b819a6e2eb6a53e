#!/usr/bin/env python3
"""Predict the speedup of a step if each call has its own layout: scripts/bench/reallocation.py

PPO with an actor and a critic of 70B parameters on 128 H100 GPUs, with 1,024 tokens of prompt and
7,168 generated, as in the largest case of ReaL (Mei et al. 2025, arXiv 2406.14088). The script
compares Megatron's heuristic for all calls, the heuristic with another layout for generation, and
the best answer of `slurmrl search`. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from predictions import ROWS
from ruamel.yaml import YAML

from slurmrl.config.allocation import parse
from slurmrl.errors import ConfigError
from slurmrl.plan.dataflow import Method
from slurmrl.plan.estimates.call_costs import MeanTokens, generating
from slurmrl.plan.estimates.pass_seconds import generation
from slurmrl.plan.estimates.step_seconds import StepSeconds, predict_step
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.search.best_layouts import SearchRequest, search

MODELS: Final = YAML(typ="safe").load(ROWS)["models"]
HEURISTIC: Final = "megatron:d4t8p4"
MEAN: Final = MeanTokens(1024, 7168)
PUBLISHED: Final = 1.81
"""Mean speedup over the heuristic that ReaL reports for its cases with long contexts."""
CONFIG: Final = {
    "experiment": "real",
    "total_steps": 1,
    "cluster": {"workers_per_host": 8, "slurm": {"gpu_type": "h100"}},
    "algorithm": {"name": "ppo", "batch_size": 128, "n_minibatches": 8},
    "actor": {
        "backend": HEURISTIC,
        "gradient_checkpointing": "full",
        "dtype": "bfloat16",
        "architecture": {**MODELS["llama-70b"], "max_position_embeddings": 131072},
    },
    "critic": {},
    "ref": {},
    "rollout": {"max_new_tokens": MEAN.response, "backend": "native:d16t8", "gpus": "0-127"},
    "reward": {"name": "exact_match"},
    "dataset": {"type": "prompt", "path": "train.jsonl", "max_prompt_tokens": MEAN.prompt},
}


def with_own_layout(step: StepSeconds, settings: Settings, *, shared: bool) -> StepSeconds:
    """Return the step if generation also has the heuristic's layout, without moved weights.

    With ``shared``, the stages share the host's time for a token. Otherwise, each stage takes this
    time.
    """
    found = generating(settings, "rollout", MEAN)
    assert found is not None
    layout, rates = parse(HEURISTIC), found.machine.efficiency
    stages = layout.sizes["pp"] if shared else 1
    machine = replace(found.machine, efficiency=replace(rates, token=rates.token / stages))
    copies = found.job.allocation.sizes["dp"] / layout.sizes["dp"]
    job = replace(found.job, allocation=layout, sequences=found.job.sequences * copies)
    (name,) = (
        call.name
        for call in settings.algorithm.calls(settings.config)
        if call.method is Method.GENERATE
    )
    return replace(step, calls={**step.calls, name: generation(job, machine)}, moves=0.0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "real.yaml"
        path.write_text(json.dumps(CONFIG))
        (path.parent / "train.jsonl").touch()

        def load(changes: Mapping[str, Any]) -> Settings | None:
            words = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
            try:
                return load_settings(path, words, scheduler="slurm", planning=True)
            except ConfigError:
                return None

        given = load({})
        assert given is not None
        moved = predict_step(given, MEAN)
        assert moved is not None
        request = SearchRequest((128,), MEAN, frozenset({"fsdp", "megatron", "native"}), results=1)
        (best,) = search(given, request, load)
    columns = {
        "one, host per stage": with_own_layout(moved, given, shared=False),
        "one, host shared": with_own_layout(moved, given, shared=True),
        "generation apart": moved,
        "search": best.step,
    }
    print(f"{'seconds of a step':20}" + "".join(f"{name:>20}" for name in columns))
    for call in moved.calls:
        seconds = (sum(step.calls[call].values()) for step in columns.values())
        print(f"{call:20}" + "".join(f"{each:20.1f}" for each in seconds))
    print(f"{'moves of weights':20}" + "".join(f"{one.moves:20.2f}" for one in columns.values()))
    print(f"{'total':20}" + "".join(f"{one.total:20.1f}" for one in columns.values()))
    for name in list(columns)[:2]:
        first = columns[name].total
        ratios = "".join(f"{first / one.total:19.2f}x" for one in columns.values())
        print(f"{'speedup':20}{ratios}")
    print(f"ReaL reports {PUBLISHED}x, the mean of its cases with long contexts")
    print(f"layouts of search: {dict(best.backends)}")


if __name__ == "__main__":
    main()
