"""Whole GRPO steps on one CPU thread: a slurmrl trial against TRL's GRPOTrainer, or against itself
with the model of transformers (train.py --grpo).

Both sample 8 completions of each of 8 prompts from the same model, score them with the same Python
function and make one update, in float32, without a reference model and without checkpoints.
slurmrl runs as a trial of the local scheduler with one rank; its batch process, supervisor, agent,
master, fork server and worker all count. In each round, each side makes a run of its own, one after
the other.

As a program, in TRL's environment, this is TRL's side: grpo.py FOLDER STEPS LIMIT OUTPUT.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from typing import Any

from spread import Spread

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 32
LEARNING_RATE, BETAS, CLIP = 1e-5, (0.9, 0.999), 1.0
WARM_UP = 2
DEADLINE_S = 900.0
POLL_S = 0.02
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
REWARD = '''
def even(texts):
    """The share of words with an even number."""
    words = [text.split() for text in texts]
    return [sum(not int(w[1:]) % 2 for w in row) / max(len(row), 1) for row in words]


def of_slurmrl(prompts, completions, rows):
    return even(completions)


def of_trl(prompts, completions, **others):
    return even(completions)
'''


@dataclass(frozen=True)
class Task:
    """What both sides do."""

    folder: Path
    """With the model, the tokenizer, ``prompts.jsonl`` and ``words.py``, the reward."""
    steps: int
    limit: int
    """Longest completion, in tokens."""

    @property
    def all_steps(self) -> int:
        return WARM_UP + self.steps + 1  # the last one, after which a run ends, does not count


def prepare(folder: Path, words: int, steps: int) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from slurmrl.engines.role_weights import init_tensor
    from slurmrl.models.architecture import ModelConfig
    from slurmrl.models.decoder import build
    from tests.support.decoder_folders import to_hf

    config = ModelConfig.from_hf({**ARCHITECTURE, "vocab_size": words})
    model = build(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_tensor(name, tuple(parameter.shape), config, seed=1))
    (folder / "model").mkdir()
    to_hf(model, folder / "model")
    numbers = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, words)}}
    tokenizer = Tokenizer(models.WordLevel(numbers, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder / "tokenizer")
    draw = random.Random(2)
    rows = [
        " ".join(f"w{draw.randrange(2, words)}" for _ in range(PROMPT_TOKENS))
        for _ in range(PROMPTS * (WARM_UP + steps + 1))
    ]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": row, "answer": "w2"}) + "\n" for row in rows)
    )
    (folder / "words.py").write_text(REWARD)


# -- one run of each ------------------------------------------------------------------------------


class SlurmrlRun:
    """A trial of the local scheduler."""

    def __init__(self, task: Task, number: int, implementation: str = "builtin") -> None:
        root = task.folder / "runs"
        trial = f"{implementation}-{number}"
        self.marker = root / getuser() / "bench" / trial
        """In the command line of all processes of the run."""
        config = {
            "experiment": "bench",
            "trial": trial,
            "total_steps": task.all_steps,
            "algorithm": {
                "name": "grpo",
                "batch_size": PROMPTS,
                "n_minibatches": 1,
                "kl": {"coef": 0},
            },
            "actor": {
                "path": str(task.folder / "model"),
                "tokenizer": str(task.folder / "tokenizer"),
                "dtype": "float32",
                "implementation": implementation,
                "optimizer": {"lr": LEARNING_RATE, "betas": BETAS, "gradient_clip": CLIP},
            },
            "rollout": {"n": GROUP, "max_new_tokens": task.limit},
            "reward": {"name": "words:of_slurmrl"},
            "dataset": {"type": "prompt", "path": str(task.folder / "prompts.jsonl")},
            "cluster": {"gpus_per_worker": 0, "cpus_per_worker": 1},
        }
        file = task.folder / "grpo.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        self._command = [sys.executable, "-m", "slurmrl"]
        self._environ = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "SLURMRL_ROOT": str(root),
        }
        subprocess.run(
            [*self._command, "submit", str(file), "--scheduler", "local", "--detach"],
            env=self._environ,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def tokens(self) -> list[float]:
        """The completion tokens of each step so far."""
        lines = lines_of(self.marker / "metrics.jsonl")
        return [line["completions"] * line["response_length"] for line in lines]

    def ended(self) -> bool:
        return not cpu_s(self.marker)

    def stop(self) -> None:
        subprocess.run([*self._command, "cancel", f"bench/{self.marker.name}"], env=self._environ)


class TrlRun:
    """A process of TRL's environment (see `train_with_trl`)."""

    def __init__(self, task: Task, number: int, python: str) -> None:
        self.marker = task.folder / f"trl-{number}"
        self.marker.mkdir()
        arguments = [str(task.folder), str(task.all_steps), str(task.limit), str(self.marker)]
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(task.folder),
        }
        with (self.marker / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [python, __file__, *arguments],
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def tokens(self) -> list[float]:
        return [line["tokens"] for line in lines_of(self.marker / "metrics.jsonl")]

    def ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        self._process.kill()


def train_with_trl(folder: Path, steps: int, limit: int, output: Path) -> None:
    """Write a line with the number of completion tokens after each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from words import of_trl  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    settings = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=limit,
        max_steps=steps,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        model_init_kwargs={"dtype": torch.float32},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    sampled: list[float] = []

    class Counting(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            sampled.append(float(made["completion_mask"].sum()))
            return made

    class Reports(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            with (output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"tokens": sampled[-1]}) + "\n")

    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").open()]
    Counting(
        model=str(folder / "model"),
        reward_funcs=of_trl,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        callbacks=[Reports()],
    ).train()


# -- measuring ------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that is being written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cpu_s(marker: Path) -> dict[int, float]:
    """CPU seconds of each process that has the path in its command line, with those of its children
    that have ended.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().decode().split("\0")
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if any(marker == Path(text) or marker in Path(text).parents for text in arguments):
            found[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS_PER_S
    return found


def wait_for(run: SlurmrlRun | TrlRun, steps: int) -> None:
    """Wait until the run has made these steps."""
    deadline = time.monotonic() + DEADLINE_S
    while len(run.tokens()) < steps:
        if run.ended() and len(run.tokens()) < steps:
            logs = [path for path in run.marker.rglob("*log") if path.is_file()]
            texts = [f"{path}:\n{path.read_text()[-2000:]}" for path in logs]
            raise SystemExit("\n".join([f"{run.marker} ended before step {steps}", *texts]))
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {DEADLINE_S:.0f} s for step {steps} of {run.marker}")
        time.sleep(POLL_S)


def measure(run: SlurmrlRun | TrlRun, task: Task) -> tuple[float, float]:
    """CPU seconds per 1,000 completion tokens, and tokens per completion, of the steps that
    count.
    """
    spent = []
    try:
        for step in (WARM_UP, WARM_UP + task.steps):
            wait_for(run, step)
            spent.append(sum(cpu_s(run.marker).values()))
        tokens = sum(run.tokens()[WARM_UP : WARM_UP + task.steps])
        while not run.ended():
            time.sleep(POLL_S)
    finally:
        if not run.ended():
            run.stop()
    return (spent[1] - spent[0]) / tokens * 1000, tokens / (task.steps * PROMPTS * GROUP)


def compare(trl_python: str | None, rounds: int, steps: int, words: int, limit: int) -> None:
    """Compare slurmrl with TRL; without its Python, with slurmrl and a model of transformers."""
    found: dict[str, list[tuple[float, float]]] = {"slurmrl": [], "trl" if trl_python else "hf": []}
    with tempfile.TemporaryDirectory(prefix="slurmrl-bench-") as made:
        task = Task(Path(made), steps, limit)
        prepare(task.folder, words, steps)
        for number in range(1, rounds + 1):
            found["slurmrl"].append(measure(SlurmrlRun(task, number), task))
            if trl_python:
                found["trl"].append(measure(TrlRun(task, number, trl_python), task))
            else:
                found["hf"].append(measure(SlurmrlRun(task, number, "hf"), task))
    print(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, one thread; GRPO, {PROMPTS} prompts"
        f" of {PROMPT_TOKENS} tokens x {GROUP} completions of up to {limit}, {words} words; "
        f"{rounds} rounds of {steps} steps"
    )
    ratios = [theirs[0] / ours[0] for ours, theirs in zip(*found.values(), strict=True)]
    for name, values in found.items():
        costs = Spread.of(cost for cost, _ in values)
        lengths = Spread.of(length for _, length in values)
        ratio = f"  {Spread.of(ratios).text()} x" if name != "slurmrl" else ""
        print(
            f"{name:8s} CPU s per 1,000 completion tokens {costs.text('.3f')}{ratio}  "
            f"tokens a completion {lengths.text('.1f')}"
        )


if __name__ == "__main__":
    train_with_trl(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
