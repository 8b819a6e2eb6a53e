"""Datasets of prompts and answers."""

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
    """The JSONL file. It is tokenised once per trial, into the run directory, when the first job
    starts. Do not change it during a trial."""
    prompt_template: TemplateText = "{prompt}"
    """Template of a prompt: `{key}` inserts the value of that key, `{{` and `}}` are literal
    braces. Every line must have every key, with a string as its value."""
    answer_template: TemplateText = "{answer}"
    """Template of an answer, in the same syntax. The end-of-text token is appended to it."""
    prompt_key: Word = "prompt"
    """Key whose value `{prompt}` inserts."""
    answer_key: Word = "answer"
    """Key whose value `{answer}` inserts. For type `prompt` it holds the reference answer for the
    reward; if one line has it, every line must have it, as a string."""
    id_key: Word = "id"
    """Key of the id. If no line has this key, line numbers are the ids."""
    max_prompt_tokens: PositiveInt | None = None
    """Lines with longer prompts are skipped; null keeps all. Their number is reported at
    submission, in the log, and as the metric `rows_left_out`."""
    max_tokens: PositiveInt | None = None
    """Lines with more tokens in prompt and answer are skipped in the same way; null keeps all."""
    shuffle: bool = True
    """Shuffle the lines anew for each epoch, with the run's seed."""
