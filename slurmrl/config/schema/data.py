"""Where prompts and answers come from."""

from __future__ import annotations

from typing import Literal

from slurmrl.config.schema.base import PathText, PositiveInt, Section, Word


class Dataset(Section):
    """A JSONL file: one object with a unique id on each line."""

    type: Literal["prompt", "prompt_answer"]
    """`prompt` feeds generation (the answer goes to the reward), `prompt_answer` feeds SFT."""
    path: PathText
    """The JSONL file."""
    prompt_template: str = "{prompt}"
    """Text of a prompt; `{prompt}` and any other key of the line in braces are filled in."""
    answer_template: str = "{answer}"
    """Text of an answer, filled in the same way; the end-of-text token follows it."""
    prompt_key: Word = "prompt"
    """Key of the line that `{prompt}` stands for."""
    answer_key: Word = "answer"
    """Key of the line that `{answer}` stands for."""
    id_key: Word = "id"
    """Key of the line's id. Where no line has one, the line's number is its id."""
    max_prompt_tokens: PositiveInt | None = None
    """Lines with longer prompts are left out; null keeps all."""
    max_tokens: PositiveInt | None = None
    """Lines with more tokens in prompt and answer are left out; null keeps all."""
    shuffle: bool = True
    """Draw a new order for each epoch from the run's seed."""
