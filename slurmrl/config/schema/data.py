"""Datasets of prompts and answers."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator

from slurmrl.config.schema.base import PathText, PositiveInt, Section, Word
from slurmrl.config.template import Template


def _check_template(text: str) -> str:
    Template.parse(text)
    return text


TemplateText = Annotated[str, AfterValidator(_check_template)]

FIRST_SETTINGS: Final = (
    "type",
    "prompt_template",
    "answer_template",
    "prompt_key",
    "answer_key",
    "id_key",
    "max_prompt_tokens",
    "max_tokens",
)
"""Settings that are in every fingerprint, see `Dataset.rules`."""


class Dataset(Section):
    """A JSONL file: one object with a unique id on each line."""

    type: Literal["prompt", "prompt_answer", "preference", "kto"]
    """`prompt` feeds generation (the answer goes to the reward), `prompt_answer` feeds SFT,
    `preference` (pairs of answers) feeds DPO and reward models, `kto` (labelled answers) KTO."""
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
    chosen_key: Word = "chosen"
    """For type `preference`: key of the preferred answer, or of a list of them. Lines may also have
    the keys `pos_answers` and `neg_answers`."""
    rejected_key: Word = "rejected"
    """For type `preference`: key of the answer that is not preferred, or of a list of as many as
    there are chosen ones. The first of one list and the first of the other are a pair, and so
    on."""
    max_pairs_per_prompt: PositiveInt | None = None
    """For type `preference`: use at most the first pairs of a line; null uses all."""
    label_key: Word = "label"
    """For type `kto`: key of the label, true if the answer is desirable and false if it is not."""
    id_key: Word = "id"
    """Key of the id. If no line has this key, line numbers are the ids."""
    max_prompt_tokens: PositiveInt | None = None
    """Lines with longer prompts are skipped; null keeps all. Their number is reported at
    submission, in the log, and as the metric `rows_left_out`."""
    max_tokens: PositiveInt | None = None
    """Lines with more tokens in prompt and answer are skipped in the same way; null keeps all."""
    shuffle: bool = True
    """Shuffle the lines anew for each epoch, with the run's seed."""

    def rules(self) -> dict[str, Any]:
        """What determines the rows except the file, as JSON values. Settings that slurmrl 1 did not
        have are left out at their defaults, so that fingerprints in older commits stay valid."""
        values = self.model_dump(mode="json", exclude={"path", "shuffle"})
        fields = type(self).model_fields
        return {
            name: value
            for name, value in values.items()
            if name in FIRST_SETTINGS or getattr(self, name) != fields[name].default
        }
