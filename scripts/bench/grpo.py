"""Whole GRPO steps on one CPU thread: a slurmrl trial against TRL's GRPOTrainer, or against itself
with the model of transformers (train.py --grpo).

All sides sample completions of the same prompts from the same model, score them with the same
Python function and make one update, in float32, without checkpoints. The default is a small random
model without a reference model, 8 prompts and 8 completions of each. ``--model`` selects a
pretrained chat model instead, with a reference model, 4 prompts and 4 completions of each. A plain
loop around transformers is then also compared.

slurmrl runs as a trial of the local scheduler with one rank. Its batch process, supervisor, agent,
master, fork server and worker all count. In each round, each side makes a separate run, one after
the other.

Run as a program, this file is one of the other sides: grpo.py trl|transformers TASK OUTPUT. TASK is
a `Task` in JSON. TRL's side runs in TRL's environment.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from getpass import getuser
from pathlib import Path
from typing import Any

from spread import Spread

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 32
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
def share(texts):
    """The share of words that end with an even digit or a vowel."""
    words = [text.split() for text in texts]
    return [sum(w[-1] in "02468aeiou" for w in row) / max(len(row), 1) for row in words]


def of_slurmrl(prompts, completions, rows):
    return share(completions)


def of_others(prompts, completions, **others):
    return share(completions)
'''


@dataclass(frozen=True)
class Task:
    """The task of all programs that are compared."""

    folder: str
    """Folder with ``prompts.jsonl`` and the reward ``words.py``."""
    model: str
    """A folder."""
    tokenizer: str
    """Folder of the tokenizer. (In the model's folder, transformers would apply the rules of
    Qwen2.)"""
    steps: int
    limit: int
    """Maximum length of a completion in tokens."""
    prompts: int = 8
    group: int = 8
    """Completions of a prompt."""
    kl: float = 0.0
    """Coefficient of the KL divergence from a reference model; 0 for none."""

    @property
    def all_steps(self) -> int:
        return (
            WARM_UP + self.steps + 1
        )  # the last step does not count, because the run ends after it


def prepare(folder: Path, words: int, count: int) -> None:
    """Write a small random model whose vocabulary has this number of words, and prompts."""
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
        " ".join(f"w{draw.randrange(2, words)}" for _ in range(PROMPT_TOKENS)) for _ in range(count)
    ]
    write_prompts(folder, rows)


def prepare_pretrained(folder: Path, model: str, count: int) -> None:
    """Write questions about numbers, as the chat template of the model renders them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for n in range(count):
        message = {"role": "user", "content": f"Why is {n + 11} a better number than {n + 27}?"}
        rows.append(
            tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        )
    write_prompts(folder, rows)


def write_prompts(folder: Path, rows: list[str]) -> None:
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": row, "answer": "none"}) + "\n" for row in rows)
    )
    (folder / "words.py").write_text(REWARD)


# -- one run of each ------------------------------------------------------------------------------


class SlurmrlRun:
    """A run of slurmrl: a trial of the local scheduler."""

    def __init__(self, task: Task, number: int, implementation: str = "builtin") -> None:
        folder = Path(task.folder)
        root = folder / "runs"
        trial = f"{implementation}-{number}"
        self.marker = root / getuser() / "bench" / trial
        """String in the command lines of all processes of the run."""
        config = {
            "experiment": "bench",
            "trial": trial,
            "total_steps": task.all_steps,
            "algorithm": {
                "name": "grpo",
                "batch_size": task.prompts,
                "n_minibatches": 1,
                "kl": {"coef": task.kl},
            },
            "actor": {
                "path": task.model,
                "tokenizer": task.tokenizer,
                "dtype": "float32",
                "implementation": implementation,
                "optimizer": {"lr": LEARNING_RATE, "betas": BETAS, "gradient_clip": CLIP},
            },
            "rollout": {"n": task.group, "max_new_tokens": task.limit},
            "reward": {"name": "words:of_slurmrl"},
            "dataset": {"type": "prompt", "path": str(folder / "prompts.jsonl")},
            "cluster": {"gpus_per_worker": 0, "cpus_per_worker": 1},
        }
        file = folder / "grpo.yaml"
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
        """Return the completion tokens of each finished step."""
        lines = lines_of(self.marker / "metrics.jsonl")
        return [line["completions"] * line["response_length"] for line in lines]

    def ended(self) -> bool:
        return not cpu_s(self.marker)

    def stop(self) -> None:
        subprocess.run([*self._command, "cancel", f"bench/{self.marker.name}"], env=self._environ)


