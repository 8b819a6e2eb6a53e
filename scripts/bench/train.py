#!/usr/bin/env python3
"""Compare the training speed of SFT on one CPU thread: slurmrl, a plain loop around transformers,
and TRL.

scripts/bench/train.py [--trl-python PYTHON] [--steps 12] [--batch 32] [--spread 0.4] [--shares]
    [--gpu] [--grpo [--rounds 5] [--words 64] [--limit 128] [--model FOLDER]]
(TRL needs a separate environment: python -m venv /tmp/trl; /tmp/trl/bin/pip install trl. Pass its
Python as --trl-python /tmp/trl/bin/python. Without the option, the script does not measure TRL.)

The programs train the same small model on the same batches with AdamW, in float32, on one thread
and without gradient checkpointing. Each program runs in a separate process. They take turns step by
step, so that the load of the machine affects all of them. For the steps after the first two, the
script prints tokens without padding per second of CPU time and of wall time, as median (minimum to
maximum). It also prints each program's time divided by slurmrl's time, and the relative difference
of its losses from slurmrl's losses.

With --grpo, a slurmrl trial and TRL's GRPOTrainer make whole GRPO steps (see grpo.py). Without
--trl-python, the second side is a trial of the same model with ``implementation: hf``. For the
steps after the first two, the script prints the CPU seconds of all processes of a run per 1,000
completion tokens, and the ratio of the second side to slurmrl in the same round. A token ends a
completion with a probability of about 1 / ``--words``. Lengths therefore vary with 64 words; with
4096 words, almost all completions have ``--limit`` tokens. With ``--model``, the sides train a
pretrained chat model with a reference model, and a plain loop around transformers takes part.

With --gpu, slurmrl and transformers train a larger model on a GPU in bfloat16 instead. Then only
wall time is compared.

slurmrl trains through its fsdp engine, in a process that is set up like a worker. transformers and
TRL pad each batch to its longest sequence. ``--shares`` runs only slurmrl, under torch's profiler,
and prints the CPU time of a step by kinds of operators.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpo
from spread import Spread

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
GPU_SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
PAD = 0
LEARNING_RATE, BETAS, EPS, CLIP = 1e-3, (0.9, 0.999), 1e-8, 1.0
WARM_UP = 2
SHORTEST, MEDIAN, LONGEST = 8, 96, 1024
"""Lengths of the sequences, in tokens."""
KINDS = {
    "attention": r"scaled_dot_product|flash_attention",
    "matrix products": r"^aten::(mm|addmm|bmm|matmul|linear)$",
}
"""Kinds of operators, by patterns of their names."""
Sequences = list[list[int]]
Step = Callable[[Sequences], float]
"""Function that makes an optimizer step on a batch and returns its loss per token."""


def lengths(spread: float, count: int) -> list[int]:
    draw = random.Random(1)
    drawn = (draw.lognormvariate(math.log(MEDIAN), spread) for _ in range(count))
    return [min(max(round(length), SHORTEST), LONGEST) for length in drawn]


def architecture(gpu: bool) -> dict[str, Any]:
    return {**ARCHITECTURE, **(GPU_SIZES if gpu else {})}


def prepare(folder: Path, spread: float, count: int, gpu: bool) -> Sequences:
    """Write the model and the sequences."""
    import torch

    from slurmrl.engines.role_weights import init_tensor
    from slurmrl.models.architecture import ModelConfig
    from slurmrl.models.decoder import build
    from tests.support.decoder_folders import to_hf

    config = ModelConfig.from_hf(architecture(gpu))
    model = build(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_tensor(name, tuple(parameter.shape), config, seed=1))
    to_hf(model, folder)
    draw, words = random.Random(2), range(1, config.vocab_size)
    sequences = [draw.choices(words, k=length) for length in lengths(spread, count)]
    (folder / "sequences.json").write_text(json.dumps(sequences))
    return sequences


# -- the programs, each in a separate process ----------------------------------------------------


def slurmrl_steps(folder: Path, gpu: bool) -> Step:
    import torch
    from torch import Tensor

    from slurmrl.algorithms.supervised import sft_loss
    from slurmrl.config.schema.roles import Model
    from slurmrl.data.sample import SequenceSample
    from slurmrl.engines import ENGINES
    from slurmrl.tensors.parallel import device
    from slurmrl.tensors.parallel.groups import build

    accelerator = device.GPU if gpu else device.CPU
    device.set_up(accelerator, threads=1, deterministic=not gpu)
    torch.distributed.init_process_group(
        accelerator.backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    placed: Any = argparse.Namespace(role="actor", ranks=(0,), sizes={"dp": 1})
    optimizer = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "gradient_clip": CLIP}
    model = {
        "architecture": architecture(gpu),
        "optimizer": optimizer,
        "dtype": "bfloat16" if gpu else "float32",
    }
    engine = ENGINES.load("fsdp")(
        "actor",
        Model.model_validate(model),
        head="lm",
        trained=True,
        context=build([placed], rank=0, device=accelerator.device)["actor"],
        seed=1,
        total_steps=1000,
        source=folder,
    )

    def first_tokens(sizes: Sequence[int]) -> Tensor:
        mask = torch.zeros(sum(sizes), dtype=torch.bool)
        mask[torch.tensor([0, *sizes[:-1]]).cumsum(0)] = True
        return mask

    def step(batch: Sequences) -> float:
        sizes = [len(sequence) for sequence in batch]
        keys = {
            "input_ids": torch.tensor([token for sequence in batch for token in sequence]),
            "prompt_mask": first_tokens(sizes),
        }
        sample = SequenceSample.from_default(sizes, [str(n) for n in range(len(sizes))], keys)
        return float(engine.train_batch(sample, sft_loss, sum(sizes) - len(sizes))["loss"])

    return step


def transformers_steps(folder: Path, gpu: bool) -> Step:
    import torch
    from transformers import AutoModelForCausalLM

    where = torch.device("cuda" if gpu else "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(where).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, BETAS, EPS, weight_decay=0.0, fused=True
    )

    def step(batch: Sequences) -> float:
        longest = max(map(len, batch))
        rows = [sequence + [PAD] * (longest - len(sequence)) for sequence in batch]
        ids = torch.tensor(rows, device=where)
        mask = (ids != PAD).long()
        labels = ids.masked_fill(mask == 0, -100)
        with torch.autocast(where.type, torch.bfloat16, enabled=gpu):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def run_trl(folder: Path, batches: Iterator[Sequences], report: Callable[[float], None]) -> None:
    """Train with TRL. TRL has its own loop, so ``report`` waits for the next turn between two
    steps.
    """
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = list(batches)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": PAD, "<eos>": 1}, "<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(rows[0]),
        max_steps=len(rows),
        max_length=None,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_grad_norm=CLIP,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    losses: list[float] = []

    class InOrder(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            report(losses[-1])

    InOrder(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": [ids for batch in rows for ids in batch]}),
        callbacks=[Turns()],
    ).train()


STEPS = {"slurmrl": slurmrl_steps, "transformers": transformers_steps}


def contest(name: str, folder: Path, batch: int, gpu: bool) -> None:
    """Make a step for each line on standard input; print its loss and times."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries
    import torch

    torch.set_num_threads(1)
    sequences: Sequences = json.loads((folder / "sequences.json").read_text())
    batches = (sequences[at : at + batch] for at in range(0, len(sequences), batch))
    began = [0.0, 0.0]

    def turn(*loss: float) -> None:
        spent = time.process_time() - began[0], time.perf_counter() - began[1]
        print(json.dumps([*loss, *spent] if loss else []), file=told, flush=True)
        sys.stdin.readline()
        began[:] = time.process_time(), time.perf_counter()

    turn()
    if name == "trl":
        run_trl(folder, batches, turn)
        return
    step = STEPS[name](folder, gpu)
    for one in batches:
        turn(step(one))


