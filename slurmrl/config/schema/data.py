"""Where prompts and answers come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from slurmrl.config.schema.base import PathText, PositiveInt, Section, Word
from slurmrl.config.template import Template


def _check_template(text: str) -> str:
    Template.parse(text)
    return text


TemplateText = Annotated[str, AfterValidator(_check_template)]


class Dataset(Section):
    """A JSONL file: one object with a unique id on each line."""

    type: Literal["prompt", "prompt_answer"]
    """`prompt` feeds generation (the answer goes to the reward), `prompt_answer` feeds SFT."""
    path: PathText
    """The JSONL file."""
    prompt_template: TemplateText = "{prompt}"
    """Text of a prompt: `{key}` stands for the text under that key of the line, `{{` and `}}` for
    braces. Every line needs every key, and its value must be a string."""
    answer_template: TemplateText = "{answer}"
    """Text of an answer, written in the same way; the end-of-text token follows it."""
    prompt_key: Word = "prompt"
    """Key of the line that `{prompt}` stands for."""
    answer_key: Word = "answer"
    """Key of the line that `{answer}` stands for. With `prompt` it is the reference that the reward
    reads; if one line has it, every line needs it, as a string."""
    id_key: Word = "id"
    """Key of the line's id. Where no line has one, the line's number is its id."""
    max_prompt_tokens: PositiveInt | None = None
    """Lines with longer prompts are left out, and their number is told when the trial is submitted,
    in the log and as the metric `rows_left_out`; null keeps all."""
    max_tokens: PositiveInt | None = None
    """Lines with more tokens in prompt and answer are left out in the same way; null keeps all."""
    shuffle: bool = True
    """Draw a new order for each epoch from the run's seed."""
