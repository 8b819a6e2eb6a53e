"""A reward from a Hugging Face classifier, which scores how positive a string is.

The classifier may be any folder that transformers' ``AutoModelForSequenceClassification`` loads. It
has a separate tokenizer and reads prompt and completion as strings. It is not part of the plan, and
runs on the CPUs of the worker that scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Sentiment:
    """The classifier's probability of a label.

    :param path: the classifier's folder; a relative one starts in the folder of this file, which is
        copied with the trial
    :param batch_size: texts in one forward pass
    """

    def __init__(
        self,
        *,
        path: str = "classifier",
        label: str = "POSITIVE",
        batch_size: int = 64,
    ) -> None:
        self._folder = Path(__file__).parent / path
        self._label, self._batch_size = label, batch_size
        if not (self._folder / "config.json").is_file():
            raise FileNotFoundError(f"no classifier in {self._folder}: it has no config.json")

    @cached_property
    def _loaded(self) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, int]:
        """Return the tokenizer, the model and the index of the label.

        The first call loads them, so that a submission does not import torch.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        model = AutoModelForSequenceClassification.from_pretrained(
            self._folder, local_files_only=True
        )
        labels = model.config.label2id
        if self._label not in labels:
            raise ValueError(f"label '{self._label}' is unknown; known: {', '.join(labels)}")
        return tokenizer, model.eval(), labels[self._label]

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        texts = [f"{prompt} {text}" for prompt, text in zip(prompts, completions, strict=True)]
        starts = range(0, len(texts), self._batch_size)
        return [
            score
            for start in starts
            for score in self._scores(texts[start : start + self._batch_size])
        ]

    def _scores(self, texts: list[str]) -> list[float]:
        import torch

        tokenizer, model, label = self._loaded
        inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        with torch.no_grad():
            logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        probabilities: list[float] = logits.float().softmax(-1)[:, label].tolist()
        return probabilities
