"""Measure how well algorithms learn the addition task: scripts/bench/learning.py [OPTIONS]

Trains every entry of the table below with every seed through `slurmrl submit` and the local
scheduler. Prints the held-out score over the steps: mean, minimum and maximum over the seeds. All
entries start from one supervised model. Distillation learns from one teacher, and DPO and KTO learn
from answers of the start model. The script makes these models and answers first. A trial is its
example (examples/*.yaml) on one worker process with one thread, with the overrides in the table.

To continue interrupted trials, run the same command again with the same --root. Finished trials are
not repeated. The name of a trial contains a digest of its settings, so a trial whose example or
overrides have changed is trained again. --report trains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from getpass import getuser
from hashlib import sha256
from pathlib import Path
from statistics import fmean

from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slurmrl.run.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = (
    "actor.architecture.hidden_size=64",
    "actor.architecture.intermediate_size=172",
    "actor.architecture.num_hidden_layers=2",
    "actor.optimizer.lr=2e-3",
    "evaluation.every_steps=20",
    "total_steps=1500",
)
"""The supervised models: 90 k parameters."""
COMMON = ("actor.backend=fsdp:d1", "checkpoint.every_steps=50")
JUDGED = 0.8
"""Minimum score of algorithms that generate and see a reward."""


@dataclass(frozen=True)
class Entry:
    """An algorithm in the table."""

    name: str
    example: str
    bar: float
    """Minimum final score, as the mean over all seeds, that counts as having learned."""
    overrides: tuple[str, ...] = ()
    metric: str = "eval/reward"
    sampled: str = ""
    """Data in place of the example's data: `pairs` or `labels` of the start model's answers."""

    @property
    def experiment(self) -> str:
        return f"addition-{self.example.replace('_', '-')}"

    @property
    def config(self) -> Path:
        return EXAMPLES / f"{self.example}.yaml"

    def trial(self, seed: int) -> str:
        """Return the name of the trial, which depends on its settings."""
        example = YAML(typ="safe").load(self.config)
        settings = (example, *COMMON, *self.overrides, self.sampled)
        return f"{self.name}-{seed}-{sha256(repr(settings).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Curve:
    """The held-out scores of an entry: step -> seed -> score."""

    name: str
    bar: float
    overrides: tuple[str, ...]
    scores: Mapping[int, Mapping[int, float]]

    @property
    def last(self) -> tuple[int, Mapping[int, float]]:
        return max(self.scores.items())


def policy(name: str, *overrides: str, preset: str = "") -> Entry:
    """Return the entry of a preset of policy gradients: 80 steps of 1,024 completions."""
    preset = f"algorithm.name={preset or name}"
    chosen = (preset, "total_steps=80", "actor.optimizer.lr=1e-3", *overrides)
    return Entry(name, "grpo", JUDGED, ("evaluation.every_steps=20", *FROM_START, *chosen))


def stale(steps: int, suffix: str = "", *overrides: str) -> Entry:
    """GRPO with completions of two rollout tasks: 100 steps at a lower learning rate, since samples
    that are four steps old come from weights of 16 updates before.
    """
    tasks = f"rollout.tasks={{max: 2, max_staleness: {steps}}}"
    chosen = (tasks, "total_steps=100", "actor.optimizer.lr=6e-4", *overrides)
    return policy(f"grpo_stale_{steps}{suffix}", *chosen, preset="grpo")


START = Entry("small", "sft", 0.6, (*SMALL, "stop_when=eval/reward >= 0.6"))
TEACHER = Entry("small-teacher", "sft", 0.9, (*SMALL, "stop_when=eval/reward >= 0.9"))
FROM_START = (f"actor.path=trial:addition-sft/{START.trial(1)}",)
ANSWERS = Entry(
    "answers",
    "generate",
    0.0,
    (
        *FROM_START,
        "dataset.path=examples/addition/train.jsonl",
        "dataset.shuffle=true",
        "algorithm.batch_size=512",
        "total_steps=6",
    ),
)
"""Trial that samples four answers of the start model to each of 3,072 problems."""

# The start model's accuracy is 0.62. The standard error of a mean over three seeds of 512 answers
# each is 0.012, so 0.7 cannot be chance. On pairs, where chance gives 0.5, 0.75 cannot be chance
# either.
TABLE = (
    policy("grpo"),
    policy("rloo", "rollout.n=4", "algorithm.batch_size=256", "algorithm.n_minibatches=1"),
    policy("reinforce_pp", "rollout.n=1", "algorithm.batch_size=1024"),
    policy("dapo", "algorithm.n_minibatches=16", "actor.optimizer.lr=3e-4"),
    policy("gspo"),
    policy("cispo", "actor.optimizer.lr=3e-4"),
    stale(0),
    stale(1),
    stale(4, "", "algorithm.correction=truncate"),
    stale(4, "_uncorrected", "algorithm.recompute_logprobs=true", "algorithm.correction=none"),
    Entry("dpo", "dpo", 0.7, FROM_START, sampled="pairs"),
    Entry("kto", "kto", 0.7, FROM_START, sampled="labels"),
    Entry("reward_model", "reward_model", 0.75, FROM_START, metric="eval/accuracy"),
    Entry(
        "distill",
        "distill",
        0.75,
        (*FROM_START, f"teacher.path=trial:addition-sft/{TEACHER.trial(1)}"),
    ),
)


# -- trials --------------------------------------------------------------------------------------


def slurmrl(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slurmrl", *arguments, "--root", str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def has_ended(root: Path, trial: str) -> bool:
    done = slurmrl(root, "status", trial, "--json")
    return done.returncode == 0 and bool(json.loads(done.stdout)["state"] == "COMPLETED")


def train(root: Path, entry: Entry, seed: int, *data: str) -> None:
    """Run a trial to its end, unless it has ended."""
    trial = entry.trial(seed)
    name = f"{entry.experiment}/{trial}"
    if has_ended(root, name):
        return
    settings = (f"trial={trial}", f"seed={seed}", *COMMON, *entry.overrides, *data)
    how = ("--scheduler", "local", "--wait")
    done = slurmrl(root, "submit", str(entry.config), *settings, *how)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr}")
    print(f"{name} has ended", file=sys.stderr)


def sampled_answers(root: Path) -> dict[str, Path]:
    """Return the files of right and wrong answers of the start model. Make missing files."""
    train(root, ANSWERS, 1)
    results = run_of(root, ANSWERS, 1).run / "results.jsonl"
    files = {kind: root / f"{ANSWERS.trial(1)}-{kind}.jsonl" for kind in ("pairs", "labels")}
    command = [sys.executable, str(EXAMPLES / "addition" / "judged.py")]
    subprocess.run([*command, results, files["pairs"], files["labels"]], check=True)
    return files


def train_seed(root: Path, entry: Entry, seed: int, answers: Mapping[str, Path]) -> None:
    train(root, entry, seed, *([f"dataset.path={answers[entry.sampled]}"] if entry.sampled else []))


def train_all(root: Path, entries: Sequence[Entry], seeds: Sequence[int], parallel: int) -> None:
    train(root, START, 1)
    if any(entry.example == "distill" for entry in entries):
        train(root, TEACHER, 1)
    answers = sampled_answers(root) if any(entry.sampled for entry in entries) else {}
    with ThreadPoolExecutor(parallel) as pool:
        jobs = [
            pool.submit(train_seed, root, entry, seed, answers)
            for seed in seeds
            for entry in entries
        ]
        for job in jobs:
            job.result()


def run_of(root: Path, entry: Entry, seed: int) -> RunPaths:
    return RunPaths.of(root, getuser(), entry.experiment, entry.trial(seed))


# -- results -------------------------------------------------------------------------------------


def curve(root: Path, entry: Entry, seeds: Sequence[int]) -> Curve:
    """Return the scores at the steps that all trials with an evaluation have."""
    of_seeds = {}
    for seed in seeds:
        if scores := dict(evaluations(run_of(root, entry, seed).metrics, entry.metric)):
            of_seeds[seed] = scores
    common = set.intersection(*map(set, of_seeds.values())) if of_seeds else set()
    scores = {step: {seed: of_seeds[seed][step] for seed in of_seeds} for step in sorted(common)}
    return Curve(entry.name, entry.bar, entry.overrides, scores)


def evaluations(metrics: Path, metric: str) -> Iterator[tuple[int, float]]:
    texts = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    for text in texts:
        line = json.loads(text) if text.endswith("\n") else {}  # the last line may be incomplete
        if metric in line:
            yield line["step"], line[metric]


def table(curves: Sequence[Curve], columns: int = 6) -> str:
    """Return a Markdown table with one row per curve and about ``columns`` steps."""
    lines = ["| algorithm | seeds | held-out score at step: mean (minimum to maximum) | bar |"]
    lines.append("|---|---|---|---|")
    for drawn in curves:
        steps = list(drawn.scores)
        every = max(1, -(-(len(steps) - 1) // (columns - 1)))
        shown = sorted({*steps[::every], *steps[-1:]})
        cells = ", ".join(f"{step}: {spread(drawn.scores[step])}" for step in shown)
        seeds = ", ".join(map(str, drawn.last[1]))
        met = "" if fmean(drawn.last[1].values()) >= drawn.bar else ", not met"
        lines.append(f"| `{drawn.name}` | {seeds} | {cells} | {drawn.bar}{met} |")
    return "\n".join(lines)


def spread(scores: Mapping[int, float]) -> str:
    values = list(scores.values())
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("runs"), help="root folder of the runs")
    parser.add_argument("--seeds", default="1,2,3", help="seeds, with commas between")
    parser.add_argument("--only", default="", help="names of entries, with commas between")
    parser.add_argument("--parallel", type=int, default=1, help="trials at the same time")
    parser.add_argument("--json", type=Path, help="also write the curves to this file")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    names = {entry.name: entry for entry in TABLE}
    only = [name for name in options.only.split(",") if name]
    if unknown := set(only) - set(names):
        parser.error(f"--only: {', '.join(sorted(unknown))} is unknown; known: {', '.join(names)}")
    entries = [names[name] for name in only or names]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    root = options.root.resolve()
    if not options.report:
        train_all(root, entries, seeds, options.parallel)
    curves = [found for entry in entries if (found := curve(root, entry, seeds)).scores]
    if options.json:
        options.json.write_text(json.dumps([asdict(found) for found in curves], indent=1) + "\n")
    print(table(curves))


if __name__ == "__main__":
    main()
