"""Whole trials for tests: tiny configurations, the command line, and the processes of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path
from typing import Any, TypeVar

from slurmrl.plan.metric_names import known_metrics
from slurmrl.plan.own_algorithm import importable
from slurmrl.plan.settings import load_run_settings
from slurmrl.run import metrics
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.metrics import TIME
from slurmrl.run.paths import RunPaths

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[2]
ADDITION = REPOSITORY / "examples" / "addition"
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROLES = {
    "chain": "slurmrl.scheduler.local_chain",
    "supervisor": "slurmrl.workers.supervisor",
    "agent": "slurmrl.workers.agent",
    "master": "slurmrl.workers.master",
    "worker": "slurmrl.workers.worker",
}


def wait_until(what: str, check: Callable[[], T | None], timeout_s: float = 300.0) -> T:
    """Poll until ``check`` returns a true value. The error at the deadline names the condition. A
    check that runs a command takes at most half a core.
    """
    deadline = time.monotonic() + timeout_s
    while (began := time.monotonic()) < deadline:
        if found := check():
            return found
        time.sleep(max(0.1, time.monotonic() - began))
    raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")


@dataclass(frozen=True)
class Site:
    """A root folder of runs, and the command line that works on it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder / "runs"

    def slurmrl(
        self, *arguments: str, code: int | None = 0, timeout_s: float = 1000.0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``slurmrl``. ``code``: the required exit code (None: any)."""
        done = subprocess.run(
            [sys.executable, "-m", "slurmrl", *arguments],
            cwd=self.folder,
            env={**os.environ, "SLURMRL_ROOT": str(self.root), **self.environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if code is not None and done.returncode != code:
            raise AssertionError(
                f"slurmrl {' '.join(arguments)} exited with {done.returncode}, not {code}\n"
                f"{done.stdout}\n{done.stderr}"
            )
        return done

    def status(self, trial: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.slurmrl("status", trial, "--json").stdout)
        return found

    def paths(self, trial: str) -> RunPaths:
        experiment, _, name = trial.partition("/")
        return RunPaths.of(self.root, getuser(), experiment, name)

    def write(self, name: str, config: Mapping[str, Any]) -> Path:
        """Write a configuration file. JSON is valid YAML."""
        path = self.folder / name
        path.write_text(json.dumps(config, indent=1))
        return path

    def wait_for_step(self, trial: str, step: int, timeout_s: float = 300.0) -> None:
        wait_until(
            f"step {step} of {trial}",
            lambda: any(line["step"] >= step for line in self.metrics(trial)),
            timeout_s,
        )

    def wait_for_end(self, trial: str, timeout_s: float = 1000.0) -> dict[str, Any]:
        """Wait until the trial neither runs nor will run soon, and return its status."""

        def ended() -> dict[str, Any] | None:
            paths = self.paths(trial)
            if any(processes(paths.run).values()) and not fold(History(paths.history).read()).end:
                return None  # running the status command would take a core from the trial
            status = self.status(trial)
            return None if status["state"] in ("PENDING", "RUNNING") else status

        return wait_until(f"the end of {trial}", ended, timeout_s)

    def metrics(self, trial: str) -> list[dict[str, Any]]:
        return metrics.read(self.paths(trial).metrics)

    def outcome(self, trial: str) -> dict[str, Any]:
        """Return all results that must not depend on interruptions: weights, optimizer state and
        random states of the last checkpoint, its ledger, the recorded results, the scores of
        evaluations, and all metrics except times.
        """
        paths = self.paths(trial)
        commit = fold(History(paths.history).read()).last_commit
        assert commit is not None, f"{trial} has no commit"
        last = paths.checkpoints / commit.directory
        with importable([paths.code]):
            settings = load_run_settings(paths)
        known = known_metrics(settings.config, settings.algorithm)
        unknown = {name for line in self.metrics(trial) for name in line}.difference(known, [TIME])
        assert not unknown, f"metrics that stop_when would refuse: {sorted(unknown)}"
        exports = sorted(paths.exports.glob("*/model.safetensors"))
        return {
            "files": {file.name: file.read_bytes() for file in sorted(last.glob("*.safetensors"))},
            "export": exports[-1].read_bytes() if exports else None,
            "results": paths.results.read_bytes() if paths.results.exists() else None,
            "evaluations": {
                file.name: {**json.loads(file.read_bytes()), "trial": ""}
                for file in sorted(paths.evaluations.glob("*"))
            },
            "ledger": json.loads((last / "state.json").read_bytes())["ledger"],
            "metrics": [
                {name: value for name, value in line.items() if not is_timing(name)}
                for line in self.metrics(trial)
            ],
        }


def is_timing(name: str) -> bool:
    return name == TIME or name.startswith("time/") or name.endswith("_per_s")


def processes(run: Path) -> dict[str, list[int]]:
    """Return the pids of a run's processes by role, from command lines that name this run. Workers
    are forked from a fork server; only their names (``ps -o comm``) distinguish them.
    """
    found: dict[str, list[int]] = {role: [] for role in (*ROLES, "fork_server")}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().decode().split("\0")
            forked = (entry / "comm").read_text().startswith("rank ")
        except OSError:
            continue
        if str(run) not in arguments or Path(arguments[0]).name == "srun":
            continue
        for role, module in ROLES.items():
            if module in arguments:
                found["fork_server" if role == "worker" and not forked else role].append(
                    int(entry.name)
                )
    return {role: sorted(pids) for role, pids in found.items()}


def alive(pid: int) -> bool:
    """Return whether a process runs; false for a zombie, or if it ends during the check."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line, or an empty list if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def parent(process: Path) -> int:
    """Return the pid of the parent of a process in /proc, or 0 if the process has ended."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def kill_one(run: Path, role: str, index: int = 0) -> None:
    """Kill one process of the run."""
    pids = wait_until(f"a {role} of {run}", lambda: processes(run)[role][index:] or None)
    os.kill(pids[0], signal.SIGKILL)


def sft_config(**changes: Any) -> dict[str, Any]:
    """Return settings of SFT of a tiny decoder on the addition data, with 2 ranks."""
    return {
        "experiment": "sft",
        "total_steps": 8,
        "algorithm": {"name": "sft", "batch_size": 16},
        "cluster": {"gpus_per_worker": 0},
        "actor": {
            "architecture": ARCHITECTURE,
            "tokenizer": str(ADDITION / "tokenizer"),
            "backend": "fsdp:d2",
            "optimizer": {"lr": 1e-3},
        },
        "dataset": {"type": "prompt_answer", "path": str(ADDITION / "train.jsonl")},
        "checkpoint": {"every_steps": 2},
        **changes,
    }


def ppo_config(**changes: Any) -> dict[str, Any]:
    """Return settings of PPO of a tiny decoder, with 2 ranks and evaluations."""
    sft = sft_config()
    return {
        **sft,
        "experiment": "ppo",
        "algorithm": {"name": "ppo", "batch_size": 16, "n_minibatches": 2},
        "critic": {"optimizer": {"lr": 1e-3}},
        "ref": {},
        "rollout": {"max_new_tokens": 4},
        "reward": {"name": "exact_match"},
        "dataset": {"type": "prompt", "path": str(ADDITION / "train.jsonl")},
        "evaluation": {
            "dataset": {"type": "prompt", "path": str(ADDITION / "heldout.jsonl")},
            "samples": 16,
            "every_steps": 3,
        },
        **changes,
    }


def generate_config(**changes: Any) -> dict[str, Any]:
    """Return settings of sampling from a tiny decoder: 2 ranks, 3 completions a prompt."""
    sft = sft_config()
    return {
        **{key: sft[key] for key in ("cluster", "actor", "checkpoint")},
        "experiment": "generate",
        "algorithm": {"name": "generate", "batch_size": 16, "logprobs": True},
        "rollout": {"n": 3, "max_new_tokens": 4},
        "reward": {"name": "exact_match"},
        "dataset": {"type": "prompt", "path": str(ADDITION / "train.jsonl")},
        **changes,
    }
