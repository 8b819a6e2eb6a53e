"""Questions to the inspector about a configuration: its data, reward, and tools. Torch-free."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from slurmrl.child import ChildRequest
from slurmrl.config.schema import Dataset, Reward
from slurmrl.data.records import MOST_PROBLEMS, RecordReader, RowChecks, id_of
from slurmrl.data.rows import reference
from slurmrl.data.types import has, own_convert, type_of_rows
from slurmrl.data.types.prompt import Prompts
from slurmrl.desk import trial_code
from slurmrl.desk.trial_checks import Code, asking_inspector
from slurmrl.errors import ConfigError, Problem, RunFailedError, UsageError, WaitTimeoutError
from slurmrl.fsio import inputs
from slurmrl.plan.settings import Settings


@dataclass(frozen=True)
class Selection:
    """The completions to score: from a file, given strings, or the rows' own answers."""

    rows: int | None
    """Number of first rows, or of first completions of the file; None for the whole file."""
    completions: Sequence[str] = ()
    """Completions to score for each of the rows."""
    file: str | None = None
    """Path of a JSONL file of completions; None without a file."""


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """Adjacent tokens of a sequence that are either all targets or all context."""

    text: str
    tokens: int
    target: bool


@dataclass(frozen=True, kw_only=True)
class DataSample:
    """One row as the model sees it."""

    source: str
    """Dotted key of the section."""
    where: str
    """Place of the row in the data, for messages."""
    id: str
    sequences: tuple[tuple[TextRun, ...], ...]


@dataclass(frozen=True, kw_only=True)
class DataCounts:
    """Counts of the rows and tokens of a source."""

    source: str
    path: str
    rows: int
    """Number of usable rows."""
    left_out: int
    """Number of rows that exceed the length limits."""
    tokens: int
    targets: int
    """Number of tokens that are trained on."""
    longest: int
    """Number of tokens of the longest sequence."""
    equal_pairs: int
    """Number of pairs whose chosen and rejected answers have the same tokens."""
    remarks: tuple[str, ...] = ()
    """Probable mistakes in the data (`data.rows.Remarks`)."""


