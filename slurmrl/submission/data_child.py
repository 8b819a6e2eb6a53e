"""The process of ``slurmrl data``, which reads rows and the tokenizer: transformers imports torch.

``python -m slurmrl.submission.data_child CONFIG ROWS PARENT`` prints JSON lines about each source
of CONFIG: its first ROWS samples, or, with 0 rows, its counts. Problems of rows are ``problems``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from slurmrl.backoff import Interval
from slurmrl.config.schema import Dataset
from slurmrl.data.preparation import TokenReader
from slurmrl.data.records import NumberedRow, id_of
from slurmrl.data.rows import ROWS, Remarks
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.data.types.base import Row, RowTokens, TokenSequence
from slurmrl.errors import ConfigError, SlurmrlError
from slurmrl.plan.settings import load_resolved_settings
from slurmrl.rollouts.tools.schemas import ToolSchemas
from slurmrl.submission.checks.child import datasets
from slurmrl.workers import process

REPORT_S = 5.0


class DataReader:
    """Reads the sources of a configuration with its tokenizer."""

    def __init__(self, config: Path) -> None:
        self.config = load_resolved_settings(config).config
        assert self.config.actor.tokenizer is not None, "checked before"
        self._tokenizer = load_tokenizer(Path(self.config.actor.tokenizer))
        self._due = Interval(REPORT_S, after_s=REPORT_S)

    def report(self, rows: int) -> Iterator[dict[str, Any]]:
        for key, part in datasets(self.config):
            try:
                yield from self._samples(key, part, rows) if rows else self._counts(key, part)
            except ConfigError as error:
                problems = [list(problem) for problem in error.problems]
                yield {"source": key, "problems": problems}
            except SlurmrlError as error:
                yield {"source": key, "problems": [[part.path, "", str(error)]]}

    def _samples(self, key: str, part: Dataset, rows: int) -> Iterator[dict[str, Any]]:
        reader = TokenReader(part, self._tokenizer, self._progress)
        first = list(islice(reader, rows))
        if len(first) < rows:
            reader.finish()
        for record, tokens in first:
            yield self._sample(key, part, reader.records.where(record.number), record, tokens)

    def _sample(
        self, key: str, part: Dataset, where: str, record: NumberedRow, row: RowTokens
    ) -> dict[str, Any]:
        return {
            "source": key,
            "where": where,
            "id": id_of(record.row, part.id_key, record.number),
            "sequences": [self._texts(sequence) for sequence in row],
        }

    def _texts(self, sequence: TokenSequence) -> list[dict[str, Any]]:
        texts, at = [], 0
        for place, length in enumerate(sequence.runs):
            ids = list(sequence.tokens[at : at + length])
            at += length
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            if length:
                texts.append({"text": text, "tokens": length, "target": place % 2 == 1})
        return texts

    def _counts(self, key: str, part: Dataset) -> Iterator[dict[str, Any]]:
        reader = TokenReader(part, self._tokenizer, self._progress)
        rows = tokens = longest = targets = equal = 0
        first: list[Row] = []
        for record, row in reader:
            if len(first) < ROWS:
                first.append(record.row)
            lengths = [len(sequence.tokens) for sequence in row]
            rows += 1
            tokens += sum(lengths)
            targets += sum(sum(sequence.runs[1::2]) for sequence in row)
            longest = max(longest, *lengths)
            equal += reader.kind.equal_pairs(row)
        reader.finish()
        counts = {"rows": rows, "left_out": reader.left_out, "tokens": tokens}
        counts |= {"targets": targets, "longest": longest, "equal_pairs": equal}
        found = Remarks(part, first, lambda: self._tokenizer)
        episode = self.config.rollout.episode
        remarks = [each.message for each in found.all(episode.tools, ToolSchemas(episode).reason)]
        yield {"source": key, "path": part.path, "counts": {**counts, "remarks": remarks}}

    def _progress(self, what: str) -> None:
        if self._due.due():
            print(what, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    process.die_with(int(arguments[2]))
    try:
        for line in DataReader(Path(arguments[0])).report(int(arguments[1])):
            print(json.dumps(line), flush=True)
    except SlurmrlError as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
