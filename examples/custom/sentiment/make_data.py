"""Make this folder's data: a small sentiment classifier, and prompts.

    python examples/custom/sentiment/make_data.py

Replace the classifier by a published one: any folder that transformers'
``AutoModelForSequenceClassification`` loads. This one is a BERT model of 4,000 parameters. It
learns in a few seconds if a short remark has more positive than negative words. ``tokenizer``
belongs to the policy, which exchanges only strings with the classifier.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification

from slurmrl.data.tokenizer import save_tokenizer

FOLDER = Path(__file__).parent
GOOD = ["good", "great", "fine", "lovely", "superb"]
BAD = ["bad", "awful", "poor", "dull", "terrible"]
OTHER = ["the", "film", "food", "book", "was", "is", "and", "very", "it", "so"]
WORDS = ["<pad>", "<eos>", "<unk>", *GOOD, *BAD, *OTHER]
LENGTH = 12
"""Longest remark of the training data, in words."""


def tokenizer(words: list[str]) -> Tokenizer:
    """Return a tokenizer with one token per word."""
    vocabulary = {word: index for index, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return core


def mood(words: list[str]) -> int:
    """Return the number of positive words minus the number of negative words."""
    return sum((word in GOOD) - (word in BAD) for word in words)


def remarks(count: int) -> list[list[str]]:
    """Return random remarks that are either positive or negative."""
    draw, made = random.Random("remarks"), []
    while len(made) < count:
        words = draw.choices(WORDS[3:], k=draw.randint(2, LENGTH))
        if mood(words):
            made.append(words)
    return made


def classifier(steps: int = 400, batch: int = 64) -> BertForSequenceClassification:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = remarks(steps * batch)
    for start in range(0, len(texts), batch):
        rows = texts[start : start + batch]
        ids = torch.zeros(len(rows), LENGTH, dtype=torch.long)
        for row, words in enumerate(rows):
            ids[row, : len(words)] = torch.tensor([WORDS.index(word) for word in words])
        labels = torch.tensor([int(mood(words) > 0) for words in rows])
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def write(folder: Path) -> None:
    classifier().save_pretrained(folder / "classifier")
    save_tokenizer(tokenizer(WORDS), folder / "classifier", end="<eos>", pad="<pad>")
    words = [*WORDS[:3], *sorted(WORDS[3:])]
    save_tokenizer(tokenizer(words), folder / "tokenizer", end="<eos>", pad="<pad>")
    subjects = [f"the {noun} {verb}" for noun in ("film", "food", "book") for verb in ("was", "is")]
    prompts = [f"{begin}{subject}" for begin in ("", "it was so and ") for subject in subjects]
    rows = (json.dumps({"id": text, "prompt": text}) + "\n" for text in prompts)
    (folder / "prompts.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