class DataReport:
    """Asks a child process about the data of a configuration.

    Call `finish` after iterating. The constructor raises UsageError for a configuration without a
    tokenizer; the methods raise RunFailedError if the child fails.
    """

    def __init__(self, settings: Settings, code: Code) -> None:
        """Prepare the question; ``code`` has the user's own types of dataset."""
        self._code = code
        if settings.config.actor.tokenizer is None:
            raise UsageError("actor.tokenizer: the data cannot be tokenized without a tokenizer")
        self._settings = settings
        self._problems: list[Problem] = []

    def samples(self, rows: int) -> Iterator[DataSample]:
        """Yield the first usable rows of each source."""
        for line in self._ask(rows):
            sequences = tuple(tuple(TextRun(**run) for run in runs) for runs in line["sequences"])
            yield DataSample(
                source=line["source"], where=line["where"], id=line["id"], sequences=sequences
            )

    def counts(self) -> Iterator[DataCounts]:
        """Read and tokenize all rows of each source; yield their counts."""
        for line in self._ask(0):
            counts = {**line["counts"], "remarks": tuple(line["counts"]["remarks"])}
            yield DataCounts(source=line["source"], path=line["path"], **counts)

    def finish(self) -> None:
        """Raise ConfigError if the child has reported rows or settings that cannot be used."""
        if self._problems:
            raise ConfigError(tuple(self._problems))

    def _ask(self, rows: int) -> Iterator[dict[str, Any]]:
        """Yield the child's replies, without problems."""
        with asking_inspector(
            "data", self._settings, self._code, {}, shown=True, rows=rows
        ) as request:
            for reply in request:
                yield from self._understood(reply)
            if code := request.ended.code:
                raise RunFailedError(f"reading the data failed, see above (exit code {code})")

    def _understood(self, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "error" in line:
            raise UsageError(line["error"])
        if "problems" not in line:
            yield line
            return
        for where, key, message in line["problems"]:
            if not where:  # The problem concerns a setting, not a row.
                key = f"{line['source']}.{key}" if key else line["source"]
                where = self._settings.source.where(tuple(key.split(".")))
            self._problems.append(Problem(where, key, message))


@dataclass(frozen=True)
class ScoredItem:
    """One completion and its score."""

    line: int
    """Line of the row in the data file."""
    id: str
    completion: str
    answer: str
    score: float | None
    """Score of the completion; None if the reward could not score it."""


@dataclass(frozen=True)
class Tried:
    items: tuple[ScoredItem, ...]
    stats: dict[str, float]
    """Means of the reward's other statistics."""
    made_s: float
    """Seconds to import and construct the reward."""
    scored_s: float
    """Seconds of the reward's call, including the start of its processes."""


class RewardData:
    """The rows that a configuration's reward scores.

    The constructor raises ConfigError for a configuration without a reward or without prompts.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        config = settings.config
        if config.reward is None:
            raise ConfigError(
                (settings.source.problem(("reward",), "the configuration has no reward"),)
            )
        self.reward: Reward = config.reward
        suites = [own for own in config.evaluations.values() if own.reward == config.reward]
        sections = (config.dataset, *(own.held_out for own in suites))
        prompts = [data for data in sections if data.kind == "prompt"]
        if not prompts:
            message = "has no prompts for a reward to score: type 'prompt' is required"
            raise ConfigError((settings.source.problem(("dataset",), message),))
        self.dataset = next(iter(prompts[0].parts.values()))
        file = config.cluster.variables_file
        self.variables = inputs.read_variables(Path(file)) if file else {}


def try_reward(
    data: RewardData, selection: Selection, code: trial_code.OwnCode, timeout_s: float
) -> Tried:
    """Score completions in one call, in a child process with the run's code and environment.

    The child also reads the rows, because their type may be the user's code.

    Raises:
        ConfigError: Rows cannot be used.
        UsageError: The reward or its return value is wrong, or the reward needs a model.
        RunFailedError: The reward raised another exception; its traceback is on standard error.
        WaitTimeoutError: The reward took longer than ``timeout_s`` seconds.
    """
    with asking_inspector(
        "reward",
        data.settings,
        Code(paths=code.paths),
        data.variables,
        timeout_s,
        shown=True,
        reward=data.reward.model_dump(mode="json"),
        dataset=data.dataset.model_dump(mode="json"),
        selection=asdict(selection),
    ) as request:
        reply = _checked(request, data.reward.title, timeout_s)
    return Tried(
        tuple(ScoredItem(**item) for item in reply["items"]),
        {name: total / count for name, (total, count) in reply["stats"].items() if count},
        reply["made_s"],
        reply["scored_s"],
    )


def _checked(request: ChildRequest, name: str, timeout_s: float) -> dict[str, Any]:
    """Return the reply to a request about a reward. Raises the errors of `try_reward`."""
    reply = request.last()
    code = request.ended.code
    if code is None:
        raise WaitTimeoutError(
            f"reward '{name}' took longer than {timeout_s:g} s; raise the limit with --timeout"
        )
    if code != 0 or not reply:
        raise RunFailedError(f"reward '{name}' failed, see above (exit code {code})")
    if "problems" in reply:
        raise ConfigError(tuple(Problem(*problem) for problem in reply["problems"]))
    if "error" in reply:
        raise UsageError(reply["error"])
    return reply


@dataclass(frozen=True)
class DataRow:
    number: int
    """Line of the row in a JSONL file, or its place in other files; counted from 1."""
    id: str
    where: str
    """Place of the row, for messages."""
    values: dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One completion to score, for a row of the data."""

    row: DataRow
    completion: str
    finished: bool = True
    """Whether the completion ended with an end-of-text token, not at a length limit."""


class FoundRows:
    """Rows of a dataset, read on demand.

    The methods raise ConfigError if a returned row lacks the keys of the dataset's type, or if an
    earlier row is not a JSON object.
    """

    def __init__(self, config: Dataset) -> None:
        kind = type_of_rows(config)
        assert isinstance(kind, Prompts), "the caller chose a dataset of prompts"
        self.config = config
        self._kind = kind

    def first(self, count: int) -> list[DataRow]:
        """Return the first ``count`` rows, or all rows of a shorter file."""
        reader = self._reader()
        with closing(self._rows(reader)) as rows:
            return self._checked(reader, islice(rows, count))

    def named(self, names: set[str]) -> dict[str, DataRow]:
        """Return a mapping from names (ids, or sample ids, which end in ``@EPOCH``) to rows.

        Read the file until all are found. Omit names without a row.
        """
        if not names:
            return {}
        named: dict[str, list[str]] = {}
        for name in names:
            for id in (name, name.rpartition("@")[0]):
                named.setdefault(id, []).append(name)
        found: dict[str, DataRow] = {}
        reader = self._reader()
        with closing(self._rows(reader)) as rows:
            for row in rows:
                found |= {name: row for name in named.get(row.id, ()) if name not in found}
                if found.keys() == names:
                    break
        self._checked(reader, {row.number: row for row in found.values()}.values())
        return found

    def prompt(self, row: DataRow) -> str:
        """Return the prompt of a row (see `Prompts.text`)."""
        return self._kind.text(row.values)

    def answer(self, row: DataRow) -> str:
        """Return the reference answer of a row, or ""."""
        return reference(self.config, row.values)

    def _reader(self) -> RecordReader:
        config = self.config
        convert = own_convert(self._kind)
        return RecordReader(Path(config.path), config.id_key, config.split, convert=convert)

    def _rows(self, reader: RecordReader) -> Generator[DataRow]:
        for record in reader:
            id = id_of(record.row, self.config.id_key, record.number)
            yield DataRow(record.number, id, reader.where(record.number), record.row)

    def _checked(self, reader: RecordReader, rows: Iterable[DataRow]) -> list[DataRow]:
        """Return the rows after reading and checking all of them."""
        checks = RowChecks(self._kind, reader.where)
        checked = []
        for row in rows:
            checks.add(row.number, row.values)
            checked.append(row)
        reader.finish()
        if checked:
            checks.finish()
        return checked


def find_items(rows: FoundRows, selection: Selection) -> list[Item]:
    """Return the completions of a selection with their rows.

    Raises:
        ConfigError: Rows cannot be used, or a line of the file has no completion or no row.
        UsageError: The rows have no answers.
    """
    if selection.file is not None:
        return _of_file(rows, Path(selection.file), selection.rows)
    assert selection.rows is not None, "only all completions of a file can be chosen"
    first, texts = rows.first(selection.rows), selection.completions
    if texts:
        return [Item(row, text) for row in first for text in texts]
    if not has(first[0].values, rows.config.answer_key):
        raise UsageError(
            f"{rows.config.path} has no answers under '{rows.config.answer_key}': "
            "give --completion or --completions"
        )
    return [Item(row, rows.answer(row)) for row in first]


def _of_file(rows: FoundRows, path: Path, count: int | None) -> list[Item]:
    """Return the first ``count`` completions of a JSONL file of ``{"id": …, "completion": …}``.

    Files in ``samples/`` of a run have this form. Without ids, the first completion belongs to the
    first row, the second to the second row, and so on.
    """
    reader = RecordReader(path, "")  # An id may occur more than once.
    given = [(record.number, record.row) for record in islice(reader, count)]
    reader.finish()
    named = rows.named({str(row["id"]) for _, row in given if "id" in row})
    unnamed = any("id" not in row for _, row in given)
    first = rows.first(len(given)) if unnamed else []
    problems: list[Problem] = []
    items = []
    for position, (line, values) in enumerate(given):
        where, text = f"{path}:{line}", values.get("completion")
        row = first[position] if position < len(first) else None
        if "id" in values:
            row = named.get(str(values["id"]))
        if not isinstance(text, str):
            problems.append(Problem(where, "completion", "must be a string"))
        elif row is None:
            which = repr(values["id"]) if "id" in values else f"number {position + 1}"
            message = f"{rows.config.path} has no row {which}"
            problems.append(Problem(where, "id", message))
        else:
            items.append(Item(row, text, values.get("finished") is not False))
    if problems:
        raise ConfigError(tuple(problems[:MOST_PROBLEMS]))
    return items
