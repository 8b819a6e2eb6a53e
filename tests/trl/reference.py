"""Losses and gradients of TRL's trainers, computed in TRL's environment: reference.py FOLDER

FOLDER has the models (``model``, ``ref``, ``reward``, as Hugging Face folders), ``batches.json``
and ``cases.json`` (tests/trl/cases.py). For each case this writes ``losses.json`` and the gradients
as a model folder, ``gradients/<case>``. Weights and gradients are float64.

The trainers are TRL's own: they tokenize the texts, pad, compute the reference's log-probabilities,
advantages and the loss. Only generation is replaced, by the completions of the batch.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Values = dict[str, Any]
PADDING, END = "<pad>", "</s>"


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for each token: ``t7`` is token 7. Tokens 0, 1 and 2 are
    padding, unknown and end.
    """
    words = {PADDING: 0, "<unk>": 1, END: 2, **{f"t{n}": n for n in range(3, vocabulary)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PADDING, eos_token=END, unk_token="<unk>"
    )


def text(tokens: list[int], *, answer: bool = False) -> str:
    """Return the text of tokens without the end token, which TRL adds to answers."""
    words = " ".join(f"t{token}" for token in tokens if token != 2)
    return f" {words}" if answer else words


def arguments(kind: str, folder: Path, settings: Values) -> Any:
    return getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "unused"),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float64},
        **settings,
    )


def rows_of(kind: str, batch: list[Values]) -> Dataset:
    if kind in ("SFT", "KTO"):
        names = ("label",) if kind == "KTO" else ()
        rows = [
            {
                "prompt": text(row["prompt"]),
                "completion": text(row["answer"], answer=True),
                **{name: row[name] for name in names},
            }
            for row in batch
        ]
    elif kind in ("DPO", "Reward"):
        rows = [
            {
                "prompt": text(row["prompt"]),
                "chosen": text(row["chosen"], answer=True),
                "rejected": text(row["rejected"], answer=True),
            }
            for row in batch
        ]
    else:
        rows = [{"prompt": text(row["prompt"])} for row in batch]
    return Dataset.from_list(rows)


def offline(case: Values, batch: list[Values], folder: Path, vocabulary: int) -> Any:
    """Return a trainer on a dataset, and the whole dataset as one batch."""
    kind, settings = case["trainer"], dict(case["theirs"])
    reference_free = settings.pop("reference_free", False)
    if reference_free:
        settings["precompute_ref_log_probs"] = True
    trainer = getattr(trl, f"{kind}Trainer")(
        model=str(folder / ("reward" if kind == "Reward" else "model")),
        args=arguments(kind, folder, {"per_device_train_batch_size": len(batch), **settings}),
        train_dataset=rows_of(kind, batch),
        processing_class=tokenizer(vocabulary),
    )
    if kind in ("DPO", "KTO") and not reference_free:
        load_reference(trainer, folder)
    inputs = trainer.data_collator(list(trainer.train_dataset))
    if reference_free:
        for name in ("ref_chosen_logps", "ref_rejected_logps"):
            inputs[name] = torch.zeros(len(batch), dtype=torch.float64)
    return trainer, inputs


def online(case: Values, batch: list[Values], folder: Path, vocabulary: int) -> Any:
    """Return a trainer that gets completions instead of generating them, and its batch."""
    kind = case["trainer"]
    group = len(batch[0]["completions"])
    completions = [tokens for row in batch for tokens in row["completions"]]
    rewards = [reward for row in batch for reward in row["rewards"]]
    settings = {
        "per_device_train_batch_size": len(completions),
        "num_generations": group,
        **case["theirs"],
    }
    trainer = getattr(trl, f"{kind}Trainer")(
        model=str(folder / "model"),
        reward_funcs=lambda **_: rewards,
        args=arguments(kind, folder, settings),
        train_dataset=rows_of(kind, batch),
        processing_class=tokenizer(vocabulary),
    )
    if trainer.ref_model is not None:
        load_reference(trainer, folder)
    prompts = [row["prompt"] for row in batch for _ in range(group)]
    answers = [text(tokens, answer=True) for tokens in completions]
    if kind == "RLOO":
        trainer._generate = lambda _: (prompts, completions, answers)
    else:
        trainer._generate = lambda _: (prompts, completions, None, answers, None, {}, None, [])
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": text(p)} for p in prompts])
    if case["batch"].startswith("stale"):
        old = torch.zeros(inputs["completion_ids"].shape, dtype=torch.float64)
        flat = (values for row in batch for values in row["old"])
        for row, values in enumerate(flat):
            old[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
        inputs["old_per_token_logps"] = old
    return trainer, inputs


def load_reference(trainer: Any, folder: Path) -> None:
    weights = load_file(folder / "ref" / "model.safetensors")
    trainer.ref_model.load_state_dict({name: value.double() for name, value in weights.items()})


MAKERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("SFT", "DPO", "KTO", "Reward"), offline),
    **dict.fromkeys(("GRPO", "RLOO"), online),
}


def main(folder: Path) -> None:
    batches = json.loads((folder / "batches.json").read_text())
    losses: dict[str, float] = {}
    for case in json.loads((folder / "cases.json").read_text()):
        kind = "reward" if case["trainer"] == "Reward" else "model"
        config = folder / kind / "config.json"
        vocabulary = json.loads(config.read_text())["vocab_size"]
        batch = batches[case["batch"]]
        trainer, inputs = MAKERS[case["trainer"]](case, batch, folder, vocabulary)
        trainer.current_gradient_accumulation_steps = 1  # as in the loop of transformers' Trainer
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses[case["name"]] = loss.item()
        target = folder / "gradients" / case["name"]
        target.mkdir(parents=True)
        shutil.copy(config, target)
        gradients = {
            name: p.grad.contiguous()
            for name, p in trainer.model.named_parameters()
            if p.grad is not None
        }
        save_file(gradients, target / "model.safetensors", metadata={"format": "pt"})
    (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
