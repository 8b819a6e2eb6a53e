"""Type ``prompt_answer``: prompts with the answers to learn. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmrl.data.fields import value_at
from slurmrl.data.messages import ASSISTANT, Message, as_context
from slurmrl.data.row_fields import RowField
from slurmrl.data.types import prompt
from slurmrl.data.types.base import Row, RowTokens, RowType, TokenSequence

if TYPE_CHECKING:
    from slurmrl.data.encoder import Encoder


class PromptAnswers(RowType):
    """One sequence: prompt, answer, end-of-text token. Both are tokenised separately, so that a
    prompt has the same tokens as in generation, and the answer as a continuation. With a chat
    template the answer is the assistant's turn, which ends as the template says, or a list of
    messages with its turns."""

    dataset = "slurmrl.data.dataset:TokenizedDataset"
    templates = ("prompt_template", "answer_template")

    def fields(self) -> list[RowField]:
        fields = [prompt.conversational(self, field) for field in super().fields()]
        return [*fields, *prompt.tools_field(self)]

    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        if encoder.chat is not None:
            return encoder.conversations(
                [(self._conversation(row), prompt.tools(self, row)) for row in rows]
            )
        texts = [encoder.without_end(self.filled("answer_template", row)) for row in rows]
        prompts = prompt.prompts(self, rows, encoder)
        answers = encoder.answers(texts, prompts)
        return [
            ids if isinstance(ids, str) else [TokenSequence.of(ids, [*answer, encoder.end])]
            for ids, answer in zip(prompts, answers, strict=True)
        ]

    def _conversation(self, row: Row) -> list[Message]:
        """The prompt, then the answer, whose turns of the assistant are the targets."""
        answer = value_at(row, self.config.answer_key)
        if not isinstance(answer, list):
            text = self.filled("answer_template", row)
            answer = [{"role": ASSISTANT, "content": text}]
        return [*as_context(prompt.conversation(self, row)), *answer]