# -- the process that gives turns to the programs -------------------------------------------------


class Contestant:
    """A process that makes one step per ``turn``."""

    def __init__(self, name: str, python: str, folder: Path, batch: int, gpu: bool) -> None:
        self.name = name
        self.turns: list[tuple[float, float, float]] = []
        """Loss, CPU seconds and wall seconds."""
        options = ["--folder", folder, "--batch", str(batch), *(["--gpu"] if gpu else [])]
        self._process = subprocess.Popen(
            [python, __file__, "--contest", name, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._reply()

    def turn(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        loss, cpu_s, wall_s = self._reply()
        self.turns.append((loss, cpu_s, wall_s))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _reply(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}")
        reply: list[float] = json.loads(line)
        return reply


def compare(pythons: dict[str, str], spread: float, steps: int, batch: int, gpu: bool) -> None:
    count = (steps + WARM_UP) * batch
    with tempfile.TemporaryDirectory(prefix="slurmrl-bench-") as made:
        folder = Path(made)
        sizes = [len(sequence) for sequence in prepare(folder, spread, count, gpu)]
        contestants = []
        try:
            for name, python in pythons.items():
                contestants.append(Contestant(name, python, folder, batch, gpu))
            for _ in range(steps + WARM_UP):
                for contestant in contestants:
                    contestant.turn()
        finally:
            for contestant in contestants:
                contestant.end()
    batches = [sizes[at : at + batch] for at in range(WARM_UP * batch, count, batch)]
    tokens = [sum(part) for part in batches]
    padded = sum(max(part) * len(part) for part in batches)
    where = "GPU, bfloat16" if gpu else "one thread"
    print(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {where}; spread {spread}: "
        f"{sum(tokens)} tokens in {steps} batches of {batch}, "
        f"{padded / sum(tokens):.2f} x as many if padded"
    )
    for contestant in contestants:
        print(line(contestant, contestants[0], tokens))


def line(one: Contestant, ours: Contestant, tokens: Sequence[int]) -> str:
    """Print the table. ``tokens`` has the tokens of each counted batch."""

    def total_s(contestant: Contestant, column: int) -> float:
        return sum(turn[column] for turn in contestant.turns[WARM_UP:])

    def rates(column: int) -> str:
        steps = zip(tokens, one.turns[WARM_UP:], strict=True)
        speed = Spread.of(count / turn[column] for count, turn in steps)
        return f"{speed.text('6.0f')} {total_s(one, column) / total_s(ours, column):5.2f} x"

    apart = max(abs(a[0] / b[0] - 1) for a, b in zip(one.turns, ours.turns, strict=True))
    return (
        f"{one.name:12s}  tokens/s cpu {rates(1)}  wall {rates(2)}"
        f"  loss {one.turns[0][0]:.4f} -> {one.turns[-1][0]:.4f}, within {apart:.0e}"
    )


def shares(spread: float, steps: int, batch: int) -> None:
    """Print the share of slurmrl's CPU time that each kind of operator takes over all steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    each: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "other")}
    with tempfile.TemporaryDirectory(prefix="slurmrl-bench-") as made:
        sequences = prepare(Path(made), spread, (steps + WARM_UP) * batch, gpu=False)
        step = slurmrl_steps(Path(made), gpu=False)
        for at in range(0, len(sequences), batch):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                step(sequences[at : at + batch])
            if at < WARM_UP * batch:
                continue
            spent = dict.fromkeys(each, 0.0)
            for event in profiler.key_averages():
                kinds = (kind for kind, names in KINDS.items() if re.search(names, event.key))
                spent[next(kinds, "other")] += event.self_cpu_time_total
            for kind, time_us in spent.items():
                each[kind].append(100 * time_us / sum(spent.values()))
    for kind, percent in each.items():
        print(f"{kind:18s} {Spread.of(percent).text('.1f')} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trl-python", help="python of an environment that has TRL")
    parser.add_argument(
        "--spread",
        type=float,
        default=0.4,
        help="deviation of the logarithms of the lengths; 0 for equal ones (GSM8K has 0.39)",
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument(
        "--shares", action="store_true", help="profile slurmrl alone: CPU time by kind of operator"
    )
    parser.add_argument("--gpu", action="store_true", help="on a GPU, in bfloat16")
    parser.add_argument("--grpo", action="store_true", help="whole GRPO steps")
    parser.add_argument("--rounds", type=int, default=5, help="with --grpo: runs of each side")
    parser.add_argument("--words", type=int, default=64, help="with --grpo: size of the vocabulary")
    parser.add_argument("--limit", type=int, default=128, help="with --grpo: longest completion")
    parser.add_argument("--model", help="with --grpo: folder of a pretrained chat model")
    parser.add_argument("--contest", choices=(*STEPS, "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gpu and (options.trl_python or options.shares):
        parser.error("--gpu compares slurmrl with transformers; it takes no --trl-python, --shares")
    if options.grpo:
        if options.gpu or options.shares:
            parser.error("--grpo takes neither --gpu nor --shares")
        steps, words, limit = options.steps, options.words, options.limit
        grpo.compare(options.trl_python, options.rounds, steps, words, limit, options.model)
        return
    if options.contest:
        contest(options.contest, options.folder, options.batch, options.gpu)
        return
    if options.shares:
        shares(options.spread, options.steps, options.batch)
        return
    pythons = dict.fromkeys(STEPS, sys.executable)
    if options.trl_python:
        pythons["trl"] = options.trl_python
    compare(pythons, options.spread, options.steps, options.batch, options.gpu)


if __name__ == "__main__":
    main()