class OtherRun:
    """A process of another side (see `train_with_trl` and `train_with_transformers`)."""

    def __init__(self, task: Task, number: int, side: str, python: str) -> None:
        self.marker = Path(task.folder) / f"{side}-{number}"
        self.marker.mkdir()
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": task.folder,
        }
        with (self.marker / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [python, __file__, side, json.dumps(asdict(task)), str(self.marker)],
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


def train_with_trl(task: Task, output: Path) -> None:
    """Write a line with the number of completion tokens after each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from words import of_others  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    settings = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=task.prompts * task.group,
        num_generations=task.group,
        max_completion_length=task.limit,
        max_steps=task.all_steps,
        temperature=1.0,
        beta=task.kl,
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
            report(output, sampled[-1])

    Counting(
        model=task.model,
        reward_funcs=of_others,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts_of(task)}),
        processing_class=AutoTokenizer.from_pretrained(task.tokenizer),
        callbacks=[Reports()],
    ).train()


def train_with_transformers(task: Task, output: Path) -> None:
    """Make the same steps in a plain loop: ``generate``, then padded rows for all passes."""
    import torch
    from torch import Tensor
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from words import of_others

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(task.tokenizer, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, BETAS, weight_decay=0.0, fused=True
    )
    prompts = prompts_of(task)

    def logprobs(of: Any, ids: Tensor, mask: Tensor, new: int) -> Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = of(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=new + 1,
            use_cache=False,
        ).logits[:, :-1]
        found: Tensor = -torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, -new:], reduction="none"
        )
        return found

    for step in range(task.all_steps):
        texts = prompts[step * task.prompts : (step + 1) * task.prompts]
        rows = [text for text in texts for _ in range(task.group)]
        given = tokenizer(rows, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            ids = model.generate(
                **given,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=task.limit,
                pad_token_id=tokenizer.pad_token_id,
            )
        new = ids.shape[1] - given["input_ids"].shape[1]
        ends = (ids[:, -new:] == tokenizer.eos_token_id).int()
        counts = ends.cumsum(1) - ends == 0
        mask = torch.cat([given["attention_mask"], counts.long()], 1)
        scores = of_others(rows, tokenizer.batch_decode(ids[:, -new:], skip_special_tokens=True))
        groups = torch.tensor(scores).view(-1, task.group)
        spread = groups.std(1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)
        found = logprobs(model, ids, mask, new)
        losses = -(found - found.detach()).exp() * advantages
        if task.kl:
            with torch.no_grad():
                apart = logprobs(reference, ids, mask, new)
            apart = apart - found
            losses = losses + task.kl * (apart.exp() - apart - 1)
        loss = ((losses * counts).sum(1) / counts.sum(1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        report(output, float(counts.sum()))


def prompts_of(task: Task) -> list[str]:
    path = Path(task.folder) / "prompts.jsonl"
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def report(output: Path, tokens: float) -> None:
    """Write the completion tokens of a step that has ended."""
    with (output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"tokens": tokens}) + "\n")


# -- measuring ------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file that another process is writing."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cpu_s(marker: Path) -> dict[int, float]:
    """Return the CPU seconds of each process that has the path in its command line, including its
    ended children.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().decode().split("\0")
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if any(marker == Path(text) or marker in Path(text).parents for text in arguments):
            found[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS_PER_S
    return found


def wait_for(run: SlurmrlRun | OtherRun, steps: int) -> None:
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


def measure(run: SlurmrlRun | OtherRun, task: Task) -> tuple[float, float]:
    """Return CPU seconds per 1,000 completion tokens, and tokens per completion, of the counted
    steps.
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
    return (spent[1] - spent[0]) / tokens * 1000, tokens / (task.steps * task.prompts * task.group)


def compare(
    trl_python: str | None, rounds: int, steps: int, words: int, limit: int, model: str | None
) -> None:
    """Compare slurmrl with the other sides (see the docstring of this module)."""
    with tempfile.TemporaryDirectory(prefix="slurmrl-bench-") as folder:
        task = Task(folder, f"{folder}/model", f"{folder}/tokenizer", steps, limit)
        if model:
            path = str(Path(model).resolve())
            task = Task(folder, path, path, steps, limit, prompts=4, group=4, kl=0.04)
            prepare_pretrained(Path(folder), task.model, task.prompts * task.all_steps)
        else:
            prepare(Path(folder), words, task.prompts * task.all_steps)
        sides: dict[str, Callable[[int], SlurmrlRun | OtherRun]] = {
            "slurmrl": lambda number: SlurmrlRun(task, number)
        }
        if model:
            sides["transformers"] = lambda number: OtherRun(
                task, number, "transformers", sys.executable
            )
        elif not trl_python:
            sides["hf"] = lambda number: SlurmrlRun(task, number, "hf")
        if trl_python:
            sides["trl"] = lambda number: OtherRun(task, number, "trl", trl_python)
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(1, rounds + 1):
            for side, start in sides.items():
                found[side].append(measure(start(number), task))
                print(f"round {number}: {side} {found[side][-1][0]:.3f}", file=sys.stderr)
    what = Path(model).name if model else f"{words} words"
    print(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, one thread; GRPO, {task.prompts} "
        f"prompts x {task.group} completions of up to {limit}, {what}; "
        f"{rounds} rounds of {steps} steps"
    )
    for name, values in found.items():
        costs = Spread.of(cost for cost, _ in values)
        lengths = Spread.of(length for _, length in values)
        ratios = [
            theirs[0] / ours[0] for ours, theirs in zip(found["slurmrl"], values, strict=True)
        ]
        ratio = f"  {Spread.of(ratios).text()} x" if name != "slurmrl" else ""
        print(
            f"{name:12s} CPU s per 1,000 completion tokens {costs.text('.3f')}{ratio}  "
            f"tokens a completion {lengths.text('.1f')}"
        )


if __name__ == "__main__":
    {"trl": train_with_trl, "transformers": train_with_transformers}[sys.argv[1]](
        Task(**json.loads(sys.argv[2])), Path(sys.argv[3])
    )
