"""The inspector: a child process on the login node that reads large files and runs user code.

The process answers one `slurmrl.child.ChildRequest` about a configuration. The request's
``subject`` is one of:

- ``inputs``: the checks before a submission (`input_checks`)
- ``tools``: the schemas of an episode's tools, for chat templates that describe them
- ``data``: rows as the model sees them, or their counts (``slurmrl data``)
- ``reward``: the scores of some completions (``slurmrl try-reward``)

The process may import torch, because transformers imports it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slurmrl import child
from slurmrl.backoff import Interval
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Config, Dataset, Reward
from slurmrl.config.source import dotted
from slurmrl.data.chat import ChatTemplate
from slurmrl.data.encoder import Continuations, RowTokens, TokenSequence
from slurmrl.data.preparation import TokenReader
from slurmrl.data.records import NumberedRow, id_of
from slurmrl.data.rows import ROWS, Remarks
from slurmrl.data.tokenizer import end_id, load_tokenizer
from slurmrl.data.types import Row
from slurmrl.desk.input_checks import datasets, inputs
from slurmrl.desk.inspection import FoundRows, Item, Selection, find_items
from slurmrl.desk.trial_checks import undescribed
from slurmrl.errors import ConfigError, SlurmrlError, UsageError
from slurmrl.plan.settings import load_resolved_settings
from slurmrl.registry import describe
from slurmrl.rewards.checked_reward import MODEL_SCORES
from slurmrl.rewards.weighted import WeightedReward, make_reward
from slurmrl.rollouts.tools import ToolSchemas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        counts = {"rows": rows, "left_out": reader.tokens.left_out, "tokens": tokens}
        counts |= {"targets": targets, "longest": longest, "equal_pairs": equal}
        found = Remarks(part, first, lambda: self._tokenizer)
        episode = self.config.rollout.episode
        remarks = [each.message for each in found.all(episode.tools, ToolSchemas(episode).reason)]
        yield {"source": key, "path": part.path, "counts": {**counts, "remarks": remarks}}

    def _progress(self, what: str) -> None:
        if self._due.due():
            print(what, file=sys.stderr, flush=True)


def data(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the first ``rows`` samples of each source, or its counts if ``rows`` is 0.

    A reply with ``problems`` lists unusable rows.
    """
    try:
        yield from DataReader(Path(request["config"])).report(request["rows"])
    except SlurmrlError as error:
        yield {"error": str(error)}


def tools(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas of `schemas_by_dataset`."""
    yield schemas_by_dataset(load_resolved(Path(request["config"])))


def schemas_by_dataset(config: Config) -> dict[str, list[dict[str, Any]]]:
    """Return the schemas for each dataset of `undescribed` by its dotted key."""
    assert config.actor.tokenizer is not None, "checked before"
    tokenizer = load_tokenizer(Path(config.actor.tokenizer))
    schemas = ToolSchemas(config.rollout.episode).schemas
    return {
        dotted(key): schemas
        for key, dataset in undescribed(config).items()
        if schemas and _writes(dataset, tokenizer, schemas)
    }


def _writes(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]
) -> bool:
    """Return whether the chat template of each source of a dataset describes the tools."""
    with suppress(ConfigError):  # another check reports a missing template
        parts = dataset.parts.values()
        return all(ChatTemplate(part, tokenizer).writes(schemas) for part in parts)
    return False


NO_MODELS = (
    "the reward needs the scores of reward_model, and try-reward loads no models: try its other "
    "parts without the part named 'model', or score completions of the actor in an evaluation "
    "(slurmrl submit CONFIG total_steps=0)"
)


def reward(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the scores of a selection, or ``problems`` or an ``error`` for mistakes of the user."""
    try:
        yield _try(request)
    except ConfigError as error:
        yield {"problems": [list(problem) for problem in error.problems]}
    except (SlurmrlError, SystemExit) as error:
        ends = f"the reward ends the process: {describe(error)}"
        yield {"error": ends if isinstance(error, SystemExit) else str(error)}


def _try(request: Mapping[str, Any]) -> dict[str, Any]:
    config = load_resolved(Path(request["config"]))
    rows = FoundRows(Dataset.model_validate(request["dataset"]))
    items = find_items(rows, Selection(**request["selection"]))
    began = time.monotonic()
    with closing(_made(Reward.model_validate(request["reward"]))) as function:
        extras = _extras(items)
        if MODEL_SCORES in function.wanted():
            raise UsageError(NO_MODELS)
        if "token_ids" in function.wanted():
            completions = [item.completion for item in items]
            extras["token_ids"] = token_ids(config.actor.tokenizer, completions)
        made = time.monotonic()
        scores = _scored(function, rows, items, extras)
        scored = time.monotonic()
        shown = [
            {
                "line": item.row.number,
                "id": item.row.id,
                "completion": item.completion,
                "answer": rows.answer(item.row),
                "score": score,
            }
            for item, score in zip(items, scores, strict=True)
        ]
        times = {"made_s": made - began, "scored_s": scored - made}
        return {"items": shown, "stats": function.metrics(), **times}


def _made(settings: Reward) -> WeightedReward:
    """Make the reward. Raises UsageError for any exception of the user's code, with its line."""
    try:
        return make_reward(settings)
    except SlurmrlError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"reward '{settings.title}': {describe(error)}") from error


def _scored(
    function: WeightedReward, rows: FoundRows, items: Sequence[Item], extras: dict[str, Any]
) -> list[float | None]:
    return function.score(
        [rows.prompt(item.row) for item in items],
        [item.completion for item in items],
        [{**item.row.values, "answer": rows.answer(item.row)} for item in items],
        [item.row.where for item in items],
        extras,
    )


def _extras(items: Sequence[Item]) -> dict[str, Any]:
    """Return the arguments that a reward may request, with values like in the first step of a run.

    The completions of one row are a group.
    """
    groups: dict[int, list[str]] = {}
    indices = []
    for item in items:
        group = groups.setdefault(item.row.number, [])
        indices.append(len(group))
        group.append(item.completion)
    return {
        "finished": [item.finished for item in items],
        "sample_ids": [f"{item.row.id}@0" for item in items],
        "indices": indices,
        "siblings": [groups[item.row.number] for item in items],
        "step": 1,
        "evaluation": False,
    }


def token_ids(folder: str | None, completions: Sequence[str]) -> list[list[int]]:
    """Return the token ids of completions, each with the end-of-text token."""
    if folder is None:
        raise UsageError("the reward needs token_ids, but the configuration has no tokenizer")
    tokenizer = load_tokenizer(Path(folder))
    end = end_id(tokenizer)
    rows = Continuations(tokenizer).ids(completions, [None] * len(completions))
    return [[*ids, end] for ids in rows]


SUBJECTS: Final = {"inputs": inputs, "tools": tools, "data": data, "reward": reward}

if __name__ == "__main__":
    child.answer(lambda request: SUBJECTS[request["subject"]](request))
