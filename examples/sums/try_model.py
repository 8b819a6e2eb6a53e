"""Ask an exported model for sums, with transformers and without slurmrl.

    python examples/sums/try_model.py FOLDER [QUESTION …]

Without a QUESTION, it asks the first three of heldout.jsonl.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HELD_OUT = Path(__file__).with_name("heldout.jsonl")
SYSTEM = "You add numbers."
"""The system message of the training."""


def answers(folder: str, questions: Sequence[str]) -> Iterator[str]:
    """Yield the model's most likely answer to each question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for question in questions:
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        answer = tokens[0, prompt["input_ids"].shape[1] :]
        yield tokenizer.decode(answer, skip_special_tokens=True).strip()


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(f"usage: {Path(sys.argv[0]).name} FOLDER [QUESTION …]")
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()[:3]]
    questions = sys.argv[2:] or [row["prompt"] for row in rows]
    for question, answer in zip(questions, answers(sys.argv[1], questions), strict=True):
        print(f"{question}  {answer}")


if __name__ == "__main__":
    main()
